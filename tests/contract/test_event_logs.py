"""One contract for every event log."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from advisor.entries import EntryKind, EventLog, LogEntry, NewEntry, Tick, control_entry
from advisor.errors import LogError
from advisor.log import SqlLog
from advisor.memory_log import MemoryLog
from advisor.segment_log import SegmentLog
from tests.postgres import PostgresServer

U64_MAX = 2**64 - 1
PIECE_ENTRIES = 16
PIECE_BYTES = 16 * 200


@pytest.fixture(params=["memory", "sqlite", "postgres", "segments"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EventLog]:
    opened = LogMaker(request, tmp_path).open()
    yield opened
    opened.close()


@pytest.fixture(params=["sqlite", "postgres", "segments"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> LogMaker:
    """Logs that outlive their process, in pieces small enough that a test sees several."""
    return LogMaker(request, tmp_path)


class LogMaker:
    """Opens one log again and again."""

    def __init__(self, request: pytest.FixtureRequest, folder: Path) -> None:
        self.kind: str = request.param
        self._folder = folder
        if self.kind == "postgres":
            self._server: PostgresServer = request.getfixturevalue("postgres")
            self._url = self._server.emptied_database()

    def open(self, *, read_only: bool = False) -> EventLog:
        match self.kind:
            case "memory":
                return MemoryLog()
            case "sqlite":
                return SqlLog(self._folder / "log.db", read_only=read_only)
            case "postgres":
                return SqlLog(
                    self._url,
                    password_file=self._server.password_file,
                    read_only=read_only,
                    partition_entries=PIECE_ENTRIES,
                )
        return SegmentLog(self._folder / "segments", read_only=read_only, segment_bytes=PIECE_BYTES)


def batch(sequence: int, payload: bytes = b"batch", producer: int = 7, epoch: int = 3) -> NewEntry:
    return NewEntry(
        kind=EntryKind.BATCH, payload=payload, producer=producer, epoch=epoch, sequence=sequence, source="engine"
    )


def test_positions_are_consecutive_from_one(log: EventLog) -> None:
    assert log.last_position() == 0
    assert log.append([batch(0), batch(1)], recorded_us=10) == 1
    assert log.append([control_entry(Tick(5))], recorded_us=11) == 3
    assert log.last_position() == 3
    assert [entry.position for entry in log.read()] == [1, 2, 3]


def test_entry_comes_back_as_it_was_appended(log: EventLog) -> None:
    entry = NewEntry(
        kind=EntryKind.BATCH,
        payload=bytes(range(256)),
        producer=1,
        epoch=2,
        sequence=3,
        source="a",
        foreign_crc=2**32 - 1,
    )
    log.append([entry], recorded_us=1_764_000_000_000_000)
    assert list(log.read()) == [
        LogEntry(1, EntryKind.BATCH, bytes(range(256)), 1, 2, 3, "a", 2**32 - 1, 1_764_000_000_000_000)
    ]


def test_control_entry_has_no_batch_identity(log: EventLog) -> None:
    tick = control_entry(Tick(1))
    log.append([tick, tick], recorded_us=1)
    assert [(e.producer, e.epoch, e.sequence, e.payload) for e in log.read()] == [(None, None, None, tick.payload)] * 2


def test_u64_numbers_survive(log: EventLog) -> None:
    numbers = [0, 1, 2**63 - 1, 2**63, U64_MAX]
    log.append([batch(number, producer=number, epoch=number) for number in numbers], recorded_us=1)
    assert [(e.producer, e.epoch, e.sequence) for e in log.read()] == [(number,) * 3 for number in numbers]


def test_read_takes_a_closed_range(log: EventLog) -> None:
    log.append([batch(i) for i in range(5)], recorded_us=1)
    for first, last in itertools.product([1, 2, 5, 6], [None, 0, 1, 3, 9]):
        wanted = [p for p in range(1, 6) if p >= first and (last is None or p <= last)]
        assert [entry.position for entry in log.read(first, last)] == wanted


def test_batch_already_there_is_refused_and_nothing_is_written(log: EventLog) -> None:
    log.append([batch(4)], recorded_us=1)
    with pytest.raises(LogError, match="batch 4 of producer 0000000000000007, epoch 3, is already at position 1"):
        log.append([batch(5), batch(4), batch(6)], recorded_us=2)
    assert [entry.sequence for entry in log.read()] == [4]
    assert log.append([batch(5)], recorded_us=3) == 2


def test_batch_twice_in_one_append_is_refused(log: EventLog) -> None:
    with pytest.raises(LogError, match="twice in one append"):
        log.append([batch(1), batch(1)], recorded_us=1)
    assert log.last_position() == 0
    assert list(log.read()) == []


def test_same_sequence_of_another_epoch_or_producer_is_another_batch(log: EventLog) -> None:
    log.append([batch(1), batch(1, epoch=4), batch(1, producer=8)], recorded_us=1)
    assert log.last_position() == 3


def test_empty_append_changes_nothing(log: EventLog) -> None:
    assert log.append([], recorded_us=1) == 1
    assert log.last_position() == 0


def test_terms_rise_by_one(log: EventLog) -> None:
    assert [log.next_term(i, "host", 42, "0.1.0") for i in range(3)] == [1, 2, 3]


def test_close_is_idempotent_and_ends_appending(log: EventLog) -> None:
    log.close()
    log.close()
    with pytest.raises(LogError):
        log.append([batch(1)], recorded_us=1)
    with pytest.raises(LogError):
        log.next_term(1, "host", 1, "0.1.0")


def test_number_beyond_u64_is_refused_and_nothing_is_written(log: EventLog) -> None:
    if isinstance(log, MemoryLog):
        pytest.skip("Python's numbers have no end")
    with pytest.raises(LogError, match=r"18446744073709551616 is outside 0 … 2\*\*64 - 1"):
        log.append([batch(1), batch(2**64)], 1)
    assert log.last_position() == 0
    assert log.append([batch(1)], 1) == 1


def test_stat_of_an_empty_log(log: EventLog) -> None:
    stat = log.stat()
    assert (stat.first_position, stat.last_position) == (1, 0)
    assert (stat.first_recorded_us, stat.last_recorded_us) == (0, 0)
    assert (log.first_position(), log.last_position()) == (1, 0)


def test_stat_tells_positions_times_and_bytes(log: EventLog) -> None:
    for sequence in range(3):
        log.append([batch(sequence, os.urandom(20_000))], recorded_us=100 + sequence)
    stat = log.stat()
    assert (stat.first_position, stat.last_position) == (1, 3)
    assert (stat.first_recorded_us, stat.last_recorded_us) == (100, 102)
    assert 60_000 <= stat.stored_bytes <= 250_000


def fill(log: EventLog, count: int, first: int = 0, payload_bytes: int = 120) -> None:
    for sequence in range(first, first + count):
        log.append([batch(sequence, os.urandom(payload_bytes))], recorded_us=1_000 + sequence)


def test_prune_drops_the_oldest_and_no_more(log: EventLog) -> None:
    fill(log, 100)
    dropped = log.prune(60)
    assert 60 - PIECE_ENTRIES < dropped <= 60 if not isinstance(log, SqlLog) else 0 <= dropped <= 60
    assert log.first_position() == 1 + dropped
    assert log.last_position() == 100
    assert [entry.position for entry in log.read()] == list(range(1 + dropped, 101))
    assert [entry.sequence for entry in log.read(1 + dropped, 1 + dropped)] == [dropped]
    assert log.stat().first_position == 1 + dropped
    assert log.stat().first_recorded_us == 1_000 + dropped


def test_newest_entry_is_never_pruned(log: EventLog) -> None:
    assert log.prune(10) == 0
    fill(log, 20)
    log.prune(1_000)
    assert log.last_position() == 20
    assert next(reversed(list(log.read()))).position == 20
    fill(log, 1, first=20)
    assert log.last_position() == 21


def test_nothing_is_pruned_in_front_of_a_reader(log: EventLog) -> None:
    fill(log, 100)
    reader = log.read(10)
    assert next(reader).position == 10
    log.prune(90)
    assert log.first_position() <= 10
    assert [entry.position for entry in reader] == list(range(11, 101))
    log.prune(90)
    assert log.first_position() > 10


def test_positions_go_on_after_a_prune(kept: LogMaker) -> None:
    log = kept.open()
    fill(log, 100)
    dropped = log.prune(70)
    log.close()
    again = kept.open()
    assert (again.first_position(), again.last_position()) == (1 + dropped, 100)
    assert again.append([batch(100)], 5) == 101
    assert [entry.position for entry in again.read()] == list(range(1 + dropped, 102))
    again.close()


def test_log_comes_back_as_it_was(kept: LogMaker) -> None:
    log = kept.open()
    fill(log, 50)
    log.append([control_entry(Tick(9)), batch(50), control_entry(Tick(10))], recorded_us=7)
    before = list(log.read())
    assert [log.next_term(1, "host", 2, "0") for _ in range(2)] == [1, 2]
    log.close()
    again = kept.open()
    assert list(again.read()) == before
    assert list(again.read(20, 30)) == before[19:30]
    assert again.next_term(1, "host", 2, "0") == 3
    again.close()


def test_second_writer_is_refused_until_the_first_closes(kept: LogMaker) -> None:
    log = kept.open()
    with pytest.raises(LogError, match=f"in use by .*process {os.getpid()} on "):
        kept.open()
    log.append([batch(1)], 1)
    log.close()
    kept.open().close()


def test_reader_sees_what_the_writer_appends_meanwhile(kept: LogMaker) -> None:
    log = kept.open()
    reader = kept.open(read_only=True)
    assert reader.last_position() == 0
    fill(log, 40)
    assert reader.last_position() == 40
    assert [entry.sequence for entry in reader.read(39)] == [38, 39]
    fill(log, 40, first=40)
    assert [entry.position for entry in reader.read()] == list(range(1, 81))
    assert reader.stat().last_position == 80
    with pytest.raises(LogError, match="not open for writing"):
        reader.append([batch(99)], 1)
    with pytest.raises(LogError, match="not open for writing"):
        reader.next_term(1, "host", 1, "0")
    with pytest.raises(LogError, match="not open for writing"):
        reader.prune(1)
    reader.close()
    log.close()
