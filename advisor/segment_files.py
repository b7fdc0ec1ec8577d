"""A segment log's files: made, read, sealed. What their bytes mean is `segment_format`'s.

`<first position>.seg` is a segment as it was written. `<first position>.kvz` is a sealed one: its frames in blocks of
whole appends, each block a Zstandard frame, then a skippable Zstandard frame with the blocks' index. So `zstd -d` makes
the segment again, and one block can be read alone.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
from backports import zstd
from zlib_ng.zlib_ng import crc32

from advisor.entries import EntryKind, LogEntry
from advisor.errors import LogError
from advisor.segment_format import HEAD, KIND_NUMBERS, META, FrameDamaged, Head, decode_body, decode_head, peek

RAW_SUFFIX = ".seg"
SEALED_SUFFIX = ".kvz"
TEMPORARY_SUFFIX = ".tmp"
READ_BYTES = 4 << 20
BLOCK_BYTES = 1 << 20
"""Of a sealed segment, before compression, or one append if that is more."""
LEVEL = 1

_SKIPPABLE = struct.Struct("<II")
_SKIPPABLE_MAGIC = 0x184D2A5E
_TRAILER = struct.Struct("<II8s")
"""Bytes and CRC-32 of the index before it, and a magic."""
_TRAILER_MAGIC = b"KVSEALED"


class SegmentDamaged(LogError):
    """Bytes that are no part of a segment. `position` should be at `offset` of the segment, uncompressed."""

    def __init__(self, path: Path, offset: int, position: int, reason: str) -> None:
        super().__init__(
            f"{path} is damaged at byte {offset}, where position {position} should be ({reason}): restore a backup of"
            " the log (`kvadvisor log restore`), or start with another directory"
        )
        self.offset = offset
        self.position = position


@dataclass(frozen=True, slots=True)
class Group:
    """One append: those of its entries that were asked for, and where it lies. `kinds`: a bit for each kind in it."""

    entries: list[LogEntry]
    first: int
    count: int
    start: int
    end: int
    kinds: int


class Block(msgspec.Struct, array_like=True, frozen=True):
    """One block of a sealed segment."""

    first: int
    last: int
    offset: int
    stored_bytes: int
    raw_bytes: int
    kinds: int


class SealedIndex(msgspec.Struct, array_like=True, frozen=True):
    """The blocks of a sealed segment, ascending, and when its first and last entries were recorded."""

    blocks: list[Block]
    first_recorded_us: int
    last_recorded_us: int


class Bytes(Protocol):
    def view(self, offset: int, count: int) -> memoryview:
        """Up to `count` bytes from `offset` on, fewer at the end."""


class FileBytes:
    """An open file's bytes, read in large pieces."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._start = 0
        self._piece = memoryview(b"")

    def view(self, offset: int, count: int) -> memoryview:
        at = offset - self._start
        if at < 0 or at + count > len(self._piece):
            self._piece = memoryview(os.pread(self._descriptor, max(count, READ_BYTES), offset))
            self._start, at = offset, 0
        return self._piece[at : at + count]


class BlockBytes:
    """A block's bytes."""

    def __init__(self, content: bytes) -> None:
        self._content = memoryview(content)

    def view(self, offset: int, count: int) -> memoryview:
        return self._content[offset : offset + count]


def read_groups(
    path: Path,
    source: Bytes,
    expected: int,
    *,
    offset: int = 0,
    from_position: int = 0,
    kind: EntryKind | None = None,
) -> Iterator[Group]:
    """Whole appends from `offset` on, where position `expected` stands, up to bytes that were never written.

    Entries before `from_position` or of another kind than `kind` are stepped over unchecked. Raises `SegmentDamaged`.
    """
    while True:
        group = _read_group(path, source, expected, offset, from_position, kind)
        if group is None:
            return
        yield group
        expected, offset = group.first + group.count, group.end


def _read_group(
    path: Path, source: Bytes, expected: int, start: int, from_position: int, kind: EntryKind | None
) -> Group | None:
    entries: list[LogEntry] = []
    wanted = None if kind is None else KIND_NUMBERS[kind]
    offset, position, count, kinds = start, expected, 1, 0
    while position < expected + count:
        try:
            head = _head(source, offset, expected, position)
            if head is None:
                return None
            number, count = peek(source.view(offset + HEAD.size, META.size))
            kinds |= 1 << number
            if position >= from_position and wanted in (None, number):
                body = source.view(offset + HEAD.size, head.body_bytes)
                if len(body) < head.body_bytes:
                    raise FrameDamaged("it is cut short")
                entries.append(decode_body(head, body).entry)
        except FrameDamaged as fault:
            raise SegmentDamaged(path, offset, position, str(fault)) from fault
        offset += HEAD.size + head.body_bytes
        position += 1
    return Group(entries, expected, count, start, offset, kinds)


def _head(source: Bytes, offset: int, first: int, position: int) -> Head | None:
    """None where no append begins. Raises `FrameDamaged`."""
    view = source.view(offset, HEAD.size)
    head = decode_head(view) if len(view) == HEAD.size else None
    if head is None:
        if position > first or any(view):
            raise FrameDamaged("the append is cut short")
        return None
    if (head.first, head.position) != (first, position):
        raise FrameDamaged(f"position {head.position} of an append from {head.first} on is there")
    if head.body_bytes < META.size or len(source.view(offset + HEAD.size, META.size)) < META.size:
        raise FrameDamaged("it is cut short")
    return head


# -- sealed segments


def seal(path: Path, first: int) -> tuple[Path, SealedIndex]:
    """Write the sealed form of the segment at `path` beside it, durable, under a temporary name.

    Returns that file and its index. Raises `SegmentDamaged` or `OSError`.
    """
    temporary = path.with_suffix(SEALED_SUFFIX + TEMPORARY_SUFFIX)
    try:
        with open(path, "rb", buffering=0) as raw, open(temporary, "wb", buffering=0) as file:
            index = _write_sealed(path, raw.fileno(), file.fileno(), first)
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary, index


def _write_sealed(path: Path, raw: int, sealed: int, first: int) -> SealedIndex:
    blocks: list[Block] = []
    recorded_us = [0, 0]
    gathered: list[Group] = []

    def finish() -> None:
        start, end = gathered[0].start, gathered[-1].end
        stored = zstd.compress(os.pread(raw, end - start, start), LEVEL)
        offset = blocks[-1].offset + blocks[-1].stored_bytes if blocks else 0
        write_all(sealed, [stored], offset)
        kinds = 0
        for group in gathered:
            kinds |= group.kinds
        last = gathered[-1].first + gathered[-1].count - 1
        blocks.append(Block(gathered[0].first, last, offset, len(stored), end - start, kinds))
        gathered.clear()

    for group in read_groups(path, FileBytes(raw), first):
        if not blocks and not gathered:
            recorded_us[0] = group.entries[0].recorded_us
        recorded_us[1] = group.entries[-1].recorded_us
        # The entries were checked; kept, they would be a second copy of the block.
        group.entries.clear()
        gathered.append(group)
        if group.end - gathered[0].start >= BLOCK_BYTES:
            finish()
    if gathered:
        finish()
    index = SealedIndex(blocks, *recorded_us)
    encoded = msgspec.msgpack.encode(index)
    trailer = _TRAILER.pack(len(encoded), crc32(encoded), _TRAILER_MAGIC)
    skippable = _SKIPPABLE.pack(_SKIPPABLE_MAGIC, len(encoded) + len(trailer))
    end = blocks[-1].offset + blocks[-1].stored_bytes if blocks else 0
    write_all(sealed, [skippable, encoded, trailer], end)
    return index


def read_index(path: Path, descriptor: int) -> SealedIndex:
    """Raises `LogError` for a file that is no sealed segment."""
    size = os.fstat(descriptor).st_size
    try:
        length, checksum, magic = _TRAILER.unpack(os.pread(descriptor, _TRAILER.size, max(0, size - _TRAILER.size)))
        encoded = os.pread(descriptor, length, max(0, size - _TRAILER.size - length))
        if magic != _TRAILER_MAGIC or crc32(encoded) != checksum:
            raise ValueError("its index's checksum is not its own")
        return msgspec.msgpack.decode(encoded, type=SealedIndex)
    except (struct.error, ValueError, msgspec.MsgspecError) as error:
        raise LogError(
            f"{path} is no sealed segment, or was cut ({error}): restore a backup of the log (`kvadvisor log restore`)"
        ) from error


def read_sealed(
    path: Path, descriptor: int, last: int, *, from_position: int = 0, kind: EntryKind | None = None
) -> Iterator[LogEntry]:
    """Entries of a sealed segment, which should end at position `last`.

    Blocks that hold none that is wanted are not read. Raises `LogError`.
    """
    bit = -1 if kind is None else 1 << KIND_NUMBERS[kind]
    blocks = read_index(path, descriptor).blocks
    if not blocks or blocks[-1].last < last:
        end = blocks[-1] if blocks else Block(0, int(path.stem) - 1, 0, 0, 0, 0)
        raise SegmentDamaged(path, end.offset + end.stored_bytes, end.last + 1, "the segment ends there")
    for block in blocks:
        if block.last < from_position or not block.kinds & bit:
            continue
        try:
            content = zstd.decompress(os.pread(descriptor, block.stored_bytes, block.offset))
        except zstd.ZstdError as error:
            raise SegmentDamaged(path, block.offset, block.first, f"its block cannot be unpacked: {error}") from error
        at = block.first - 1
        groups = read_groups(path, BlockBytes(content), block.first, from_position=from_position, kind=kind)
        for group in groups:
            yield from group.entries
            at = group.first + group.count - 1
        if at != block.last:
            raise SegmentDamaged(path, block.offset, at + 1, "its block is cut short")


def write_all(descriptor: int, buffers: list[bytes], offset: int) -> None:
    """All of them from `offset` on, whatever one call takes. Raises `OSError`."""
    left = buffers
    while left:
        written = os.pwritev(descriptor, left[:IOV_MAX], offset)
        offset += written
        left = _after(left, written)


IOV_MAX = os.sysconf("SC_IOV_MAX")


def _after(buffers: list[bytes], written: int) -> list[bytes]:
    """What is left of the buffers once so many bytes are written."""
    for number, buffer in enumerate(buffers):
        if written < len(buffer):
            return [buffer[written:], *buffers[number + 1 :]]
        written -= len(buffer)
    return []
