"""kill -9 of the log's writer, or of its server: all that was acknowledged is there."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from advisor.errors import LogError
from advisor.log import SqlLog
from advisor.segment_log import SegmentLog
from tests.crash.append_until_killed import GROUP, opened
from tests.postgres import PostgresServer

WRITER = Path(__file__).with_name("append_until_killed.py")


@pytest.fixture(params=["sqlite", "segments", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """Arguments of the writer."""
    if request.param == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres")
        return ["postgres", server.emptied_database(), str(server.password_file)]
    return [request.param, str(tmp_path / "log")]


def append_then_kill(place: list[str], acknowledgements: int) -> int:
    """Returns the last position that the child said was durable before it died."""
    with subprocess.Popen([sys.executable, "-m", "tests.crash.append_until_killed", *place], stdout=subprocess.PIPE,
                          text=True, cwd=WRITER.parents[2]) as child:  # fmt: skip
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(acknowledgements)]
        child.kill()
        # A half-written last line was never read whole by anybody, so it acknowledged nothing.
        lines += [line for line in child.stdout if line.endswith("\n")]
    return int(lines[-1])


def open_after_kill(place: list[str]) -> SqlLog | SegmentLog:
    """PostgreSQL lets go of a killed writer's lock when it sees its connection gone."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return opened(*place)  # type: ignore[return-value]
        except LogError as fault:
            if "in use by" not in str(fault) or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


@pytest.mark.crash
def test_acknowledged_entries_survive_kill(place: list[str]) -> None:
    for acknowledgements in (1, 100):
        acknowledged = append_then_kill(place, acknowledgements)
        log = open_after_kill(place)
        entries = list(log.read())
        log.close()
        assert [entry.position for entry in entries] == list(range(1, len(entries) + 1))
        assert all(entry.payload == b"%d" % ((entry.sequence or 0) % GROUP) * 1000 for entry in entries)
        assert len(entries) >= acknowledged
        assert len(entries) % GROUP == 0, "an append is there whole or not at all"


@pytest.mark.crash
def test_read_only_reads_a_killed_writers_log_and_changes_no_byte(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    acknowledged = append_then_kill(["sqlite", str(path)], 20)
    wal = path.with_name("log.db-wal")
    before = path.read_bytes(), wal.read_bytes()
    assert before[1], "the killed writer should have left a WAL to recover"
    reader = SqlLog(path, read_only=True)
    assert reader.last_position() >= acknowledged
    assert len(list(reader.read())) == reader.last_position()
    reader.close()
    assert (path.read_bytes(), wal.read_bytes()) == before


@pytest.mark.crash
def test_killed_segment_log_is_read_without_a_change(tmp_path: Path) -> None:
    acknowledged = append_then_kill(["segments", str(tmp_path)], 30)
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    reader = SegmentLog(tmp_path, read_only=True)
    assert reader.last_position() >= acknowledged
    assert [entry.position for entry in reader.read()] == list(range(1, reader.last_position() + 1))
    reader.close()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files


@pytest.mark.crash
def test_killed_server_ends_the_writer_with_a_sentence_and_loses_nothing_acknowledged() -> None:
    server = PostgresServer()
    try:
        place = ["postgres", server.emptied_database(), str(server.password_file)]
        command = [sys.executable, "-m", "tests.crash.append_until_killed", *place]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=WRITER.parents[2]
        ) as child:
            assert child.stdout is not None
            lines = [child.stdout.readline() for _ in range(30)]
            server.stop()
            rest, told = child.communicate(timeout=150)
        acknowledged = int([*lines, *rest.splitlines()][-1])
        assert told.splitlines()[-1].startswith("advisor.errors.LogError: cannot append to postgresql://")
        assert "the server cannot be reached or went away" in told.splitlines()[-1]
        server.start()
        log = open_after_kill(place)
        positions = [entry.position for entry in log.read()]
        log.close()
        assert positions == list(range(1, len(positions) + 1))
        assert len(positions) >= acknowledged
    finally:
        server.close()
