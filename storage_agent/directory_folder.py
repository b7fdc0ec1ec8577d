"""The folder of a directory volume, open to write: its owner, label, deleted places, and what is found in it."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from storage_agent.block_header import PAGE_BYTES, BlockHeader
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.directory_format import (
    DELETED_NAME,
    INDEX,
    SEALED,
    VOLUME_NAME,
    WRITING,
    DirectoryLabel,
    Place,
    pack_deleted,
    pack_label,
    unpack_deleted,
    unpack_label,
)
from storage_agent.directory_owner import DirectoryOwner
from storage_agent.directory_segments import (
    Segment,
    block_pages,
    blocks_of,
    make_direct,
    make_segment,
    open_segment,
    probe,
    remove_segment,
    seal_segment,
)
from storage_agent.errors import BlockFormatError, VolumeError
from storage_agent.files import read_into, replace_file, whole_pages

_LIFE_SHIFT = 40
"""Each life takes a fresh range of generations."""
_PRUNE_PAGES_MIN = 16


class Lying(NamedTuple):
    """Where a live block lies, and over how many pages."""

    place: Place
    pages: int


class Found(NamedTuple):
    """What a folder held when it was opened. Every segment is sealed; blocks are live, each once."""

    segments: list[Segment]
    blocks: list[tuple[BlockHeader, Lying]]
    generation_next: int
    number_next: int
    """Above every segment that is there or that a deleted place names."""


class DirectoryFolder:
    """Not thread-safe: its store holds a lock."""

    def __init__(self, descriptor: VolumeDescriptor, path: Path) -> None:
        """Make the folder where there is none, and own it. Raises `VolumeError`."""
        self.path = path
        name = f"volume {descriptor.id!r}"
        if not path.parent.is_dir():
            raise VolumeError(f"{name}: there is no folder {path.parent}; make it first")
        try:
            path.mkdir(mode=0o755, exist_ok=True)
            self._owner = DirectoryOwner(descriptor.id, path)
        except OSError as error:
            raise VolumeError(f"{name}: {path} cannot be opened: {error.strerror}") from error
        try:
            self._traits = probe(path)
            self.label = self._begin_life(descriptor)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._deleted_fd = os.open(path / DELETED_NAME, flags, 0o644)
        except (OSError, VolumeError) as error:
            self._owner.close()
            if isinstance(error, VolumeError):
                raise
            raise VolumeError(f"{name}: {path} cannot be used: {error.strerror}") from error
        self._deleted_pages = 0
        self._deleted: set[Place] = set()
        """Deleted places of segments that are there."""
        self.is_closed = False

    @property
    def mode(self) -> str:
        return self._traits.mode + ("" if self._owner.has_locks else ", no locks")

    @property
    def is_direct(self) -> bool:
        return self._traits.is_direct

    def recover(self, block_bytes_max: int) -> Found:
        """Seal what a crash left, put doubles with the deleted. Raises `OSError`, `VolumeError`."""
        self._read_deleted()
        self._sweep()
        segments: list[Segment] = []
        newest: dict[object, tuple[BlockHeader, Lying]] = {}
        older: list[Place] = []
        for path in sorted(self.path.iterdir()):
            if path.suffix not in (SEALED, WRITING):
                continue
            segment = self._open_segment(path)
            if segment is None:
                continue
            blocks = blocks_of(segment, block_bytes_max=block_bytes_max)
            if not segment.is_sealed and not self._seal_found(segment, blocks):
                continue
            if self._traits.is_direct:
                make_direct(segment.fd)
            segments.append(segment)
            for header, page in blocks:
                place = Place(segment.number, page)
                if place in self._deleted:
                    continue
                lying = Lying(place, block_pages(header))
                other_header, other = newest.setdefault(header.key, (header, lying))
                if other == lying:
                    continue
                # A copy that compaction made has its source's generation and a later segment.
                if (other_header.generation, other.place) < (header.generation, place):
                    newest[header.key] = header, lying
                    older.append(other.place)
                else:
                    older.append(place)
        numbers = [place.segment for place in self._deleted] + [segment.number for segment in segments]
        self.note_deleted(older)
        return Found(segments, list(newest.values()), self.label.lives << _LIFE_SHIFT, max(numbers, default=0) + 1)

    def make_segment(self, number: int, segment_bytes: int) -> Segment:
        """Raises `OSError`."""
        return make_segment(
            self.path, number, volume_mark=self.label.mark, segment_bytes=segment_bytes, traits=self._traits
        )

    def note_deleted(self, places: Sequence[Place]) -> None:
        """No block is at `places` any more. Durable when it returns. Raises `OSError`, with nothing noted."""
        if not places:
            return
        pages = pack_deleted(places, self._deleted_pages, volume_mark=self.label.mark)
        try:
            written = os.pwrite(self._deleted_fd, pages, self._deleted_pages * PAGE_BYTES)
            if written != len(pages):
                raise OSError(errno.ENOSPC, f"only {written} of {len(pages)} bytes were written")
            os.fdatasync(self._deleted_fd)
        except OSError:
            os.ftruncate(self._deleted_fd, self._deleted_pages * PAGE_BYTES)
            raise
        self._deleted_pages += len(pages) // PAGE_BYTES
        self._deleted |= set(places)

    def prune_deleted(self, segments: set[int]) -> None:
        """Write the list anew, of places in `segments` only, where it is mostly of others. Raises `OSError`."""
        kept = sorted(place for place in self._deleted if place.segment in segments)
        pages = pack_deleted(kept, 0, volume_mark=self.label.mark)
        if self._deleted_pages < _PRUNE_PAGES_MIN or 2 * len(pages) > self._deleted_pages * PAGE_BYTES:
            return
        path = self.path / DELETED_NAME
        replace_file(path, [pages], permissions=0o644)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        os.close(self._deleted_fd)
        self._deleted_fd = fd
        self._deleted_pages = len(pages) // PAGE_BYTES
        self._deleted = set(kept)

    def read_block(self, segment: Segment, lying: Lying) -> memoryview:
        """Header page and payload, unchecked. Raises `OSError`."""
        view = whole_pages(lying.pages * PAGE_BYTES)
        read_into(segment.fd, view, lying.place.page * PAGE_BYTES)
        return view

    def close(self) -> None:
        """Idempotent."""
        if not self.is_closed:
            self.is_closed = True
            os.close(self._deleted_fd)
            self._owner.close()

    def _begin_life(self, descriptor: VolumeDescriptor) -> DirectoryLabel:
        path = self.path / VOLUME_NAME
        if path.exists():
            label = read_label(path, descriptor)
        elif any(entry.stem.isdecimal() and entry.suffix in (SEALED, WRITING) for entry in self.path.iterdir()):
            raise VolumeError(
                f"volume {descriptor.id!r}: {self.path} has segments but no label {VOLUME_NAME!r}; restore it, or give "
                "another path"
            )
        else:
            mark = int.from_bytes(os.urandom(8), "little")
            label = DirectoryLabel(descriptor.id, descriptor.block_bytes_max, mark)
        label = replace(label, lives=label.lives + 1)
        replace_file(path, [pack_label(label)], permissions=0o644)
        return label

    def _read_deleted(self) -> None:
        """Ends at the first page that is not whole: it was being written when the last life ended."""
        self._deleted, self._deleted_pages = read_deleted(self._deleted_fd, self.label.mark)
        os.ftruncate(self._deleted_fd, self._deleted_pages * PAGE_BYTES)

    def _sweep(self) -> None:
        """Drafts, and indexes of segments that are gone."""
        names = {entry.name for entry in self.path.iterdir()}
        for name in names:
            is_draft = name.startswith(".") and (name.endswith(WRITING) or name.startswith(".probe-"))
            stem = name.removesuffix(INDEX)
            is_orphan = name.endswith(INDEX) and not names & {stem + SEALED, stem + WRITING}
            if is_draft or is_orphan:
                (self.path / name).unlink()

    def _open_segment(self, path: Path) -> Segment | None:
        if path.suffix == WRITING and path.stat().st_size < PAGE_BYTES:  # its name lasted, its content did not
            path.unlink()
            return None
        try:
            return open_segment(path, volume_mark=self.label.mark, flags=os.O_RDWR)
        except (BlockFormatError, ValueError) as error:
            if path.suffix == WRITING:  # it was being made
                path.unlink()
                return None
            raise VolumeError(
                f"volume {self.label.volume_id!r}: {path} is no segment of it ({error}); it is left alone: move it away"
            ) from error

    def _seal_found(self, segment: Segment, blocks: list[tuple[BlockHeader, int]]) -> bool:
        if not blocks:
            remove_segment(segment)
            return False
        last, page = blocks[-1]
        segment.end = page + block_pages(last)
        segment.written = list(blocks)
        seal_segment(segment)
        return True


def read_label(path: Path, descriptor: VolumeDescriptor) -> DirectoryLabel:
    """Raises `OSError`, and `VolumeError` where it is of another volume or size."""
    name = f"volume {descriptor.id!r}"
    try:
        label = unpack_label(path.read_bytes())
    except BlockFormatError as error:
        raise VolumeError(
            f"{name}: {path} is no directory volume ({error}); it is left alone: give another path"
        ) from error
    if (label.volume_id, label.block_bytes_max) != (descriptor.id, descriptor.block_bytes_max):
        raise VolumeError(
            f"{name}: {path.parent} was made as {label.volume_id!r} for blocks of {label.block_bytes_max} bytes, asked "
            f"for are {descriptor.id!r} and {descriptor.block_bytes_max}; restore the settings or give another path"
        )
    return label


def read_deleted(fd: int, volume_mark: int) -> tuple[set[Place], int]:
    """The deleted places, and the number of whole pages. Raises `OSError`."""
    places: set[Place] = set()
    number = 0
    while page := os.pread(fd, PAGE_BYTES, number * PAGE_BYTES):
        try:
            places.update(unpack_deleted(page, number, volume_mark=volume_mark))
        except BlockFormatError:
            break
        number += 1
    return places, number
