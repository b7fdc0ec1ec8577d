"""Changes other than a batch's records: clearing places, removing subtrees, orders, drains."""

from __future__ import annotations

from advisor.index.frequency import rank_all, unrank_all
from advisor.index.jit import inlined, kernel
from advisor.index.keep import keep_block
from advisor.index.layout import TOUCHED, TOUCHED_COUNT, Array, Tables, int64
from advisor.index.placing import placement_in, take_out
from advisor.index.tree import leave_limbo


@kernel
def clear_place(t: Tables, place: int, realms: Array) -> int:
    """Take out all blocks of a place, or those of the realms marked in `realms` u1 (empty: all); returns how many."""
    count = int64(0)
    # Newest first, so that most children go before their parents.
    p = int64(t.places[place].newest)
    while p >= 0:
        older = int64(t.placements[p].older)
        row = int64(t.placements[p].block)
        if len(realms) == 0 or realms[int64(t.blocks[row].realm)]:
            take_out(t, row, place, p)
            count += 1
        p = older
    return count


@kernel
def remove_one(t: Tables, row: int, place: int) -> bool:
    """Take one block out of a place; whether it was there."""
    p = placement_in(t, row, place)
    if p < 0:
        return False
    take_out(t, row, place, p)
    return True


@inlined
def deepest_first_child(t: Tables, row: int) -> int:
    child = int64(t.blocks[row].first_child)
    while child >= 0:
        row = child
        child = int64(t.blocks[row].first_child)
    return row


@kernel
def remove_subtree(t: Tables, top: int, place: int, rows: Array) -> int:
    """Take blocks of a subtree out of `place` (-1: of every place), children before parents.

    Takes as many blocks as `rows` i4 (scratch) holds; returns how many that were. Fewer than that: the subtree is done.
    """
    count = int64(0)
    row = deepest_first_child(t, top)
    while count < len(rows):
        if (place < 0 and t.blocks[row].placed >= 0) or (place >= 0 and placement_in(t, row, place) >= 0):
            rows[count] = row
            count += 1
        if row == top:
            break
        sibling = int64(t.blocks[row].next_sibling)
        row = deepest_first_child(t, sibling) if sibling >= 0 else int64(t.blocks[row].parent)
    for i in range(count):
        row = int64(rows[i])
        p = int64(t.blocks[row].placed)
        while p >= 0:
            after = int64(t.placements[p].next_placed)
            here = int64(t.placements[p].place)
            if place < 0 or here == place:
                take_out(t, row, here, p)
            p = after
    return count


@kernel
def set_frequency_order(t: Tables, place: int, by_frequency: bool) -> None:
    """Evict from `place` by frequency, counting from now on, or by recency."""
    if t.places[place].by_frequency:
        unrank_all(t.places, t.steps, t.state, place)
    t.places[place].by_frequency = by_frequency
    if by_frequency:
        rank_all(t, place, True)


@kernel
def drain_touched(t: Tables, out: Array) -> int:
    """Move the rows of placed blocks touched since the last drain to `out` i4, in order of their first touch."""
    s = t.state
    leave_limbo(t)
    count = int64(0)
    for i in range(s[TOUCHED_COUNT]):
        row = int64(t.touched[i])
        keep_block(t, row)
        b = t.blocks[row]
        b.marks = int64(b.marks) & ~TOUCHED
        if b.placed >= 0:
            out[count] = row
            count += 1
    s[TOUCHED_COUNT] = 0
    return count
