"""Checkpoints: folded state on disk with its log position, so that a start folds only the log's tail.

A checkpoint is a folder, `checkpoints/<position>`, made whole under another name and then renamed: `index.kvi` (the
index's own file, with its own checksum) and `state.kvs` (everything else, with the gate's cursors). The two newest are
kept. A damaged one is passed over for the one before it, and in the end for the log itself.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from advisor.errors import AdvisorError
from event_plane.sequence import StreamState

KEPT = 2
INDEX_FILE = "index.kvi"
STATE_FILE = "state.kvs"
_MAGIC = b"KVS1"
_CHECKSUM_BYTES = 8
_PARTIAL = ".partial-"


class CheckpointError(AdvisorError):
    """A checkpoint that cannot be written or read; says which file and why."""


class Cursors(msgspec.Struct, array_like=True):
    """The gate's memory and the names of its producers at the checkpoint's position."""

    streams: list[StreamState]
    names: dict[int, str]


class _StateFile(msgspec.Struct, array_like=True):
    position: int
    fold: bytes
    cursors: Cursors


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint on disk. `fold` and `cursors` are read and verified; the index is still in its file."""

    position: int
    fold: bytes
    cursors: Cursors
    index_path: Path


class CheckpointFolder:
    """Reads and writes one advisor's checkpoints. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self, position: int) -> Path:
        """An empty folder for the checkpoint at `position`; the caller puts `INDEX_FILE` there, then `finish`es."""
        part = self.folder / f"{_PARTIAL}{position:020d}"
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        except OSError as fault:
            raise CheckpointError(f"{part} cannot be made ({fault.strerror}): free some space there") from fault
        return part

    def finish(self, part: Path, position: int, fold: bytes, cursors: Cursors) -> Path:
        """Write the state beside the index, make the folder whole, and drop all but the newest `KEPT`."""
        payload = msgspec.msgpack.encode(_StateFile(position, fold, cursors))
        checksum = xxhash.xxh3_64_digest(payload)
        final = self.folder / f"{position:020d}"
        try:
            with (part / STATE_FILE).open("wb") as file:
                file.write(_MAGIC + checksum + payload)
                file.flush()
                os.fsync(file.fileno())
            _sync(part)
            part.replace(final)
            _sync(self.folder)
        except OSError as fault:
            raise CheckpointError(f"{part} cannot be written ({fault.strerror}): free some space there") from fault
        for old in self._positions()[KEPT:]:
            shutil.rmtree(self.folder / f"{old:020d}", ignore_errors=True)
        return final

    def discard_partial(self) -> None:
        """Remove what a killed process left half made."""
        for part in self.folder.glob(f"{_PARTIAL}*"):
            shutil.rmtree(part, ignore_errors=True)

    def newest_first(self) -> Iterator[Found | CheckpointError]:
        """Each checkpoint, or why it cannot be used."""
        for position in self._positions():
            try:
                yield self._read(position)
            except CheckpointError as fault:
                yield fault

    def _positions(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        names = [path.name for path in self.folder.iterdir() if path.is_dir()]
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def _read(self, position: int) -> Found:
        path = self.folder / f"{position:020d}" / STATE_FILE
        try:
            content = path.read_bytes()
        except OSError as fault:
            raise CheckpointError(f"{path} cannot be read ({fault.strerror})") from fault
        start = len(_MAGIC) + _CHECKSUM_BYTES
        if content[: len(_MAGIC)] != _MAGIC or xxhash.xxh3_64_digest(content[start:]) != content[len(_MAGIC) : start]:
            raise CheckpointError(f"{path} is damaged: its checksum does not hold")
        try:
            state = msgspec.msgpack.decode(content[start:], type=_StateFile)
        except msgspec.MsgspecError as fault:
            raise CheckpointError(f"{path} is of another version: {fault}") from fault
        if state.position != position:
            raise CheckpointError(f"{path} says position {state.position}: the folder was renamed")
        return Found(position, state.fold, state.cursors, path.with_name(INDEX_FILE))


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
