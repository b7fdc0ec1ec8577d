"""The embedding example, run as its reader would."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import zmq

from tests.ports import free_ports

EXAMPLE = Path(__file__).parents[2] / "examples" / "embed.py"


def test_example_prints_the_blocks_of_a_vllm_publisher_in_ten_lines_until_ctrl_c(tmp_path: Path) -> None:
    body = [line for line in EXAMPLE.read_text().splitlines() if line.strip() and "import" not in line]
    assert len(body) <= 10
    port, _ = free_ports(2)
    event = {
        "type": "BlockStored", "block_hashes": [0xBEEF], "parent_block_hash": None,
        "token_ids": list(range(16)), "block_size": 16, "medium": "GPU",
    }  # fmt: skip
    payload = msgspec.msgpack.encode([1.5, [event], 0])
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        publisher.setsockopt(zmq.LINGER, 0)
        publisher.bind(f"tcp://127.0.0.1:{port}")
        command = [sys.executable, str(EXAMPLE), f"zmq+tcp://127.0.0.1:{port}", str(tmp_path / "state")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as example:
            assert example.stdout is not None
            try:
                # A PUB socket drops what it sends before the subscriber has joined: send until it has printed.
                poller = zmq.Poller()
                poller.register(example.stdout.fileno(), zmq.POLLIN)
                for _ in range(1_000):
                    publisher.send_multipart((b"kv", (0).to_bytes(8, "big"), payload))
                    if poller.poll(100):
                        break
                assert example.stdout.readline().split() == [f"{0xBEEF:032x}", "['engine/kv/dp0/GPU']"]
                example.send_signal(signal.SIGINT)
                _, errors = example.communicate(timeout=150)
            finally:
                example.kill()
        assert (example.returncode, errors) == (0, "")
