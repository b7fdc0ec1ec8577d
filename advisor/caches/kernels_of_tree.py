"""Policies that keep what is cached closed under ancestors: only a leaf of the cached tree may go.

A request's leading present blocks are touched root to leaf, its own path is pinned, what is absent enters in the order
of the path and evicts one unpinned leaf each; where there is none, the rest of the path is left out.
"""

from __future__ import annotations

from typing import Any

from advisor.caches.counting import HITS, Trace, count_run, leading
from advisor.caches.heap import enter, take_out
from advisor.index.jit import kernel

Array = Any
"""As numba types it."""

LRU_LEAF, GDSF_LEAF, BELADY_LEAF, MIN = range(4)
NEVER = 1 << 40
"""The next use of a block that is not used again, as a number of a request."""


@kernel
def find_next_uses(ids: Array, ends: Array, soonest: Array, out: Array) -> None:
    """`out[i]`: the next request that uses the block of access i. `soonest` is scratch, by block."""
    soonest[:] = NEVER
    end = len(ids)
    for r in range(len(ends) - 1, -1, -1):
        first = ends[r - 1] if r > 0 else 0
        for i in range(first, end):
            out[i] = soonest[ids[i]]
        for i in range(first, end):
            soonest[ids[i]] = r
        end = first


@kernel
def by_key_of_leaves(
    t: Trace,
    capacity: int,
    present: Array,
    counts: Array,
    keys: Array,
    children: Array,
    pinned: Array,
    heap: Array,
    places: Array,
    next_uses: Array,
    rule: int,
    out: Array,
) -> None:
    """LRU_LEAF: the least recently touched. GDSF_LEAF: as `kernels_flat.by_key`. BELADY_LEAF: the farthest next use.

    MIN is Belady's own: any block may go. Both take the deepest of several, and do not enter a block whose next use is
    no sooner than that of the block it would evict.
    """
    size = 0
    used = 0
    inflation = 0
    now = 0
    first = 0
    looks_ahead = rule >= BELADY_LEAF
    for r in range(len(t.ends)):
        end = t.ends[r]
        counted = r >= t.counted_from
        count_run(t, r, leading(t.ids, first, end, present), end - first, out)
        for i in range(first, end):
            block = t.ids[i]
            pinned[block] = r + 1
            if places[block] >= 0:
                size = take_out(heap, places, keys, size, block)
        for i in range(first, end):
            block = t.ids[i]
            now += 1
            is_hit = present[block]
            if is_hit:
                out[HITS] += counted
            elif used == capacity:
                if size == 0:
                    break
                victim = heap[0]
                if looks_ahead and next_uses[i] >= -keys[victim] >> 16:
                    if rule == MIN:
                        continue
                    break
                inflation = keys[victim] >> 32
                size = take_out(heap, places, keys, size, victim)
                present[victim] = False
                used -= 1
                parent = t.parents[victim]
                if parent >= 0:
                    children[parent] -= 1
                    if rule != MIN and children[parent] == 0 and pinned[parent] != r + 1:
                        size = enter(heap, places, keys, size, parent)
            if not is_hit:
                present[block] = True
                used += 1
                counts[block] = 0
                if t.parents[block] >= 0:
                    children[t.parents[block]] += 1
            counts[block] += 1
            if rule == LRU_LEAF:
                keys[block] = now
            elif rule == GDSF_LEAF:
                keys[block] = (inflation + counts[block]) << 32 | now
            else:
                keys[block] = -(next_uses[i] << 16 | min(t.depths[block], 65535))
        for i in range(first, end):
            block = t.ids[i]
            if present[block] and places[block] < 0 and (rule == MIN or children[block] == 0):
                size = enter(heap, places, keys, size, block)
        first = end
