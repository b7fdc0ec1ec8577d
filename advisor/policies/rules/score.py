"""Touches that fade: each adds 2^(t / 900 s), kept as a base-2 logarithm so that it never overflows."""

from __future__ import annotations

import math

from advisor.index.jit import rule

HALF_LIFE_S = 900.0
RANK_PERIOD_S = 30.0
RANK_TOUCHES_MIN = 2
NO_SCORE = -1e9


@rule
def score_with_touch(score: float, now_s: float) -> float:
    """`score` after one more touch."""
    touch = now_s / HALF_LIFE_S
    high = max(score, touch)
    low = min(score, touch)
    return high + math.log2(1.0 + 2.0 ** (low - high)) if high - low < 60.0 else high
