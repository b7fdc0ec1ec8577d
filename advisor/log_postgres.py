"""The log's PostgreSQL database, through SQLAlchemy and asyncpg: one loop thread, whoever asks waits for it."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import socket
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import structlog
from sqlalchemy import URL, Connection, make_url, text
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from advisor.errors import LogError
from advisor.log_faults import explained, is_server_gone
from advisor.log_schema import migrate, require_current

Answer = TypeVar("Answer")

PARTITION_ENTRIES = 65_536
"""Positions in one partition: what one prune drops at least."""
WRITER_LOCK = 0x6B76_6164_7669_736F
"""Key of the advisory lock that the writer's session holds; a database holds one log."""
CONNECT_TIMEOUT_S = 10
LOCK_TIMEOUT = "2s"
"""A partition that somebody reads is dropped another time: waiting for it would keep the writer waiting too."""
SIZE = text("SELECT coalesce(sum(pg_total_relation_size(relid)), 0) FROM pg_partition_tree('entries')")

_log = structlog.get_logger()
_PARTITION = re.compile(r"entries_p(\d{20})")
_PARTITIONS = text("SELECT relid::regclass::text FROM pg_partition_tree('entries') WHERE isleaf ORDER BY 1")
_HOLDER = text(
    "SELECT a.application_name FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE l.locktype = 'advisory'"
    " AND l.classid = :high AND l.objid = :low AND l.granted"
)


def is_postgres(url: str) -> bool:
    return url.startswith(("postgresql:", "postgresql+", "postgres:"))


def postgres_url(url: str, password_file: Path | None) -> URL:
    """For asyncpg, with the file's password. Raises `LogError`."""
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise LogError(f"log.url {url!r} cannot be read: write postgresql://user@host:port/database") from error
    if parsed.get_backend_name() != "postgresql" or not parsed.database:
        raise LogError(f"log.url {parsed.render_as_string()} names no database: write postgresql://user@host/database")
    if parsed.password is not None:
        raise LogError("log.url holds a password: move it to a file, which log.password_file names; nothing shows that")
    password = None
    if password_file is not None:
        try:
            password = password_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise LogError(f"log.password_file {password_file} cannot be read ({error}): check the path") from error
    return parsed.set(drivername="postgresql+asyncpg", password=password)


def async_engine(url: URL, purpose: str) -> AsyncEngine:
    """`purpose` is shown to the server's administrators."""
    return create_async_engine(
        url,
        pool_size=2,
        connect_args={
            "timeout": CONNECT_TIMEOUT_S,
            "server_settings": {
                "application_name": f"kvadvisor {purpose}, process {os.getpid()} on {socket.gethostname()}"[:63],
                "synchronous_commit": "on",
            },
        },
    )


class PostgresDatabase:
    """`advisor.log_database.Database` on a server. Writing, its session holds an advisory lock.

    Entries lie in partitions by position, made ahead and dropped whole. A batch's identity is unique in its partition.
    """

    def __init__(
        self, url: str, password_file: Path | None, *, read_only: bool, partition_entries: int = PARTITION_ENTRIES
    ) -> None:
        parsed = postgres_url(url, password_file)
        self.name = url
        self.writable = not read_only
        self._partition_entries = partition_entries
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvadvisor-postgres", daemon=True)
        self._thread.start()
        self._engine = async_engine(parsed, "log" if self.writable else "reader")
        self._writer: AsyncConnection | None = None
        self._room_below = 0
        """Partitions for all positions below it are there."""
        try:
            with explained(url, "open"):
                if read_only:
                    self.read(lambda connection: require_current(connection, url))
                else:
                    self._writer = self._wait(self._connect())
                    self._take_lock()
                    self.write(lambda connection: migrate(connection, url))
                    self.write(self._find_room)
                    self.read(self._warn_of_lost_flushes)
        except BaseException:
            self.close()
            raise

    def read(self, question: Callable[[Connection], Answer]) -> Answer:
        async def ask() -> Answer:
            async with self._engine.connect() as connection:
                return await connection.run_sync(question)

        return self._wait(ask())

    def write(self, change: Callable[[Connection], Answer]) -> Answer:
        writer = self._writer
        assert writer is not None

        async def carry_out() -> Answer:
            async with writer.begin():
                return await writer.run_sync(change)

        return self._wait(carry_out())

    def make_room(self, connection: Connection, through: int) -> None:
        """The partition of `through`, and the next one when it is half full."""
        while through + self._partition_entries // 2 >= self._room_below:
            first, end = self._room_below, self._room_below + self._partition_entries
            name = f"entries_p{first:020d}"
            # Attaching, unlike CREATE … PARTITION OF, keeps no reader waiting.
            for statement in (
                f"CREATE TABLE IF NOT EXISTS {name} (LIKE entries INCLUDING DEFAULTS INCLUDING STORAGE)",
                f"CREATE UNIQUE INDEX IF NOT EXISTS {name}_batch ON {name} (producer, epoch, sequence)",
                f"ALTER TABLE entries ATTACH PARTITION {name} FOR VALUES FROM ({first}) TO ({end})",
            ):
                connection.exec_driver_sql(statement)
            self._room_below = end

    def prune(self, through: int) -> None:
        """Whole partitions. One that somebody reads stays for now."""

        def drop(connection: Connection) -> None:
            partitions = _partitions(connection)
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
            for (_, name), (next_first, _) in itertools.pairwise(partitions):
                if next_first - 1 <= through:
                    connection.exec_driver_sql(f"DROP TABLE {name}")

        async def carry_out() -> None:
            async with self._engine.begin() as connection:
                await connection.run_sync(drop)

        self._wait(carry_out())

    def stored_bytes(self, connection: Connection) -> int:
        return int(connection.scalar(SIZE) or 0)

    def is_broken_by(self, error: LogError) -> bool:
        """With the connection goes the lock: another writer may have begun."""
        return is_server_gone(error)

    def close(self) -> None:
        if self._loop.is_closed():
            return
        try:
            with explained(self.name, "close"):
                if self._writer is not None:
                    self._wait(self._writer.close())
                    self._writer = None
                self._wait(self._engine.dispose())
        except LogError:
            # A server that went away keeps nothing of ours open.
            self._writer = None
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _connect(self) -> AsyncConnection:
        return await self._engine.connect()

    def _wait(self, step: Coroutine[Any, Any, Answer]) -> Answer:
        return asyncio.run_coroutine_threadsafe(step, self._loop).result()

    def _take_lock(self) -> None:
        def take(connection: Connection) -> str | None:
            if connection.scalar(text("SELECT pg_try_advisory_lock(:key)"), {"key": WRITER_LOCK}):
                return None
            halves = {"high": WRITER_LOCK >> 32, "low": WRITER_LOCK & 0xFFFF_FFFF}
            return str(connection.scalar(_HOLDER, halves) or "another session")

        holder = self.write(take)
        if holder is not None:
            raise LogError(f"{self.name} is in use by {holder}: stop that one first, or give this one its own database")

    def _warn_of_lost_flushes(self, connection: Connection) -> None:
        if connection.scalar(text("SHOW fsync")) == "off":
            _log.warning("the server acknowledges what its disk does not have yet: set fsync = on there", log=self.name)

    def _find_room(self, connection: Connection) -> None:
        partitions = _partitions(connection)
        last = int(connection.scalar(text("SELECT coalesce(max(position), 0) FROM entries")) or 0)
        self._room_below = partitions[-1][0] + self._partition_entries if partitions else 0
        self.make_room(connection, last + 1)


def _partitions(connection: Connection) -> list[tuple[int, str]]:
    """First position and name of each, ascending."""
    names = [str(row[0]) for row in connection.execute(_PARTITIONS)]
    return sorted((int(match[1]), match[0]) for match in map(_PARTITION.search, names) if match is not None)
