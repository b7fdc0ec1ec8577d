"""A slab's slot table after it was opened: from the saved table and a look at what changed since, or at every slot."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from storage_agent.saved_rows import load_rows
from storage_agent.slab_file import SlabFile, session_of_this_process
from storage_agent.slab_format import NO_TABLE, Intents, Regions
from storage_agent.slab_scan import look
from storage_agent.slot_rows import ROW, SlotRows
from storage_agent.slot_store import Recovered

_LIFE_SHIFT = 40
"""Each opening takes a fresh range of generations, so that one is never used twice, not even after a crash."""


def recover_slab(slab: SlabFile) -> tuple[Recovered, Intents | None]:
    """The slots' rows, and the intents that they start from. Frees what is torn or doubled and marks the slab open.

    Raises `OSError`.
    """
    rows, intents, changed = _start(slab)
    session = slab.session
    generation = session.generation_next if session is not None else 0
    torn: list[int] = []
    for first, end in _runs(changed, slab.superblock.region_slots, slab.superblock.capacity_blocks):
        rows.rows[first:end] = np.zeros((), dtype=ROW)
        for slot, header, fault in look(slab, first, end, check_payloads=not slab.was_closed_in_order):
            if header is not None:
                generation = max(generation, header.generation)
            if fault or header is None:
                torn.append(slot)
            else:
                rows.set(header)
    if changed.any():  # a saved table names no block twice
        torn += _doubled(rows)
    generation = max(generation, int(rows.rows["generation"].max(initial=0)))
    generation_next = ((generation >> _LIFE_SHIFT) + 1) << _LIFE_SHIFT
    slab.write_session(session_of_this_process(is_open=True, generation_next=generation_next))
    if torn and intents is not None:  # they lie in regions told already, unless they are doubles of the saved table
        intents.changed[np.asarray(torn) // slab.superblock.region_slots] = True
        slab.write_intents(intents)
    slab.erase_headers(torn)
    for slot in torn:
        rows.clear(slot)
    return Recovered(rows, generation_next, slab.superblock.classes), intents


def _start(slab: SlabFile) -> tuple[SlotRows, Intents | None, Regions]:
    """Rows to begin with, the intents they belong to, and the regions to look at."""
    superblock = slab.superblock
    intents = slab.read_intents()
    if intents is not None and slab.session is not None:  # a damaged page beside them makes them suspect too
        loaded = slab.table_path and load_rows(
            slab.table_path,
            file_mark=superblock.mark,
            row_count=superblock.capacity_blocks,
            table_marks=(intents.table, intents.table_next),
        )
        if loaded:
            rows, mark = loaded
            return rows, replace(intents, table=mark), intents.changed
        if intents.table == NO_TABLE:
            return SlotRows.empty(superblock.capacity_blocks), intents, intents.changed
    return SlotRows.empty(superblock.capacity_blocks), None, np.ones(superblock.regions, dtype=np.bool_)


def _runs(changed: Regions, region_slots: int, capacity: int) -> list[tuple[int, int]]:
    """Slots of neighbouring changed regions, as (first, end)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], changed, [False])).astype(np.int8))).tolist()
    return [
        (first * region_slots, min(end * region_slots, capacity))
        for first, end in zip(edges[::2], edges[1::2], strict=True)
    ]


def _doubled(rows: SlotRows) -> list[int]:
    """Slots whose block is in another slot with a higher generation."""
    slots = rows.live_slots()
    keys = rows.packed_keys(slots)
    if len(set(keys)) == len(keys):
        return []
    newest: dict[bytes, int] = {}
    older: list[int] = []
    generations = rows.rows["generation"]
    for slot, key in zip(slots.tolist(), keys, strict=True):
        other = newest.setdefault(key, slot)
        if other != slot:
            old, new = sorted((other, slot), key=lambda s: int(generations[s]))
            older.append(old)
            newest[key] = new
    return older
