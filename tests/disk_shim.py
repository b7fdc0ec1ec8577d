"""Every change that this process makes under a folder, in order: to be stopped at, or to be lost as a power cut would.

`DiskShim` stands between a volume and the operating system, NIXL's writes included. `Disk` is what a disk holds after
some of them: all (the process was killed), or those that a sync made last and any of the others (the power went).
"""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

from storage_agent.nixl_spans import NixlSpans
from storage_agent.nixl_transfer import NixlTransfer

SECTOR_BYTES = 512
Kept = Literal["all", "synced", "some"]


class Change(NamedTuple):
    """One operation on what lies under the folder. `path` and `target` are relative to it; `ino` names a file."""

    verb: Literal["create", "write", "truncate", "extend", "sync", "rename", "unlink", "mkdir", "sync folder"]
    ino: int = 0
    path: str = ""
    target: str = ""
    offset: int = 0
    data: bytes = b""


class DiskShim:
    """Calls `before` ahead of every change, with the change and a function that does the first half of it."""

    def __init__(self, folder: Path, before: Callable[[Change, Callable[[], None]], None]) -> None:
        self._folder = str(folder.resolve())
        self._before = before

    @contextmanager
    def watching(self) -> Iterator[None]:
        names = ("open", "write", "pwrite", "pwritev", "fsync", "fdatasync", "rename", "replace", "unlink", "ftruncate")
        replaced = {name: getattr(self, f"_{name}") for name in (*names, "posix_fallocate", "mkdir")}
        self._real = {name: getattr(os, name) for name in replaced}
        shim, together = self, NixlTransfer._transfer_together

        def transfer_together(
            this: Any, operation: str, extents: Any, portions: Any, before: Any, after: Any
        ) -> None:
            if operation != "WRITE":
                together(this, operation, extents, portions, before, after)
                return
            for first, end in portions.bounds:
                before(first, end)
                for at, staged, length, fd in extents[first:end]:
                    # In order, and each written before the next is thought of: stopped here, those before are there.
                    shim._pwrite(fd, this._memory[staged : staged + length], at, aligned=True)

        spans_transfer = NixlSpans.transfer

        def transfer(this: Any, operation: Any, spans: Any, file_offsets: Any) -> None:
            if operation != "WRITE":
                spans_transfer(this, operation, spans, file_offsets)
                return
            for span, at in zip(spans, file_offsets, strict=True):
                shim._pwrite(this._fd, ctypes.string_at(span.address, span.size_bytes), at, aligned=True)

        with (
            patch.multiple(os, **replaced),
            patch.object(NixlTransfer, "_transfer_together", transfer_together),
            patch.object(NixlSpans, "transfer", transfer),
        ):
            yield

    def _inside(self, path: Any) -> str | None:
        full = os.path.abspath(os.fspath(path))
        return os.path.relpath(full, self._folder) if full.startswith(self._folder + os.sep) else None

    def _file(self, fd: int) -> str | None:
        return self._inside(os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)"))

    def _open(self, path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        name = self._inside(path)
        created = name is not None and flags & os.O_CREAT and not os.path.lexists(path)
        if created:
            self._before(Change("create", path=name or ""), lambda: None)
        fd: int = self._real["open"](path, flags & ~os.O_TRUNC if name else flags, mode, **options)
        if name is not None and created:
            self.created(name, os.fstat(fd).st_ino)
        if name is not None and flags & os.O_TRUNC:
            self._ftruncate(fd, 0)
        return fd

    def created(self, name: str, ino: int) -> None:
        """A file was made; for whoever keeps the changes."""

    def _write(self, fd: int, data: Any) -> int:
        name = self._file(fd)
        if name is None:
            return int(self._real["write"](fd, data))
        offset = os.lseek(fd, 0, os.SEEK_CUR)
        done = self._pwrite(fd, data, offset)
        os.lseek(fd, offset + done, os.SEEK_SET)
        return done

    def _pwritev(self, fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if self._file(fd) is None:
            return int(self._real["pwritev"](fd, buffers, offset, flags))
        return self._pwrite(fd, b"".join(bytes(each) for each in buffers), offset, aligned=True)

    def _pwrite(self, fd: int, data: Any, offset: int, *, aligned: bool = False) -> int:
        content = bytes(data)
        half = len(content) // 2
        if aligned:
            half = half // 4096 * 4096
        if self._file(fd) is not None:
            self._before(
                Change("write", os.fstat(fd).st_ino, offset=offset, data=content),
                lambda: self._put(fd, content[:half], offset),
            )
        self._put(fd, content, offset)
        return len(content)

    def _put(self, fd: int, content: bytes, offset: int) -> None:
        # By a descriptor of our own: the volume's may want aligned memory.
        own = self._real["open"](f"/proc/self/fd/{fd}", os.O_WRONLY)
        try:
            while content:
                done = self._real["pwrite"](own, content, offset)
                content, offset = content[done:], offset + done
        finally:
            os.close(own)

    def _fsync(self, fd: int) -> None:
        name = self._file(fd)
        if name is not None or os.readlink(f"/proc/self/fd/{fd}") == self._folder:
            if os.path.isdir(f"/proc/self/fd/{fd}"):
                self._before(Change("sync folder", path=name or "."), lambda: None)
            else:
                self._before(Change("sync", os.fstat(fd).st_ino), lambda: None)
        self._real["fsync"](fd)

    _fdatasync = _fsync

    def _rename(self, source: Any, target: Any) -> None:
        name, new = self._inside(source), self._inside(target)
        if name is not None and new is not None:
            self._before(Change("rename", path=name, target=new), lambda: None)
        self._real["rename"](source, target)

    _replace = _rename

    def _unlink(self, path: Any, **options: Any) -> None:
        name = self._inside(path)
        if name is not None and os.path.lexists(path):
            self._before(Change("unlink", path=name), lambda: None)
        self._real["unlink"](path, **options)

    def _mkdir(self, path: Any, mode: int = 0o777, **options: Any) -> None:
        name = self._inside(path)
        if name is not None and not os.path.lexists(path):
            self._before(Change("mkdir", path=name), lambda: None)
        self._real["mkdir"](path, mode, **options)

    def _ftruncate(self, fd: int, length: int) -> None:
        if self._file(fd) is not None:
            self._before(Change("truncate", os.fstat(fd).st_ino, offset=length), lambda: None)
        self._real["ftruncate"](fd, length)

    def _posix_fallocate(self, fd: int, offset: int, length: int) -> None:
        if self._file(fd) is not None:
            self._before(Change("extend", os.fstat(fd).st_ino, offset=offset + length), lambda: None)
        self._real["posix_fallocate"](fd, offset, length)


class Recording(DiskShim):
    """Keeps the changes, and what the watched code says between them."""

    def __init__(self, folder: Path) -> None:
        self.changes: list[Change | str] = []
        super().__init__(folder, lambda change, half: self.changes.append(change))

    def created(self, name: str, ino: int) -> None:
        self.changes[-1] = Change("create", ino, name)

    def say(self, words: str) -> None:
        self.changes.append(words)


@dataclass
class _File:
    now: bytearray = field(default_factory=bytearray)
    synced: bytearray = field(default_factory=bytearray)
    since: list[Change] = field(default_factory=list)


@dataclass
class Disk:
    """Files and names, as they are and as they surely last."""

    names: dict[str, int | None] = field(default_factory=dict)
    """By path; None for a folder."""
    synced_names: dict[str, int | None] = field(default_factory=dict)
    unsynced_names: list[Change] = field(default_factory=list)
    files: dict[int, _File] = field(default_factory=dict)
    _ids: dict[int, int] = field(default_factory=dict)
    """The file that an inode's number stands for now: numbers are used again."""

    def apply(self, change: Change) -> None:
        match change.verb:
            case "create":
                number = len(self.files)
                self._ids[change.ino] = number
                self.files[number] = _File()
                change = change._replace(ino=number)
            case "write" | "truncate" | "extend":
                file = self.files[self._ids[change.ino]]
                _change(file.now, change)
                file.since.append(change)
                return
            case "sync":
                file = self.files[self._ids[change.ino]]
                file.synced = bytearray(file.now)
                file.since.clear()
                return
            case "sync folder":
                mine = [each for each in self.unsynced_names if _folder_of(each) == change.path]
                for each in mine:
                    _rename(self.synced_names, each)
                self.unsynced_names = [each for each in self.unsynced_names if each not in mine]
                return
        _rename(self.names, change)
        self.unsynced_names.append(change)

    def write_to(self, folder: Path, kept: Kept, chance: random.Random) -> None:
        """What is found under `folder` after the end. `some`: of what no sync made last, any part, in sectors."""
        names = self.names
        if kept != "all":
            names = dict(self.synced_names)
            if kept == "some":
                # A journal keeps the order of names.
                for change in self.unsynced_names[: chance.randint(0, len(self.unsynced_names))]:
                    _rename(names, change)
        folder.mkdir()
        for name, number in sorted(names.items()):
            path = folder / name
            if number is None:
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_content(self.files[number], kept, chance))


def _content(file: _File, kept: Kept, chance: random.Random) -> bytes:
    if kept == "all":
        return bytes(file.now)
    content = bytearray(file.synced)
    if kept == "some":
        for change in file.since:
            if change.verb != "write":
                if chance.random() < 0.5:
                    _change(content, change)
                continue
            for at in range(0, len(change.data), SECTOR_BYTES):
                if chance.random() < 0.5:
                    part = change.data[at : at + SECTOR_BYTES]
                    _change(content, change._replace(offset=change.offset + at, data=part))
    return bytes(content)


def _change(content: bytearray, change: Change) -> None:
    if change.verb == "truncate":
        del content[change.offset :]
    end = change.offset + len(change.data)
    content.extend(bytes(max(0, end - len(content))))
    if change.verb == "write":
        content[change.offset : end] = change.data


def _rename(names: dict[str, int | None], change: Change) -> None:
    if change.verb == "create":
        names[change.path] = change.ino
    elif change.verb == "mkdir":
        names[change.path] = None
    elif change.verb == "unlink":
        names.pop(change.path, None)
    elif change.path in names:
        names[change.target] = names.pop(change.path)


def _folder_of(change: Change) -> str:
    return os.path.dirname(change.path) or "."
