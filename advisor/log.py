"""The event log in SQLAlchemy: one row an entry, one transaction an append (reference/ingest.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, Select, func, insert, select
from sqlalchemy.exc import IntegrityError

from advisor.entries import EntryKind, EventLog, LogEntry, LogStat, NewEntry, decode_control
from advisor.errors import LogError
from advisor.log_database import Database, SqliteDatabase, database_path
from advisor.log_faults import explained
from advisor.log_postgres import PARTITION_ENTRIES, PostgresDatabase, is_postgres
from advisor.open_reads import OpenReads, pruned_under_reader
from advisor.tables import entries, terms
from event_plane import wire
from event_plane.errors import WireError
from event_plane.schema import Batch

PAGE_ENTRIES_MAX = 1_024
PAGE_BYTES_MAX = 8 * 1024 * 1024
"""A page of `SqlLog.read` ends after this many entries or payload bytes, and with it the transaction."""
FETCH_ROWS = 64
"""Rows that PostgreSQL sends ahead within a page."""

_INSERT = insert(entries)
_BATCH = (entries.c.producer, entries.c.epoch, entries.c.sequence)


def to_entry(row: Row[Any]) -> LogEntry:
    """A row of `tables.entries`. Raises `ValueError` for a kind that this version does not know."""
    return LogEntry(
        position=row.position,
        kind=EntryKind(row.kind),
        payload=row.payload,
        producer=row.producer,
        epoch=row.epoch,
        sequence=row.sequence,
        source=row.source,
        foreign_crc=row.foreign_crc,
        recorded_us=row.recorded_us,
    )


def read_decoded(
    log: EventLog, place: str | Path, from_position: int = 1
) -> Iterator[tuple[LogEntry, Batch | None]]:
    """Entries in order, each with its batch if it is one. Raises `LogError` naming an entry that is damaged."""
    for entry in log.read(from_position):
        batch = None
        try:
            if entry.kind is EntryKind.BATCH:
                batch = wire.decode(entry.payload)
            else:
                decode_control(entry.payload)
        except (WireError, msgspec.MsgspecError) as error:
            raise LogError(
                f"entry {entry.position} of {place} is damaged ({error}): restore a copy of the log, or start with "
                "another directory"
            ) from error
        yield entry, batch


class SqlLog:
    """`advisor.entries.EventLog` on SQLite, named by path or `sqlite:///` URL, or on PostgreSQL.

    For writing it makes an SQLite file and its folder if absent, brings the schema up to date and holds a lock, so
    that a second writer is refused. `append` and `next_term` belong to one thread, all else may be called from any.
    With `read_only` it takes no lock and changes neither the file nor a WAL that a killed writer left behind. Every
    method raises `LogError`.
    """

    def __init__(
        self,
        url_or_path: str | Path,
        *,
        password_file: Path | None = None,
        read_only: bool = False,
        partition_entries: int = PARTITION_ENTRIES,
    ) -> None:
        self._database: Database
        if is_postgres(str(url_or_path)):
            self._database = PostgresDatabase(
                str(url_or_path), password_file, read_only=read_only, partition_entries=partition_entries
            )
        else:
            self._database = SqliteDatabase(database_path(url_or_path), read_only=read_only)
        self.name = self._database.name
        self._reads = OpenReads()
        self._failed = False
        self._closed = False
        self._last_position = 0
        if not read_only:
            try:
                self._last_position = self._stored_last_position()
            except BaseException:
                self._database.close()
                raise

    def append(self, new: Sequence[NewEntry], recorded_us: int) -> int:
        """All or nothing, in one transaction; durable when it returns. Returns the first entry's position."""
        self._require_writer()
        first = self._last_position + 1
        if not new:
            return first
        rows = [
            {
                "position": position,
                "kind": entry.kind.value,
                "source": entry.source,
                "producer": entry.producer,
                "epoch": entry.epoch,
                "sequence": entry.sequence,
                "foreign_crc": entry.foreign_crc,
                "recorded_us": recorded_us,
                "payload": entry.payload,
            }
            for position, entry in enumerate(new, first)
        ]

        def add(connection: Connection) -> None:
            self._database.make_room(connection, first + len(new) - 1)
            connection.execute(_INSERT, rows)

        try:
            with explained(self.name, "append to"):
                self._database.write(add)
        except LogError as error:
            if isinstance(error.__cause__, IntegrityError):
                raise LogError(self._conflict(new, first)) from error
            self._failed = self._database.is_broken_by(error)
            raise
        self._last_position += len(new)
        return first

    def read(self, from_position: int = 1, to_position: int | None = None) -> Iterator[LogEntry]:
        """Entries in order. Each page is one short transaction: an open reader keeps the WAL from being cut."""
        with self._reads.open(from_position) as under_way:
            while page := self._page(under_way.position, to_position):
                if page[0].position > under_way.position > from_position:
                    raise pruned_under_reader(self.name, under_way.position, page[0].position)
                for entry in page:
                    under_way.position = entry.position
                    yield entry
                under_way.position += 1

    def first_position(self) -> int:
        """Of the oldest entry kept; 1 when nothing was ever appended."""
        with explained(self.name, "read"):
            return int(self._database.read(lambda c: c.scalar(select(func.min(entries.c.position)))) or 1)

    def last_position(self) -> int:
        """0 when empty. Read-only, it sees what another process has appended since."""
        return self._last_position if self._database.writable else self._stored_last_position()

    def prune(self, through: int) -> int:
        """SQLite drops rows, some 16,000 a call; its file never shrinks. PostgreSQL drops whole partitions."""
        self._require_writer()
        before = self.first_position()
        wanted = self._reads.spare(min(through, self._last_position - 1))
        if wanted < before:
            return 0
        with explained(self.name, "prune"):
            self._database.prune(wanted)
        return self.first_position() - before

    def stat(self) -> LogStat:
        with explained(self.name, "read"):
            return self._database.read(self._stat)

    def _stat(self, connection: Connection) -> LogStat:
        ends = select(func.min(entries.c.position), func.max(entries.c.position))
        first, last = connection.execute(ends).one()
        recorded = select(entries.c.recorded_us)
        return LogStat(
            first_position=first or 1,
            last_position=last or 0,
            stored_bytes=self._database.stored_bytes(connection),
            first_recorded_us=connection.scalar(recorded.where(entries.c.position == first)) or 0,
            last_recorded_us=connection.scalar(recorded.where(entries.c.position == last)) or 0,
        )

    def next_term(self, started_us: int, host: str, pid: int, version: str) -> int:
        self._require_writer()
        row = insert(terms).values(started_us=started_us, host=host, pid=pid, version=version)
        with explained(self.name, "append to"):
            key = self._database.write(lambda connection: connection.execute(row).inserted_primary_key)
        assert key is not None
        return int(key[0])

    def close(self) -> None:
        self._closed = True
        self._database.close()

    def _require_writer(self) -> None:
        if self._closed or not self._database.writable:
            raise LogError(f"{self.name} is not open for writing: open it without read_only, and before close")
        if self._failed:
            raise LogError(f"{self.name} is not written to after it failed: check disk or server, then start again")

    def _page(self, from_position: int, to_position: int | None) -> list[LogEntry]:
        statement = _page_statement(from_position, to_position)

        def fetch(connection: Connection) -> list[LogEntry]:
            page: list[LogEntry] = []
            payload_bytes = 0
            with connection.execute(statement) as rows:
                for row in rows:
                    page.append(to_entry(row))
                    payload_bytes += len(row.payload)
                    if payload_bytes >= PAGE_BYTES_MAX:
                        break
            return page

        with explained(self.name, "read"):
            return self._database.read(fetch)

    def _stored_last_position(self) -> int:
        with explained(self.name, "read"):
            return int(self._database.read(lambda c: c.scalar(select(func.max(entries.c.position)))) or 0)

    def _conflict(self, new: Sequence[NewEntry], first: int) -> str:
        seen: set[tuple[int | None, int | None, int | None]] = set()
        for entry in new:
            if entry.producer is None:
                continue
            key = (entry.producer, entry.epoch, entry.sequence)
            where = [column == value for column, value in zip(_BATCH, key, strict=True)]
            lookup = select(entries.c.position).where(*where)
            with explained(self.name, "read"):
                position = self._database.read(lambda connection, lookup=lookup: connection.scalar(lookup))  # type: ignore[misc]
            if position is not None or key in seen:
                place = "twice in one append" if position is None else f"already at position {position}"
                return (
                    f"batch {entry.sequence} of producer {entry.producer:016x}, epoch {entry.epoch}, is {place} "
                    f"of {self.name}: drop duplicates before appending; nothing was written"
                )
            seen.add(key)
        return f"position {first} of {self.name} is taken: something else writes to it without the lock; stop that"


def _page_statement(from_position: int, to_position: int | None) -> Select[Any]:
    statement = select(entries).where(entries.c.position >= from_position)
    if to_position is not None:
        statement = statement.where(entries.c.position <= to_position)
    statement = statement.order_by(entries.c.position).limit(PAGE_ENTRIES_MAX)
    return statement.execution_options(stream_results=True, max_row_buffer=FETCH_ROWS)
