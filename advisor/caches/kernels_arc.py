"""ARC (Megiddo and Modha 2003), with the paper's real-valued target; and its choice restricted to leaves."""

from __future__ import annotations

from typing import Any

from advisor.caches.counting import HITS, Trace, count_run, leading
from advisor.caches.heap import enter, take_out
from advisor.caches.linked import clear, oldest, push, unlink
from advisor.index.jit import inlined, kernel

Array = Any
"""As numba types it."""

ABSENT, ONCE, TWICE, ONCE_GHOST, TWICE_GHOST = range(5)
"""The paper's T1, T2, B1, B2. `sizes` counts them."""
LISTS = 5


@inlined
def retarget(sizes: Array, found: int, target: float, capacity: int) -> float:
    """The target size of T1 after a hit in a list of ghosts."""
    if found == ONCE_GHOST:
        return min(float(capacity), target + max(1.0, sizes[TWICE_GHOST] / sizes[ONCE_GHOST]))
    if found == TWICE_GHOST:
        return max(0.0, target - max(1.0, sizes[ONCE_GHOST] / sizes[TWICE_GHOST]))
    return target


@inlined
def list_to_evict_from(sizes: Array, found: int, target: float) -> int:
    ones = sizes[ONCE]
    return ONCE if ones >= 1 and (ones > target or (found == TWICE_GHOST and ones == target)) else TWICE


@inlined
def forget_oldest(newer: Array, older: Array, where: Array, sizes: Array, head: int, ghosts: int) -> None:
    forgotten = oldest(newer, head)
    unlink(newer, older, forgotten)
    where[forgotten] = ABSENT
    sizes[ghosts] -= 1


@kernel
def arc(
    t: Trace, capacity: int, present: Array, newer: Array, older: Array, where: Array, sizes: Array, out: Array
) -> None:
    blocks = len(present)
    clear(newer, older, blocks)
    target = 0.0
    first = 0
    for r in range(len(t.ends)):
        end = t.ends[r]
        counted = r >= t.counted_from
        count_run(t, r, leading(t.ids, first, end, present), end - first, out)
        for i in range(first, end):
            block = t.ids[i]
            found = where[block]
            if found != ABSENT:
                target = retarget(sizes, found, target, capacity)
            if present[block]:
                out[HITS] += counted
            else:
                evict = True
                if found == ABSENT:
                    if sizes[ONCE] + sizes[ONCE_GHOST] == capacity:
                        if sizes[ONCE] < capacity:
                            forget_oldest(newer, older, where, sizes, blocks + ONCE_GHOST, ONCE_GHOST)
                        else:
                            present[oldest(newer, blocks + ONCE)] = False
                            forget_oldest(newer, older, where, sizes, blocks + ONCE, ONCE)
                            evict = False
                    elif sizes.sum() >= capacity:
                        if sizes.sum() == 2 * capacity:
                            forget_oldest(newer, older, where, sizes, blocks + TWICE_GHOST, TWICE_GHOST)
                    else:
                        evict = False
                if evict:
                    evicted = list_to_evict_from(sizes, found, target)
                    victim = oldest(newer, blocks + evicted)
                    unlink(newer, older, victim)
                    present[victim] = False
                    sizes[evicted] -= 1
                    where[victim] = evicted + 2
                    sizes[evicted + 2] += 1
                    push(newer, older, blocks + evicted + 2, victim)
            if found != ABSENT:
                unlink(newer, older, block)
                sizes[found] -= 1
            where[block] = ONCE if found == ABSENT else TWICE
            sizes[where[block]] += 1
            push(newer, older, blocks + where[block], block)
            present[block] = True
        first = end


@kernel
def arc_of_leaves(
    t: Trace,
    capacity: int,
    present: Array,
    newer: Array,
    older: Array,
    where: Array,
    sizes: Array,
    keys: Array,
    children: Array,
    pinned: Array,
    once_heap: Array,
    once_places: Array,
    twice_heap: Array,
    twice_places: Array,
    out: Array,
) -> None:
    """ARC's choice between its lists; of the chosen one the least recently used leaf, of the other where it has none.

    Of ghosts there are C at most, of those used twice C/2: so it comes within 0.2 % of the figures it is compared with.
    """
    blocks = len(present)
    clear(newer, older, blocks)
    target = 0.0
    ones = 0
    twos = 0
    now = 0
    first = 0
    for r in range(len(t.ends)):
        end = t.ends[r]
        counted = r >= t.counted_from
        count_run(t, r, leading(t.ids, first, end, present), end - first, out)
        for i in range(first, end):
            block = t.ids[i]
            pinned[block] = r + 1
            if once_places[block] >= 0:
                ones = take_out(once_heap, once_places, keys, ones, block)
            if twice_places[block] >= 0:
                twos = take_out(twice_heap, twice_places, keys, twos, block)
        for i in range(first, end):
            block = t.ids[i]
            now += 1
            found = where[block]
            if present[block]:
                out[HITS] += counted
                keys[block] = now
                sizes[found] -= 1
                sizes[TWICE] += 1
                where[block] = TWICE
                continue
            target = retarget(sizes, found, target, capacity)
            if sizes[ONCE] + sizes[TWICE] >= capacity:
                evicted = list_to_evict_from(sizes, found, target)
                if ones == 0 and twos == 0:
                    break
                if evicted == ONCE and ones == 0:
                    evicted = TWICE
                if evicted == TWICE and twos == 0:
                    evicted = ONCE
                if evicted == ONCE:
                    victim = once_heap[0]
                    ones = take_out(once_heap, once_places, keys, ones, victim)
                else:
                    victim = twice_heap[0]
                    twos = take_out(twice_heap, twice_places, keys, twos, victim)
                present[victim] = False
                sizes[evicted] -= 1
                where[victim] = evicted + 2
                sizes[evicted + 2] += 1
                push(newer, older, blocks + evicted + 2, victim)
                parent = t.parents[victim]
                if parent >= 0:
                    children[parent] -= 1
                    if children[parent] == 0 and pinned[parent] != r + 1:
                        if where[parent] == ONCE:
                            ones = enter(once_heap, once_places, keys, ones, parent)
                        else:
                            twos = enter(twice_heap, twice_places, keys, twos, parent)
            if where[block] == ONCE_GHOST or where[block] == TWICE_GHOST:
                unlink(newer, older, block)
                sizes[where[block]] -= 1
                where[block] = TWICE
            else:
                where[block] = ONCE
            sizes[where[block]] += 1
            while sizes[ONCE_GHOST] + sizes[TWICE_GHOST] > capacity and sizes[ONCE_GHOST] > 0:
                forget_oldest(newer, older, where, sizes, blocks + ONCE_GHOST, ONCE_GHOST)
            while sizes[TWICE_GHOST] > capacity // 2:
                forget_oldest(newer, older, where, sizes, blocks + TWICE_GHOST, TWICE_GHOST)
            present[block] = True
            keys[block] = now
            if t.parents[block] >= 0:
                children[t.parents[block]] += 1
        for i in range(first, end):
            block = t.ids[i]
            if present[block] and children[block] == 0:
                if where[block] == ONCE and once_places[block] < 0:
                    ones = enter(once_heap, once_places, keys, ones, block)
                if where[block] == TWICE and twice_places[block] < 0:
                    twos = enter(twice_heap, twice_places, keys, twos, block)
        first = end
