"""Policies that see one access at a time and know no tree: each access is a hit, or evicts one block and enters.

Every kernel takes a `Trace` of arrays, the capacity in blocks, and scratch arrays by block, zeroed: `present` (bool),
`newer` and `older` (with room for the heads of its lists). It adds to `out` (see `counting`).
"""

from __future__ import annotations

from typing import Any

from advisor.caches.counting import HITS, Trace, count_run, leading
from advisor.caches.heap import enter, rekeyed, take_out
from advisor.caches.linked import clear, oldest, push, unlink
from advisor.index.jit import kernel

Array = Any
"""As numba types it."""


@kernel
def by_age(
    t: Trace, capacity: int, present: Array, newer: Array, older: Array, out: Array, touch: bool, from_leaf: bool
) -> None:
    """FIFO; with `touch` LRU; with `from_leaf` each request's blocks are seen leaf to root."""
    blocks = len(present)
    clear(newer, older, blocks)
    used = 0
    first = 0
    for r in range(len(t.ends)):
        end = t.ends[r]
        counted = r >= t.counted_from
        count_run(t, r, leading(t.ids, first, end, present), end - first, out)
        for i in range(first, end):
            block = t.ids[end - 1 - (i - first)] if from_leaf else t.ids[i]
            if present[block]:
                out[HITS] += counted
                if touch:
                    unlink(newer, older, block)
                    push(newer, older, blocks, block)
                continue
            if used == capacity:
                victim = oldest(newer, blocks)
                unlink(newer, older, victim)
                present[victim] = False
            else:
                used += 1
            present[block] = True
            push(newer, older, blocks, block)
        first = end


@kernel
def lfu(t: Trace, capacity: int, present: Array, newer: Array, older: Array, counts: Array, out: Array) -> None:
    """The fewest uses since it entered, then the one that came to that count first. A list for each count."""
    blocks = len(present)
    clear(newer, older, blocks)
    used = 0
    lowest = 1
    first = 0
    for r in range(len(t.ends)):
        end = t.ends[r]
        counted = r >= t.counted_from
        count_run(t, r, leading(t.ids, first, end, present), end - first, out)
        for i in range(first, end):
            block = t.ids[i]
            if present[block]:
                out[HITS] += counted
                unlink(newer, older, block)
                counts[block] += 1
                push(newer, older, blocks + counts[block], block)
                continue
            if used == capacity:
                while oldest(newer, blocks + lowest) == blocks + lowest:
                    lowest += 1
                victim = oldest(newer, blocks + lowest)
                unlink(newer, older, victim)
                present[victim] = False
            else:
                used += 1
            present[block] = True
            counts[block] = 1
            push(newer, older, blocks + 1, block)
            lowest = 1
        first = end


@kernel
def by_key(
    t: Trace,
    capacity: int,
    present: Array,
    counts: Array,
    keys: Array,
    heap: Array,
    places: Array,
    out: Array,
    length_aware: bool,
) -> None:
    """GDSF for blocks of one size: key = L + uses since it entered, L the last evicted key, ties to the older access.

    `length_aware`: the fewest uses since it entered, then the deepest, then the oldest access.
    """
    size = 0
    inflation = 0
    now = 0
    first = 0
    for r in range(len(t.ends)):
        end = t.ends[r]
        counted = r >= t.counted_from
        count_run(t, r, leading(t.ids, first, end, present), end - first, out)
        for i in range(first, end):
            block = t.ids[i]
            now += 1
            is_hit = present[block]
            if is_hit:
                out[HITS] += counted
                counts[block] += 1
            else:
                if size == capacity:
                    victim = heap[0]
                    inflation = keys[victim] >> 32
                    size = take_out(heap, places, keys, size, victim)
                    present[victim] = False
                counts[block] = 1
            if length_aware:
                keys[block] = min(counts[block], 32767) << 48 | (65535 - min(t.depths[block], 65535)) << 32 | now
            else:
                keys[block] = (inflation + counts[block]) << 32 | now
            if is_hit:
                rekeyed(heap, places, keys, size, block)
            else:
                present[block] = True
                size = enter(heap, places, keys, size, block)
        first = end


ABSENT, SMALL, MAIN, GHOST = range(4)
"""Where S3-FIFO and 2Q have a block: 2Q's A1in, Am and A1out."""


@kernel
def two_queues(t: Trace, capacity: int, present: Array, newer: Array, older: Array, where: Array, out: Array) -> None:
    """2Q (Johnson and Shasha 1994): A1in of C/4, its ghosts A1out C/2, Am by recency."""
    blocks = len(present)
    clear(newer, older, blocks)
    small_max = max(1, capacity // 4)
    ghosts_max = max(1, capacity // 2)
    small = 0
    main = 0
    ghosts = 0
    first = 0
    for r in range(len(t.ends)):
        end = t.ends[r]
        counted = r >= t.counted_from
        count_run(t, r, leading(t.ids, first, end, present), end - first, out)
        for i in range(first, end):
            block = t.ids[i]
            if present[block]:
                out[HITS] += counted
                if where[block] == MAIN:
                    unlink(newer, older, block)
                    push(newer, older, blocks + MAIN, block)
                continue
            if small + main == capacity:
                if small > small_max or main == 0:
                    victim = oldest(newer, blocks + SMALL)
                    unlink(newer, older, victim)
                    small -= 1
                    push(newer, older, blocks + GHOST, victim)
                    where[victim] = GHOST
                    ghosts += 1
                    if ghosts > ghosts_max:
                        forgotten = oldest(newer, blocks + GHOST)
                        unlink(newer, older, forgotten)
                        where[forgotten] = ABSENT
                        ghosts -= 1
                else:
                    victim = oldest(newer, blocks + MAIN)
                    unlink(newer, older, victim)
                    where[victim] = ABSENT
                    main -= 1
                present[victim] = False
            present[block] = True
            if where[block] == GHOST:  # it may have been forgotten just now
                unlink(newer, older, block)
                ghosts -= 1
                where[block] = MAIN
                main += 1
            else:
                where[block] = SMALL
                small += 1
            push(newer, older, blocks + where[block], block)
        first = end


@kernel
def sieve(t: Trace, capacity: int, present: Array, newer: Array, older: Array, seen: Array, out: Array) -> None:
    """SIEVE (Zhang et al. 2024): a hand goes from old to new, spares what was used since it passed, evicts the rest."""
    blocks = len(present)
    clear(newer, older, blocks)
    hand = blocks
    used = 0
    first = 0
    for r in range(len(t.ends)):
        end = t.ends[r]
        counted = r >= t.counted_from
        count_run(t, r, leading(t.ids, first, end, present), end - first, out)
        for i in range(first, end):
            block = t.ids[i]
            if present[block]:
                out[HITS] += counted
                seen[block] = True
                continue
            if used == capacity:
                victim = oldest(newer, blocks) if hand == blocks else hand
                while seen[victim]:
                    seen[victim] = False
                    victim = newer[victim]
                    if victim == blocks:
                        victim = oldest(newer, blocks)
                hand = newer[victim]
                unlink(newer, older, victim)
                present[victim] = False
            else:
                used += 1
            present[block] = True
            seen[block] = False
            push(newer, older, blocks, block)
        first = end


@kernel
def s3_fifo(
    t: Trace, capacity: int, present: Array, newer: Array, older: Array, where: Array, uses: Array, out: Array,
    start_up: bool,
) -> None:  # fmt: skip
    """S3-FIFO (Yang et al. 2023): small C/10, main the rest, ghosts 9C/10, to main at 2 uses.

    `start_up`: libCacheSim's rule: before the first eviction, once small is full, what comes goes to main.
    """
    blocks = len(present)
    clear(newer, older, blocks)
    small_max = max(1, capacity // 10)
    ghosts_max = capacity * 9 // 10
    small = 0
    main = 0
    ghosts = 0
    has_evicted = False
    first = 0
    for r in range(len(t.ends)):
        end = t.ends[r]
        counted = r >= t.counted_from
        count_run(t, r, leading(t.ids, first, end, present), end - first, out)
        for i in range(first, end):
            block = t.ids[i]
            if present[block]:
                out[HITS] += counted
                uses[block] = min(3, uses[block] + 1)
                continue
            was_ghost = where[block] == GHOST
            if was_ghost:
                unlink(newer, older, block)
                ghosts -= 1
            while small + main >= capacity:
                has_evicted = True
                if small >= small_max or main == 0:
                    victim = oldest(newer, blocks + SMALL)
                    unlink(newer, older, victim)
                    small -= 1
                    if uses[victim] >= 2:
                        uses[victim] = 0
                        push(newer, older, blocks + MAIN, victim)
                        where[victim] = MAIN
                        main += 1
                        continue
                    present[victim] = False
                    push(newer, older, blocks + GHOST, victim)
                    where[victim] = GHOST
                    ghosts += 1
                    if ghosts > ghosts_max:
                        forgotten = oldest(newer, blocks + GHOST)
                        unlink(newer, older, forgotten)
                        where[forgotten] = ABSENT
                        ghosts -= 1
                else:
                    victim = oldest(newer, blocks + MAIN)
                    unlink(newer, older, victim)
                    if uses[victim] > 0:
                        uses[victim] -= 1
                        push(newer, older, blocks + MAIN, victim)
                        continue
                    present[victim] = False
                    where[victim] = ABSENT
                    main -= 1
            present[block] = True
            uses[block] = 0
            if was_ghost or (start_up and not has_evicted and small >= small_max):
                where[block] = MAIN
                main += 1
            else:
                where[block] = SMALL
                small += 1
            push(newer, older, blocks + where[block], block)
        first = end
