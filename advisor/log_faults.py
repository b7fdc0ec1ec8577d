"""What a database's or a disk's errors mean: one sentence each, with what to do."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg
from sqlalchemy.exc import SQLAlchemyError, StatementError

from advisor.errors import LogError

DISK_FULL = "the disk is full: free space there or choose another directory, then start again"

_ERRNO = {
    errno.ENOSPC: DISK_FULL,
    errno.EDQUOT: "the user's quota of the disk is used up: free space there, then start again",
    errno.EFBIG: "a file may not grow so large here: raise the limit (`ulimit -f`), then start again",
}

_SQLITE = {
    sqlite3.SQLITE_FULL: DISK_FULL,
    sqlite3.SQLITE_IOERR: "the disk failed: check it, then start again, which recovers all that was acknowledged",
    sqlite3.SQLITE_NOTADB: "the file is no SQLite database: move it away or choose another directory",
    sqlite3.SQLITE_CORRUPT: "the file is damaged: restore a copy of it or start with another directory",
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened: check that it exists and that its folder can be written to",
    sqlite3.SQLITE_READONLY: "the file may not be written: check its permissions and its file system's",
    sqlite3.SQLITE_PERM: "the file may not be used: check its permissions",
    sqlite3.SQLITE_BUSY: "another program holds it: close that one",
}

_POSTGRES: dict[type[BaseException], str] = {
    asyncpg.DiskFullError: "the server's disk is full: free space there, then start again",
    asyncpg.InvalidPasswordError: "the server refuses the user or password: check log.url and log.password_file",
    asyncpg.InvalidAuthorizationSpecificationError: "the server refuses the user: check log.url and log.password_file",
    asyncpg.InvalidCatalogNameError: "the server has no such database: make it with `createdb`",
    asyncpg.InsufficientPrivilegeError: "the user may not do this: let it own the database",
    asyncpg.TooManyConnectionsError: "the server has no connection left: raise its max_connections",
    asyncpg.LockNotAvailableError: "another session holds the table: end its transaction",
    asyncpg.CannotConnectNowError: "the server is starting or stopping: wait for it, then start again",
}
_SERVER_GONE = (
    "the server cannot be reached or went away ({detail}): check it and the network, then start again, which finds all"
    " that was acknowledged"
)
_GONE: tuple[type[BaseException], ...] = (
    OSError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
)

_RAISED = (
    SQLAlchemyError, sqlite3.Error, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError
)  # fmt: skip


@contextmanager
def explained(place: object, doing: str) -> Iterator[None]:
    """Turns what the database raises inside into one `LogError`: what, where, and what to do."""
    try:
        yield
    except (*_RAISED, OSError, ValueError) as error:
        raise LogError(f"cannot {doing} {place}: {_meaning(error)}") from error


def is_failure_of(error: BaseException | None, primary_code: int) -> bool:
    """Whether SQLite's own error behind `error` has this primary result code."""
    return any(_sqlite_code(cause) == primary_code for cause in _causes(error))


def is_server_gone(error: BaseException | None) -> bool:
    """Whether behind `error` is a PostgreSQL server that cannot be reached any more."""
    return any(isinstance(cause, _GONE) for cause in _causes(error))


def os_fault(place: object, doing: str, error: OSError) -> LogError:
    """A file's error as a `LogError`."""
    meaning = _ERRNO.get(error.errno or 0, f"{error.strerror}: check the disk")
    return LogError(f"cannot {doing} {place}: {meaning}")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = (error.orig if isinstance(error, StatementError) else None) or error.__cause__


def _sqlite_code(error: BaseException) -> int | None:
    if not isinstance(error, sqlite3.Error):
        return None
    # Extended codes carry the primary one in their low byte. Errors of the driver itself have none.
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _meaning(error: Exception) -> str:
    causes = list(_causes(error))
    for cause in causes:
        code = _sqlite_code(cause)
        if code in _SQLITE:
            return _SQLITE[code]
        for kind, meaning in _POSTGRES.items():
            if isinstance(cause, kind):
                return meaning
    for cause in causes:
        if isinstance(cause, _GONE):
            return _SERVER_GONE.format(detail=str(cause).strip() or type(cause).__name__)
    return str(error.orig if isinstance(error, StatementError) else error)
