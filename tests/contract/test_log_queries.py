"""One contract for the questions that the admin view asks of a log while it is written."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from advisor.entries import (
    Control,
    EntryKind,
    EventLog,
    LogEntry,
    NewEntry,
    OperatorEntry,
    SettingsEntry,
    Tick,
    control_entry,
)
from advisor.log import SqlLog
from advisor.log_queries import STRETCH_BYTES_MAX, EntryFilter, LogQueries, SegmentQueries, SqlQueries
from advisor.segment_log import SegmentLog
from tests.postgres import PostgresServer

Answer = TypeVar("Answer")

BIG_BYTES = 1 << 20


class Asked:
    """A log, and its queries on an event loop of their own."""

    def __init__(self, log: EventLog, open_queries: Callable[[], LogQueries]) -> None:
        self.log = log
        self._open = open_queries

    def ask(self, question: Callable[[LogQueries], Awaitable[Answer]]) -> Answer:
        async def answered() -> Answer:
            queries = self._open()
            try:
                return await question(queries)
            finally:
                await queries.close()

        return asyncio.run(answered())

    def looked_back(self, before: int | None, *kinds: EntryKind) -> list[LogEntry]:
        """All stretches to the oldest entry; each begins where the one before it ended."""

        async def look(queries: LogQueries) -> list[LogEntry]:
            found: list[LogEntry] = []
            at = before
            while True:
                stretch = await queries.before(at, kinds)
                assert at is None or stretch.reached < at or stretch.is_complete
                assert all(stretch.reached <= entry.position for entry in stretch.entries)
                found += stretch.entries
                if stretch.is_complete:
                    return found
                at = stretch.reached

        return self.ask(look)


@pytest.fixture(params=["sqlite", "postgres", "segments"])
def asked(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Asked]:
    if request.param == "segments":
        segments = SegmentLog(tmp_path, segment_bytes=2 * BIG_BYTES)
        yield Asked(segments, lambda: SegmentQueries(segments))
        segments.close()
        return
    url, password_file = str(tmp_path / "log.db"), None
    if request.param == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres")
        url, password_file = server.emptied_database(), server.password_file
    log = SqlLog(url, password_file=password_file)
    yield Asked(log, lambda: SqlQueries(url, password_file=password_file))
    log.close()


def batch(sequence: int, payload: bytes = b"batch", producer: int = 2**64 - 1, source: str = "a") -> NewEntry:
    return NewEntry(EntryKind.BATCH, payload, producer, 1, sequence, source)


def test_looking_back_gives_every_entry_once_newest_first(asked: Asked) -> None:
    for first in range(0, 600, 150):
        pairs = [(batch(sequence), control_entry(Tick(sequence))) for sequence in range(first, first + 150)]
        asked.log.append([entry for pair in pairs for entry in pair], first)
    expected = list(asked.log.read())[::-1]
    assert asked.looked_back(None) == expected
    assert asked.looked_back(601) == expected[-600:]
    assert asked.looked_back(1) == []


@pytest.mark.parametrize("asked", ["sqlite", "segments"], indirect=True)
def test_a_look_back_ends_after_so_many_bytes(asked: Asked) -> None:
    for sequence in range(6):
        asked.log.append([batch(sequence, os.urandom(BIG_BYTES))], sequence)
    stretch = asked.ask(lambda queries: queries.before(None))
    assert 1 <= len(stretch.entries) <= STRETCH_BYTES_MAX // BIG_BYTES
    assert not stretch.is_complete
    assert [entry.sequence for entry in asked.looked_back(None)] == list(range(5, -1, -1))


@pytest.mark.parametrize("asked", ["sqlite", "segments"], indirect=True)
def test_looking_back_for_kinds_steps_over_the_others(asked: Asked) -> None:
    rare: dict[int, Control] = {
        1: OperatorEntry("ann", "pause"), 4: SettingsEntry({}, "v"), 7: OperatorEntry("bob", "resume"),
    }  # fmt: skip
    for sequence in range(9):
        entry = control_entry(rare[sequence]) if sequence in rare else batch(sequence, os.urandom(BIG_BYTES))
        asked.log.append([entry], sequence)
    found = asked.looked_back(None, EntryKind.OPERATOR, EntryKind.SETTINGS)
    assert [entry.position for entry in found] == [8, 5, 2]
    assert [entry.position for entry in asked.looked_back(5, EntryKind.OPERATOR, EntryKind.SETTINGS)] == [2]
    assert asked.looked_back(None, EntryKind.VOLUME) == []


@pytest.mark.parametrize("asked", ["sqlite", "segments"], indirect=True)
def test_looking_back_ends_at_what_is_kept(asked: Asked) -> None:
    for sequence in range(7):
        asked.log.append([batch(sequence, os.urandom(BIG_BYTES))], sequence)
    asked.log.prune(4)
    kept = list(asked.log.read())[::-1]
    assert asked.looked_back(None) == kept
    assert asked.looked_back(kept[-1].position) == []


def test_pages_keep_a_producer_a_source_and_an_end(asked: Asked) -> None:
    asked.log.append([batch(1), batch(2, source="b"), control_entry(Tick(1)), batch(1, producer=5), batch(3)], 1)

    def positions(first: int | None, wanted: EntryFilter) -> list[int]:
        page = asked.ask(lambda queries: queries.page(first, 100, wanted))
        return [entry.position for entry in page]

    assert positions(1, EntryFilter(producer=2**64 - 1)) == [1, 2, 5]
    assert positions(2, EntryFilter(producer=2**64 - 1, until=4)) == [2]
    assert positions(1, EntryFilter(source="b")) == [2]
    assert positions(1, EntryFilter(source="a", producer=5)) == [4]
    assert positions(1, EntryFilter(kind=EntryKind.BATCH, until=3)) == [1, 2]
