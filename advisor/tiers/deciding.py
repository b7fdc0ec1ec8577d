"""Admission at each request, and in ranked batches. Each works on one `FastTier`, which pays from its own bucket."""

from __future__ import annotations

from typing import Any

from advisor.index.jit import inlined, routine
from advisor.policies.rules.admission import affordable, remembered, touched_enough
from advisor.policies.rules.eviction import VALUE
from advisor.policies.rules.worth import BATCH_SHARE, protected, worth_swapping
from advisor.tiers.fast_tier import HEAPED, TOKENS, TURN, USED, FastTier, bring_in, evict_first, into_heap, touch
from advisor.tiers.reads import Heat, TimedTrace
from advisor.tiers.sorting import heap_up, take_best

Array = Any
"""As numba types it."""

ALWAYS, TOUCHES, GHOST = range(3)


@inlined
def touch_all(t: TimedTrace, first: int, end: int, heat: Heat, tier: FastTier, values: Array) -> None:
    """The request's blocks are used in the tier, and stay out of its heap until `settle`."""
    for i in range(first, end):
        block = t.ids[i]
        touch(tier, block, heat.touches[block], values[block])


@inlined
def settle(t: TimedTrace, first: int, end: int, tier: FastTier) -> None:
    """The request's blocks may be evicted from now on."""
    for i in range(first, end):
        into_heap(tier, t.ids[i])


@routine
def admit_request(
    t: TimedTrace, r: int, first: int, end: int, heat: Heat, tier: FastTier, kind: int, threshold: int, ghosts: Array
) -> None:
    """Walk the path root to leaf and stop at the first refusal.

    ALWAYS takes a block whose parent is not there. `ghosts` is by block: the turn at which it was last kept out.
    """
    now_s = t.arrivals_s[r]
    for i in range(first, end):
        block = t.ids[i]
        if tier.present[block]:
            continue
        parent = t.parents[block]
        if kind != ALWAYS and parent >= 0 and not tier.present[parent]:
            break
        if kind == TOUCHES and not touched_enough(heat.touches[block], threshold):
            break
        if kind == GHOST and not remembered(tier.counts[TURN], ghosts[block], tier.capacity):
            break
        if not affordable(tier.levels[TOKENS]):
            break
        if tier.counts[USED] == tier.capacity:
            if tier.counts[HEAPED] == 0:
                break
            evict_first(tier, t.parents, heat.pins, r + 1, now_s)
        bring_in(tier, block, parent, heat.touches[block], heat.scores[block], now_s)
    if kind == GHOST:
        for i in range(first, end):
            block = t.ids[i]
            ghosts[block] = 0 if tier.present[block] else tier.counts[TURN]


@routine
def admit_ranked(
    t: TimedTrace,
    waiting: Array,
    count: int,
    heat: Heat,
    tier: FastTier,
    values: Array,
    margin: float,
    floor: float,
    now_s: float,
) -> None:
    """Bring in `waiting[:count]`, best first, each for a block that may leave and whose value is lower by `margin`.

    The first block not worth `floor`, or that the budget does not allow, ends the batch.
    """
    heap_up(waiting, count, values, t.depths)
    for left in range(count, 0, -1):
        block = take_best(waiting, left, values, t.depths)
        if not affordable(tier.levels[TOKENS]) or values[block] < floor:
            break
        parent = t.parents[block]
        if tier.present[block] or (parent >= 0 and not tier.present[parent]):
            continue
        if tier.counts[USED] == tier.capacity:
            if tier.counts[HEAPED] == 0:
                break
            victim = tier.heap[0]
            if victim == parent or values[block] - values[victim] <= margin:
                continue
            evict_first(tier, t.parents, heat.pins, -1, now_s)
        bring_in(tier, block, parent, heat.touches[block], values[block], now_s)
        into_heap(tier, block)


@routine
def admit_worthy(
    t: TimedTrace, r: int, first: int, end: int, heat: Heat, tier: FastTier, worth: Array, least: float, margin: float
) -> None:
    """Of the request's path, root to leaf, what is worth `least`, each for something worth less by `margin`."""
    now_s = t.arrivals_s[r]
    for i in range(first, end):
        block = t.ids[i]
        if tier.present[block]:
            continue
        parent = t.parents[block]
        if worth[block] < least or (parent >= 0 and not tier.present[parent]) or not affordable(tier.levels[TOKENS]):
            break
        if tier.counts[USED] == tier.capacity:
            if tier.counts[HEAPED] == 0 or not worth_swapping(worth[block], worth[tier.heap[0]], margin):
                break
            evict_first(tier, t.parents, heat.pins, r + 1, now_s)
        bring_in(tier, block, parent, heat.touches[block], worth[block], now_s)


@routine
def admit_guarded(
    t: TimedTrace, r: int, first: int, end: int, heat: Heat, tier: FastTier, threshold: int, worth: Array
) -> None:
    """From the `threshold`-th touch, root to leaf; a block used once drives out no block of promise used twice."""
    now_s = t.arrivals_s[r]
    for i in range(first, end):
        block = t.ids[i]
        if tier.present[block]:
            continue
        parent = t.parents[block]
        if not touched_enough(heat.touches[block], threshold) or not affordable(tier.levels[TOKENS]):
            break
        if parent >= 0 and not tier.present[parent]:
            break
        if tier.counts[USED] == tier.capacity:
            if tier.counts[HEAPED] == 0:
                break
            victim = tier.heap[0]
            if protected(heat.touches[block], worth[block], heat.touches[victim], worth[victim]):
                break
            evict_first(tier, t.parents, heat.pins, r + 1, now_s)
        bring_in(tier, block, parent, heat.touches[block], worth[block], now_s)


@inlined
def blocks_found(t: TimedTrace, first: int, run: int, tier: FastTier) -> int:
    found = 0
    for i in range(first, first + run):
        found += tier.present[t.ids[i]]
    return found


@inlined
def renew_worth(tier: FastTier, order: Array, worth: Array) -> None:
    """Every key is a block's worth again. `order` holds all that are present."""
    for at in range(tier.counts[HEAPED]):
        tier.places[tier.heap[at]] = -1
    tier.counts[HEAPED] = 0
    for block in order:
        if tier.present[block]:
            tier.keys[block] = worth[block]
            into_heap(tier, block)


@routine
def swap_worthy(
    t: TimedTrace, heat: Heat, tier: FastTier, worth: Array, order: Array, waiting: Array, margin: float, now_s: float
) -> float:
    """The best absent blocks of `order` for the worst present ones, while a batch's share of the budget lasts and each
    gains `margin`.

    Returns the price of a move from now on: the worth of the best that it could not pay for.
    """
    if tier.rule == VALUE:
        renew_worth(tier, order, worth)
    kept = (1.0 - BATCH_SHARE) * tier.levels[TOKENS]
    tier.levels[TOKENS] -= kept
    count = 0
    for block in order:
        if not tier.present[block] and worth[block] >= margin:
            waiting[count] = block
            count += 1
    if affordable(tier.levels[TOKENS]):
        admit_ranked(t, waiting, count, heat, tier, worth, margin, margin, now_s)
    price = margin
    if not affordable(tier.levels[TOKENS]):
        for at in range(count):
            block = waiting[at]
            parent = t.parents[block]
            if not tier.present[block] and (parent < 0 or tier.present[parent]):
                price = max(price, worth[block])
    tier.levels[TOKENS] += kept
    return price
