"""One contract for every event log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from advisor.entries import EntryKind, EventLog, LogEntry, NewEntry, Tick, control_entry
from advisor.errors import LogError
from advisor.log import SqlLog
from advisor.memory_log import MemoryLog

U64_MAX = 2**64 - 1


@pytest.fixture(params=["sql", "memory"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EventLog]:
    makers: dict[str, Callable[[], EventLog]] = {"sql": lambda: SqlLog(tmp_path / "log.db"), "memory": MemoryLog}
    opened = makers[request.param]()
    yield opened
    opened.close()


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


@pytest.mark.parametrize("number", [0, 1, 2**63 - 1, 2**63, U64_MAX])
def test_u64_numbers_survive(log: EventLog, number: int) -> None:
    log.append([batch(number, producer=number, epoch=number)], recorded_us=1)
    entry = next(iter(log.read()))
    assert (entry.producer, entry.epoch, entry.sequence) == (number, number, number)


@pytest.mark.parametrize("first", [1, 2, 5, 6])
@pytest.mark.parametrize("last", [None, 0, 1, 3, 9])
def test_read_takes_a_closed_range(log: EventLog, first: int, last: int | None) -> None:
    log.append([batch(i) for i in range(5)], recorded_us=1)
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
