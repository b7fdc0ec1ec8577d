"""Placements: a block in a place, in the place's recency list and, where the place asks for it, in its steps."""

from __future__ import annotations

from advisor.index.frequency import promote, rank_first, unrank
from advisor.index.heat import level_of, set_level
from advisor.index.jit import inlined
from advisor.index.keep import keep_block, keep_placement
from advisor.index.layout import (
    ENTERED,
    GHOSTS,
    LOW_32,
    NONE,
    NOTED,
    PLACEMENT_FREE,
    PLACEMENT_MAX,
    PLACEMENT_TOP,
    PLACEMENTS_FREE,
    TOUCHED,
    TOUCHED_COUNT,
    Array,
    Lookup,
    Tables,
    int64,
)
from advisor.index.tree import add_to_group, count_touch, free_if_idle, root_of


@inlined
def placements_spare(s: Array) -> int:
    return s[PLACEMENT_MAX] - s[PLACEMENT_TOP] + s[PLACEMENTS_FREE]


@inlined
def placement_in(t: Tables | Lookup, row: int, place: int) -> int:
    """The placement of a block in a place, or -1. Takes time in proportion to the places that hold the block."""
    p = int64(t.blocks[row].placed)
    while p >= 0 and t.placements[p].place != place:
        p = int64(t.placements[p].next_placed)
    return p


@inlined
def first_to_go(t: Tables, place: int) -> int:
    """The placement that a place would evict first, or -1."""
    z = t.places[place]
    if z.by_frequency:
        step = int64(z.lowest)
        return int64(-1) if step < 0 else int64(t.steps[step].oldest)
    return int64(z.oldest)


@inlined
def next_to_go(t: Tables, place: int, p: int) -> int:
    if not t.places[place].by_frequency:
        return int64(t.placements[p].newer)
    q = int64(t.ranks[p].newer)
    if q < 0:
        step = int64(t.steps[int64(t.ranks[p].step)].higher)
        if step >= 0:
            q = int64(t.steps[step].oldest)
    return q


@inlined
def become_newest(t: Tables, place: int, p: int) -> None:
    """Append to the recency list. The caller has kept `p` and sets nothing but its links here."""
    z = t.places[place]
    newest = int64(z.newest)
    x = t.placements[p]
    x.older = newest
    x.newer = NONE
    if newest >= 0:
        keep_placement(t, newest)
        t.placements[newest].newer = p
    else:
        z.oldest = p
    z.newest = p


@inlined
def leave_recency(t: Tables, place: int, p: int) -> None:
    older = int64(t.placements[p].older)
    newer = int64(t.placements[p].newer)
    if older >= 0:
        keep_placement(t, older)
        t.placements[older].newer = newer
    else:
        t.places[place].oldest = newer
    if newer >= 0:
        keep_placement(t, newer)
        t.placements[newer].older = older
    else:
        t.places[place].newest = older


@inlined
def put_in(t: Tables, row: int, place: int, block_bytes: int, now_ms: int) -> int:
    """Place a block that is not in that place. The caller has made sure that there is room."""
    s = t.state
    p = s[PLACEMENT_FREE]
    if p >= 0:
        keep_placement(t, p)
        s[PLACEMENT_FREE] = int64(t.placements[p].next_placed)
        s[PLACEMENTS_FREE] -= 1
    else:
        p = s[PLACEMENT_TOP]
        s[PLACEMENT_TOP] += 1
    keep_block(t, row)
    b = t.blocks[row]
    first = int64(b.placed)
    x = t.placements[p]
    x.block = row
    x.next_placed = first
    x.block_bytes = block_bytes
    x.references = 1
    x.uses = 1
    x.last_use = now_ms // 1000
    x.place = place
    b.placed = p
    become_newest(t, place, p)
    s[ENTERED] += 1
    z = t.places[place]
    z.placements += 1
    z.placed_bytes += block_bytes
    if z.by_frequency:
        rank_first(t.places, t.ranks, t.steps, s, place, p, 1, -1)
    realm = t.realms[int64(b.realm)]
    realm.placed_bytes += block_bytes
    came = int64(0)
    if first < 0:
        came = int64(1)
        s[GHOSTS] -= 1
        realm.blocks += 1
        set_level(t, row, 0, 1)
    add_to_group(t, root_of(t, row), came, block_bytes)
    return p


@inlined
def resize(t: Tables, row: int, place: int, p: int, block_bytes: int) -> None:
    keep_placement(t, p)
    more = block_bytes - int64(t.placements[p].block_bytes)
    t.placements[p].block_bytes = block_bytes
    t.places[place].placed_bytes += more
    t.realms[int64(t.blocks[row].realm)].placed_bytes += more
    add_to_group(t, root_of(t, row), 0, more)


@inlined
def take_out(t: Tables, row: int, place: int, p: int) -> None:
    """Take a block out of a place. Its history ends with its last placement."""
    s = t.state
    keep_placement(t, p)
    x = t.placements[p]
    after = int64(x.next_placed)
    block_bytes = int64(x.block_bytes)
    before = int64(t.blocks[row].placed)
    keep_block(t, row)
    b = t.blocks[row]
    if before == p:
        b.placed = after
    else:
        while int64(t.placements[before].next_placed) != p:
            before = int64(t.placements[before].next_placed)
        keep_placement(t, before)
        t.placements[before].next_placed = after
    leave_recency(t, place, p)
    z = t.places[place]
    if z.by_frequency:
        unrank(t.places, t.ranks, t.steps, s, place, p)
    z.placements -= 1
    z.placed_bytes -= block_bytes
    x.block = NONE
    x.next_placed = s[PLACEMENT_FREE]
    s[PLACEMENT_FREE] = p
    s[PLACEMENTS_FREE] += 1
    realm = t.realms[int64(b.realm)]
    realm.placed_bytes -= block_bytes
    root = root_of(t, row)
    if b.placed >= 0:
        add_to_group(t, root, 0, -block_bytes)
        return
    add_to_group(t, root, -1, -block_bytes)
    realm.blocks -= 1
    s[GHOSTS] += 1
    set_level(t, row, level_of(int64(b.touches)), 0)
    b.touches = 0
    b.first_touch = 0
    b.last_touch = 0
    b.marks = int64(b.marks) & TOUCHED
    if b.first_child < 0:
        free_if_idle(t, row)


@inlined
def refresh(t: Tables, place: int, p: int, hits: int, now_ms: int) -> None:
    """A use of a block where it is: it becomes the place's newest."""
    keep_placement(t, p)
    if t.placements[p].newer >= 0:
        leave_recency(t, place, p)
        become_newest(t, place, p)
    uses = min(int64(t.placements[p].uses) + hits, LOW_32)
    t.placements[p].uses = uses
    t.placements[p].last_use = now_ms // 1000
    if t.places[place].by_frequency:
        promote(t.places, t.ranks, t.steps, t.state, place, p, uses)


@inlined
def touch(t: Tables, row: int, place: int, p: int, hits: int, now_ms: int) -> None:
    """Count `hits` uses of a placed block at `place`; `p` is its placement there if it was there before, else -1.

    A use in G1 or G2 also refreshes the volumes that hold the block: heat belongs to the block.
    """
    count_touch(t, row, hits, now_ms)
    if p >= 0:
        refresh(t, place, p, hits, now_ms)
    first = int64(t.blocks[row].placed)
    if t.places[place].tier <= 2 and t.placements[first].next_placed >= 0:
        q = first
        while q >= 0:
            other = int64(t.placements[q].place)
            if t.places[other].volume:
                refresh(t, other, q, hits, now_ms)
            q = int64(t.placements[q].next_placed)


@inlined
def note_touched(t: Tables, row: int) -> None:
    """Remember a block of a volume for the next drain, once."""
    s = t.state
    if int64(t.blocks[row].marks) & TOUCHED:
        return
    p = int64(t.blocks[row].placed)
    while p >= 0:
        if t.places[int64(t.placements[p].place)].volume:
            keep_block(t, row)
            t.blocks[row].marks = int64(t.blocks[row].marks) | TOUCHED
            t.touched[s[TOUCHED_COUNT]] = row
            s[TOUCHED_COUNT] += 1
            s[NOTED] += 1
            return
        p = int64(t.placements[p].next_placed)
