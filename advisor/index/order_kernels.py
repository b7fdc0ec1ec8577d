"""Blocks in the order of eviction, of heat, of the table."""

from __future__ import annotations

from advisor.index.jit import inlined, kernel, prefetch
from advisor.index.layout import BLOCK_TOP, FREE, HEAT_CHUNK_SHIFT, LOW_31, LOW_32, Array, Tables, int64
from advisor.index.placing import first_to_go, next_to_go, placement_in

_EMITTED = int64(-1)


@kernel
def coldest_blocks(t: Tables, place: int, out: Array) -> int:
    """Fill `out` i4 with the rows that go first, leaf or not; returns how many there are."""
    count = int64(0)
    p = first_to_go(t, place)
    while p >= 0 and count < len(out):
        out[count] = t.placements[p].block
        count += 1
        p = next_to_go(t, place, p)
    return count


@inlined
def slot_of(keys: Array, row: int) -> int:
    """Where `row` is or would be in the scratch map; `keys` holds row + 1, its length is a power of two."""
    mask = len(keys) - 1
    i = ((row * 1640531527) >> 7) & mask
    while keys[i] != 0 and keys[i] != row + 1:
        i = (i + 1) & mask
    return i


@inlined
def blocking_child(t: Tables, place: int, child: int, keys: Array, values: Array) -> int:
    """From `child` on among its siblings, the first that is in `place` and not emitted; -1: none."""
    while child >= 0:
        i = slot_of(keys, child)
        if (keys[i] == 0 or values[i] != _EMITTED) and placement_in(t, child, place) >= 0:
            return child
        child = int64(t.blocks[child].next_sibling)
    return child


@inlined
def push(heap: Array, size: int, value: int) -> None:
    i = size
    while i > 0 and heap[(i - 1) >> 1] > value:
        heap[i] = heap[(i - 1) >> 1]
        i = (i - 1) >> 1
    heap[i] = value


@inlined
def pop(heap: Array, size: int) -> int:
    top = heap[0]
    value = heap[size - 1]
    i = int64(0)
    while True:
        child = 2 * i + 1
        if child >= size - 1:
            break
        if child + 1 < size - 1 and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= value:
            break
        heap[i] = heap[child]
        i = child
    heap[i] = value
    return top


@kernel
def coldest_leaves(t: Tables, place: int, out: Array, keys: Array, values: Array, heap: Array) -> int:
    """Fill `out` i4 with rows, coldest leaf first; a block comes after all its children in that place.

    A block that the order reaches before its children waits for one of them, by rank; when the last is out it comes
    next, being colder than all that the order has not reached. `keys` i8 (zeroed) and `values` i8 are a scratch map of
    one power of two, `heap` i8 is half as long. Returns how many rows, or -1 where the scratch is too small.
    """
    count = int64(0)
    ready = int64(0)
    rank = int64(0)
    mapped = int64(0)
    p = first_to_go(t, place)
    while count < len(out):
        if ready > 0:
            row = pop(heap, ready) & LOW_32
            ready -= 1
        else:
            row = int64(-1)
            while row < 0:
                if p < 0:
                    return count
                candidate = int64(t.placements[p].block)
                p = next_to_go(t, place, p)
                if p >= 0:
                    prefetch(t.placements, p)
                child = blocking_child(t, place, int64(t.blocks[candidate].first_child), keys, values)
                if child < 0:
                    row = candidate
                else:
                    i = slot_of(keys, candidate)
                    keys[i] = candidate + 1
                    values[i] = (rank << 32) | child
                    mapped += 1
                    if 2 * mapped >= len(keys):
                        return int64(-1)
                rank += 1
        out[count] = row
        count += 1
        i = slot_of(keys, row)
        if keys[i] == 0:
            keys[i] = row + 1
            mapped += 1
            if 2 * mapped >= len(keys):
                return int64(-1)
        values[i] = _EMITTED
        parent = int64(t.blocks[row].parent)
        if parent >= 0:
            i = slot_of(keys, parent)
            if keys[i] != 0 and values[i] != _EMITTED and (values[i] & LOW_32) == row:
                child = blocking_child(t, place, int64(t.blocks[row].next_sibling), keys, values)
                if child >= 0:
                    values[i] = (values[i] & ~LOW_32) | child
                else:
                    push(heap, ready, (values[i] & ~LOW_32) | parent)
                    ready += 1
    return count


@kernel
def hot_blocks(t: Tables, place: int, level: int, enough: int, out: Array) -> int:
    """Blocks of heat `level` and above that are not in `place` (-1: nowhere to exclude), hotter than `level` first.

    Stops at the first `enough` of exactly `level`; `out` i4 has room. Corrects the bounds of the chunks that it reads.
    """
    count = int64(0)
    top = t.state[BLOCK_TOP]
    chunk_rows = 1 << HEAT_CHUNK_SHIFT
    for above in range(2):
        for chunk in range((top + chunk_rows - 1) >> HEAT_CHUNK_SHIFT):
            if above == 1 and count >= enough:
                return count
            if t.peaks[chunk] < level or (above == 0 and t.peaks[chunk] == level):
                continue
            first = chunk << HEAT_CHUNK_SHIFT
            end = min(first + chunk_rows, top)
            peak = int64(0)
            for row in range(first, end):
                peak = max(peak, int64(t.heat[row]))
            t.peaks[chunk] = peak
            if peak < level:
                continue
            for row in range(first, end):
                here = int64(t.heat[row])
                if (here > level if above == 0 else here == level) and (
                    place < 0 or placement_in(t, row, place) < 0
                ):
                    if above == 1 and count >= enough:
                        return count
                    out[count] = row
                    count += 1
    return count


@kernel
def page_rows(
    t: Tables, after: int, rows_max: int, place: int, tier: int, realms: Array, pattern: Array, out: Array
) -> int:
    """Placed blocks after row `after` in row order, looking at `rows_max` rows at most.

    Filters: `place` (-1 none), `tier` (0 none), `realms` u1 by realm (empty: none), `pattern` u8: low and high half of
    the hash, then of the mask under which it is compared. Fills `out[1:]`, leaves the last row looked at in `out[0]`;
    returns how many were found.
    """
    count = int64(0)
    row = after
    end = min(after + rows_max, t.state[BLOCK_TOP] - 1)
    while row < end and count < len(out) - 1:
        row += 1
        b = t.blocks[row]
        if int64(b.marks) & FREE or b.placed < 0:
            continue
        if len(realms) > 0 and not realms[int64(b.realm)]:
            continue
        if (b.hash_lo & pattern[2]) != pattern[0] or (b.hash_hi & pattern[3]) != pattern[1]:
            continue
        in_place = place < 0
        in_tier = tier == 0
        p = int64(b.placed)
        while p >= 0 and not (in_place and in_tier):
            here = int64(t.placements[p].place)
            in_place = in_place or here == place
            in_tier = in_tier or t.places[here].tier == tier
            p = int64(t.placements[p].next_placed)
        if in_place and in_tier:
            count += 1
            out[count] = row
    out[0] = row
    return count


@kernel
def roots(t: Tables, after: int, rows_max: int, out: Array) -> int:
    """Rows that are roots, as `page_rows` gives placed blocks."""
    count = int64(0)
    row = after
    end = min(after + rows_max, t.state[BLOCK_TOP] - 1)
    while row < end and count < len(out) - 1:
        row += 1
        b = t.blocks[row]
        if b.parent < 0 and not int64(b.marks) & FREE:
            count += 1
            out[count] = row
    out[0] = row
    return count


@kernel
def children_of(t: Tables, row: int, out: Array) -> int:
    """Fill `out` i4 with child rows, the last attached first; returns how many there are in all, ghosts included."""
    count = int64(0)
    child = int64(t.blocks[row].first_child)
    while child >= 0:
        if count < len(out):
            out[count] = child
        count += 1
        child = int64(t.blocks[child].next_sibling)
    return count


@kernel
def child_counts(t: Tables, rows: Array, out: Array) -> None:
    """How many children each of `rows` has, ghosts included, into `out` i8."""
    for i in range(len(rows)):
        count = int64(0)
        child = int64(t.blocks[int64(rows[i])].first_child)
        while child >= 0:
            count += 1
            child = int64(t.blocks[child].next_sibling)
        out[i] = count


@kernel
def group_figures(t: Tables, rows: Array, out: Array) -> None:
    """Of each root in `rows`: placed blocks of its group, and their bytes, into `out` i8 (n, 2)."""
    for i in range(len(rows)):
        r = t.blocks[int64(rows[i])]
        out[i, 0] = r.next_sibling
        out[i, 1] = (int64(r.root) << 31) + (int64(r.prev_sibling) & LOW_31)
