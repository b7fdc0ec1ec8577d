"""The event log in SQLAlchemy: one row an entry, one transaction an append (reference/ingest.md)."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, Select, func, insert, select
from sqlalchemy.exc import IntegrityError

from advisor.entries import EntryKind, EventLog, LogEntry, NewEntry, decode_control
from advisor.errors import LogError
from advisor.log_database import database_path, explained, is_failure_of, open_reader, open_writer
from advisor.log_lock import WriterLock
from advisor.tables import entries, terms
from event_plane import wire
from event_plane.errors import WireError
from event_plane.schema import Batch

PAGE_ENTRIES_MAX = 1_024
PAGE_BYTES_MAX = 8 * 1024 * 1024
"""A page of `SqlLog.read` ends after this many entries or payload bytes, and with it the transaction."""

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
    log: EventLog, path: Path, from_position: int = 1
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
                f"entry {entry.position} of {path} is damaged ({error}): restore a copy of the log, or start with "
                "another directory"
            ) from error
        yield entry, batch


class SqlLog:
    """`advisor.entries.EventLog` on an SQLite file, named by path or `sqlite:///` URL.

    For writing it makes the file and its folder if absent, brings the schema up to date and holds `<file>.lock`, so
    that a second writer is refused. `append` and `next_term` belong to one thread; `read` and `last_position` may be
    called from any. With `read_only` it takes no lock and changes neither the file nor a WAL that a killed writer
    left behind. Every method raises `LogError`.
    """

    def __init__(self, url_or_path: str | Path, *, read_only: bool = False) -> None:
        self.path = database_path(url_or_path)
        self._lock: WriterLock | None = None
        self._writer: Connection | None = None
        self._failed = False
        if read_only:
            self._engine = open_reader(self.path)
            return
        _make_folder(self.path.parent)
        self._lock = WriterLock(self.path)
        try:
            self._engine = open_writer(self.path)
            _sync_folder(self.path.parent)
            with explained(self.path, "open"):
                self._writer = self._engine.connect()
            self._last_position = self._stored_last_position()
        except BaseException:
            self._lock.release()
            raise

    def append(self, new: Sequence[NewEntry], recorded_us: int) -> int:
        """All or nothing, in one transaction; durable when it returns. Returns the first entry's position.

        A disk that failed to sync is not asked again: what it holds is known only after a restart.
        """
        writer = self._require_writer()
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
        try:
            with explained(self.path, "append to"), writer.begin():
                writer.execute(_INSERT, rows)
        except LogError as error:
            if isinstance(error.__cause__, IntegrityError):
                raise LogError(self._conflict(new, first)) from error
            self._failed = is_failure_of(error, sqlite3.SQLITE_IOERR)
            raise
        self._last_position += len(new)
        return first

    def read(self, from_position: int = 1, to_position: int | None = None) -> Iterator[LogEntry]:
        """Entries in order. Each page is one short transaction: an open reader keeps the WAL from being cut."""
        position = from_position
        while page := self._page(position, to_position):
            yield from page
            position = page[-1].position + 1

    def last_position(self) -> int:
        """0 when empty. Read-only, it sees what another process has appended since."""
        return self._last_position if self._writer is not None else self._stored_last_position()

    def next_term(self, started_us: int, host: str, pid: int, version: str) -> int:
        writer = self._require_writer()
        with explained(self.path, "append to"), writer.begin():
            result = writer.execute(
                insert(terms).values(started_us=started_us, host=host, pid=pid, version=version)
            )
            key = result.inserted_primary_key
        assert key is not None
        return int(key[0])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._engine.dispose()
        if self._lock is not None:
            self._lock.release()

    def _require_writer(self) -> Connection:
        if self._writer is None:
            raise LogError(f"{self.path} is not open for writing: open it without read_only, and before close")
        if self._failed:
            raise LogError(f"{self.path} is not written to after its disk failed: check it, then start again")
        return self._writer

    def _page(self, from_position: int, to_position: int | None) -> list[LogEntry]:
        statement = _page_statement(from_position, to_position)
        page: list[LogEntry] = []
        payload_bytes = 0
        with explained(self.path, "read"), self._engine.connect() as connection:
            for row in connection.execute(statement):
                page.append(to_entry(row))
                payload_bytes += len(row.payload)
                if payload_bytes >= PAGE_BYTES_MAX:
                    break
        return page

    def _stored_last_position(self) -> int:
        with explained(self.path, "read"), self._engine.connect() as connection:
            return int(connection.scalar(select(func.coalesce(func.max(entries.c.position), 0))) or 0)

    def _conflict(self, new: Sequence[NewEntry], first: int) -> str:
        seen: set[tuple[int | None, int | None, int | None]] = set()
        with explained(self.path, "read"), self._engine.connect() as connection:
            for entry in new:
                if entry.producer is None:
                    continue
                key = (entry.producer, entry.epoch, entry.sequence)
                where = [column == value for column, value in zip(_BATCH, key, strict=True)]
                position = connection.scalar(select(entries.c.position).where(*where))
                if position is not None or key in seen:
                    place = "twice in one append" if position is None else f"already at position {position}"
                    return (
                        f"batch {entry.sequence} of producer {entry.producer:016x}, epoch {entry.epoch}, is {place} "
                        f"of {self.path}: drop duplicates before appending; nothing was written"
                    )
                seen.add(key)
        return f"position {first} of {self.path} is taken: something else writes to it without the lock; stop that"


def _page_statement(from_position: int, to_position: int | None) -> Select[Any]:
    statement = select(entries).where(entries.c.position >= from_position)
    if to_position is not None:
        statement = statement.where(entries.c.position <= to_position)
    return statement.order_by(entries.c.position).limit(PAGE_ENTRIES_MAX)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LogError(f"{folder} cannot be made ({error.strerror}): choose another directory") from error


def _sync_folder(folder: Path) -> None:
    """Makes the file's name as durable as its content."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise LogError(f"{folder} cannot be synced ({error.strerror}): check its disk") from error
    finally:
        os.close(descriptor)
