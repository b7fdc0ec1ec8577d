"""Which segments a segment log has: listed from its folder, added, sealed, dropped. Thread-safe."""

from __future__ import annotations

import bisect
import itertools
import os
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from advisor.log_faults import os_fault
from advisor.log_folder import sync_folder
from advisor.segment_files import RAW_SUFFIX, SEALED_SUFFIX, read_index

LANDMARK_BYTES = 1 << 20
LOOKS_MAX = 5


@dataclass(slots=True, eq=False)
class Segment:
    """One file. `last` is None for the one that is written to. `stored_bytes`: what it holds, not what is reserved."""

    first: int
    path: Path
    last: int | None = None
    stored_bytes: int = 0
    landmarks: list[tuple[int, int]] = field(default_factory=list)
    """Of a raw one: where some appends begin, position and offset, ascending; so that a read starts near its entry."""

    @property
    def sealed(self) -> bool:
        return self.path.suffix == SEALED_SUFFIX

    def passed(self, position: int, offset: int) -> None:
        """An append begins there."""
        if offset - (self.landmarks[-1][1] if self.landmarks else 0) >= LANDMARK_BYTES:
            self.landmarks.append((position, offset))

    def near(self, position: int) -> tuple[int, int]:
        """The last landmark at or before `position`."""
        count = bisect.bisect_right(self.landmarks, position, key=lambda landmark: landmark[0])
        return self.landmarks[count - 1] if count else (self.first, 0)


def raw_path(folder: Path, first: int) -> Path:
    return folder / f"{first:020d}{RAW_SUFFIX}"


def listed(folder: Path) -> list[Segment]:
    """The segments in a folder, ascending. Each but the last ends where the next begins.

    Where a raw and a sealed form of one are there, the sealed one counts: it got its name when it was whole.
    """
    found: dict[int, Path] = {}
    for path in sorted(folder.glob(f"*{RAW_SUFFIX}")) + sorted(folder.glob(f"*{SEALED_SUFFIX}")):
        if path.stem.isdecimal():
            found[int(path.stem)] = path
    firsts = sorted(found)
    segments = [
        Segment(first, found[first], following - 1) for first, following in itertools.pairwise(firsts)
    ]
    if firsts:
        path = found[firsts[-1]]
        segments.append(Segment(firsts[-1], path, _sealed_last(path) if path.suffix == SEALED_SUFFIX else None))
    for segment in segments:
        if segment.last is not None:
            segment.stored_bytes = segment.path.stat().st_size
    return segments


def _sealed_last(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        blocks = read_index(path, descriptor).blocks
    finally:
        os.close(descriptor)
    return blocks[-1].last if blocks else int(path.stem) - 1


class Shelf:
    """The segments of one log in this process, ascending."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._segments: list[Segment] = []

    def relist(self) -> None:
        """Take what is in the folder. Raises `LogError`."""
        try:
            segments = self._looked()
        except OSError as error:
            raise os_fault(self.folder, "read", error) from error
        with self._lock:
            self._segments = segments

    def _looked(self) -> list[Segment]:
        for _ in range(LOOKS_MAX - 1):
            with suppress(FileNotFoundError):  # another process sealed or dropped one since its name was read
                return listed(self.folder)
        return listed(self.folder)

    def segments(self) -> list[Segment]:
        """A copy of the list; of the segments only `path` and `stored_bytes` change."""
        with self._lock:
            return list(self._segments)

    def add(self, segment: Segment, last_before: int, stored_bytes: int) -> None:
        """Begin a segment; the one before it ends at `last_before` and holds `stored_bytes`."""
        with self._lock:
            if self._segments and self._segments[-1].last is None:
                self._segments[-1].last = last_before
                self._segments[-1].stored_bytes = stored_bytes
            self._segments.append(segment)

    def holding(self, position: int) -> Segment | None:
        """The segment with `position`, or the first one after it."""
        with self._lock:
            return next((s for s in self._segments if s.last is None or s.last >= position), None)

    def open(self, segment: Segment) -> tuple[Path, int]:
        """Its file as it is now, and a descriptor, which stays good when the segment is sealed or dropped.

        Raises `OSError`.
        """
        with self._lock:
            return segment.path, os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)

    def unsealed(self) -> Segment | None:
        """The oldest one that is full and raw."""
        with self._lock:
            return next((s for s in self._segments if s.last is not None and not s.sealed), None)

    def seal(self, segment: Segment, temporary: Path) -> bool:
        """Put the sealed form in the raw one's place, unless it was dropped meanwhile: False then.

        Raises `OSError` or `LogError`.
        """
        raw = segment.path
        with self._lock:
            if segment not in self._segments:
                return False
            sealed = raw.with_suffix(SEALED_SUFFIX)
            os.replace(temporary, sealed)
            segment.path, segment.stored_bytes = sealed, sealed.stat().st_size
        sync_folder(self.folder)
        raw.unlink(missing_ok=True)  # a drop meanwhile took both forms
        return True

    def drop(self, through: int) -> list[Segment]:
        """Forget and unlink the full segments that end at or before `through`; returns them.

        Raises `OSError` or `LogError`.
        """
        with self._lock:
            count = 0
            while count < len(self._segments) and (self._segments[count].last or through + 1) <= through:
                count += 1
            dropped = self._segments[:count]
            del self._segments[:count]
        for segment in dropped:
            # The raw form of one that was sealed a moment ago may still be there, and would pass for what is left.
            raw_path(self.folder, segment.first).unlink(missing_ok=True)
            segment.path.unlink(missing_ok=True)
        if dropped:
            sync_folder(self.folder)
        return dropped
