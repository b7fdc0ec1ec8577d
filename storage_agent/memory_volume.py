"""Volumes of kind `memory`: for tests, and for a tier that need not last. Closing one, or a crash, empties it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import msgspec

from storage_agent.block_header import BlockHeader, check_header, check_parts, pack_header
from storage_agent.errors import CorruptBlock, TransferError
from storage_agent.kinds import Opening, VolumeKind, slot_kind
from storage_agent.slot_rows import SlotRows
from storage_agent.slot_store import Recovered, SlotRead, SlotWrite, Take

BATCH_SLOTS = 256


class MemoryOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory has no options."""


class MemoryStore:
    """Implements `slot_store.SlotStore`. Holds headers and payloads as a slab does, so that the same checks are run."""

    mode = "memory"
    batch_slots = BATCH_SLOTS
    upkeep_due = False
    slots_in_order = True

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._lock = threading.Lock()
        self._slots: dict[int, tuple[bytes, bytes]] = {}
        """Header page and payload by slot."""

    def recover(self) -> Recovered:
        """See `SlotStore.recover`: there is nothing yet."""
        return Recovered(SlotRows.empty(self._capacity), 1)

    def write(self, writes: Sequence[SlotWrite]) -> None:
        """See `SlotStore.write`."""
        pages = [pack_header(write.header, write.checksums, place=write.header.slot, mark=0) for write in writes]
        with self._lock:
            for write, page in zip(writes, pages, strict=True):
                self._slots[write.header.slot] = page, bytes(write.payload)

    def sync(self) -> None:
        """Nothing: memory does not last."""

    def read(self, reads: Sequence[SlotRead], take: Take) -> None:
        """See `SlotStore.read`."""
        with self._lock:
            found = [self._slots.get(read.header.slot) for read in reads]
        if None in found:
            missing = [read.header.slot for read, slot in zip(reads, found, strict=True) if slot is None]
            raise TransferError(f"slot {missing[0]} holds nothing")
        for number, (read, slot) in enumerate(zip(reads, found, strict=True)):
            assert slot is not None
            page, payload = slot
            part = memoryview(payload)[read.offset : read.offset + read.payload_bytes]
            error: CorruptBlock | None = None
            try:
                checksums = check_header(page, read.header, place=read.header.slot, mark=0)
                check_parts(part, read.header, checksums, read.first)
            except CorruptBlock as caught:
                error = caught
            take(number, error, part)

    def erase(self, headers: Sequence[BlockHeader]) -> None:
        """See `SlotStore.erase`."""
        with self._lock:
            for header in headers:
                self._slots.pop(header.slot, None)

    def forget_cached(self, headers: Sequence[BlockHeader]) -> None:
        """Nothing: memory is the medium."""

    def resize(self, capacity_blocks: int) -> None:
        """See `SlotStore.resize`."""
        self._capacity = capacity_blocks

    def compact(self) -> int:
        """Nothing: slots of memory do not fragment."""
        return 0

    def upkeep(self, copy_table: Callable[[], tuple[SlotRows, list[int]]]) -> None:
        """Nothing: there is no recovery."""

    def close(self, *, in_order: bool, generation_next: int) -> None:
        """See `SlotStore.close`."""
        with self._lock:
            self._slots.clear()


def _open_store(opening: Opening) -> MemoryStore:
    return MemoryStore(opening.descriptor.capacity_blocks)


KIND: VolumeKind = slot_kind(MemoryOptions, _open_store, path="none")
