"""A directory volume as any host may read it: no lock, nothing written, and checked like every read."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from storage_agent.block_header import PAGE_BYTES, BlockHeader, check_header, check_parts, page_ceiling
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.directory_folder import read_deleted, read_label
from storage_agent.directory_format import DELETED_NAME, OWNER_NAME, SEALED, VOLUME_NAME, WRITING, Place
from storage_agent.directory_segments import Segment, block_pages, blocks_of, open_segment, walk
from storage_agent.errors import BlockFormatError, VolumeError
from storage_agent.files import read_into, whole_pages
from storage_agent.port import BlockKey
from storage_agent.slot_store import SlotRead


class Seen(NamedTuple):
    """A block, and where it lay when the folder was looked at."""

    header: BlockHeader
    segment: Segment
    page: int


class DirectoryReader:
    """What a directory volume held when it was last looked at. Thread-safe."""

    def __init__(self, descriptor: VolumeDescriptor, path: Path) -> None:
        """Raises `VolumeError` where there is no such volume."""
        self.path = path
        self._descriptor = descriptor
        try:
            self._label = read_label(path / VOLUME_NAME, descriptor)
        except OSError as error:
            raise VolumeError(
                f"volume {descriptor.id!r}: {path} cannot be read: {error.strerror}; let its owner make it first"
            ) from error
        self._lock = threading.Lock()
        self._segments: dict[int, Segment] = {}
        self._in_segment: dict[int, list[tuple[BlockHeader, int]]] = {}
        self._blocks: dict[BlockKey, Seen] = {}
        self.gone_total = 0
        """Blocks that were there at one look and not at the next."""

    @property
    def owner(self) -> str:
        """Who has it open to write, in words; who had it last where nobody has."""
        try:
            return (self.path / OWNER_NAME).read_text(errors="replace").strip() or "its owner"
        except OSError:
            return "its owner"

    @property
    def is_being_written(self) -> bool:
        return any(self.path.glob(f"*{WRITING}"))

    def look(self) -> None:
        """See what is there now. Raises `OSError`."""
        with self._lock:
            self._find_segments()
            deleted = self._deleted()
            newest: dict[BlockKey, Seen] = {}
            for segment in self._segments.values():
                for header, page in self._in_segment[segment.number]:
                    if Place(segment.number, page) in deleted:
                        continue
                    seen = newest.setdefault(header.key, Seen(header, segment, page))
                    if (seen.header.generation, seen.segment.number) < (header.generation, segment.number):
                        newest[header.key] = Seen(header, segment, page)
            self.gone_total += len(self._blocks.keys() - newest.keys())
            self._blocks = newest

    def find(self, key: BlockKey) -> Seen | None:
        """As of the last look."""
        with self._lock:
            return self._blocks.get(key)

    def blocks(self) -> list[Seen]:
        """As of the last look."""
        with self._lock:
            return list(self._blocks.values())

    def read(self, seen: Seen, read: SlotRead) -> memoryview:
        """Verified bytes of a block. Raises `CorruptBlock`, `OSError`."""
        fd, block_at = seen.segment.fd, seen.page * PAGE_BYTES
        head = whole_pages(PAGE_BYTES)
        read_into(fd, head, block_at)
        checksums = check_header(bytes(head), seen.header, place=seen.page, mark=seen.segment.mark)
        payload = whole_pages(page_ceiling(read.payload_bytes))[: read.payload_bytes]
        read_into(fd, payload, block_at + PAGE_BYTES + read.offset)
        check_parts(payload, seen.header, checksums, read.first)
        return payload

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            for segment in self._segments.values():
                segment.close()
            self._segments.clear()
            self._blocks.clear()

    def _find_segments(self) -> None:
        """Open what is new, read on in what grows, let go of what is gone. A file that goes meanwhile is none.

        A read under way may find its file closed, or another in its place: it fails, or sees by the mark, and is tried
        again.
        """
        # A draft that is about to be renamed has another's name within its own.
        named = [p for p in sorted(self.path.iterdir()) if p.suffix in (SEALED, WRITING) and p.stem.isdecimal()]
        there = {int(p.stem): p for p in named}
        for number in self._segments.keys() - there.keys():
            self._segments.pop(number).close()
            del self._in_segment[number]
        for number, path in there.items():
            known = self._segments.get(number)
            with suppress(FileNotFoundError, BlockFormatError):
                if known is None:
                    if path.stat().st_size < PAGE_BYTES:
                        continue  # it has its name, and its first page comes
                    segment = open_segment(path, volume_mark=self._label.mark, flags=os.O_RDONLY)
                    self._segments[number] = segment
                    self._in_segment[number] = self._blocks_in(segment)
                elif not known.is_sealed:
                    known.end = os.fstat(known.fd).st_size // PAGE_BYTES
                    self._in_segment[number] += self._blocks_in(known)
                    known.is_sealed = path.suffix == SEALED

    def _blocks_in(self, segment: Segment) -> list[tuple[BlockHeader, int]]:
        """Those not seen yet. Payloads are checked when they are read."""
        block_bytes_max = self._descriptor.block_bytes_max
        known = self._in_segment.get(segment.number)
        if segment.is_sealed and known is None:
            return blocks_of(segment, block_bytes_max=block_bytes_max)
        first = known[-1][1] + block_pages(known[-1][0]) if known else 1
        return list(walk(segment, first=first, block_bytes_max=block_bytes_max, check_payloads=False))

    def _deleted(self) -> set[Place]:
        try:
            fd = os.open(self.path / DELETED_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return set()
        try:
            return read_deleted(fd, self._label.mark)[0]
        finally:
            os.close(fd)
