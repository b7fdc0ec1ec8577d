"""Questions to the log from the service's event loop, beside its writer: each answer is one short transaction."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Select, func, select, text
from sqlalchemy.ext.asyncio import create_async_engine

from advisor.entries import LogEntry
from advisor.log import to_entry
from advisor.log_database import database_path, explained, reader_url, require_file
from advisor.tables import entries, terms


@dataclass(frozen=True, slots=True)
class Term:
    """One start of the advisor. `started_us`: µs since 1970."""

    term: int
    started_us: int
    host: str
    pid: int
    version: str


class LogQueries:
    """Reads a log that a `SqlLog` has opened; writes nothing, holds nothing open between calls.

    Used on one event loop. Every method raises `LogError`, and so does the construction where there is no log.
    """

    def __init__(self, url_or_path: str | Path) -> None:
        self.path = database_path(url_or_path)
        require_file(self.path)
        self._engine = create_async_engine(reader_url(self.path, "sqlite+aiosqlite"))

    async def page(
        self, from_position: int | None = None, limit: int = 100, kind: str | None = None
    ) -> list[LogEntry]:
        """At most `limit` entries from `from_position` on, or the newest ones, of one kind or all. Always ascending."""
        rows = await self._rows(_page_statement(from_position, limit, kind))
        with explained(self.path, "read"):
            page = [to_entry(row) for row in rows]
        return page if from_position is not None else page[::-1]

    async def last_position(self) -> int:
        """0 when empty."""
        return int((await self._rows(select(func.coalesce(func.max(entries.c.position), 0))))[0][0])

    async def size_bytes(self) -> int:
        """Bytes of the database, pages that only the WAL holds included."""
        size = text("SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()")
        return int((await self._rows(size))[0][0])

    async def terms(self) -> list[Term]:
        """Every start of the advisor, oldest first."""
        columns = (terms.c.term, terms.c.started_us, terms.c.host, terms.c.pid, terms.c.version)
        return [Term(*row) for row in await self._rows(select(*columns).order_by(terms.c.term))]

    async def close(self) -> None:
        """Idempotent."""
        await self._engine.dispose()

    async def _rows(self, statement: Any) -> list[Any]:
        with explained(self.path, "read"):
            async with self._engine.connect() as connection:
                return list((await connection.execute(statement)).all())


def _page_statement(from_position: int | None, limit: int, kind: str | None) -> Select[Any]:
    statement = select(entries)
    if kind is not None:
        statement = statement.where(entries.c.kind == kind)
    if from_position is None:
        return statement.order_by(entries.c.position.desc()).limit(limit)
    return statement.where(entries.c.position >= from_position).order_by(entries.c.position).limit(limit)
