"""The bytes of a slab: one file of a superblock, a session page and equal slots. Pure: no I/O.

    page 0          superblock, written once
    page 1          session: who has the slab open, and whether it was closed in order
    page 2 …        slots; each is a 4 KiB header and room for one payload, rounded up to 4 KiB

Everything is little-endian. A page ends in the XXH3-64 of all its bytes before, so a flipped bit anywhere is seen.
A slot whose header page is all zero is free. A slot is live when its header is whole and says this slot's number, and
the payload's XXH3-64 is the header's.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

import msgspec
import xxhash

from event_plane.schema import Namespace
from storage_agent.errors import CorruptBlock, SlabFormatError
from storage_agent.port import BlockKey

PAGE_BYTES = 4096
FORMAT_VERSION = 1
SLOTS_OFFSET = 2 * PAGE_BYTES
ZERO_PAGE = bytes(PAGE_BYTES)

_MASK64 = 0xFFFF_FFFF_FFFF_FFFF
_CHECKSUM = struct.Struct("<Q")
_BODY_BYTES = PAGE_BYTES - _CHECKSUM.size

_SUPERBLOCK_MAGIC = b"KVASLAB\0"
_SUPERBLOCK = struct.Struct("<8sIIQQQB64s")  # magic, version, reserved, slot bytes, capacity, block max, id length, id
_SESSION_MAGIC = b"KVASESS\0"
_SESSION = struct.Struct("<8sIIQQ")  # magic, version, open, pid, next generation
_SLOT_MAGIC = b"KVASLOT\0"
# magic, version, group, namespace id, hash lo, hi, parent lo, hi, depth, tokens, payload bytes, payload checksum,
# generation, slot, namespace length
_SLOT = struct.Struct("<8sIB3xQQQQQIH2xQQQQI")
NAMESPACE_BYTES_MAX = _BODY_BYTES - _SLOT.size
"""Longest MessagePack of a namespace that a slot header has room for."""


@dataclass(frozen=True, slots=True)
class Superblock:
    """What a slab is. `slot_bytes` includes the slot's header."""

    volume_id: str
    capacity_blocks: int
    block_bytes_max: int

    @property
    def slot_bytes(self) -> int:
        return PAGE_BYTES + page_ceiling(self.block_bytes_max)

    @property
    def file_bytes(self) -> int:
        return SLOTS_OFFSET + self.capacity_blocks * self.slot_bytes

    def slot_offset(self, slot: int) -> int:
        return SLOTS_OFFSET + slot * self.slot_bytes


@dataclass(frozen=True, slots=True)
class Session:
    """Who opened the slab last. `is_open` still True while nobody holds the lock means it was not closed in order."""

    is_open: bool
    pid: int
    generation_next: int


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """What a slot holds. `generation` rises with every put into the volume; sizes in bytes."""

    slot: int
    key: BlockKey
    namespace: Namespace
    parent_hash: int
    depth: int
    block_tokens: int
    payload_bytes: int
    payload_checksum: int
    generation: int


def page_ceiling(size_bytes: int) -> int:
    """`size_bytes` rounded up to whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def payload_checksum(payload: memoryview | bytes) -> int:
    return xxhash.xxh3_64_intdigest(payload)


def pack_superblock(superblock: Superblock) -> bytes:
    name = superblock.volume_id.encode()
    return _seal(
        _SUPERBLOCK.pack(
            _SUPERBLOCK_MAGIC, FORMAT_VERSION, 0, superblock.slot_bytes, superblock.capacity_blocks,
            superblock.block_bytes_max, len(name), name,
        )
    )  # fmt: skip


def unpack_superblock(page: bytes) -> Superblock:
    """Raises `SlabFormatError` if `page` is no superblock of this version."""
    body = _open_seal(page, _SUPERBLOCK_MAGIC, "superblock")
    _, version, _, slot_bytes, capacity, block_bytes_max, name_bytes, name = _SUPERBLOCK.unpack_from(body)
    if version != FORMAT_VERSION:
        raise SlabFormatError(f"slab format {version} is not {FORMAT_VERSION}; use the version that made the file")
    superblock = Superblock(name[:name_bytes].decode(), capacity, block_bytes_max)
    if superblock.slot_bytes != slot_bytes:
        raise SlabFormatError(f"superblock says {slot_bytes} bytes a slot for blocks of {block_bytes_max}")
    return superblock


def pack_session(session: Session) -> bytes:
    return _seal(
        _SESSION.pack(_SESSION_MAGIC, FORMAT_VERSION, session.is_open, session.pid, session.generation_next)
    )


def unpack_session(page: bytes) -> Session:
    """Raises `SlabFormatError` if `page` is no whole session page."""
    _, _, is_open, pid, generation_next = _SESSION.unpack_from(_open_seal(page, _SESSION_MAGIC, "session page"))
    return Session(bool(is_open), pid, generation_next)


def pack_slot_header(header: SlotHeader) -> bytes:
    """One page. Raises `SlabFormatError` where the namespace is too long for it, or a number."""
    namespace = _encode_namespace(header.namespace)
    if len(namespace) > NAMESPACE_BYTES_MAX:
        raise SlabFormatError(
            f"the namespace takes {len(namespace)} bytes, a slot header has room for {NAMESPACE_BYTES_MAX}; shorten it"
        )
    key = header.key
    try:
        facts = _SLOT.pack(
            _SLOT_MAGIC, FORMAT_VERSION, key.group, key.namespace_id,
            key.sequence_hash & _MASK64, key.sequence_hash >> 64,
            header.parent_hash & _MASK64, header.parent_hash >> 64,
            header.depth, header.block_tokens, header.payload_bytes, header.payload_checksum,
            header.generation, header.slot, len(namespace),
        )  # fmt: skip
    except struct.error as error:
        raise SlabFormatError(f"{key}, depth {header.depth} or {header.block_tokens} tokens: {error}") from error
    return _seal(facts + namespace)


def unpack_slot_header(page: bytes, slot: int) -> SlotHeader | None:
    """What `page`, the header of slot number `slot`, says; None where the slot is free.

    Raises `SlabFormatError` where it is neither: torn, damaged, or of another slot.
    """
    if page == ZERO_PAGE:
        return None
    body = _open_seal(page, _SLOT_MAGIC, f"header of slot {slot}")
    (
        _, version, group, namespace_id, hash_lo, hash_hi, parent_lo, parent_hi,
        depth, block_tokens, payload_bytes, checksum, generation, written_slot, namespace_bytes,
    ) = _SLOT.unpack_from(body)  # fmt: skip
    if version != FORMAT_VERSION:
        raise SlabFormatError(f"header of slot {slot} has format {version}, not {FORMAT_VERSION}")
    if written_slot != slot:
        raise SlabFormatError(f"header of slot {slot} was written for slot {written_slot}")
    return SlotHeader(
        slot=slot,
        key=BlockKey(namespace_id, group, hash_hi << 64 | hash_lo),
        namespace=_decode_namespace(body[_SLOT.size : _SLOT.size + namespace_bytes]),
        parent_hash=parent_hi << 64 | parent_lo,
        depth=depth,
        block_tokens=block_tokens,
        payload_bytes=payload_bytes,
        payload_checksum=checksum,
        generation=generation,
    )


def check_slot(page: bytes, payload: memoryview, expected: SlotHeader) -> None:
    """Raises `CorruptBlock` unless `page` and `payload`, read from a slot, are what `expected` says was put there."""
    try:
        found = unpack_slot_header(page, expected.slot)
    except SlabFormatError as error:
        raise CorruptBlock(str(error)) from error
    if found is None:
        raise CorruptBlock(f"slot {expected.slot} is empty, block {expected.key.sequence_hash:032x} was put there")
    if found != expected:
        raise CorruptBlock(
            f"slot {expected.slot} holds generation {found.generation} of block {found.key.sequence_hash:032x}, "
            f"not generation {expected.generation} of {expected.key.sequence_hash:032x}"
        )
    checksum = payload_checksum(payload)
    if checksum != expected.payload_checksum:
        raise CorruptBlock(
            f"slot {expected.slot}: the payload of block {expected.key.sequence_hash:032x} has checksum "
            f"{checksum:016x}, {expected.payload_checksum:016x} was put"
        )


def _seal(body: bytes) -> bytes:
    padded = body.ljust(_BODY_BYTES, b"\0")
    return padded + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(padded))


def _open_seal(page: bytes, magic: bytes, what: str) -> bytes:
    if len(page) != PAGE_BYTES or not page.startswith(magic):
        raise SlabFormatError(f"the {what} does not start with {magic!r}")
    body = page[:_BODY_BYTES]
    (stored,) = _CHECKSUM.unpack_from(page, _BODY_BYTES)
    computed = xxhash.xxh3_64_intdigest(body)
    if stored != computed:
        raise SlabFormatError(f"the {what} has checksum {computed:016x}, {stored:016x} is written in it")
    return body


@lru_cache(maxsize=4096)
def _encode_namespace(namespace: Namespace) -> bytes:
    return msgspec.msgpack.encode(namespace)


@lru_cache(maxsize=4096)
def _decode_namespace(packed: bytes) -> Namespace:
    try:
        return msgspec.msgpack.decode(packed, type=Namespace)
    except msgspec.MsgspecError as error:
        raise SlabFormatError(f"a slot header's namespace cannot be read: {error}") from error
