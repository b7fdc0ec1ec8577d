"""The replay's rules on the live planner's notes: what requests do to them, the arms' shadows, the sweep.

A slot of the heat book is a block's number here. Shadows hold one block in `sample`, by tag, and are as much smaller
than the volume; there a block's parent is its nearest ancestor in the sample, so that paths keep their sense.
"""

from __future__ import annotations

from typing import Any

from advisor.index.jit import inlined, kernel, routine
from advisor.index.layout import int64, uint64
from advisor.policies.rules.hazard import NEW_CHAIN, block_class
from advisor.policies.rules.noting import REQUESTS, use_once
from advisor.policies.rules.score import RANK_TOUCHES_MIN
from advisor.policies.rules.worth import price_after
from advisor.tiers.deciding import admit_ranked, swap_worthy
from advisor.tiers.duelling import Duel, Shadows, end_turn, least_worth, serve_shadows
from advisor.tiers.fast_tier import HEAPED, USED, FastTier, into_heap, out_of_heap
from advisor.tiers.learning import PRICE, Learned, learn_ages, learn_uses, value_path
from advisor.tiers.reads import Heat, TimedTrace

Array = Any
"""As numba types it."""

SAMPLE_MIX = 0xD6E8FEB86659FD93
SAMPLE_SHIFT = 40
"""A tag is mixed otherwise than for its slot, so that the sample is one of all slots; hashes may be small numbers."""


@inlined
def sampled(book: Array, slot: int, sample: int) -> bool:
    return bool((book[slot].tag * uint64(SAMPLE_MIX) >> uint64(SAMPLE_SHIFT)) % uint64(sample) == uint64(0))


STEPS_MAX = 64
"""Times as many ancestors are looked at as it takes on average to find one in the sample."""


@inlined
def _nearest_sampled(book: Array, slot: int, sample: int) -> Any:
    """Or -1. A slot that changed hands is nobody's parent: what is there now may be below the block that points to it.

    Nor is the walk endless where blocks stood in another order when they were noted.
    """
    here = int64(slot)
    for _ in range(STEPS_MAX * sample):
        above = int64(book[here].parent)
        if above < 0 or book[above].tag != book[here].parent_tag:
            return int64(-1)
        if sampled(book, above, sample):
            return above
        here = above
    return int64(-1)


@kernel
def serve_requests(
    book: Array,
    counts: Array,
    t: TimedTrace,
    requests: int,
    heat: Heat,
    rule: int,
    inflation: float,
    learns: bool,
    learned: Learned,
    shadowed: TimedTrace,
    shadowed_max: int,
    sample: int,
    s: Shadows,
    duel: Duel,
    ghosts: Array,
    ranking: Array,
    is_ranking: Array,
    ranked: int,
    margin: float,
) -> int:
    """`requests` of `t` happen, in order; the arms' shadows serve theirs, where `shadowed_max` blocks are not too few.

    `shadowed` is `t` of the sample: its `ids` are scratch, its `parents` the nearest ancestors in it.
    `ranking[:ranked]` gains what the ranked batch will look at. Returns `ranked`.
    """
    first = 0
    least = least_worth(learned, margin)
    for r in range(requests):
        end = t.ends[r]
        run = 0
        while first + run < end and heat.touches[t.ids[first + run]] > 0:
            run += 1
        if learns:
            learn_uses(t, r, first, end, run, heat, learned)
        for i in range(first, end):
            block = t.ids[i]
            if heat.touches[block] == 0 and shadowed_max > 0 and sampled(book, block, sample):
                shadowed.parents[block] = _nearest_sampled(book, block, sample)
            use_once(book, block, counts, t.arrivals_s[r], rule, inflation)
        counts[REQUESTS] += 1
        if learns:
            value_path(t, first, end, learned)
        chosen = 0
        known = 0
        for i in range(first, end):
            block = t.ids[i]
            if shadowed_max > 0 and sampled(book, block, sample):
                shadowed.ids[chosen] = block
                heat.pins[block] = r + 1
                chosen += 1
                known += i < first + run
        if 0 < chosen <= shadowed_max:
            shadowed_max -= chosen
            serve_shadows(shadowed, r, 0, chosen, known, heat, s, duel, learned.worth, ghosts, 0.0, least, margin)
            for i in range(chosen):
                block = shadowed.ids[i]
                if not is_ranking[block] and heat.touches[block] >= RANK_TOUCHES_MIN:
                    is_ranking[block] = True
                    ranking[ranked] = block
                    ranked += 1
        for i in range(chosen):
            heat.pins[shadowed.ids[i]] = 0
        first = end
    return ranked


@kernel
def classify(book: Array) -> None:
    """What was noted before anything was learned gets a class by what its note tells."""
    for slot in range(len(book)):
        note = book[slot]
        if note.tag != uint64(0):
            note.group = block_class(int64(note.touches), NEW_CHAIN, note.gap_s, 0, 0)


@kernel
def rank_shadow(
    t: TimedTrace, heat: Heat, s: Shadows, ranking: Array, ranked: int, is_ranking: Array, now_s: float
) -> None:
    """The ranked arm's batch comes."""
    admit_ranked(t, ranking, ranked, heat, s.ranked, heat.scores, 0.0, -1e18, now_s)
    for at in range(ranked):
        is_ranking[ranking[at]] = False


@kernel
def sweep(
    t: TimedTrace,
    heat: Heat,
    learned: Learned,
    order: Array,
    capacity: int,
    moves: int,
    requests: int,
    swaps: bool,
    shadowed: TimedTrace,
    in_sample: Array,
    s: Shadows,
    waiting: Array,
    margin: float,
    now_s: float,
) -> None:
    """Learn from what was not used, and make every worth again; where it `swaps`, the arm that goes by worth does so in
    its shadow.

    `order` and `in_sample` are all slots in use, and those in the sample.
    """
    learn_ages(t, heat, learned, order, capacity, moves, requests, now_s)
    if swaps:
        price = swap_worthy(shadowed, heat, s.by_worth, learned.worth, in_sample, waiting, margin, now_s)
        learned.levels[PRICE] = price_after(learned.levels[PRICE], price)


@kernel
def close_turn(duel: Duel, s: Shadows, turn: int) -> None:
    """200 requests are over, for the `turn`-th time."""
    end_turn(duel, s, turn)


@kernel
def lose_slots(given: Array, is_given: Array, parents: Array, s: Shadows, ghosts: Array) -> None:
    """The slots `given` changed hands: no shadow holds what was there, and its children have no parent any more.

    `is_given` is scratch by slot: all False, and left so.
    """
    for slot in given:
        ghosts[slot] = 0
        if s.by_worth.present[slot]:
            _lose(slot, parents, s.by_worth)
        if s.first.present[slot]:
            _lose(slot, parents, s.first)
        if s.second.present[slot]:
            _lose(slot, parents, s.second)
        if s.third.present[slot]:
            _lose(slot, parents, s.third)
        if s.ghosts.present[slot]:
            _lose(slot, parents, s.ghosts)
        if s.ranked.present[slot]:
            _lose(slot, parents, s.ranked)
    for slot in given:
        is_given[slot] = True
        parents[slot] = -1
    for slot in range(len(parents)):
        if parents[slot] >= 0 and is_given[parents[slot]]:
            parents[slot] = -1
    for slot in given:
        is_given[slot] = False
        s.by_worth.children[slot] = 0
        s.first.children[slot] = 0
        s.second.children[slot] = 0
        s.third.children[slot] = 0
        s.ghosts.children[slot] = 0
        s.ranked.children[slot] = 0


@routine
def _lose(slot: int, parents: Array, tier: FastTier) -> None:
    out_of_heap(tier, slot)
    tier.present[slot] = False
    tier.counts[USED] -= 1
    parent = parents[slot]
    if parent >= 0:
        tier.children[parent] -= 1
        into_heap(tier, parent)


@kernel
def parents_in_sample(book: Array, sample: int, parents: Array) -> None:
    """`parents`, out: by slot the nearest ancestor in the sample, of every block in it."""
    for slot in range(len(book)):
        if book[slot].tag != uint64(0) and sampled(book, slot, sample):
            parents[slot] = _nearest_sampled(book, slot, sample)


@kernel
def restore_tier(tier: FastTier, slots: Array, keys: Array, heap: Array, parents: Array) -> None:
    """An empty tier gets what `slots` held, by the keys and the heap that it had."""
    for i in range(len(slots)):
        tier.present[slots[i]] = True
        tier.keys[slots[i]] = keys[i]
    tier.counts[USED] = len(slots)
    for slot in slots:
        if parents[slot] >= 0:
            tier.children[parents[slot]] += 1
    for at in range(len(heap)):
        tier.heap[at] = heap[at]
        tier.places[heap[at]] = at
    tier.counts[HEAPED] = len(heap)
