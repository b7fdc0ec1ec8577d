"""The heat book's kernels: what the live planner remembers of blocks beside what the index holds.

The book is a set-associative table: a block's tag names a set of `WAYS` slots, and the coldest of a full set gives way.
So it is bounded, and what it holds depends on the history alone, never on row numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from advisor.index.jit import inlined, kernel
from advisor.index.layout import int64, uint64
from advisor.policies.rules.eviction import eviction_key
from advisor.policies.rules.score import score_with_touch

Array = Any
"""As numba types it."""

NOTE_DTYPE = np.dtype(
    (
        np.record,
        [
            ("tag", "u8"),  # 0: the slot is free
            ("score", "f8"),  # touches that fade, see score.py
            ("key", "f8"),  # of eviction, made at the last touch
            ("touched_s", "f8"),
            ("dropped_s", "f8"),  # from the fast volume; 0: never
            ("dropped_turn", "i8"),
            ("entered_turn", "i8"),  # into the fast volume
            ("turn", "i8"),  # of the last touch
            ("out_turn", "i8"),  # when last kept out of the fast volume; 0: never
            ("touches", "u4"),
            ("seen_touches", "u4"),  # when an eviction last looked at it
            ("gap_s", "f4"),  # between the last two touches
            ("dropped_heat", "f4"),  # expected touches, relative, when it was dropped
            ("region", "u4"),  # of the evictions that have several
        ],
    )
)
WAYS = 8
TOUCHES_SCORED_MAX = 64
"""Touches between two plans that count for a score; more of them add a six-hundredth each."""
GREEDY = -1
"""Instead of a rule of eviction.py: a note's key is the inflation at its last touch."""
TURN, NOTES, FIRST_SEEN = range(3)
"""Numbers in `counts`: uses so far, slots in use, blocks noted for the first time by the last call."""

_MIX = 0x9E3779B97F4A7C15


@inlined
def tag_of(blocks: Array, realms: Array, row: int) -> Any:
    """Of a block, never 0: its hash mixed with its namespace and group."""
    b = blocks[row]
    realm = realms[b.realm]
    mixed = (uint64(realm.namespace_id) + uint64(realm.group)) * uint64(_MIX)
    tag = uint64(b.hash_lo) ^ (uint64(b.hash_hi) * uint64(_MIX)) ^ mixed
    return tag if tag != uint64(0) else uint64(1)


@inlined
def set_of(book: Array, tag: Any) -> Any:
    """The first of the slots where a block may be noted."""
    return int64((tag * uint64(_MIX) >> uint64(20)) % uint64(len(book) // WAYS)) * WAYS


@inlined
def slot_of(book: Array, tag: Any) -> Any:
    """Where the block is noted, or -1."""
    first = set_of(book, tag)
    for slot in range(first, first + WAYS):
        if book[slot].tag == tag:
            return slot
    return -1


@inlined
def room_for(book: Array, counts: Array, tag: Any) -> Any:
    """A slot for a block that is not noted: a free one of its set, or the coldest's."""
    first = set_of(book, tag)
    coldest = first
    for slot in range(first, first + WAYS):
        if book[slot].tag == uint64(0):
            coldest = slot
            counts[NOTES] += 1
            break
        if book[slot].score < book[coldest].score:
            coldest = slot
    note = book[coldest]
    note.tag = tag
    note.score = -1e9
    note.key = 0.0
    note.touched_s = 0.0
    note.dropped_s = 0.0
    note.dropped_turn = 0
    note.dropped_heat = 0.0
    note.entered_turn = 0
    note.turn = 0
    note.out_turn = 0
    note.touches = 0
    note.seen_touches = 0
    note.gap_s = 0.0
    note.region = 0
    return coldest


@kernel
def note_touches(
    blocks: Array,
    realms: Array,
    rows: Array,
    book: Array,
    counts: Array,
    slots: Array,
    rule: int,
    inflation: float,
) -> None:
    """Note the touches of blocks `rows` since they were last noted. `slots`, out: where each is."""
    counts[FIRST_SEEN] = 0
    for i in range(len(rows)):
        b = blocks[rows[i]]
        touches = int64(b.touches)
        tag = tag_of(blocks, realms, rows[i])
        slot = slot_of(book, tag)
        if slot < 0:
            slot = room_for(book, counts, tag)
            counts[FIRST_SEEN] += 1
        slots[i] = slot
        note = book[slot]
        known = int64(note.touches)
        # The index forgot the block meanwhile, and counts it from one again.
        fresh = touches - known if touches >= known else touches
        if fresh == 0:
            continue
        last_ms = (int64(b.marks) >> 10 & 0x3FF) << 32 | int64(b.last_touch)
        last_s = last_ms / 1000.0
        for _ in range(min(fresh, TOUCHES_SCORED_MAX)):
            note.score = score_with_touch(note.score, last_s)
        counts[TURN] += fresh
        if known > 0:
            note.gap_s = last_s - note.touched_s
        note.touched_s = last_s
        note.touches = touches
        note.turn = counts[TURN]
        note.key = inflation if rule == GREEDY else eviction_key(rule, inflation, touches, counts[TURN], note.score)


@kernel
def find_notes(blocks: Array, realms: Array, rows: Array, book: Array, slots: Array) -> None:
    """`slots`, out: where each of `rows` is noted, or -1."""
    for i in range(len(rows)):
        slots[i] = slot_of(book, tag_of(blocks, realms, rows[i]))


@kernel
def placed_columns(blocks: Array, placements: Array, rows: Array, place: int, uses: Array, sizes: Array) -> None:
    """`uses` since they came and bytes of blocks `rows` in a place, out; uses -1 where it is not there."""
    for i in range(len(rows)):
        uses[i] = -1
        sizes[i] = 0
        p = int64(blocks[rows[i]].placed)
        while p >= 0:
            x = placements[p]
            if int64(x.place) == place:
                uses[i] = int64(x.uses)
                sizes[i] = int64(x.block_bytes)
                break
            p = int64(x.next_placed)


@kernel
def leaves_before_parents(blocks: Array, rows: Array, keys: Array, at: Array, order: Array) -> None:
    """Raise each block's key in `keys` to the highest of its descendants among `rows`.

    `at` is scratch by block row, filled with -1 and left so; `order` numbers `rows` deepest first.
    """
    for i in range(len(rows)):
        at[rows[i]] = i
    for j in range(len(order)):
        i = order[j]
        parent = int64(blocks[rows[i]].parent)
        if parent >= 0:
            above = at[parent]
            if above >= 0 and keys[above] < keys[i]:
                keys[above] = keys[i]
    for i in range(len(rows)):
        at[rows[i]] = -1
