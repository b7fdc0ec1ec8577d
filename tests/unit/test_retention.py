"""How much of a log is kept, and where it is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.entries import EntryKind, EventLog, LogStat, NewEntry
from advisor.log import SqlLog
from advisor.memory_log import MemoryLog
from advisor.retention import Decision, decide, entries_allowed, first_recorded_since
from advisor.segment_log import SegmentLog
from tests.examples import examples


def stat(first: int, last: int, stored_bytes: int = 0) -> LogStat:
    return LogStat(first, last, stored_bytes, 0, 0)


def test_entries_allowed_follow_the_tighter_limit() -> None:
    assert entries_allowed(stat(1, 100, 1_000), 0, 0) is None
    assert entries_allowed(stat(1, 100, 1_000), 500, 0) == 50
    assert entries_allowed(stat(1, 100, 1_000), 500, 71) == 30
    assert entries_allowed(stat(1, 100, 1_000), 100, 71) == 10
    assert entries_allowed(stat(1, 100, 1_000), 50_000, 0) == 5_000
    assert entries_allowed(stat(1, 0), 500, 0) is None


@pytest.mark.parametrize(
    ("kept", "allowed", "checkpoints", "decision"),
    [
        (stat(1, 100), None, [90, 80], Decision()),
        (stat(1, 0), 10, [], Decision()),
        (stat(1, 100), 40, [95, 80], Decision(through=60)),
        (stat(1, 100), 40, [95, 30], Decision(through=30, ask=100)),
        (stat(1, 100), 40, [100, 30], Decision(through=30)),
        (stat(1, 100), 40, [95], Decision(ask=100)),
        (stat(1, 100), 40, [100], Decision()),
        (stat(1, 100), 40, [], Decision(ask=100)),
        (stat(1, 100), 40, [80, 30], Decision(through=30, ask=100)),
        (stat(61, 100), 40, [99, 80], Decision()),
        (stat(1, 100), 1_000, [], Decision()),
        (stat(1, 600), 1_000, [500, 400], Decision()),
        (stat(1, 600), 1_000, [100], Decision(ask=600)),
    ],
)
def test_cut_and_checkpoint(kept: LogStat, allowed: int | None, checkpoints: list[int], decision: Decision) -> None:
    assert decide(kept, allowed, checkpoints) == decision


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(30, 500), st.lists(st.integers(1, 10), min_size=50, max_size=200))
def test_log_stays_near_its_limit_and_a_start_can_always_be_made(allowed: int, appends: list[int]) -> None:
    """A checkpoint is made between two rounds. The log holds no more than its limit and what came in one round."""
    first, last = 1, 0
    checkpoints: list[int] = []
    for count in appends * 10:
        last += count
        decision = decide(stat(first, last), allowed, checkpoints)
        first = max(first, decision.through + 1)
        assert first - 1 <= (checkpoints[1] if len(checkpoints) > 1 else 0)
        if decision.ask:
            checkpoints = [last, *checkpoints][:2]
        assert last - first + 1 <= allowed + 3 * max(appends)


@pytest.fixture(params=["memory", "sqlite", "segments"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> EventLog:
    match request.param:
        case "memory":
            return MemoryLog()
        case "sqlite":
            return SqlLog(tmp_path / "log.db")
    return SegmentLog(tmp_path, segment_bytes=1_000)


def test_oldest_entry_of_an_age_is_found(log: EventLog) -> None:
    for sequence in range(40):
        log.append([NewEntry(EntryKind.BATCH, b"batch", 1, 1, sequence)], recorded_us=sequence * 10)
    log.prune(15)
    kept = log.stat()
    found = [first_recorded_since(log, kept, since_us) for since_us in (-5, 200, 201, 389, 390, 10_000)]
    assert found == [kept.first_position, 21, 22, 40, 40, 40]
    log.close()
