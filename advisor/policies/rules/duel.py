"""Which of several arms decides: each runs a shadow of the fast tier, and the one that found the most leads."""

from __future__ import annotations

from typing import Any

from advisor.index.jit import rule

Array = Any
"""f64 by arm, as numba types it."""

TURN_REQUESTS = 200
KEPT = 0.75
"""Of the scores, from turn to turn."""
MOVE_WEIGHT = 0.02
"""Hits that a move must bring."""
LEAD = 1.02
"""How much more another arm must have found than the one that leads."""


@rule
def duel_score(score: float, hits: int, moves: int) -> float:
    """At the end of a turn; hits and moves are the turn's."""
    return KEPT * score + hits - MOVE_WEIGHT * moves


@rule
def leader_of(scores: Array, allowed: int, leader: int) -> int:
    """`allowed`: a bit for each arm. The first of the best, where it is ahead of the leader by the lead."""
    best = leader
    for arm in range(len(scores)):
        if allowed >> arm & 1 and scores[arm] > scores[best]:
            best = arm
    return best if scores[best] > LEAD * scores[leader] else leader
