"""The bytes of a volume in an object store, and the names of its objects. Pure: no I/O.

    PREFIX/owner            who has the volume open, in JSON for people
    PREFIX/blocks/MARK      several blocks; never changes once it is there
    PREFIX/freed/MARK       which blocks of that object are free, if some are and some are not

An object of blocks is an index and the blocks one after another, each a header page (`block_header`) and its payload.
Its mark, 64 random bits, is its name and is in each of its pages, so that an object under another's name is seen. The
index says how long the object is and ends in a checksum; everything is little-endian.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from storage_agent.block_header import PAGE_BYTES, BlockHeader, checksum
from storage_agent.errors import UNREADABLE, BlockFormatError
from storage_agent.slot_rows import ROW, SlotRows

FORMAT_VERSION = 1
HEAD_BYTES = 48
"""Enough of an object to tell how long its index is."""

_INDEX_MAGIC = b"KVAOBJT\0"
_HEAD = struct.Struct("<8sIIQQQQ")  # magic, version, blocks, mark, bytes of the index, of the object, of the names
_FREED_MAGIC = b"KVAFREE\0"
_FREED = struct.Struct("<8sIIQ")  # magic, version, blocks, mark
_CHECKSUM = struct.Struct("<Q")
_MARK = re.compile(r"[0-9a-f]{16}")
assert _HEAD.size == HEAD_BYTES


Numbers = npt.NDArray[np.int64]


class StoredBlock(NamedTuple):
    """A block of an object. `offset`: of its header page. `stored_ms`: when it was put, since 1970."""

    header: BlockHeader
    offset: int
    stored_ms: int

    @property
    def end(self) -> int:
        return self.offset + PAGE_BYTES + self.header.payload_bytes


class ObjectIndex:
    """What an object holds, in the order in which it lies there: 112 bytes a block. Immutable.

    `offsets` and `stored_ms`: as in `StoredBlock`, by number of the block. `slot` of its headers is that number.
    """

    __slots__ = ("_rows", "mark", "object_bytes", "offsets", "stored_ms")

    def __init__(self, mark: int, index_bytes: int, rows: SlotRows, stored_ms: Numbers) -> None:
        self._rows = rows
        self.mark = mark
        self.stored_ms = stored_ms
        ends = index_bytes + np.cumsum(self.block_bytes)
        self.offsets: Numbers = ends - self.block_bytes
        self.object_bytes = int(ends[-1]) if len(ends) else index_bytes

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def block_bytes(self) -> Numbers:
        """Bytes that each block takes in the object, by number."""
        return self._rows.rows["payload_bytes"].astype(np.int64) + PAGE_BYTES

    def block(self, number: int) -> StoredBlock:
        return StoredBlock(self._rows.header(number), int(self.offsets[number]), int(self.stored_ms[number]))

    @property
    def blocks(self) -> list[StoredBlock]:
        return [self.block(number) for number in range(len(self))]


class Holder(msgspec.Struct, frozen=True):
    """A process. `machine`: its host, boot and namespace of process ids. `started`: tells it from a later one's id."""

    host: str
    machine: str
    pid: int
    started: str


class OwnerRecord(msgspec.Struct, frozen=True, kw_only=True, tag="kvadvisor object volume"):
    """Who writes a volume. `beat` rises while the owner lives; one that stands still for `lease_s` has lost it.

    No generation from `generation_next` on was ever used, nor will be by the holder.
    """

    version: int = FORMAT_VERSION
    volume: str
    is_open: bool
    holder: Holder
    beat: int
    lease_s: float
    generation_next: int
    in_order: bool = True
    """Whether nothing was under way or in doubt when the holder closed it."""


def blocks_name(prefix: str, mark: int) -> str:
    return f"{prefix}/blocks/{mark:016x}"


def freed_name(prefix: str, mark: int) -> str:
    return f"{prefix}/freed/{mark:016x}"


def owner_name(prefix: str) -> str:
    return f"{prefix}/owner"


def mark_in(name: str, folder: str) -> int | None:
    """The mark in a name of `folder`; None where nothing of ours has such a name."""
    found = name.removeprefix(f"{folder}/") if name.startswith(f"{folder}/") else ""
    return int(found, 16) if _MARK.fullmatch(found) else None


def pack_index(mark: int, blocks: Sequence[tuple[BlockHeader, int]]) -> tuple[bytes, ObjectIndex]:
    """The index of an object of these blocks and the times they were put, and what it says.

    Raises `BlockFormatError` where a number has no room in it.
    """
    count = len(blocks)
    try:
        table = SlotRows.of(count, (header._replace(slot=n) for n, (header, _) in enumerate(blocks)))
    except (OverflowError, ValueError, struct.error) as error:
        raise BlockFormatError(f"a header's number is out of range: {error}") from error
    rows, names = table.pack()
    times = np.array([stored_ms for _, stored_ms in blocks], dtype="<i8")
    length = HEAD_BYTES + len(rows) + times.nbytes + len(names) + _CHECKSUM.size
    index = ObjectIndex(mark, length, table, times)
    head = _HEAD.pack(_INDEX_MAGIC, FORMAT_VERSION, count, mark, length, index.object_bytes, len(names))
    body = b"".join((head, rows, times.tobytes(), names))
    return body + _CHECKSUM.pack(checksum(body)), index


def is_begun(start: bytes) -> bool:
    """Whether these are the first bytes of an object of a volume, whatever became of the rest."""
    return start.startswith(_INDEX_MAGIC)


def index_bytes(start: bytes) -> int:
    """How long the index is that starts so. Raises `BlockFormatError` where it is none, or of another version."""
    if len(start) < HEAD_BYTES or not is_begun(start):
        raise BlockFormatError("the object does not start as one of a volume does")
    _, version, _, _, length, _, _ = _HEAD.unpack_from(start)
    if version != FORMAT_VERSION:
        raise BlockFormatError(f"the object has format {version}, this version reads {FORMAT_VERSION}")
    return int(length)


def unpack_index(packed: bytes, mark: int) -> ObjectIndex:
    """Raises `BlockFormatError` unless it is the whole index of object `mark`."""
    length = index_bytes(packed)
    if len(packed) < length or length < HEAD_BYTES + _CHECKSUM.size:
        raise BlockFormatError(f"the index has {len(packed)} of {length} bytes")
    body = packed[: length - _CHECKSUM.size]
    (stored,) = _CHECKSUM.unpack_from(packed, len(body))
    if checksum(body) != stored:
        raise BlockFormatError(f"the index has checksum {checksum(body):016x}, {stored:016x} is written in it")
    _, _, count, of_mark, _, object_bytes, names_bytes = _HEAD.unpack_from(body)
    if of_mark != mark:
        raise BlockFormatError(f"the object was written as {of_mark:016x}, it lies under the name {mark:016x}")
    rows_end = HEAD_BYTES + count * ROW.itemsize
    times_end = rows_end + 8 * count
    if times_end + names_bytes != len(body):
        raise BlockFormatError(f"an index of {count} blocks has {times_end + names_bytes} bytes, not {len(body)}")
    view = memoryview(body)
    rows = SlotRows.unpack(view[HEAD_BYTES:rows_end], view[times_end:])
    index = ObjectIndex(mark, length, rows, np.frombuffer(view[rows_end:times_end], dtype="<i8").copy())
    if index.object_bytes != object_bytes:
        raise BlockFormatError(f"its blocks end at byte {index.object_bytes}, the object at byte {object_bytes}")
    return index


def pack_freed(mark: int, count: int, freed: Collection[int]) -> bytes:
    """Which of an object's `count` blocks are free."""
    flags = np.zeros(count, dtype=np.bool_)
    flags[list(freed)] = True
    body = _FREED.pack(_FREED_MAGIC, FORMAT_VERSION, count, mark) + np.packbits(flags).tobytes()
    return body + _CHECKSUM.pack(checksum(body))


def unpack_freed(packed: bytes, mark: int) -> set[int]:
    """Raises `BlockFormatError` unless these are the free blocks of object `mark`."""
    body = packed[: -_CHECKSUM.size]
    if len(body) < _FREED.size or packed[-_CHECKSUM.size :] != _CHECKSUM.pack(checksum(body)):
        raise BlockFormatError(f"what is free of object {mark:016x} has a wrong length or checksum")
    magic, version, count, of_mark = _FREED.unpack_from(body)
    if (magic, version, of_mark) != (_FREED_MAGIC, FORMAT_VERSION, mark):
        raise BlockFormatError(f"what is free of object {mark:016x} was written for {of_mark:016x}, version {version}")
    flags = np.unpackbits(np.frombuffer(body, dtype=np.uint8, offset=_FREED.size))[:count]
    return set(np.flatnonzero(flags).tolist())


def pack_owner(record: OwnerRecord) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record))


def unpack_owner(packed: bytes) -> OwnerRecord:
    """Raises `BlockFormatError` for anything else, and for another version."""
    try:
        record = msgspec.json.decode(packed, type=OwnerRecord)
    except UNREADABLE as error:
        raise BlockFormatError(f"it does not say who owns a volume: {error}") from error
    if record.version != FORMAT_VERSION:
        raise BlockFormatError(f"it has format {record.version}, this version reads {FORMAT_VERSION}")
    return record
