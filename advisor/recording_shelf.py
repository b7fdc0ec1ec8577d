"""The folder of recordings: which files are there, what they say of themselves, and that no name leads out of it."""

from __future__ import annotations

import os
import re
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from advisor.errors import ActionRefused, FieldRefused, NothingSuch
from advisor.recording_views import NAME_PATTERN, RecordingFormat
from event_plane.errors import RecordingError
from event_plane.parquet import read_facts
from event_plane.part_file import part_of
from event_plane.recording import detect_format

RECORDINGS_MAX: Final = 1_000
"""Files in the folder, past which none is begun."""
FREE_BYTES_MIN: Final = 256 << 20
"""Left free on the disk: it is the log's too, which must not stand still for a recording."""

_NAME: Final = re.compile(NAME_PATTERN, re.ASCII)
_PART_SUFFIX: Final = part_of(Path("x")).suffix
_RESERVED: Final = (_PART_SUFFIX, ".toml")
"""Endings of files that are under way, and of what commands take for an advisor's settings."""
_FACTS_KEPT_MAX: Final = 2 * RECORDINGS_MAX


class NoRoom(ActionRefused):
    """The disk is full, or nearly."""


class TooLarge(ActionRefused):
    """More bytes than are taken."""


@dataclass(frozen=True, slots=True)
class Shelved:
    """A file at one moment. `is_part`: it is not whole. `stamp` is another one when its content may be."""

    name: str
    path: Path
    is_part: bool
    size_bytes: int
    changed_us: int
    stamp: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class ShelvedFacts:
    """What a file says of itself without being read. Positions are those that its batches have; None: not told."""

    format: RecordingFormat | None
    fault: str = ""
    events: int | None = None
    batches: int | None = None
    first_position: int | None = None
    last_position: int | None = None


class RecordingShelf:
    """Thread-safe. Only regular files count: a symbolic link in the folder is not there."""

    def __init__(self, folder: Path, *, free_bytes_min: int = FREE_BYTES_MIN) -> None:
        """Makes the folder. Raises `OSError`."""
        self.folder = folder.absolute()
        self.free_bytes_min = free_bytes_min
        self.folder.mkdir(parents=True, exist_ok=True)
        self._facts: OrderedDict[tuple[int, int, int], ShelvedFacts] = OrderedDict()
        self._lock = threading.Lock()

    def path(self, name: str) -> Path:
        """Where `name` is or would be. Raises `FieldRefused` for a name that is none."""
        if not _NAME.fullmatch(name):
            remedy = "give up to 64 lower-case letters, digits, '.', '_' and '-', the first a letter or digit"
            raise FieldRefused(f"{name[:80]!r} is no name of a recording: {remedy}", "name", repr(name[:80]), remedy)
        for suffix in _RESERVED:
            if name.endswith(suffix):
                reason = f"{name!r} ends in {suffix}, which means something else: leave that out"
                raise FieldRefused(reason, "name", repr(name), f"leave {suffix} out")
        return self.folder / name

    def list(self) -> list[Shelved]:
        """The newest first; a file that is not whole under the name that it was to have."""
        names = dict.fromkeys(self._names())
        found = [shelved for name in names if (shelved := self._look(name)) is not None]
        return sorted(found, key=lambda each: (-each.changed_us, each.name))

    def find(self, name: str) -> Shelved:
        """Raises `NothingSuch`."""
        shelved = self._look(name) if _NAME.fullmatch(name) and not name.endswith(_RESERVED) else None
        if shelved is None:
            raise NothingSuch(f"there is no recording {name!r}: GET /api/v1/recordings lists them")
        return shelved

    def require_free(self, name: str) -> Path:
        """Where a recording of that name may be written. Raises `ActionRefused`, and `NoRoom` for a full disk."""
        path = self.path(name)
        if os.path.lexists(path) or os.path.lexists(part_of(path)):
            raise ActionRefused(f"there is a recording {name!r} already: delete it, or choose another name")
        if len(set(self._names())) >= RECORDINGS_MAX:
            raise ActionRefused(f"there are {RECORDINGS_MAX:,} recordings already: delete some")
        self.require_room()
        return path

    def require_room(self) -> None:
        """Raises `NoRoom` where less is free than is to be left."""
        disk = os.statvfs(self.folder)
        free_bytes = disk.f_bavail * disk.f_frsize
        if free_bytes < self.free_bytes_min:
            raise NoRoom(
                f"the disk of the recordings has {free_bytes:,} bytes left, and {self.free_bytes_min:,} are left to"
                " the event log: free space, or delete recordings"
            )

    def facts(self, shelved: Shelved) -> ShelvedFacts:
        """Read once for each state of a file. One that is not whole says nothing."""
        if shelved.is_part:
            return ShelvedFacts(None)
        with self._lock:
            known = self._facts.get(shelved.stamp)
        if known is None:
            known = facts_of(shelved.path)
            with self._lock:
                self._facts[shelved.stamp] = known
                if len(self._facts) > _FACTS_KEPT_MAX:
                    self._facts.popitem(last=False)
        return known

    def _names(self) -> Iterator[str]:
        with os.scandir(self.folder) as entries:
            for entry in entries:
                name = entry.name.removesuffix(_PART_SUFFIX)
                if _NAME.fullmatch(name) and not name.endswith(_RESERVED) and entry.is_file(follow_symlinks=False):
                    yield name

    def _look(self, name: str) -> Shelved | None:
        for path, is_part in ((self.folder / name, False), (part_of(self.folder / name), True)):
            try:
                found = path.lstat()
            except FileNotFoundError:
                continue
            if stat.S_ISREG(found.st_mode):
                stamp = (found.st_ino, found.st_size, found.st_mtime_ns)
                return Shelved(name, path, is_part, found.st_size, found.st_mtime_ns // 1_000, stamp)
        return None


def without_place(sentence: str, path: Path) -> str:
    """A reader's error as it is told to others: the file, or the part of it, by its name, its folder left out."""
    name = path.name.removesuffix(_PART_SUFFIX)
    return sentence.replace(str(path), name).replace(f"{name}{_PART_SUFFIX}", name)


def facts_of(path: Path) -> ShelvedFacts:
    """What a file says of itself, without reading the whole of it."""
    try:
        kind = detect_format(path)
        if kind != "parquet":
            return ShelvedFacts(kind)
        groups = read_facts(path).groups
    except RecordingError as error:
        return ShelvedFacts(None, without_place(str(error), path))
    return ShelvedFacts(
        kind,
        events=sum(group.events for group in groups),
        batches=sum(group.batches for group in groups),
        first_position=groups[0].first_position if groups else None,
        last_position=groups[-1].last_position if groups else None,
    )
