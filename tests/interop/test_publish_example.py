"""The publishing example, run as its reader would."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from advisor.cli import main
from event_plane.parquet import read_parquet
from event_plane.schema import BatchKind, Tier

EXAMPLE = Path(__file__).parents[2] / "examples" / "publish.py"


def test_example_publishes_blocks_until_ctrl_c(tmp_path: Path) -> None:
    url, out = f"zmq+ipc://{tmp_path}/events", tmp_path / "out.parquet"
    with subprocess.Popen([sys.executable, str(EXAMPLE), url], stderr=subprocess.PIPE, text=True) as example:
        try:
            with pytest.raises(SystemExit) as ended:
                main(["record", "--source", url, "--out", str(out), "--events", "2", "--seconds", "60"])
            assert ended.value.code in (0, None)
            example.send_signal(signal.SIGINT)
            _, errors = example.communicate(timeout=100)
        finally:
            example.kill()
    assert (example.returncode, errors) == (0, "")
    batches = [recorded.batch for recorded in read_parquet(out)]
    assert [batch.kind for batch in batches[:3]] == [
        BatchKind.SNAPSHOT_BEGIN, BatchKind.SNAPSHOT_END, BatchKind.EVENTS
    ]  # fmt: skip
    first = batches[2].records[0]
    block = int.from_bytes(hashlib.blake2b(b"block 0", digest_size=16).digest(), "little")
    assert int(first["sequence_hash_hi"]) << 64 | int(first["sequence_hash_lo"]) == block
    assert (first["tier"], batches[2].locations) == (Tier.G3, ("nvme0",))
