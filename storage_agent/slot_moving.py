"""Blocks from slot to slot of one volume while they are served, so that the slots past a capacity can be given back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from storage_agent.block_header import BlockHeader, part_checksums
from storage_agent.errors import TransferError, VolumeError
from storage_agent.slot_store import SlotStore, SlotWrite
from storage_agent.slot_table import SlotTable

ReadAll = Callable[[Sequence[BlockHeader]], list[tuple[BlockHeader, bytes]]]
"""Reads and verifies blocks; what is corrupt is freed and left out."""


def shrink(
    volume: str, capacity: int, table: SlotTable, unpinned: threading.Condition, store: SlotStore, read_all: ReadAll
) -> None:
    """Empty the slots from `capacity` on and give them back; `unpinned` guards `table`.

    Raises `VolumeError`, with every block served and every slot usable as before.
    """
    with unpinned:
        held = table.capacity - table.free_count
        if held > capacity:
            raise VolumeError(f"volume {volume!r} holds {held} blocks, more than {capacity}; delete some first")
        above = table.limit(capacity)
    try:
        for start in range(0, len(above), store.batch_slots):
            _move(read_all(above[start : start + store.batch_slots]), table, unpinned, store)
        with unpinned:
            if not table.is_empty_past_limit:
                raise VolumeError(f"volume {volume!r}: slots past {capacity} are in use; shrink it again in a moment")
        store.resize(capacity)
        with unpinned:
            table.shrink()
    except VolumeError:
        with unpinned:
            table.unlimit()
        raise
    except TransferError as error:
        with unpinned:
            table.unlimit()
        raise VolumeError(f"volume {volume!r} cannot be shrunk: {error}") from error


def _move(
    blocks: Sequence[tuple[BlockHeader, bytes]], table: SlotTable, unpinned: threading.Condition, store: SlotStore
) -> None:
    """Copy blocks to slots below the limit, durably, serve the copies, free the old slots. Raises `TransferError`."""
    writes: list[SlotWrite] = []
    olds: list[BlockHeader] = []
    for number, (old, payload) in enumerate(blocks):
        with unpinned:
            reserved = table.reserve_copy()
        if reserved is None:
            break  # puts took what was free: the caller finds the slot in use
        copy = old._replace(slot=reserved.slot, generation=reserved.generation)
        writes.append(SlotWrite(number, copy, memoryview(payload), part_checksums(memoryview(payload), old.part_bytes)))
        olds.append(old)
    switched: list[BlockHeader] = []
    unused = [write.header for write in writes]
    try:
        if writes:
            store.write(writes)
            store.sync()
        with unpinned:
            for old, write in zip(olds, writes, strict=True):
                if table.switch(old, write.header):
                    switched.append(old)
                    unused.remove(write.header)
            unpinned.wait_for(lambda: not any(table.is_pinned(old.slot) for old in switched))
    finally:
        if unused:
            store.erase(unused)
            with unpinned:
                for header in unused:
                    table.abandon(header.slot)
    if switched:
        store.erase(switched)
        with unpinned:
            for old in switched:
                table.release(old.slot)
