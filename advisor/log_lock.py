"""One writer for a log: a lock that ends with its process, however that ends."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from advisor.errors import LogError


def lock_path(database: Path) -> Path:
    return database.with_name(database.name + ".lock")


class WriterLock:
    """Holds `<database>.lock` from construction to `release`.

    The file stays when the lock goes: removing it would let two processes lock two files of one name. Raises
    `LogError` naming the process that holds it.
    """

    def __init__(self, database: Path) -> None:
        path = lock_path(database)
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise LogError(f"{path} cannot be opened ({error.strerror}): make its folder writable") from error
        try:
            self._take(database)
        except BaseException:
            os.close(self._descriptor)
            raise

    def _take(self, database: Path) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._descriptor, 512, 0).decode(errors="replace").strip() or "another process"
            raise LogError(
                f"{database} is in use by {holder}: stop that one first, or give this one a directory of its own"
            ) from error
        except OSError as error:
            raise LogError(f"{database}.lock cannot be locked ({error.strerror}): use a local file system") from error
        owner = f"process {os.getpid()} on {socket.gethostname()}\n".encode()
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, owner, 0)
        except OSError as error:
            raise LogError(f"{database}.lock cannot be written ({error.strerror}): free some space there") from error

    def release(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def require_unlocked(database: Path) -> None:
    """Raises `LogError` while a writer has the database; takes nothing and makes no file."""
    path = lock_path(database)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        raise LogError(f"{path} cannot be opened ({error.strerror}): make it readable") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 512, 0).decode(errors="replace").strip() or "another process"
        raise LogError(f"{database} is in use by {holder}: stop that one first") from error
    finally:
        os.close(descriptor)
