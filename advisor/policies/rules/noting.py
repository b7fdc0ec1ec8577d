"""The heat book's kernels: what the live planner remembers of blocks beside what the index holds.

The book is a set-associative table: a block's tag names a set of `WAYS` slots, and the coldest of a full set gives way.
So it is bounded, and what it holds depends on the history alone, never on row numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from advisor.index.jit import inlined, kernel
from advisor.index.layout import FREE, int64, uint64
from advisor.policies.rules.eviction import eviction_key
from advisor.policies.rules.score import NO_SCORE, score_with_touch

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
            ("parent", "i4"),  # slot of the parent's note, -1 for none
            ("worth", "f8"),  # uses to come, see hazard.py
            ("parent_tag", "u8"),
            ("row", "i4"),  # in the index when last used: good while the block there has this tag
            ("depth", "u4"),
            ("counted", "u4"),  # touches that the index told when it was last noted
            ("group", "u2"),  # class of hazard.py
            ("kind", "u1"),  # of hazard.py
            ("left", "u1"),  # uses that the plan in the making has not taken yet
        ],
    )
)
"""Two cache lines."""
assert NOTE_DTYPE.itemsize == 128
NOTES_OF_3 = np.dtype([(name, NOTE_DTYPE[name]) for name in (NOTE_DTYPE.names or ())[:13]])
"""As states of version 3 hold them."""
WAYS = 8
TOUCHES_SCORED_MAX = 64
"""Touches between two plans that count for a score; more of them add a six-hundredth each."""
GREEDY = -1
"""Instead of a rule of eviction.py: a note's key is the inflation at its last touch."""
COUNTS = 5
TURN, NOTES, FIRST_SEEN, GIVEN_AWAY, REQUESTS = range(COUNTS)
"""Numbers in `counts`: uses so far, slots in use, by the last call: blocks noted for the first time and slots that
changed hands; requests so far."""

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
def room_for(book: Array, counts: Array, given: Array, tag: Any) -> Any:
    """A slot for a block that is not noted: a free one of its set, or the coldest's, which goes into `given`."""
    first = set_of(book, tag)
    coldest = first
    for slot in range(first, first + WAYS):
        if book[slot].tag == uint64(0):
            coldest = slot
            break
        if book[slot].score < book[coldest].score:
            coldest = slot
    if book[coldest].tag == uint64(0):
        counts[NOTES] += 1
    else:
        given[counts[GIVEN_AWAY]] = coldest
        counts[GIVEN_AWAY] += 1
    note = book[coldest]
    note.tag = tag
    note.score = NO_SCORE
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
    note.worth = 0.0
    note.group = 0
    note.kind = 0
    note.counted = 0
    note.region = 0
    return coldest


@kernel
def note_blocks(
    blocks: Array, realms: Array, rows: Array, book: Array, counts: Array, slots: Array, given: Array
) -> None:
    """Find or make the notes of blocks `rows`, and put down how often each was used since it was last noted.

    Out: `slots`, where each note is, which another of `rows` may have taken meanwhile; `given`, what changed hands.
    """
    counts[FIRST_SEEN] = 0
    counts[GIVEN_AWAY] = 0
    for i in range(len(rows)):
        b = blocks[rows[i]]
        touches = int64(b.touches)
        tag = tag_of(blocks, realms, rows[i])
        slot = slot_of(book, tag)
        if slot < 0:
            slot = room_for(book, counts, given, tag)
            counts[FIRST_SEEN] += 1
            _place(blocks, realms, rows[i], book, slot)
        slots[i] = slot
        note = book[slot]
        note.row = rows[i]
        # The index forgot the block meanwhile, and counts it from one again.
        fresh = touches - int64(note.counted) if touches >= int64(note.counted) else touches
        if note.counted == 0 and first_touch_s(b) < last_touch_s(b):
            fresh = 1  # of the earlier ones nothing is known
        note.counted = touches
        note.left = min(fresh, TOUCHES_SCORED_MAX)
        counts[TURN] += fresh - int64(note.left)
        note.touches += fresh - int64(note.left)


@inlined
def first_touch_s(block: Any) -> float:
    return float((int64(block.marks) & 0x3FF) << 32 | int64(block.first_touch)) / 1000.0


@inlined
def last_touch_s(block: Any) -> float:
    return float((int64(block.marks) >> 10 & 0x3FF) << 32 | int64(block.last_touch)) / 1000.0


@inlined
def _place(blocks: Array, realms: Array, row: int, book: Array, slot: int) -> None:
    """In the tree of notes."""
    note = book[slot]
    note.depth = blocks[row].depth
    note.parent = -1
    note.parent_tag = uint64(0)
    parent = int64(blocks[row].parent)
    if parent >= 0:
        tag = tag_of(blocks, realms, parent)
        above = slot_of(book, tag)
        if above >= 0:
            note.parent = above
            note.parent_tag = tag


@inlined
def use_once(book: Array, slot: int, counts: Array, now_s: float, rule: int, inflation: float) -> None:
    """A use of a noted block, which takes a turn."""
    note = book[slot]
    counts[TURN] += 1
    note.score = score_with_touch(note.score, now_s)
    if note.touches > 0:
        note.gap_s = now_s - note.touched_s
    note.touched_s = now_s
    note.touches += 1
    note.turn = counts[TURN]
    note.key = inflation
    if rule != GREEDY:
        note.key = eviction_key(rule, inflation, int64(note.touches), counts[TURN], note.score)


@kernel
def part_from_lost(book: Array) -> None:
    """Notes whose parent's slot changed hands have no parent any more."""
    for slot in range(len(book)):
        note = book[slot]
        if note.tag != uint64(0) and note.parent >= 0 and book[note.parent].tag != note.parent_tag:
            note.parent = -1
            note.parent_tag = uint64(0)


@inlined
def _climb(book: Array, slot: int, ids: Array, end: int) -> int:
    """Take a use of a block, and of its ancestors as far as they have one left, leaf first into `ids` from `end` on."""
    at = end
    here = slot
    while True:
        note = book[here]
        note.left -= 1
        ids[at] = here
        at += 1
        above = int64(note.parent)
        if above < 0 or book[above].tag != note.parent_tag or book[above].left == 0:
            break
        here = above
    return at


@inlined
def _turn_round(values: Array, first: int, end: int) -> None:
    for i in range((end - first) // 2):
        values[first + i], values[end - 1 - i] = values[end - 1 - i], values[first + i]


@inlined
def _tell_the_rest(book: Array, rows: Array, slots: Array, ids: Array, ends: Array, count: int, end: int) -> int:
    """Of blocks used more than once: paths from the last leaf that has uses left on, told the first one first."""
    told = count
    start = end
    for at in range(len(rows) - 1, -1, -1):
        leaf = int64(slots[at])
        while book[leaf].row == rows[at] and book[leaf].left > 0:
            length = -end
            end = _climb(book, leaf, ids, end)
            ends[count] = length + end
            count += 1
    _turn_round(ids, start, end)
    _turn_round(ends, told, count)
    for r in range(told, count):
        start += ends[r]
        ends[r] = start
    return count


@kernel
def tell_requests(
    blocks: Array,
    book: Array,
    rows: Array,
    slots: Array,
    ids: Array,
    ends: Array,
    arrivals_s: Array,
    input_tokens: Array,
    block_tokens: Array,
) -> int:
    """Requests, as what blocks were used tells them: a use of each block of a path that has uses left.

    `ids` are slots, root to leaf. The two last say in tokens of the index whether a request's last block is partial.
    Returns how many there are.
    """
    count = 0
    end = 0
    at = 0
    while at < len(rows):
        leaf = int64(slots[at])
        if book[leaf].row != rows[at] or book[leaf].left == 0:
            at += 1
            continue
        first = end
        end = _climb(book, leaf, ids, end)
        _turn_round(ids, first, end)
        at += 1
        while at < len(rows):
            below = int64(slots[at])
            note = book[below]
            if note.row != rows[at] or note.left == 0 or note.parent != leaf or note.parent_tag != book[leaf].tag:
                break
            note.left -= 1
            ids[end] = below
            end += 1
            leaf = below
            at += 1
        ends[count] = end
        count += 1
    count = _tell_the_rest(book, rows, slots, ids, ends, count, end)
    first = 0
    for r in range(count):
        tokens = 0
        for i in range(first, ends[r]):
            tokens += int64(blocks[book[ids[i]].row].block_tokens)
        arrivals_s[r] = last_touch_s(blocks[book[ids[ends[r] - 1]].row])
        block_tokens[r] = int64(blocks[book[ids[first]].row].block_tokens)
        input_tokens[r] = tokens
        first = ends[r]
    return count


@kernel
def find_notes(blocks: Array, realms: Array, rows: Array, book: Array, slots: Array) -> None:
    """`slots`, out: where each of `rows` is noted, or -1."""
    for i in range(len(rows)):
        slots[i] = slot_of(book, tag_of(blocks, realms, rows[i]))


@kernel
def worthy_absent(
    blocks: Array, realms: Array, placements: Array, book: Array, place: int, least: float, rows: Array
) -> int:
    """Blocks worth `least` that are not in `place`, as far as their notes still know their rows; returns how many."""
    count = 0
    for slot in range(len(book)):
        note = book[slot]
        if note.tag == uint64(0) or note.worth < least or int64(blocks[note.row].marks) & FREE:
            continue
        if tag_of(blocks, realms, note.row) == note.tag and placement_in(blocks, placements, note.row, place) < 0:
            rows[count] = note.row
            count += 1
    return count


@inlined
def placement_in(blocks: Array, placements: Array, row: int, place: int) -> Any:
    """Where a block's placement in a place is, or -1."""
    p = int64(blocks[row].placed)
    while p >= 0 and int64(placements[p].place) != place:
        p = int64(placements[p].next_placed)
    return p


@kernel
def placed_columns(blocks: Array, placements: Array, rows: Array, place: int, uses: Array, sizes: Array) -> None:
    """`uses` since they came and bytes of blocks `rows` in a place, out; uses -1 where it is not there."""
    for i in range(len(rows)):
        uses[i] = -1
        sizes[i] = 0
        p = placement_in(blocks, placements, rows[i], place)
        if p >= 0:
            uses[i] = int64(placements[p].uses)
            sizes[i] = int64(placements[p].block_bytes)


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
