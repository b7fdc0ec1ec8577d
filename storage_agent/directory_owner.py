"""Who may write into a directory volume: one process on one host, by a lock, or by a file where there are no locks."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress
from pathlib import Path

from storage_agent.directory_format import OWNER_NAME
from storage_agent.errors import VolumeError
from storage_agent.files import try_lock

_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_HELD_SUFFIX = ".held"


class DirectoryOwner:
    """The right to write, until `close`. `has_locks`: the file system keeps it, and ends it with the process."""

    def __init__(self, volume: str, folder: Path) -> None:
        """Raises `VolumeError` that names the owner where there is one, `OSError` where the folder cannot be used."""
        self._path = folder / OWNER_NAME
        self._held = folder / f"{OWNER_NAME}{_HELD_SUFFIX}"
        self.has_locks = True
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            if not self._take(volume):
                raise VolumeError(
                    f"volume {volume!r}: {folder} is owned by {_said(self._path)}; close it there, or read it from "
                    "here with kind 'directory-view'"
                )
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, _this_process().encode(), 0)
        except (OSError, VolumeError):
            os.close(self._fd)
            raise

    def close(self) -> None:
        """Idempotent."""
        if self._fd < 0:
            return
        if not self.has_locks:
            with suppress(FileNotFoundError):
                self._held.unlink()
        os.close(self._fd)
        self._fd = -1

    def _take(self, volume: str) -> bool:
        try:
            return try_lock(self._fd)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        self.has_locks = False
        return self._take_by_file(volume)

    def _take_by_file(self, volume: str) -> bool:
        """Where no lock ends with its process, a file stays behind after a crash: ours is taken over."""
        for _ in range(2):
            try:
                fd = os.open(self._held, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            except FileExistsError:
                pid, _, host = _said(self._held).removeprefix("process ").partition(" on ")
                if host != socket.gethostname():
                    raise VolumeError(
                        f"volume {volume!r}: {self._held} says that it is owned by process {pid} on {host}; if that "
                        "host is gone, remove this file"
                    ) from None
                if pid.isdigit() and _is_alive(int(pid)):
                    return False
                with suppress(FileNotFoundError):
                    self._held.unlink()
                continue
            with os.fdopen(fd, "w") as file:
                file.write(_this_process())
            return True
        return False


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _said(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip() or "another process"
    except OSError:
        return "another process"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
