"""Questions to the log from the service's event loop, beside its writer: each answer is one short transaction."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sqlalchemy import ColumnElement, Select, func, literal_column, select
from sqlalchemy.ext.asyncio import create_async_engine

from advisor.entries import EntryKind, LogEntry
from advisor.log import to_entry
from advisor.log_database import SIZE, database_path, reader_url, require_file
from advisor.log_faults import explained
from advisor.log_postgres import SIZE as POSTGRES_SIZE
from advisor.log_postgres import async_engine, is_postgres, postgres_url
from advisor.segment_log import SegmentLog
from advisor.tables import U64, entries, terms

STRETCH_ENTRIES_MAX = 512
STRETCH_BYTES_MAX = 4 << 20
"""A stretch of the log ends after so many entries, or bytes of them."""
STRETCH_S = 0.1
"""A segment log is looked through for entries of some kinds for so long."""


@dataclass(frozen=True, slots=True)
class Term:
    """One start of the advisor. `started_us`: µs since 1970."""

    term: int
    started_us: int
    host: str
    pid: int
    version: str


@dataclass(frozen=True, slots=True)
class Stretch:
    """Entries before some position, newest first, and how far back was looked."""

    entries: list[LogEntry]
    reached: int
    """Everything kept from here on was looked at: look before it next."""
    is_complete: bool
    """Nothing older is kept."""


@dataclass(frozen=True, slots=True)
class EntryFilter:
    """Which entries are wanted: None and an empty source leave out none. `until` is the last position."""

    kind: EntryKind | None = None
    producer: int | None = None
    source: str = ""
    until: int | None = None

    def admits(self, entry: LogEntry) -> bool:
        """Whether it comes from the wanted producer and source."""
        return self.producer in (None, entry.producer) and self.source in ("", entry.source)


ALL = EntryFilter()


class LogQueries(Protocol):
    """Reads a log that is open; writes nothing, holds nothing open between calls.

    Used on one event loop. Every method raises `LogError`.
    """

    async def page(
        self, from_position: int | None = None, limit: int = 100, wanted: EntryFilter = ALL
    ) -> list[LogEntry]:
        """At most `limit` entries from `from_position` on, or the newest ones. Always ascending.

        A filter by producer or source has no index: whoever gives one bounds the positions.
        """

    async def before(self, position: int | None, kinds: Sequence[EntryKind] = ()) -> Stretch:
        """Entries before `position`, or the newest ones, of some kinds or all: as many as one short look finds."""

    async def last_position(self) -> int:
        """0 when empty."""

    async def size_bytes(self) -> int:
        """What the kept entries take."""

    async def terms(self) -> list[Term]:
        """Every start of the advisor, oldest first."""

    async def close(self) -> None:
        """Idempotent."""


class SqlQueries:
    """`LogQueries` to SQLite or PostgreSQL. Raises `LogError` where there is no file."""

    def __init__(self, url_or_path: str | Path, *, password_file: Path | None = None) -> None:
        self.name = str(url_or_path)
        if is_postgres(self.name):
            self._engine = async_engine(postgres_url(self.name, password_file), "admin view")
            self._size = POSTGRES_SIZE
        else:
            path = database_path(url_or_path)
            require_file(path)
            self._engine = create_async_engine(reader_url(path, "sqlite+aiosqlite"))
            self._size = SIZE

    async def page(
        self, from_position: int | None = None, limit: int = 100, wanted: EntryFilter = ALL
    ) -> list[LogEntry]:
        page = await self._entries(_page_statement(from_position, limit, wanted))
        return page if from_position is not None else page[::-1]

    async def before(self, position: int | None, kinds: Sequence[EntryKind] = ()) -> Stretch:
        # Sizes first: a page of large batches would not fit. A kind at a time, since each is read along its own index.
        sizes = [row for kind in kinds or (None,) for row in await self._rows(_sizes_statement(position, kind))]
        sizes.sort(reverse=True)
        ends = itertools.accumulate(payload_bytes for _, payload_bytes in sizes)
        fitting = 1 + sum(end <= STRETCH_BYTES_MAX for end in itertools.islice(ends, 1, STRETCH_ENTRIES_MAX))
        taken = [at for at, _ in sizes[:fitting]]
        is_complete = len(taken) == len(sizes) < STRETCH_ENTRIES_MAX
        statement = select(entries).where(entries.c.position.in_(taken)).order_by(entries.c.position.desc())
        return Stretch(await self._entries(statement), 1 if is_complete else taken[-1], is_complete)

    async def last_position(self) -> int:
        return int((await self._rows(select(func.coalesce(func.max(entries.c.position), 0))))[0][0])

    async def size_bytes(self) -> int:
        return int((await self._rows(self._size))[0][0])

    async def terms(self) -> list[Term]:
        columns = (terms.c.term, terms.c.started_us, terms.c.host, terms.c.pid, terms.c.version)
        return [Term(*row) for row in await self._rows(select(*columns).order_by(terms.c.term))]

    async def close(self) -> None:
        await self._engine.dispose()

    async def _entries(self, statement: Any) -> list[LogEntry]:
        rows = await self._rows(statement)
        with explained(self.name, "read"):
            return [to_entry(row) for row in rows]

    async def _rows(self, statement: Any) -> list[Any]:
        with explained(self.name, "read"):
            async with self._engine.connect() as connection:
                return list((await connection.execute(statement)).all())


class SegmentQueries:
    """`LogQueries` to the segment log of this process, on threads."""

    def __init__(self, log: SegmentLog) -> None:
        self._log = log

    async def page(
        self, from_position: int | None = None, limit: int = 100, wanted: EntryFilter = ALL
    ) -> list[LogEntry]:
        return await asyncio.to_thread(self._page, from_position, limit, wanted)

    def _page(self, from_position: int | None, limit: int, wanted: EntryFilter) -> list[LogEntry]:
        if from_position is None:
            return [entry for entry in self._log.newest(limit, wanted.kind) if wanted.admits(entry)]
        found = self._log.read(from_position, wanted.until, wanted.kind)
        return list(itertools.islice(filter(wanted.admits, found), limit))

    async def before(self, position: int | None, kinds: Sequence[EntryKind] = ()) -> Stretch:
        return await asyncio.to_thread(self._before, position, kinds)

    def _before(self, position: int | None, kinds: Sequence[EntryKind]) -> Stretch:
        found: list[LogEntry] = []
        reached = self._log.last_position() + 1 if position is None else position
        until_s = time.monotonic() + STRETCH_S
        while first := self._log.piece_before(reached, whole=bool(kinds)):
            piece = [entry for kind in kinds or (None,) for entry in self._log.read(first, reached - 1, kind)]
            found += sorted(piece, key=lambda entry: entry.position, reverse=True)
            reached = first
            if not kinds or len(found) >= STRETCH_ENTRIES_MAX or time.monotonic() > until_s:
                return Stretch(found, reached, not self._log.piece_before(reached))
        return Stretch(found, 1, True)

    async def last_position(self) -> int:
        return self._log.last_position()

    async def size_bytes(self) -> int:
        return (await asyncio.to_thread(self._log.stat)).stored_bytes

    async def terms(self) -> list[Term]:
        return [Term(*row) for row in await asyncio.to_thread(self._log.terms)]

    async def close(self) -> None:
        """The log is its owner's."""


def _page_statement(from_position: int | None, limit: int, wanted: EntryFilter) -> Select[Any]:
    statement = select(entries)
    if wanted.kind is not None:
        statement = statement.where(entries.c.kind == wanted.kind.value)
    if wanted.producer is not None:
        # The sign keeps SQLite from the index of batches, along which it would have to sort all of the producer's.
        unindexed: ColumnElement[int] = literal_column("+producer", U64)
        statement = statement.where(unindexed == wanted.producer)
    if wanted.source:
        statement = statement.where(entries.c.source == wanted.source)
    if wanted.until is not None:
        statement = statement.where(entries.c.position <= wanted.until)
    if from_position is None:
        return statement.order_by(entries.c.position.desc()).limit(limit)
    return statement.where(entries.c.position >= from_position).order_by(entries.c.position).limit(limit)


def _sizes_statement(before: int | None, kind: EntryKind | None) -> Select[Any]:
    """Position and bytes of entries, newest first."""
    statement = select(entries.c.position, func.length(entries.c.payload))
    if before is not None:
        statement = statement.where(entries.c.position < before)
    if kind is not None:
        statement = statement.where(entries.c.kind == kind.value)
    return statement.order_by(entries.c.position.desc()).limit(STRETCH_ENTRIES_MAX)
