"""Blocks from slot to slot of one volume while they are served.

So slots past a capacity can be given back, and large slots that took small blocks while the small slots were taken; and
chains come to lie in neighbouring slots.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from storage_agent.block_header import BlockHeader
from storage_agent.chains import chain_order
from storage_agent.errors import TransferError, VolumeError
from storage_agent.slot_store import SlotStore, SlotWrite
from storage_agent.slot_table import Reservation, SlotTable

ReadAll = Callable[[Sequence[BlockHeader]], list[tuple[BlockHeader, bytes]]]
"""Reads and verifies blocks; what is corrupt is freed and left out."""
Verify = Callable[[Sequence[SlotWrite]], set[int]]
"""Reads durable copies back from the medium. The slots whose bytes are not what was written, or cannot be had."""
Reserve = Callable[[BlockHeader], Reservation | None]


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
            part = read_all(above[start : start + store.batch_slots])
            _move(part, table.reserve_copy, table, unpinned, store)
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


def settle_into_classes(
    table: SlotTable, unpinned: threading.Condition, store: SlotStore, read_all: ReadAll
) -> int:
    """Carry blocks to free slots of the class of their size, chain by chain. Bytes that larger blocks have again.

    Raises `TransferError`, with every block served as before or in its place.
    """
    with unpinned:
        oversized = chain_order(table.oversized())
    freed_bytes = 0
    for start in range(0, len(oversized), store.batch_slots):
        part = read_all(oversized[start : start + store.batch_slots])
        for old, copy in _move(part, table.reserve_copy, table, unpinned, store):
            freed_bytes += table.class_bytes(old.slot) - table.class_bytes(copy.slot)
    return freed_bytes


def move_together(
    runs: Sequence[tuple[Sequence[BlockHeader], int]],
    table: SlotTable,
    unpinned: threading.Condition,
    store: SlotStore,
    read_all: ReadAll,
    verify: Verify,
) -> None:
    """Carry each run to neighbouring free slots; where there are too few, to fewer stretches than its extents now.

    Raises `TransferError`, with every block served as before or in its place.
    """
    with unpinned:
        reserved = table.reserve_together([run for run, _ in runs], [extents for _, extents in runs])
    headers = [header for run, _ in runs for header in run if header.slot in reserved]
    try:
        for start in range(0, len(headers), store.batch_slots):
            part = read_all(headers[start : start + store.batch_slots])
            _move(part, lambda old: reserved.pop(old.slot, None), table, unpinned, store, verify)
    finally:
        with unpinned:
            for left in reserved.values():  # of blocks that went meanwhile, or are corrupt
                table.abandon(left.slot)


def _move(
    blocks: Sequence[tuple[BlockHeader, bytes]],
    reserve: Reserve,
    table: SlotTable,
    unpinned: threading.Condition,
    store: SlotStore,
    verify: Verify | None = None,
) -> list[tuple[BlockHeader, BlockHeader]]:
    """Copy blocks to better slots, durably, serve the copies, free the old slots. The old and the copy of those moved.

    Raises `TransferError`.
    """
    writes: list[SlotWrite] = []
    olds: list[BlockHeader] = []
    for number, (old, payload) in enumerate(blocks):
        with unpinned:
            reserved = reserve(old)
        if reserved is None:
            continue  # puts took what was free: it stays in its slot
        copy = old._replace(slot=reserved.slot, generation=reserved.generation)
        writes.append(SlotWrite(number, copy, memoryview(payload)))
        olds.append(old)
    switched: list[BlockHeader] = []
    moved: list[tuple[BlockHeader, BlockHeader]] = []
    unused = [write.header for write in writes]
    try:
        if writes:
            store.write(writes)
            store.sync()
        bad = verify(writes) if verify is not None and writes else set()
        with unpinned:
            for old, write in zip(olds, writes, strict=True):
                if write.slot not in bad and table.switch(old, write.header):
                    switched.append(old)
                    moved.append((old, write.header))
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
    return moved
