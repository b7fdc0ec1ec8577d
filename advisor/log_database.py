"""The log's SQLite file: where it lies, how it is opened, read, written and cut."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, delete, event, func, inspect, make_url, select, text
from sqlalchemy.exc import ArgumentError

from advisor.errors import LogError
from advisor.log_faults import explained, is_failure_of
from advisor.log_folder import make_folder, sync_folder
from advisor.log_lock import WriterLock
from advisor.log_schema import migrate, require_current
from advisor.tables import entries
from advisor.turnstile import Turnstile

Answer = TypeVar("Answer")

PRUNE_ENTRIES = 256
"""Deleted in one transaction: a writer beside it waits for no more."""
PRUNE_STEPS_MAX = 64
"""In one call, which so ends soon."""
SIZE = text(
    "SELECT (page_count - freelist_count) * page_size"
    " FROM pragma_page_count(), pragma_freelist_count(), pragma_page_size()"
)
"""Bytes of the pages in use. The file itself never shrinks."""

# reference/ingest.md; the page size holds only if it is set before WAL is.
_WRITER_PRAGMAS = (
    "page_size = 16384",
    "journal_mode = WAL",
    "synchronous = FULL",
    "wal_autocheckpoint = 512",
    "secure_delete = OFF",
    "cache_size = -32768",
)
_READER_PRAGMAS = ("query_only = ON", "cache_size = -32768")

_FORMS = "write sqlite:///PATH or postgresql://user@host:port/database"


class Database(Protocol):
    """What a `SqlLog` asks of the database below it. Its errors are the driver's: `log_faults` explains them."""

    name: str
    """For people: a path or a URL without password."""
    writable: bool

    def read(self, question: Callable[[Connection], Answer]) -> Answer:
        """One short transaction. From any thread."""

    def write(self, change: Callable[[Connection], Answer]) -> Answer:
        """One transaction of the only writer, durable when it returns."""

    def make_room(self, connection: Connection, through: int) -> None:
        """Before entries up to position `through` are inserted, in their transaction."""

    def prune(self, through: int) -> None:
        """Drop entries up to `through`, or fewer. From any thread."""

    def stored_bytes(self, connection: Connection) -> int:
        """What the kept entries take on disk, with their indexes."""

    def is_broken_by(self, error: LogError) -> bool:
        """Whether nothing may be written any more after this."""

    def close(self) -> None:
        """Idempotent."""


def database_path(url_or_path: str | Path) -> Path:
    """The absolute path that `sqlite:///…` or a plain path names. Raises `LogError` for any other database."""
    text = str(url_or_path)
    if "://" not in text:
        return Path(text).absolute()
    try:
        url = make_url(text)
    except ArgumentError as error:
        raise LogError(f"{text!r} is no database URL: {_FORMS}") from error
    if url.get_backend_name() != "sqlite" or not url.database or url.database == ":memory:":
        raise LogError(f"a log at {url.render_as_string()} is not possible: {_FORMS}")
    return Path(url.database).absolute()


def require_file(path: Path) -> None:
    """Raises `LogError` where there is no file to read."""
    if not path.is_file():
        raise LogError(f"there is no log at {path}: check the directory")


def reader_url(path: Path, driver: str = "sqlite") -> URL:
    """Opens the file, and the WAL that a killed writer left, without changing either."""
    return URL.create(driver, database=path.absolute().as_uri(), query={"mode": "ro", "uri": "true"})


class SqliteDatabase:
    """`Database` on a file. Writing, it holds `<file>.lock`, makes the file and brings its schema up to date."""

    def __init__(self, path: Path, *, read_only: bool) -> None:
        self.name = str(path)
        self.writable = not read_only
        self._lock: WriterLock | None = None
        self._writer: Connection | None = None
        self._writing = Turnstile()
        """Held for one transaction: by the writer, and between its own by who prunes."""
        if read_only:
            self._engine = open_reader(path)
            return
        make_folder(path.parent)
        self._lock = WriterLock(path)
        try:
            self._engine = open_writer(path)
            sync_folder(path.parent)
            with explained(path, "open"):
                self._writer = self._engine.connect()
        except BaseException:
            self._lock.release()
            raise

    def read(self, question: Callable[[Connection], Answer]) -> Answer:
        with self._engine.connect() as connection:
            return question(connection)

    def write(self, change: Callable[[Connection], Answer]) -> Answer:
        assert self._writer is not None
        with self._writing, self._writer.begin():
            return change(self._writer)

    def make_room(self, connection: Connection, through: int) -> None:
        """A file takes what comes."""

    def prune(self, through: int) -> None:
        """Row by row, in steps; their pages are used again."""
        for _ in range(PRUNE_STEPS_MAX):
            if self.write(lambda connection: self._prune_step(connection, through)):
                return

    def _prune_step(self, connection: Connection, through: int) -> bool:
        """Whether nothing is left to drop."""
        first = connection.scalar(select(func.min(entries.c.position)))
        if first is None or first > through:
            return True
        connection.execute(delete(entries).where(entries.c.position <= min(through, first + PRUNE_ENTRIES - 1)))
        return False

    def stored_bytes(self, connection: Connection) -> int:
        return int(connection.scalar(SIZE) or 0)

    def is_broken_by(self, error: LogError) -> bool:
        """A disk that failed to sync is not asked again: what it holds is known only after a restart."""
        return is_failure_of(error, sqlite3.SQLITE_IOERR)

    def close(self) -> None:
        if self._writer is not None:
            with self._writing:
                self._writer.close()
            self._writer = None
        self._engine.dispose()
        if self._lock is not None:
            self._lock.release()


def open_writer(path: Path) -> Engine:
    """An engine on the file, made if absent, with the schema of this version. The caller holds the lock."""
    engine = create_engine(URL.create("sqlite", database=str(path)), connect_args={"check_same_thread": False})
    _prepare(engine, _WRITER_PRAGMAS)
    try:
        with explained(path, "open"), engine.begin() as connection:
            migrate(connection, path)
    except BaseException:
        engine.dispose()
        raise
    return engine


def open_reader(path: Path) -> Engine:
    """An engine that writes nothing and takes no lock."""
    require_file(path)
    engine = create_engine(reader_url(path), connect_args={"check_same_thread": False})
    _prepare(engine, _READER_PRAGMAS)
    try:
        with explained(path, "open"), engine.connect() as connection:
            require_current(connection, path)
    except BaseException:
        engine.dispose()
        raise
    return engine


def is_begun(path: Path) -> bool:
    """Whether the file holds tables: a writer that was killed before its first transaction leaves none."""
    engine = create_engine(reader_url(path))
    _prepare(engine, _READER_PRAGMAS)
    try:
        with explained(path, "open"), engine.connect() as connection:
            return bool(inspect(connection).get_table_names())
    finally:
        engine.dispose()


def _prepare(engine: Engine, pragmas: tuple[str, ...]) -> None:
    @event.listens_for(engine, "connect")
    def connected(connection: Any, _record: object) -> None:
        # Left to itself the driver opens no transaction before DDL, and a migration could be half done.
        connection.isolation_level = None
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}").close()

    @event.listens_for(engine, "begin")
    def begun(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")
