"""The fast tier as the kernels keep it: what is in it, who may leave first, and what came of each move.

Everything is in the slow tier; the fast one holds copies, so to evict is to forget. Where only leaves may leave,
`heap` holds the leaves of what is present, otherwise all of it, by `keys`, smallest first. A request's own blocks are
taken out of the heap while it is served: nothing evicts them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from advisor.caches.heap import enter, take_out
from advisor.index.jit import inlined, routine
from advisor.policies.rules.admission import BUCKET_START_BLOCKS, bounced
from advisor.policies.rules.eviction import eviction_key, inflation_of, leaves_only

Array = Any
"""As numba types it."""

USED, HEAPED, TURN, MOVES, USEFUL, BOUNCED = range(6)
TOKENS, INFLATION = range(2)


class FastTier(NamedTuple):
    """All but the last four are by block. `counts` and `levels` are indexed by the names above."""

    capacity: int
    rule: int
    present: Array
    hit: Array
    dropped_s: Array
    keys: Array
    children: Array
    places: Array
    heap: Array
    counts: Array
    levels: Array

    @classmethod
    def empty(cls, blocks: int, capacity: int, rule: int) -> FastTier:
        levels = np.zeros(2)
        levels[TOKENS] = BUCKET_START_BLOCKS
        return cls(
            capacity,
            rule,
            np.zeros(blocks, np.bool_),
            np.zeros(blocks, np.bool_),
            np.full(blocks, -1e18),
            np.zeros(blocks),
            np.zeros(blocks, np.int64),
            np.full(blocks, -1, np.int64),
            np.empty(capacity + 1, np.int64),
            np.zeros(6, np.int64),
            levels,
        )


@inlined
def into_heap(tier: FastTier, block: int) -> None:
    """Where it is present, not in it, and may leave at all."""
    if tier.present[block] and tier.places[block] < 0 and (tier.children[block] == 0 or not leaves_only(tier.rule)):
        tier.counts[HEAPED] = enter(tier.heap, tier.places, tier.keys, tier.counts[HEAPED], block)


@inlined
def out_of_heap(tier: FastTier, block: int) -> None:
    if tier.places[block] >= 0:
        tier.counts[HEAPED] = take_out(tier.heap, tier.places, tier.keys, tier.counts[HEAPED], block)


@inlined
def touch(tier: FastTier, block: int, touches: int, value: float) -> None:
    """A use: the block's key is made again, and it stays out of the heap until `into_heap`."""
    tier.counts[TURN] += 1
    if tier.present[block]:
        out_of_heap(tier, block)
        tier.keys[block] = eviction_key(tier.rule, tier.levels[INFLATION], touches, tier.counts[TURN], value)


@routine
def evict_first(tier: FastTier, parents: Array, pins: Array, pin: int, now_s: float) -> None:
    """The heap must hold a block. A parent that becomes a leaf may leave next, unless `pins` says `pin` of it."""
    victim = tier.heap[0]
    out_of_heap(tier, victim)
    tier.present[victim] = False
    tier.dropped_s[victim] = now_s
    tier.counts[USED] -= 1
    tier.levels[INFLATION] = inflation_of(tier.rule, tier.keys[victim])
    parent = parents[victim]
    if parent >= 0:
        tier.children[parent] -= 1
        if pins[parent] != pin:
            into_heap(tier, parent)


@routine
def bring_in(tier: FastTier, block: int, parent: int, touches: int, value: float, now_s: float) -> None:
    """A move: there must be room. The block stays out of the heap until `into_heap`."""
    tier.counts[TURN] += 1
    tier.counts[USED] += 1
    tier.counts[MOVES] += 1
    tier.counts[BOUNCED] += bounced(now_s, tier.dropped_s[block])
    tier.levels[TOKENS] -= 1.0
    tier.present[block] = True
    tier.hit[block] = False
    tier.keys[block] = eviction_key(tier.rule, tier.levels[INFLATION], touches, tier.counts[TURN], value)
    if parent >= 0:
        tier.children[parent] += 1
        if leaves_only(tier.rule):
            out_of_heap(tier, parent)
