"""kill -9 of the log's writer: all that was acknowledged is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from advisor.log import SqlLog

WRITER = Path(__file__).with_name("append_until_killed.py")


def append_then_kill(path: Path, acknowledgements: int) -> int:
    """Returns the last position that the child said was durable before it died."""
    with subprocess.Popen([sys.executable, WRITER, path], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(acknowledgements)]
        child.kill()
        # A half-written last line was never read whole by anybody, so it acknowledged nothing.
        lines += [line for line in child.stdout if line.endswith("\n")]
    return int(lines[-1])


@pytest.mark.crash
def test_acknowledged_entries_survive_kill(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    for acknowledgements in (1, 30, 200):
        acknowledged = append_then_kill(path, acknowledgements)
        log = SqlLog(path)
        positions = [entry.position for entry in log.read()]
        log.close()
        assert positions == list(range(1, len(positions) + 1))
        assert len(positions) >= acknowledged
        assert len(positions) % 4 == 0, "an append is there whole or not at all"


@pytest.mark.crash
def test_read_only_reads_a_killed_writers_log_and_changes_no_byte(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    acknowledged = append_then_kill(path, 20)
    wal = path.with_name("log.db-wal")
    before = path.read_bytes(), wal.read_bytes()
    assert before[1], "the killed writer should have left a WAL to recover"
    reader = SqlLog(path, read_only=True)
    assert reader.last_position() >= acknowledged
    assert len(list(reader.read())) == reader.last_position()
    reader.close()
    assert (path.read_bytes(), wal.read_bytes()) == before
