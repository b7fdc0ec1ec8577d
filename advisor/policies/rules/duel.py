"""Which of several arms decides: each runs a shadow of the fast tier, and the one that found the most leads."""

from __future__ import annotations

from typing import Any

from advisor.index.jit import rule

Array = Any
"""f64 by arm, as numba types it."""

TURN_REQUESTS = 200
MOVE_HITS = 0.02
"""Hits that are taken off for each move."""
HOME_TURNS = 8
"""Arm 0 keeps the lead that it begins with so long: first turns tell little, and what another arm spends is gone."""
KEPT = 0.85
"""Of the scores, from turn to turn."""
LEAD = 1.01
"""How much more another arm must have found than the one that leads."""
HOME_WEIGHT = 1.02
"""Arm 0 needs less: it saves moves, and its shadow is as good as the others only once it has learned."""


@rule
def duel_score(score: float, hits: int, moves: int, margin: float) -> float:
    """At the end of a turn; hits and moves are the turn's, `margin` as `MOVE_HITS`."""
    return KEPT * score + hits - margin * moves


@rule
def _weighed(scores: Array, arm: int) -> float:
    return float(scores[arm] * HOME_WEIGHT) if arm == 0 else float(scores[arm])


@rule
def may_turn(turn: int, leader: int) -> bool:
    """`turn`: which one ends, from 1."""
    return leader != 0 or turn >= HOME_TURNS


@rule
def leader_of(scores: Array, allowed: int, leader: int) -> int:
    """`allowed`: a bit for each arm. The first of the best, where it is ahead of the leader by the lead."""
    best = leader
    for arm in range(len(scores)):
        if allowed >> arm & 1 and _weighed(scores, arm) > _weighed(scores, best):
            best = arm
    return best if _weighed(scores, best) > LEAD * _weighed(scores, leader) else leader
