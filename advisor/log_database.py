"""The log's SQLite file: where it lies, how it is opened, its schema, and what its errors mean."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, make_url
from sqlalchemy.exc import ArgumentError, StatementError

from advisor.errors import LogError

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

_MEANINGS = {
    sqlite3.SQLITE_FULL: "the disk is full: free space there or choose another directory, then start again",
    sqlite3.SQLITE_IOERR: "the disk failed: check it, then start again, which recovers all that was acknowledged",
    sqlite3.SQLITE_NOTADB: "the file is no SQLite database: move it away or choose another directory",
    sqlite3.SQLITE_CORRUPT: "the file is damaged: restore a copy of it or start with another directory",
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened: check that it exists and that its folder can be written to",
    sqlite3.SQLITE_READONLY: "the file may not be written: check its permissions and its file system's",
    sqlite3.SQLITE_PERM: "the file may not be used: check its permissions",
    sqlite3.SQLITE_BUSY: "another program holds it: close that one",
}


def database_path(url_or_path: str | Path) -> Path:
    """The absolute path that `sqlite:///…` or a plain path names. Raises `LogError` for any other database."""
    text = str(url_or_path)
    if "://" not in text:
        return Path(text).absolute()
    try:
        url = make_url(text)
    except ArgumentError as error:
        raise LogError(f"{text!r} is no database URL: write sqlite:///PATH") from error
    if url.get_backend_name() != "sqlite" or not url.database or url.database == ":memory:":
        raise LogError(
            f"a log at {url.render_as_string()} is not possible: write sqlite:///PATH; PostgreSQL comes with issue 3"
        )
    return Path(url.database).absolute()


def require_file(path: Path) -> None:
    """Raises `LogError` where there is no file to read."""
    if not path.is_file():
        raise LogError(f"there is no log at {path}: check the directory")


def reader_url(path: Path, driver: str = "sqlite") -> URL:
    """Opens the file, and the WAL that a killed writer left, without changing either."""
    return URL.create(driver, database=path.absolute().as_uri(), query={"mode": "ro", "uri": "true"})


@contextmanager
def explained(path: Path, doing: str) -> Iterator[None]:
    """Turns what the database raises inside into one `LogError`: what, where, and what to do."""
    try:
        yield
    except (StatementError, sqlite3.Error, ValueError) as error:
        raise LogError(f"cannot {doing} {path}: {_meaning(error)}") from error


def is_failure_of(error: BaseException | None, primary_code: int) -> bool:
    """Whether SQLite's own error behind `error` has this primary result code."""
    return _primary_code(error) == primary_code


def open_writer(path: Path) -> Engine:
    """An engine on the file, made if absent, with the schema of this version. The caller holds the lock."""
    engine = create_engine(URL.create("sqlite", database=str(path)), connect_args={"check_same_thread": False})
    _prepare(engine, _WRITER_PRAGMAS)
    try:
        with explained(path, "open"), engine.begin() as connection:
            _migrate(connection, path)
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
            _require_current(connection, path)
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


def _alembic() -> Config:
    config = Config()
    config.set_main_option("script_location", "advisor:migrations")
    config.set_main_option("path_separator", "os")
    return config


def _migrate(connection: Connection, path: Path) -> None:
    config = _alembic()
    scripts = ScriptDirectory.from_config(config)
    found = MigrationContext.configure(connection).get_current_revision()
    if found is None and inspect(connection).get_table_names():
        raise LogError(f"{path} is another program's database: move it away or choose another directory")
    _refuse_newer(found, scripts, path)
    if found != scripts.get_current_head():
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def _require_current(connection: Connection, path: Path) -> None:
    scripts = ScriptDirectory.from_config(_alembic())
    found = MigrationContext.configure(connection).get_current_revision()
    if found is None:
        raise LogError(f"{path} holds no log: check the directory")
    _refuse_newer(found, scripts, path)
    if found != scripts.get_current_head():
        raise LogError(
            f"{path} has schema {found}, older than this version's {scripts.get_current_head()}: "
            "start `kvadvisor serve` on it once, which brings it up to date"
        )


def _refuse_newer(found: str | None, scripts: ScriptDirectory, path: Path) -> None:
    known = {script.revision for script in scripts.walk_revisions()}
    if found is not None and found not in known:
        raise LogError(
            f"{path} has schema {found}, made by a newer kvadvisor than this one, which knows up to "
            f"{scripts.get_current_head()}: install that version again or choose another directory"
        )


def _primary_code(error: BaseException | None) -> int | None:
    while error is not None:
        if isinstance(error, sqlite3.Error):
            # Extended codes carry the primary one in their low byte. Errors of the driver itself have none.
            code = getattr(error, "sqlite_errorcode", None)
            return None if code is None else code & 0xFF
        error = error.orig if isinstance(error, StatementError) else error.__cause__
    return None


def _meaning(error: Exception) -> str:
    code = _primary_code(error)
    if code in _MEANINGS:
        return _MEANINGS[code]
    return str(error.orig if isinstance(error, StatementError) else error)
