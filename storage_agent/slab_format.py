"""The bytes of a slab: one file of four pages and equal slots. Pure: no I/O.

    page 0          superblock; page 2 is its copy, written after it, so that a torn write leaves one
    page 1          session: who has the slab open, and whether it was closed in order
    page 3          intents: the regions of slots that changed since the slot table was saved
    page 4 …        slots; each is a header page (`block_header`) and room for one payload, rounded up to 4 KiB.
                    Slots of several sizes lie class by class, the smallest first, numbered through

Everything is little-endian and every page sealed. A slot whose header page is all zero is free. A slot is live when its
header is whole and says this slot's number and this slab's mark, and the payload has the header's checksums.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from storage_agent.block_header import BODY_BYTES, PAGE_BYTES, open_seal, page_ceiling, seal
from storage_agent.errors import BlockFormatError
from storage_agent.slot_classes import CLASSES_MAX, SlotClass, SlotClasses, SlotsByClass

FORMAT_VERSION = 2
SUPERBLOCK_OFFSETS = (0, 2 * PAGE_BYTES)
SESSION_OFFSET = PAGE_BYTES
INTENTS_OFFSET = 3 * PAGE_BYTES
SLOTS_OFFSET = 4 * PAGE_BYTES
HOST_BYTES_MAX = 255

_SUPERBLOCK_MAGIC = b"KVASLAB\0"
_VERSION = struct.Struct("<8sI")
# magic, version, id length, edition, mark, slot bytes, capacity, block max, id; then the count of classes, 0 where all
# slots are equal, and each class
_SUPERBLOCK = struct.Struct("<8sIIQQQQQ64s")
_CLASS_COUNT = struct.Struct("<Q")
_CLASS = struct.Struct("<QQ")  # block bytes, blocks
_SESSION_MAGIC = b"KVASESS\0"
_SESSION = struct.Struct("<8sIIQQI")  # magic, version, open, pid, next generation, host length
_INTENTS_MAGIC = b"KVAINTT\0"
_INTENTS = struct.Struct("<8sIIQQ")  # magic, version, slots a region, the saved table's mark, the next one's
_REGIONS_MAX = (BODY_BYTES - _INTENTS.size) * 8
_REGION_SLOTS_MIN = 256

NO_TABLE = 0
"""Mark of the table of a slab that is new: every slot is free."""

Regions = npt.NDArray[np.bool_]
"""One flag for each region: its slots may differ from the saved table."""


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Slots `first` to `end`, for blocks of at most `block_bytes`, from byte `offset` of the file on."""

    first: int
    end: int
    block_bytes: int
    offset: int
    slot_bytes: int
    """With the slot's header."""

    @property
    def end_offset(self) -> int:
        return self.offset + (self.end - self.first) * self.slot_bytes


@dataclass(frozen=True, slots=True)
class Superblock:
    """What a slab is. `mark` is drawn when it is made: no two slabs share it. `edition` rises with each change of
    capacity. `classes`: all its slots, by size, where they are not equal.
    """

    volume_id: str
    capacity_blocks: int
    block_bytes_max: int
    mark: int = 0
    edition: int = 1
    classes: SlotClasses = ()
    runs: tuple[SlotRun, ...] = field(init=False, compare=False, repr=False)
    """Neighbouring slots of one size, all of them in order."""
    slot_bytes: int = field(init=False, compare=False, repr=False)
    """Of a slot of the largest class, with its header."""
    _by_class: SlotsByClass = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        classes = self.classes or (SlotClass(self.block_bytes_max, self.capacity_blocks),)
        runs: list[SlotRun] = []
        first, offset = 0, SLOTS_OFFSET
        for each in classes:
            slot_bytes = PAGE_BYTES + page_ceiling(each.block_bytes)
            run = SlotRun(first, first + each.blocks, each.block_bytes, offset, slot_bytes)
            runs.append(run)
            first, offset = run.end, run.end_offset
        object.__setattr__(self, "runs", tuple(runs))
        object.__setattr__(self, "slot_bytes", runs[-1].slot_bytes)
        object.__setattr__(self, "_by_class", SlotsByClass(classes))

    @property
    def file_bytes(self) -> int:
        return self.runs[-1].end_offset

    def slot_offset(self, slot: int) -> int:
        run = self.runs[self._by_class.number(slot)] if self.classes else self.runs[0]
        return run.offset + (slot - run.first) * run.slot_bytes

    @property
    def region_slots(self) -> int:
        """Slots that one intent stands for."""
        return max(_REGION_SLOTS_MIN, -(-self.capacity_blocks // _REGIONS_MAX))

    @property
    def regions(self) -> int:
        return -(-self.capacity_blocks // self.region_slots)

    def resized(self, capacity_blocks: int) -> Superblock:
        """Of equal slots only."""
        return replace(self, capacity_blocks=capacity_blocks, edition=self.edition + 1)


@dataclass(frozen=True, slots=True)
class Session:
    """Who opened the slab last. `is_open` still True while nobody holds the lock means it was not closed in order."""

    is_open: bool
    pid: int
    generation_next: int
    host: str = ""


@dataclass(frozen=True, slots=True)
class Intents:
    """The regions that changed since the slot table with mark `table` was saved.

    A save that a crash cut short may have left the table of mark `table_next`; it differs in these regions only.
    """

    table: int
    table_next: int
    region_slots: int
    changed: Regions


def pack_superblock(superblock: Superblock) -> bytes:
    name = superblock.volume_id.encode()
    return seal(
        _SUPERBLOCK.pack(
            _SUPERBLOCK_MAGIC, FORMAT_VERSION, len(name), superblock.edition, superblock.mark, superblock.slot_bytes,
            superblock.capacity_blocks, superblock.block_bytes_max, name,
        )
        + _CLASS_COUNT.pack(len(superblock.classes))
        + b"".join(_CLASS.pack(each.block_bytes, each.blocks) for each in superblock.classes)
    )  # fmt: skip


def unpack_superblock(page: bytes) -> Superblock:
    """Raises `BlockFormatError` if `page` is no superblock of this version."""
    body = open_seal(page, _SUPERBLOCK_MAGIC, "superblock")
    _, version = _VERSION.unpack_from(body)
    if version != FORMAT_VERSION:
        raise BlockFormatError(
            f"it has slab format {version}, this version reads {FORMAT_VERSION}; its blocks can be computed again: "
            "remove the file to have it made anew, or use the version of kvadvisor that made it"
        )
    _, _, name_bytes, edition, mark, slot_bytes, capacity, block_bytes_max, name = _SUPERBLOCK.unpack_from(body)
    classes = _unpack_classes(body, capacity)
    superblock = Superblock(name[:name_bytes].decode(), capacity, block_bytes_max, mark, edition, classes)
    if superblock.slot_bytes != slot_bytes:
        raise BlockFormatError(f"superblock says {slot_bytes} bytes a slot for blocks of {block_bytes_max}")
    return superblock


def _unpack_classes(body: bytes, capacity: int) -> SlotClasses:
    (count,) = _CLASS_COUNT.unpack_from(body, _SUPERBLOCK.size)
    if count > CLASSES_MAX:
        raise BlockFormatError(f"superblock says {count} classes of slots, {CLASSES_MAX} are the most")
    start = _SUPERBLOCK.size + _CLASS_COUNT.size
    classes = tuple(SlotClass(*facts) for facts in _CLASS.iter_unpack(body[start : start + count * _CLASS.size]))
    if classes and sum(each.blocks for each in classes) != capacity:
        raise BlockFormatError(f"superblock says {capacity} slots, and other numbers of its classes: {classes}")
    return classes


def pack_session(session: Session) -> bytes:
    host = session.host.encode()[:HOST_BYTES_MAX]
    facts = _SESSION.pack(
        _SESSION_MAGIC, FORMAT_VERSION, session.is_open, session.pid, session.generation_next, len(host)
    )
    return seal(facts + host)


def unpack_session(page: bytes) -> Session:
    """Raises `BlockFormatError` if `page` is no whole session page."""
    body = open_seal(page, _SESSION_MAGIC, "session page")
    _, _, is_open, pid, generation_next, host_bytes = _SESSION.unpack_from(body)
    host = body[_SESSION.size : _SESSION.size + min(host_bytes, HOST_BYTES_MAX)]
    return Session(bool(is_open), pid, generation_next, host.decode(errors="replace"))


def pack_intents(intents: Intents) -> bytes:
    facts = _INTENTS.pack(
        _INTENTS_MAGIC, FORMAT_VERSION, intents.region_slots, intents.table, intents.table_next
    )
    return seal(facts + np.packbits(intents.changed, bitorder="little").tobytes())


def unpack_intents(page: bytes, superblock: Superblock) -> Intents:
    """Raises `BlockFormatError` if `page` is no whole page of intents for a slab of this size."""
    body = open_seal(page, _INTENTS_MAGIC, "page of intents")
    _, _, region_slots, table, table_next = _INTENTS.unpack_from(body)
    if region_slots != superblock.region_slots:
        raise BlockFormatError(f"intents of {region_slots} slots a region are not of this slab")
    bits = np.unpackbits(np.frombuffer(body, dtype=np.uint8, offset=_INTENTS.size), bitorder="little")
    return Intents(table, table_next, region_slots, bits[: superblock.regions].astype(np.bool_))
