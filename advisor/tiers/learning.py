"""What the replay learns of each class of blocks as it goes, and what that makes each block worth."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from advisor.index.jit import inlined, routine
from advisor.policies.rules import hazard
from advisor.policies.rules.hazard import (
    age_bin,
    block_class,
    expose,
    fade,
    fade_factor,
    request_shape,
    revalue,
    value_at,
)
from advisor.tiers.reads import Heat, TimedTrace

Array = Any
"""As numba types it."""

SWEPT_S, HORIZON_S, PRICE, MOVE_RATE, LONGEST_S = range(5)
KNOWN, REQUESTS, MOVED = range(3)


class Learned(NamedTuple):
    """`classes`, `kinds` and `worth` are by block; the tables are of `rules.hazard`.

    `levels` and `counts` are indexed by the names above. Blocks are known in the order of their numbers.
    """

    classes: Array
    kinds: Array
    worth: Array
    hits: Array
    exposure: Array
    values: Array
    levels: Array
    counts: Array

    @classmethod
    def nothing(cls, blocks: int, longest_s: float, classes: int = hazard.CLASSES) -> Learned:
        """`longest_s`: the longest horizon; `classes`: `hazard.TOLD_CLASSES` where priorities are told."""
        table = (classes, hazard.BINS)
        levels = np.zeros(5)
        levels[MOVE_RATE] = -1.0
        levels[HORIZON_S] = hazard.HORIZON_MIN_S
        levels[LONGEST_S] = longest_s
        return cls(
            np.zeros(blocks, np.int64),
            np.zeros(blocks, np.int64),
            np.zeros(blocks),
            np.zeros(table),
            np.zeros(table),
            np.zeros((classes, hazard.BINS + 1)),
            levels,
            np.zeros(3, np.int64),
        )


@routine
def learn_uses(t: TimedTrace, r: int, first: int, end: int, run: int, heat: Heat, learned: Learned) -> None:
    """Call it before the request's touches are counted. `run`: how many of its leading blocks were known."""
    now_s = t.arrivals_s[r]
    partial = t.input_tokens[r] < (end - first) * t.block_tokens[r]
    shape = request_shape(end - first, end - first - run)
    for i in range(first, end):
        block = t.ids[i]
        if heat.touches[block] == 0:
            kind = hazard.CONTINUATION if run > 0 else hazard.NEW_CHAIN
            if i == end - 1 and partial:
                kind = hazard.PARTIAL
            learned.kinds[block] = kind
            learned.classes[block] = block_class(1, kind, 0.0, shape, t.priorities[r])
            learned.counts[KNOWN] = max(learned.counts[KNOWN], block + 1)
        else:
            gap_s = now_s - heat.last_s[block]
            seen_s = max(0.0, learned.levels[SWEPT_S] - heat.last_s[block])
            expose(learned.exposure, learned.classes[block], seen_s, gap_s)
            learned.hits[learned.classes[block], age_bin(gap_s)] += 1.0
            learned.classes[block] = block_class(
                heat.touches[block] + 1, learned.kinds[block], gap_s, shape, t.priorities[r]
            )


@routine
def learn_ages(
    t: TimedTrace, heat: Heat, learned: Learned, order: Array, capacity: int, moves: int, r: int, now_s: float
) -> None:
    """Count what went unused since the last time, make the tables again, and the worth of the blocks in `order`: a
    parent's is at least its child's.


    The horizon is a share of the time that a block stays: the capacity over the rate of moves into it.
    """
    elapsed_s = max(now_s - learned.levels[SWEPT_S], 1e-9)
    requests = r - learned.counts[REQUESTS]
    learned.counts[REQUESTS] = r
    fade(learned.hits, learned.exposure, fade_factor(elapsed_s, requests))
    rate = (moves - learned.counts[MOVED]) / elapsed_s
    learned.counts[MOVED] = moves
    before = learned.levels[MOVE_RATE]
    learned.levels[MOVE_RATE] = rate if before < 0.0 else 0.9 * before + 0.1 * rate
    learned.levels[HORIZON_S] = hazard.horizon_s(
        capacity, learned.levels[MOVE_RATE], learned.levels[LONGEST_S]
    )
    for block in order:
        seen_s = max(0.0, learned.levels[SWEPT_S] - heat.last_s[block])
        expose(learned.exposure, learned.classes[block], seen_s, now_s - heat.last_s[block])
    learned.levels[SWEPT_S] = now_s
    for _ in range(2):
        revalue(learned.hits, learned.exposure, learned.values, learned.levels[HORIZON_S])
    for block in order:
        learned.worth[block] = value_at(learned.values, learned.classes[block], now_s - heat.last_s[block])
    for block in order:
        least = learned.worth[block]
        parent = t.parents[block]
        while parent >= 0 and learned.worth[parent] < least:
            learned.worth[parent] = least
            parent = t.parents[parent]


@inlined
def value_path(t: TimedTrace, first: int, end: int, learned: Learned) -> None:
    """The worth of blocks that were just used; a parent's is at least its child's."""
    below = 0.0
    for i in range(end - 1, first - 1, -1):
        block = t.ids[i]
        below = max(below, learned.values[learned.classes[block], 0])
        learned.worth[block] = below
