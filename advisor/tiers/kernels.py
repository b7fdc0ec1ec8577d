"""Whole replays of a trace through one fast tier."""

from __future__ import annotations

from typing import Any

from advisor.index.jit import inlined, kernel
from advisor.policies.rules.score import RANK_PERIOD_S, RANK_TOUCHES_MIN, score_with_touch
from advisor.tiers.deciding import admit_ranked, admit_request, settle, touch_all
from advisor.tiers.fast_tier import TOKENS, FastTier
from advisor.tiers.reads import FIRST_TOUCHES, Heat, Reads, TimedTrace, count_read

Array = Any
"""As numba types it."""


@inlined
def heat_up(t: TimedTrace, r: int, first: int, end: int, heat: Heat) -> int:
    """Every block of the request is touched. Returns how many are touched for the first time."""
    now_s = t.arrivals_s[r]
    stored = 0
    for i in range(first, end):
        block = t.ids[i]
        stored += heat.touches[block] == 0
        heat.touches[block] += 1
        heat.scores[block] = score_with_touch(heat.scores[block], now_s)
        heat.last_s[block] = now_s
        heat.pins[block] = r + 1
    return stored


@inlined
def remember_hot(tier: FastTier, heat: Heat, hot: Array) -> None:
    """What a scan must not push out: blocks of the tier touched at least twice."""
    for block in range(len(hot)):
        hot[block] = tier.present[block] and heat.touches[block] >= 2


@kernel
def at_each_request(
    t: TimedTrace,
    heat: Heat,
    tier: FastTier,
    reads: Reads,
    budget: float,
    kind: int,
    threshold: int,
    ghosts: Array,
    scan_from: int,
    hot: Array,
) -> None:
    """Admission as `deciding.admit_request`. `hot` is what the tier holds of use when request `scan_from` arrives."""
    first = 0
    for r in range(len(t.ends)):
        end = t.ends[r]
        if r == scan_from:
            remember_hot(tier, heat, hot)
        count_read(t, r, first, end, heat, tier, reads)
        stored = heat_up(t, r, first, end, heat)
        reads.counts[FIRST_TOUCHES] += stored
        tier.levels[TOKENS] += stored * budget
        touch_all(t, first, end, heat, tier, heat.scores)
        admit_request(t, r, first, end, heat, tier, kind, threshold, ghosts)
        settle(t, first, end, tier)
        first = end


@kernel
def in_ranked_batches(
    t: TimedTrace,
    heat: Heat,
    tier: FastTier,
    reads: Reads,
    budget: float,
    waiting: Array,
    is_waiting: Array,
    scan_from: int,
    hot: Array,
) -> None:
    """Every 30 s, what was touched since the last time and twice in all, by score. `waiting` is scratch, by block."""
    count = 0
    first = 0
    due_s = t.arrivals_s[0] + RANK_PERIOD_S
    last = len(t.ends)
    for r in range(last + 1):
        now_s = t.arrivals_s[min(r, last - 1)]
        if now_s >= due_s or r in (scan_from, last):
            admit_ranked(t, waiting, count, heat, tier, heat.scores, 0.0, -1e18, now_s)
            for at in range(count):
                is_waiting[waiting[at]] = False
            count = 0
            while due_s <= now_s:
                due_s += RANK_PERIOD_S
        if r == scan_from:
            remember_hot(tier, heat, hot)
        if r == last:
            break
        end = t.ends[r]
        count_read(t, r, first, end, heat, tier, reads)
        stored = heat_up(t, r, first, end, heat)
        reads.counts[FIRST_TOUCHES] += stored
        tier.levels[TOKENS] += stored * budget
        touch_all(t, first, end, heat, tier, heat.scores)
        settle(t, first, end, tier)
        for i in range(first, end):
            block = t.ids[i]
            if not is_waiting[block] and heat.touches[block] >= RANK_TOUCHES_MIN:
                is_waiting[block] = True
                waiting[count] = block
                count += 1
        first = end
