"""The catalogue of a segment log: an SQLite database of its sealed segments and of the advisor's terms.

The files are the truth. What the catalogue says of segments is made again from them whenever it differs.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy import delete, insert, select

from advisor.entries import EntryKind, LogEntry, SettingsEntry, decode_control
from advisor.errors import LogError
from advisor.log_database import open_writer
from advisor.log_faults import explained, is_failure_of
from advisor.segment_files import FileBytes, read_groups, read_index, read_sealed
from advisor.segment_shelf import Segment
from advisor.tables import segments, terms

CATALOGUE = "catalogue.db"
REFUSED_SUFFIX = ".refused"

_log = structlog.get_logger()


class Catalogue:
    """Of the log in `folder`, which the caller has locked. From any thread. Raises `LogError`."""

    def __init__(self, folder: Path, shelf: list[Segment]) -> None:
        """Made, or made again, where it is absent or damaged: with the files' segments and the last term in them."""
        self.path = folder / CATALOGUE
        is_there = self.path.exists()
        try:
            self._engine = open_writer(self.path)
        except LogError as error:
            if not any(is_failure_of(error, code) for code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)):
                raise
            _log.warning("the catalogue is damaged and is made again from the segments", path=str(self.path))
            os.replace(self.path, self.path.with_name(self.path.name + REFUSED_SUFFIX))
            is_there = False
            self._engine = open_writer(self.path)
        try:
            if not is_there and shelf:
                self._restore_term(shelf)
            self._match(shelf)
        except BaseException:
            self._engine.dispose()
            raise

    def next_term(self, started_us: int, host: str, pid: int, version: str) -> int:
        row = insert(terms).values(started_us=started_us, host=host, pid=pid, version=version)
        with explained(self.path, "append to"), self._engine.begin() as connection:
            key = connection.execute(row).inserted_primary_key
        assert key is not None
        return int(key[0])

    def terms(self) -> list[tuple[int, int, str, int, str]]:
        columns = (terms.c.term, terms.c.started_us, terms.c.host, terms.c.pid, terms.c.version)
        with explained(self.path, "read"), self._engine.connect() as connection:
            return [row._tuple() for row in connection.execute(select(*columns).order_by(terms.c.term))]

    def record(self, segment: Segment) -> None:
        """A segment that was sealed."""
        with explained(self.path, "append to"), self._engine.begin() as connection:
            connection.execute(insert(segments), [_row(segment)])

    def forget(self, dropped: Iterable[Segment]) -> None:
        firsts = [segment.first for segment in dropped]
        with explained(self.path, "prune"), self._engine.begin() as connection:
            connection.execute(delete(segments).where(segments.c.first_position.in_(firsts)))

    def close(self) -> None:
        self._engine.dispose()

    def _match(self, shelf: list[Segment]) -> None:
        """Correct the rows to what the files say."""
        sealed = {segment.first: segment for segment in shelf if segment.sealed}
        with explained(self.path, "open"), self._engine.begin() as connection:
            known = set(connection.scalars(select(segments.c.first_position)))
            if stale := known - sealed.keys():
                connection.execute(delete(segments).where(segments.c.first_position.in_(stale)))
            if absent := sealed.keys() - known:
                connection.execute(insert(segments), [_row(sealed[first]) for first in sorted(absent)])

    def _restore_term(self, shelf: list[Segment]) -> None:
        """Go on from the last term that an entry of settings names: an agent refuses a lower one."""
        for segment in reversed(shelf):
            latest = None
            for entry in _settings_in(segment):
                latest = entry
            settings = decode_control(latest.payload) if latest is not None else None
            if latest is not None and isinstance(settings, SettingsEntry):
                row = insert(terms).values(
                    term=settings.term, started_us=latest.recorded_us, host="", pid=0, version=""
                )
                with explained(self.path, "open"), self._engine.begin() as connection:
                    connection.execute(row)
                return


def _settings_in(segment: Segment) -> Iterator[LogEntry]:
    descriptor = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if segment.sealed:
            yield from read_sealed(segment.path, descriptor, segment.last or 0, kind=EntryKind.SETTINGS)
        else:
            groups = read_groups(segment.path, FileBytes(descriptor), segment.first, kind=EntryKind.SETTINGS)
            for group in groups:
                yield from group.entries
    finally:
        os.close(descriptor)


def _row(segment: Segment) -> dict[str, Any]:
    descriptor = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        index = read_index(segment.path, descriptor)
    finally:
        os.close(descriptor)
    return {
        "first_position": segment.first,
        "last_position": segment.last,
        "raw_bytes": sum(block.raw_bytes for block in index.blocks),
        "stored_bytes": segment.stored_bytes,
        "first_recorded_us": index.first_recorded_us,
        "last_recorded_us": index.last_recorded_us,
    }
