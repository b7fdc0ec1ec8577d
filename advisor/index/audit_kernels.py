"""Invariants of the tables, and what can be made again from them."""

from __future__ import annotations

from advisor.index.frequency import rank_all
from advisor.index.hash_table import find, home_of, tag_of
from advisor.index.heat import level_of
from advisor.index.jit import inlined, kernel, prefetch
from advisor.index.layout import (
    BITS,
    BLOCK_FREE,
    BLOCK_ROWS,
    BLOCK_TOP,
    BLOCKS_FREE,
    ENTRIES,
    FREE,
    GHOSTS,
    HASH_SPILL,
    HEAT_CHUNK_SHIFT,
    HISTOGRAM,
    LEVELS,
    LIMBO,
    LOW_31,
    PLACEMENT_FREE,
    PLACEMENT_TOP,
    PLACEMENTS_FREE,
    TOUCHED,
    TOUCHED_COUNT,
    Array,
    Tables,
    int64,
)

FAULTS = (
    "",
    "ghost {0} has no children and was not freed",
    "ghost {0} kept its touches",
    "block {0} is not found under its own key",
    "block {0} is no child of its parent {1}",
    "child {0} of block {1} names another parent or the wrong sibling",
    "block {0} leads to another root than its parent {1}",
    "placement {1} of block {0} belongs to block or place that does not know it",
    "placement {1} of block {0} has no references",
    "block {0} has heat {1}, not that of its touches",
    "chunk of block {0} is hotter than its bound {1}",
    "{0} block rows are in use, counted {1}",
    "{0} ghosts, counted {1}",
    "{0} hash entries, counted {1}",
    "{0} free block rows, counted {1}",
    "{0} free placements, counted {1}",
    "place {0} orders {1} placements, another number is counted",
    "place {0} holds {1} bytes, another number is counted",
    "order of place {0} breaks at placement {1}",
    "realm {0} has {1} rows, blocks or bytes, another number is counted",
    "group of root {0} has {1} blocks or bytes, another number is counted",
    "{0} blocks are reached from roots, {1} are in use: a cycle",
    "histogram counts {1} blocks at level {0}, which is wrong",
    "block {0} is marked touched and not listed, or listed and not marked",
    "place {0} orders by frequency: placement {1} is out of order",
    "{0} freed rows wait for a drain, counted {1}",
)
(
    _OK, BARREN_GHOST, TOUCHED_GHOST, NOT_FOUND, NO_CHILD, WRONG_PARENT, WRONG_ROOT, STRAY_PLACEMENT, NO_REFERENCES,
    WRONG_HEAT, WRONG_BOUND, ROWS, GHOST_COUNT, ENTRY_COUNT, FREE_BLOCKS, FREE_PLACEMENTS, PLACE_COUNT, PLACE_BYTES,
    PLACE_ORDER, REALM_FIGURES, GROUP_FIGURES, REACHED, LEVEL_COUNT, TOUCH_MARK, FREQUENCY_ORDER, LIMBO_COUNT,
) = range(len(FAULTS))  # fmt: skip


@inlined
def fault(out: Array, which: int, first: int, second: int) -> int:
    out[0] = first
    out[1] = second
    return which


@inlined
def true_root(t: Tables, row: int) -> int:
    while t.blocks[row].parent >= 0:
        row = int64(t.blocks[row].root)
    return row


@kernel
def check_blocks(t: Tables, sums: Array, groups: Array, out: Array) -> int:
    """Block rows, their links and figures. `sums` i8 (realms + levels, 3), `groups` i8 (block rows, 2): zeroed."""
    s = t.state
    top = s[BLOCK_TOP]
    rows = int64(0)
    ghosts = int64(0)
    levels = len(sums) - LEVELS
    for row in range(top):
        b = t.blocks[row]
        heat = int64(t.heat[row])
        if heat > t.peaks[row >> HEAT_CHUNK_SHIFT]:
            return fault(out, WRONG_BOUND, row, int64(t.peaks[row >> HEAT_CHUNK_SHIFT]))
        if int64(b.marks) & FREE:
            if heat != 0:
                return fault(out, WRONG_HEAT, row, heat)
            continue
        rows += 1
        realm = int64(b.realm)
        sums[realm, 0] += 1
        if find(t, tag_of(s, b.hash_lo, b.hash_hi, realm), b.hash_lo, b.hash_hi, realm) != row:
            return fault(out, NOT_FOUND, row, 0)
        root = true_root(t, row)
        parent = int64(b.parent)
        if parent >= 0:
            if true_root(t, parent) != root:
                return fault(out, WRONG_ROOT, row, parent)
            before = int64(b.prev_sibling)
            links_here = t.blocks[parent].first_child == row if before < 0 else t.blocks[before].next_sibling == row
            if not links_here:
                return fault(out, NO_CHILD, row, parent)
        child = int64(b.first_child)
        before = int64(-1)
        while child >= 0:
            if t.blocks[child].parent != row or t.blocks[child].prev_sibling != before:
                return fault(out, WRONG_PARENT, child, row)
            before = child
            child = int64(t.blocks[child].next_sibling)
        p = int64(b.placed)
        if p < 0:
            ghosts += 1
            if b.first_child < 0:
                return fault(out, BARREN_GHOST, row, 0)
            if b.touches != 0:
                return fault(out, TOUCHED_GHOST, row, 0)
            if heat != 0:
                return fault(out, WRONG_HEAT, row, heat)
            continue
        if heat != level_of(int64(b.touches)):
            return fault(out, WRONG_HEAT, row, heat)
        sums[levels + heat, 0] += 1
        sums[realm, 1] += 1
        groups[root, 0] += 1
        while p >= 0:
            x = t.placements[p]
            if x.block != row:
                return fault(out, STRAY_PLACEMENT, row, p)
            if x.references < 1:
                return fault(out, NO_REFERENCES, row, p)
            sums[realm, 2] += int64(x.block_bytes)
            groups[root, 1] += int64(x.block_bytes)
            p = int64(x.next_placed)
    if rows != s[BLOCK_ROWS]:
        return fault(out, ROWS, rows, s[BLOCK_ROWS])
    if ghosts != s[GHOSTS]:
        return fault(out, GHOST_COUNT, ghosts, s[GHOSTS])
    for level in range(LEVELS):
        if sums[levels + level, 0] != s[HISTOGRAM + level]:
            return fault(out, LEVEL_COUNT, level, s[HISTOGRAM + level])
    return _OK


@kernel
def check_trees(t: Tables, sums: Array, groups: Array, out: Array) -> int:
    """Group and realm figures, and that every block hangs on a root. Scratch as `check_blocks` left it."""
    s = t.state
    reached = int64(0)
    for root in range(s[BLOCK_TOP]):
        b = t.blocks[root]
        if int64(b.marks) & FREE or b.parent >= 0:
            continue
        placed_bytes = (int64(b.root) << 31) + (int64(b.prev_sibling) & LOW_31)
        if groups[root, 0] != b.next_sibling or groups[root, 1] != placed_bytes:
            return fault(out, GROUP_FIGURES, root, groups[root, 0])
        row = root
        going = True
        while going:
            reached += 1
            if reached > s[BLOCK_ROWS]:
                return fault(out, REACHED, reached, s[BLOCK_ROWS])
            child = int64(t.blocks[row].first_child)
            if child >= 0:
                row = child
                continue
            while row != root and t.blocks[row].next_sibling < 0:
                row = int64(t.blocks[row].parent)
            if row == root:
                going = False
            else:
                row = int64(t.blocks[row].next_sibling)
    if reached != s[BLOCK_ROWS]:
        return fault(out, REACHED, reached, s[BLOCK_ROWS])
    for realm in range(len(sums) - LEVELS):
        z = t.realms[realm]
        if sums[realm, 0] != z.rows or sums[realm, 1] != z.blocks or sums[realm, 2] != z.placed_bytes:
            return fault(out, REALM_FIGURES, realm, sums[realm, 0])
    return _OK


@kernel
def check_places(t: Tables, places: int, out: Array) -> int:
    """Recency lists, steps, placements that belong together, totals."""
    for place in range(places):
        z = t.places[place]
        count = int64(0)
        placed_bytes = int64(0)
        before = int64(-1)
        p = int64(z.oldest)
        while p >= 0:
            x = t.placements[p]
            if x.older != before or x.place != place or x.block < 0 or count > z.placements:
                return fault(out, PLACE_ORDER, place, p)
            q = int64(t.blocks[int64(x.block)].placed)
            while q >= 0 and q != p:
                q = int64(t.placements[q].next_placed)
            if q < 0:
                return fault(out, STRAY_PLACEMENT, int64(x.block), p)
            count += 1
            placed_bytes += int64(x.block_bytes)
            before = p
            p = int64(x.newer)
        if z.newest != before:
            return fault(out, PLACE_ORDER, place, before)
        if count != z.placements:
            return fault(out, PLACE_COUNT, place, count)
        if placed_bytes != z.placed_bytes:
            return fault(out, PLACE_BYTES, place, placed_bytes)
        if z.by_frequency:
            ranked = int64(0)
            uses = int64(0)
            step = int64(z.lowest)
            while step >= 0:
                if t.steps[step].uses <= uses or t.steps[step].oldest < 0:
                    return fault(out, FREQUENCY_ORDER, place, step)
                uses = t.steps[step].uses
                p = int64(t.steps[step].oldest)
                before = int64(-1)
                while p >= 0:
                    if t.ranks[p].step != step or t.ranks[p].older != before or t.placements[p].uses != uses:
                        return fault(out, FREQUENCY_ORDER, place, p)
                    ranked += 1
                    before = p
                    p = int64(t.ranks[p].newer)
                step = int64(t.steps[step].higher)
            if ranked != count:
                return fault(out, FREQUENCY_ORDER, place, ranked)
    return _OK


@kernel
def check_free(t: Tables, out: Array) -> int:
    """Free lists, hash entries, marks of touch."""
    s = t.state
    count = int64(0)
    row = s[BLOCK_FREE]
    while row >= 0 and count <= s[BLOCKS_FREE]:
        count += 1
        row = int64(t.blocks[row].first_child)
    if count != s[BLOCKS_FREE]:
        return fault(out, FREE_BLOCKS, count, s[BLOCKS_FREE])
    if s[BLOCK_ROWS] + s[BLOCKS_FREE] + s[LIMBO] != s[BLOCK_TOP]:
        return fault(out, ROWS, s[BLOCK_TOP], s[BLOCK_ROWS])
    count = int64(0)
    p = s[PLACEMENT_FREE]
    while p >= 0 and count <= s[PLACEMENTS_FREE]:
        count += 1
        p = int64(t.placements[p].next_placed)
    if count != s[PLACEMENTS_FREE]:
        return fault(out, FREE_PLACEMENTS, count, s[PLACEMENTS_FREE])
    used = int64(0)
    for p in range(s[PLACEMENT_TOP]):
        used += t.placements[p].block >= 0
    if used + s[PLACEMENTS_FREE] != s[PLACEMENT_TOP]:
        return fault(out, FREE_PLACEMENTS, s[PLACEMENT_TOP] - used, s[PLACEMENTS_FREE])
    count = int64(0)
    for i in range(min(len(t.entries), (1 << s[BITS]) + HASH_SPILL)):
        count += t.entries[i].slot != 0
    if count != s[ENTRIES] or count != s[BLOCK_ROWS]:
        return fault(out, ENTRY_COUNT, count, s[ENTRIES])
    marked = int64(0)
    waiting = int64(0)
    for row in range(s[BLOCK_TOP]):
        marks = int64(t.blocks[row].marks)
        marked += (marks & TOUCHED) != 0
        waiting += (marks & TOUCHED) != 0 and (marks & FREE) != 0
    if marked != s[TOUCHED_COUNT]:
        return fault(out, TOUCH_MARK, marked, 0)
    for i in range(s[TOUCHED_COUNT]):
        if not int64(t.blocks[int64(t.touched[i])].marks) & TOUCHED:
            return fault(out, TOUCH_MARK, int64(t.touched[i]), 0)
    if waiting != s[LIMBO]:
        return fault(out, LIMBO_COUNT, waiting, s[LIMBO])
    return _OK


@kernel
def index_rows(t: Tables) -> None:
    """Fill the empty hash table, heat and histogram from the block rows. The table is large enough."""
    s = t.state
    ahead = 16
    top = s[BLOCK_TOP]
    for i in range(top + ahead):
        if i < top:
            b = t.blocks[i]
            prefetch(t.entries, home_of(s, tag_of(s, b.hash_lo, b.hash_hi, int64(b.realm))))
        row = i - ahead
        if row < 0:
            continue
        b = t.blocks[row]
        if int64(b.marks) & FREE:
            continue
        tag = tag_of(s, b.hash_lo, b.hash_hi, int64(b.realm))
        p = home_of(s, tag)
        while t.entries[p].slot != 0:
            p += 1
        t.entries[p].tag = tag
        t.entries[p].slot = row + 1
        s[ENTRIES] += 1
        if b.placed >= 0:
            level = level_of(int64(b.touches))
            t.heat[row] = level
            s[HISTOGRAM + level] += 1
            if level > t.peaks[row >> HEAT_CHUNK_SHIFT]:
                t.peaks[row >> HEAT_CHUNK_SHIFT] = level


@kernel
def rank_place(t: Tables, place: int) -> None:
    """Make the frequency steps of a place from its placements' uses."""
    rank_all(t, place, False)
