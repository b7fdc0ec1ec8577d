"""Questions to the log from the service's event loop, beside its writer: each answer is one short transaction."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sqlalchemy import Select, func, select
from sqlalchemy.ext.asyncio import create_async_engine

from advisor.entries import EntryKind, LogEntry
from advisor.log import to_entry
from advisor.log_database import SIZE, database_path, reader_url, require_file
from advisor.log_faults import explained
from advisor.log_postgres import SIZE as POSTGRES_SIZE
from advisor.log_postgres import async_engine, is_postgres, postgres_url
from advisor.segment_log import SegmentLog
from advisor.tables import entries, terms


@dataclass(frozen=True, slots=True)
class Term:
    """One start of the advisor. `started_us`: µs since 1970."""

    term: int
    started_us: int
    host: str
    pid: int
    version: str


class LogQueries(Protocol):
    """Reads a log that is open; writes nothing, holds nothing open between calls.

    Used on one event loop. Every method raises `LogError`.
    """

    async def page(
        self, from_position: int | None = None, limit: int = 100, kind: str | None = None
    ) -> list[LogEntry]:
        """At most `limit` entries from `from_position` on, or the newest ones, of one kind or all. Always ascending."""

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
        self, from_position: int | None = None, limit: int = 100, kind: str | None = None
    ) -> list[LogEntry]:
        rows = await self._rows(_page_statement(from_position, limit, kind))
        with explained(self.name, "read"):
            page = [to_entry(row) for row in rows]
        return page if from_position is not None else page[::-1]

    async def last_position(self) -> int:
        return int((await self._rows(select(func.coalesce(func.max(entries.c.position), 0))))[0][0])

    async def size_bytes(self) -> int:
        return int((await self._rows(self._size))[0][0])

    async def terms(self) -> list[Term]:
        columns = (terms.c.term, terms.c.started_us, terms.c.host, terms.c.pid, terms.c.version)
        return [Term(*row) for row in await self._rows(select(*columns).order_by(terms.c.term))]

    async def close(self) -> None:
        await self._engine.dispose()

    async def _rows(self, statement: Any) -> list[Any]:
        with explained(self.name, "read"):
            async with self._engine.connect() as connection:
                return list((await connection.execute(statement)).all())


class SegmentQueries:
    """`LogQueries` to the segment log of this process, on threads."""

    def __init__(self, log: SegmentLog) -> None:
        self._log = log

    async def page(
        self, from_position: int | None = None, limit: int = 100, kind: str | None = None
    ) -> list[LogEntry]:
        return await asyncio.to_thread(self._page, from_position, limit, EntryKind(kind) if kind else None)

    def _page(self, from_position: int | None, limit: int, kind: EntryKind | None) -> list[LogEntry]:
        if from_position is None:
            return self._log.newest(limit, kind)
        return list(itertools.islice(self._log.read(from_position, kind=kind), limit))

    async def last_position(self) -> int:
        return self._log.last_position()

    async def size_bytes(self) -> int:
        return (await asyncio.to_thread(self._log.stat)).stored_bytes

    async def terms(self) -> list[Term]:
        return [Term(*row) for row in await asyncio.to_thread(self._log.terms)]

    async def close(self) -> None:
        """The log is its owner's."""


def _page_statement(from_position: int | None, limit: int, kind: str | None) -> Select[Any]:
    statement = select(entries)
    if kind is not None:
        statement = statement.where(entries.c.kind == kind)
    if from_position is None:
        return statement.order_by(entries.c.position.desc()).limit(limit)
    return statement.where(entries.c.position >= from_position).order_by(entries.c.position).limit(limit)
