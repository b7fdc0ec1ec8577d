"""Segment files of a directory volume: made, appended to, sealed, walked. The store holds one lock around all of it."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from storage_agent.block_header import (
    PAGE_BYTES,
    ZERO_PAGE,
    BlockHeader,
    check_parts,
    is_sound,
    page_ceiling,
    unpack_header,
)
from storage_agent.directory_format import INDEX, SEALED, WRITING, pack_segment, segment_name, unpack_segment
from storage_agent.errors import BlockFormatError, CorruptBlock
from storage_agent.files import free_bytes, read_into, read_page, sync_folder, whole_pages, write_page
from storage_agent.saved_rows import load_rows, save_rows
from storage_agent.slot_rows import SlotRows

_NO_FALLOCATE = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})


@dataclass(slots=True)
class Segment:
    """One file. Pages in its own count; `end` is the first one after its last block."""

    number: int
    path: Path
    fd: int
    mark: int
    end: int = 1
    is_sealed: bool = False
    live_pages: int = 0
    written: list[tuple[BlockHeader, int]] = field(default_factory=list)
    """Blocks and their pages, until it is sealed."""

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True, slots=True)
class FolderTraits:
    """What the file system of the folder can do, as probed."""

    is_direct: bool
    has_fallocate: bool

    @property
    def mode(self) -> str:
        return ("O_DIRECT" if self.is_direct else "buffered") + ("" if self.has_fallocate else ", no fallocate")


def probe(folder: Path) -> FolderTraits:
    """Tries both on a file of its own. Raises `OSError` where not even a plain file can be written."""
    path = folder / f".probe-{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        write_page(fd, 0, ZERO_PAGE)
        has_fallocate = _fallocate(fd, 2 * PAGE_BYTES)
        is_direct = make_direct(fd)
        if is_direct:
            try:
                write_page(fd, 0, ZERO_PAGE)
                read_page(fd, 0)
            except OSError:
                is_direct = False
    finally:
        os.close(fd)
        path.unlink()
    return FolderTraits(is_direct, has_fallocate)


def make_direct(fd: int) -> bool:
    """Switch to O_DIRECT; False where the file system does not take it."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


def make_segment(folder: Path, number: int, *, volume_mark: int, segment_bytes: int, traits: FolderTraits) -> Segment:
    """An empty one, named durably. Raises `OSError`, with nothing left behind."""
    path = folder / segment_name(number, WRITING)
    mark = int.from_bytes(os.urandom(8), "little")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        if free_bytes(fd) < segment_bytes:
            raise OSError(errno.ENOSPC, f"{segment_bytes} bytes are needed for a segment, {free_bytes(fd)} are free")
        if traits.has_fallocate:
            _fallocate(fd, segment_bytes)
        write_page(fd, 0, pack_segment(number, volume_mark=volume_mark, mark=mark))
        os.fsync(fd)
        sync_folder(folder)
        if traits.is_direct:
            make_direct(fd)
    except OSError:
        os.close(fd)
        path.unlink()
        raise
    return Segment(number, path, fd, mark)


def seal_segment(segment: Segment) -> None:
    """Cut it to what it holds, save its index, give it its last name. Durable at every step. Raises `OSError`."""
    os.ftruncate(segment.fd, segment.end * PAGE_BYTES)
    os.fsync(segment.fd)
    rows = SlotRows.of(len(segment.written), [h._replace(slot=n) for n, (h, _) in enumerate(segment.written)])
    rows.rows["page"] = [page for _, page in segment.written]
    save_rows(segment.path.with_suffix(INDEX), rows, file_mark=segment.mark, table_mark=segment.number)
    sealed = segment.path.with_suffix(SEALED)
    os.rename(segment.path, sealed)
    sync_folder(segment.path.parent)
    segment.path, segment.is_sealed = sealed, True
    segment.written.clear()


def open_segment(path: Path, *, volume_mark: int, flags: int) -> Segment:
    """One that is there. Raises `OSError`, `BlockFormatError` where it is not of this volume."""
    number = int(path.stem)
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        mark = unpack_segment(read_page(fd, 0), number, volume_mark=volume_mark)
        end = os.fstat(fd).st_size // PAGE_BYTES
    except (OSError, BlockFormatError):
        os.close(fd)
        raise
    return Segment(number, path, fd, mark, end, is_sealed=path.suffix == SEALED)


def blocks_of(segment: Segment, *, block_bytes_max: int) -> list[tuple[BlockHeader, int]]:
    """Every block of a segment with its page, deleted or not: by its index, or by a walk where there is none.

    A walk ends at the first place without a whole block, which is where a crash cut it. Payloads of a segment that was
    never sealed are checked. Raises `OSError`.
    """
    if segment.is_sealed:
        index = segment.path.with_suffix(INDEX)
        loaded = load_rows(index, file_mark=segment.mark, row_count=None, table_marks=(segment.number, segment.number))
        if loaded is not None:
            rows = loaded[0]
            pages = rows.rows["page"].tolist()
            return [(rows.header(n), page) for n, page in enumerate(pages)]
    return list(walk(segment, block_bytes_max=block_bytes_max, check_payloads=not segment.is_sealed))


def walk(
    segment: Segment, *, block_bytes_max: int, check_payloads: bool, first: int = 1
) -> Iterator[tuple[BlockHeader, int]]:
    """Blocks from page `first` on. Raises `OSError`."""
    page = first
    view = whole_pages(page_ceiling(block_bytes_max))
    while page < segment.end:
        content = read_page(segment.fd, page * PAGE_BYTES)
        if content == ZERO_PAGE:
            return
        try:
            header, checksums = unpack_header(content, 0, place=page, mark=segment.mark)
            if is_sound(header, block_bytes_max):
                return
            length = page_ceiling(header.payload_bytes)
            if (page + 1) * PAGE_BYTES + length > segment.end * PAGE_BYTES:
                return
            if check_payloads:
                read_into(segment.fd, view[:length], (page + 1) * PAGE_BYTES)
                check_parts(view[: header.payload_bytes], header, checksums)
        except (BlockFormatError, CorruptBlock):
            return
        yield header, page
        page += 1 + length // PAGE_BYTES


def remove_segment(segment: Segment) -> None:
    """Its file and its index. Raises `OSError`."""
    segment.close()
    segment.path.unlink(missing_ok=True)
    segment.path.with_suffix(INDEX).unlink(missing_ok=True)
    with suppress(OSError):  # a name that comes back after a crash is of a segment without live blocks
        sync_folder(segment.path.parent)


def block_pages(header: BlockHeader) -> int:
    """Pages that a block takes, its header's included."""
    return 1 + page_ceiling(header.payload_bytes) // PAGE_BYTES


def _fallocate(fd: int, size_bytes: int) -> bool:
    """False where the file system does not set room aside. Raises `OSError` where it has none."""
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno in _NO_FALLOCATE:
            return False
        raise
    return True
