"""A file that has its name only when it is whole: written as `NAME.part`, synced, renamed, its folder synced."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import IO

from event_plane.errors import RecordingError


def part_of(path: Path) -> Path:
    """Where `path` is written until it is whole."""
    return path.with_name(f"{path.name}.part")


class PartFile:
    """`file` is open for writing. Close it by `finish` or by `discard`."""

    def __init__(self, path: Path, *, buffering: int = -1) -> None:
        """Raises `RecordingError` where the file cannot be made."""
        self.path = path
        try:
            self.file: IO[bytes] = part_of(path).open("wb", buffering)
        except OSError as error:
            raise self.unwritable(error) from error

    def finish(self, size_bytes: int) -> None:
        """Cut at `size_bytes`, make it durable and give it its name, replacing what had it. Raises `RecordingError`."""
        try:
            with self.file:
                self.file.truncate(size_bytes)
                self.file.flush()
                os.fsync(self.file.fileno())
            part_of(self.path).rename(self.path)
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise self.unwritable(error) from error

    def discard(self) -> None:
        """Leave nothing of it."""
        with contextlib.suppress(OSError):
            self.file.close()
        with contextlib.suppress(OSError):
            part_of(self.path).unlink()

    def unwritable(self, error: OSError) -> RecordingError:
        """What to raise for `error`."""
        return RecordingError(
            f"{self.path} cannot be written ({error.strerror or error}): free space, or choose another place"
        )
