"""Bytes of a segment log's files (docs/log.md). Pure.

A segment is frames, one after the other. A frame is a 32-byte head, 48 bytes of what is known of the entry, the name of
its source, and the entry's own bytes. Zeros, or the file's end, follow the last one. Little-endian throughout.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zlib_ng.zlib_ng import crc32

from advisor.entries import EntryKind, LogEntry, NewEntry

MAGIC = b"KVF1"
HEAD = struct.Struct("<4sIQQII")
"""Magic, bytes after the head, position, first position of the append, CRC-32 of what follows, CRC-32 of the head."""
META = struct.Struct("<BBHIQQQQI4x")
"""Kind, flags, bytes of the source's name, foreign CRC-32, recorded µs, producer, epoch, sequence, entries of the
append, padding."""
BODY_BYTES_MAX = 1 << 31

_HEAD_START = struct.Struct("<4sIQQI")
_HEAD_CRC = struct.Struct("<I")
_HAS_BATCH, _HAS_FOREIGN_CRC = 1, 2

KIND_NUMBERS: dict[EntryKind, int] = {
    EntryKind.BATCH: 1,
    EntryKind.TICK: 2,
    EntryKind.MOVE: 3,
    EntryKind.SETTINGS: 4,
    EntryKind.VOLUME: 5,
    EntryKind.OPERATOR: 6,
    EntryKind.MEASUREMENT: 7,
}
_KINDS = {number: kind for kind, number in KIND_NUMBERS.items()}


class FrameDamaged(Exception):
    """Bytes that are no frame; says why."""


@dataclass(frozen=True, slots=True)
class Head:
    """`first`: the position of the first entry of the same append."""

    body_bytes: int
    position: int
    first: int
    body_crc: int


@dataclass(frozen=True, slots=True)
class Body:
    """`group_entries`: how many entries were appended together."""

    entry: LogEntry
    group_entries: int


def encode_group(entries: Sequence[NewEntry], first: int, recorded_us: int) -> tuple[list[bytes], int]:
    """Buffers to write one after the other, and their bytes in all. No entry's own bytes are copied.

    Raises `ValueError` for a number or a name that has no room.
    """
    buffers: list[bytes] = []
    total_bytes = 0
    for position, entry in enumerate(entries, first):
        meta = _meta(entry, recorded_us, len(entries))
        body_bytes = len(meta) + len(entry.payload)
        if body_bytes >= BODY_BYTES_MAX:
            raise ValueError(f"an entry of {body_bytes} bytes is too long: {BODY_BYTES_MAX - 1} are the most")
        body_crc = crc32(entry.payload, crc32(meta))
        start = _HEAD_START.pack(MAGIC, body_bytes, position, first, body_crc)
        buffers += [start + _HEAD_CRC.pack(crc32(start)) + meta, entry.payload]
        total_bytes += HEAD.size + body_bytes
    return buffers, total_bytes


def decode_head(buffer: memoryview) -> Head | None:
    """The head at the buffer's start; None where nothing was ever written. Raises `FrameDamaged`."""
    magic, body_bytes, position, first, body_crc, head_crc = HEAD.unpack_from(buffer)
    if crc32(buffer[: _HEAD_START.size]) == head_crc and magic == MAGIC:
        return Head(body_bytes, position, first, body_crc)
    if not any(buffer[: HEAD.size]):
        return None
    raise FrameDamaged("its head is no frame's" if magic != MAGIC else "its head's checksum is not its own")


def peek(body: memoryview) -> tuple[int, int]:
    """The number of the entry's kind and the entries of its append, unchecked. Of `body` only `META` is looked at."""
    meta = META.unpack_from(body)
    return meta[0], meta[-1]


def decode_body(head: Head, body: memoryview) -> Body:
    """What follows the head, whole. Raises `FrameDamaged`."""
    if crc32(body) != head.body_crc:
        raise FrameDamaged("its checksum is not its own")
    kind, flags, name_bytes, foreign_crc, recorded_us, producer, epoch, sequence, group = META.unpack_from(body)
    if kind not in _KINDS:
        raise FrameDamaged(f"its kind {kind} is not known to this version")
    name_end = META.size + name_bytes
    if len(body) < name_end:
        raise FrameDamaged(f"its source's name has {name_bytes} bytes, {len(body) - META.size} follow")
    try:
        source = str(body[META.size : name_end], "utf-8")
    except UnicodeDecodeError as error:
        raise FrameDamaged(f"its source's name is no text ({error.reason})") from error
    is_batch = bool(flags & _HAS_BATCH)
    entry = LogEntry(
        position=head.position,
        kind=_KINDS[kind],
        payload=bytes(body[name_end:]),
        producer=producer if is_batch else None,
        epoch=epoch if is_batch else None,
        sequence=sequence if is_batch else None,
        source=source,
        foreign_crc=foreign_crc if flags & _HAS_FOREIGN_CRC else None,
        recorded_us=recorded_us,
    )
    return Body(entry, group)


def later_frames(buffer: memoryview, after: int) -> Iterator[Head]:
    """Whole heads of appends that began after position `after`, wherever in the buffer they stand."""
    content = bytes(buffer)
    at = content.find(MAGIC)
    while 0 <= at <= len(content) - HEAD.size:
        try:
            head = decode_head(buffer[at:])
        except FrameDamaged:
            head = None
        if head is not None and head.first > after:
            yield head
        at = content.find(MAGIC, at + 1)


def _meta(entry: NewEntry, recorded_us: int, group_entries: int) -> bytes:
    is_batch = entry.producer is not None
    name = entry.source.encode()
    try:
        meta = META.pack(
            KIND_NUMBERS[entry.kind],
            (_HAS_BATCH if is_batch else 0) | (_HAS_FOREIGN_CRC if entry.foreign_crc is not None else 0),
            len(name),
            entry.foreign_crc or 0,
            recorded_us,
            entry.producer or 0,
            entry.epoch or 0,
            entry.sequence or 0,
            group_entries,
        )
    except struct.error as error:
        numbers = (entry.producer, entry.epoch, entry.sequence, recorded_us)
        wrong = next((n for n in numbers if n is not None and not 0 <= n < 1 << 64), None)
        if wrong is not None:
            raise ValueError(f"{wrong} is outside 0 … 2**64 - 1") from error
        raise ValueError(f"an entry of source {entry.source[:80]!r} cannot be written ({error})") from error
    return meta + name
