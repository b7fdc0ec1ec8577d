"""The example of a hook, run as its reader would, beside the publishing one."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_example_prints_what_the_publishing_example_stores_until_ctrl_c(tmp_path: Path) -> None:
    url = f"zmq+ipc://{tmp_path}/events"
    publish = [sys.executable, str(EXAMPLES / "publish.py"), url]
    listen = [sys.executable, str(EXAMPLES / "hook.py"), url, str(tmp_path / "state")]
    with (
        subprocess.Popen(publish) as publisher,
        subprocess.Popen(listen, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as example,
    ):
        assert example.stdout is not None
        try:
            said = example.stdout.readline()
            while not said.startswith("stored"):  # what the log says of its start
                assert said
                said = example.stdout.readline()
            example.send_signal(signal.SIGINT)
            _, errors = example.communicate(timeout=100)
        finally:
            publisher.kill()
            example.kill()
    block = int.from_bytes(hashlib.blake2b(b"block 0", digest_size=16).digest(), "little")
    assert said.split() == ["stored", f"{block:032x}", "nvme0", "4096"]
    assert (example.returncode, errors) == (0, "")
