"""Admissions that learn: by worth alone, or the best of several arms, each of which runs a shadow of the fast tier."""

from __future__ import annotations

from typing import Any, NamedTuple

from advisor.index.jit import inlined, kernel, routine
from advisor.policies.rules.duel import MOVE_HITS, TURN_REQUESTS, duel_score, leader_of, may_turn
from advisor.policies.rules.eviction import VALUE
from advisor.policies.rules.hazard import PERIOD_S
from advisor.policies.rules.score import RANK_PERIOD_S, RANK_TOUCHES_MIN
from advisor.policies.rules.worth import LEARNING_S, price_after
from advisor.tiers.deciding import (
    GHOST,
    TOUCHES,
    admit_guarded,
    admit_ranked,
    admit_request,
    admit_worthy,
    blocks_found,
    renew_worth,
    settle,
    swap_worthy,
    touch_all,
)
from advisor.tiers.fast_tier import MOVES, TOKENS, FastTier
from advisor.tiers.kernels import heat_up, remember_hot
from advisor.tiers.learning import KNOWN, PRICE, SWEPT_S, Learned, learn_ages, learn_uses, value_path
from advisor.tiers.reads import FIRST_TOUCHES, Heat, Reads, TimedTrace, count_read

Array = Any
"""As numba types it."""

BY_WORTH, FIRST, SECOND, THIRD, GHOSTS, RANKED = range(6)
ARMS = 6


class Shadows(NamedTuple):
    """A fast tier for each arm, as large as the real one, with a budget of its own."""

    by_worth: FastTier
    first: FastTier
    second: FastTier
    third: FastTier
    ghosts: FastTier
    ranked: FastTier


class Duel(NamedTuple):
    """`allowed`: a bit for each arm. By arm: `scores`, and the hits and moves since the last turn."""

    allowed: int
    scores: Array
    hits: Array
    moves: Array
    leader: Array


@inlined
def _serve_shadow(
    t: TimedTrace, first: int, end: int, run: int, heat: Heat, tier: FastTier, values: Array, credit: float
) -> int:
    found = blocks_found(t, first, run, tier)
    tier.levels[TOKENS] += credit
    touch_all(t, first, end, heat, tier, values)
    return found


@routine
def end_turn(duel: Duel, s: Shadows, turn: int) -> None:
    """Score what the arms found since the last turn; the best of those that are allowed leads. `turn`: from 1."""
    _close(duel, BY_WORTH, s.by_worth)
    _close(duel, FIRST, s.first)
    _close(duel, SECOND, s.second)
    _close(duel, THIRD, s.third)
    _close(duel, GHOSTS, s.ghosts)
    _close(duel, RANKED, s.ranked)
    if may_turn(turn, duel.leader[0]):
        duel.leader[0] = leader_of(duel.scores, duel.allowed, duel.leader[0])


@inlined
def _close(duel: Duel, arm: int, tier: FastTier) -> None:
    moves = tier.counts[MOVES]
    duel.scores[arm] = duel_score(duel.scores[arm], duel.hits[arm], moves - duel.moves[arm], MOVE_HITS)
    duel.hits[arm] = 0
    duel.moves[arm] = moves


@inlined
def least_worth(learned: Learned, margin: float) -> float:
    """What a request's own blocks must be worth to come: none do before the first price is known."""
    return max(margin, learned.levels[PRICE]) if learned.levels[PRICE] > 0.0 else 1e18


@routine
def serve_shadows(
    t: TimedTrace,
    r: int,
    first: int,
    end: int,
    run: int,
    heat: Heat,
    s: Shadows,
    duel: Duel,
    worth: Array,
    ghosts: Array,
    credit: float,
    least: float,
    margin: float,
) -> None:
    """A request comes to every arm's shadow, whose bucket gains `credit`. `run`: how many of its blocks were known."""
    duel.hits[BY_WORTH] += _serve_shadow(t, first, end, run, heat, s.by_worth, worth, credit)
    admit_worthy(t, r, first, end, heat, s.by_worth, worth, least, margin)
    settle(t, first, end, s.by_worth)
    duel.hits[FIRST] += _serve_shadow(t, first, end, run, heat, s.first, heat.scores, credit)
    admit_request(t, r, first, end, heat, s.first, TOUCHES, 1, ghosts)
    settle(t, first, end, s.first)
    duel.hits[SECOND] += _serve_shadow(t, first, end, run, heat, s.second, heat.scores, credit)
    admit_request(t, r, first, end, heat, s.second, TOUCHES, 2, ghosts)
    settle(t, first, end, s.second)
    duel.hits[THIRD] += _serve_shadow(t, first, end, run, heat, s.third, heat.scores, credit)
    admit_request(t, r, first, end, heat, s.third, TOUCHES, 3, ghosts)
    settle(t, first, end, s.third)
    duel.hits[GHOSTS] += _serve_shadow(t, first, end, run, heat, s.ghosts, heat.scores, credit)
    admit_request(t, r, first, end, heat, s.ghosts, GHOST, 0, ghosts)
    settle(t, first, end, s.ghosts)
    duel.hits[RANKED] += _serve_shadow(t, first, end, run, heat, s.ranked, heat.scores, credit)
    settle(t, first, end, s.ranked)


@kernel
def learning(
    t: TimedTrace,
    heat: Heat,
    tier: FastTier,
    reads: Reads,
    budget: float,
    margin: float,
    learned: Learned,
    s: Shadows,
    duel: Duel,
    ghosts: Array,
    tier_ghosts: Array,
    ranking: Array,
    is_ranking: Array,
    waiting: Array,
    order: Array,
    scan_from: int,
    hot: Array,
) -> None:
    """`margin`: the uses that a move by worth must bring. `duel.allowed` with one arm only: no shadows.

    `ranking`, `is_ranking` and `waiting` are scratch, by block. `order` is their numbers.
    """
    duels = duel.allowed & (duel.allowed - 1) != 0
    learns = duel.allowed >> BY_WORTH & 1 != 0 or tier.rule == VALUE
    ranks = duel.allowed >> RANKED & 1 != 0
    ranked = 0
    first = 0
    start_s = t.arrivals_s[0]
    due_s = start_s + PERIOD_S
    learned_s = start_s + LEARNING_S
    rank_due_s = start_s + RANK_PERIOD_S
    learned.levels[SWEPT_S] = start_s
    last = len(t.ends)
    for r in range(last + 1):
        now_s = t.arrivals_s[min(r, last - 1)]
        at_scan = r in (scan_from, last)
        if ranks and (now_s >= rank_due_s or at_scan):
            if duels:
                admit_ranked(t, ranking, ranked, heat, s.ranked, heat.scores, 0.0, -1e18, now_s)
            if duel.leader[0] == RANKED:
                admit_ranked(t, ranking, ranked, heat, tier, heat.scores, 0.0, -1e18, now_s)
            for at in range(ranked):
                is_ranking[ranking[at]] = False
            ranked = 0
            while rank_due_s <= now_s:
                rank_due_s += RANK_PERIOD_S
        if learns and (now_s >= due_s or at_scan):
            moves = s.by_worth.counts[MOVES] if duels else tier.counts[MOVES]
            known = order[: learned.counts[KNOWN]]
            learn_ages(t, heat, learned, known, tier.capacity, moves, r, now_s)
            by_worth = now_s >= learned_s
            if duels and by_worth:
                price = swap_worthy(t, heat, s.by_worth, learned.worth, known, waiting, margin, now_s)
                learned.levels[PRICE] = price_after(learned.levels[PRICE], price)
            if duel.leader[0] == BY_WORTH and by_worth:
                price = swap_worthy(t, heat, tier, learned.worth, known, waiting, margin, now_s)
                if not duels:
                    learned.levels[PRICE] = price_after(learned.levels[PRICE], price)
            elif tier.rule == VALUE:
                renew_worth(tier, known, learned.worth)
            while due_s <= now_s:
                due_s += PERIOD_S
        if r == scan_from:
            remember_hot(tier, heat, hot)
        if r == last:
            break
        end = t.ends[r]
        run = count_read(t, r, first, end, heat, tier, reads)
        if learns:
            learn_uses(t, r, first, end, run, heat, learned)
        stored = heat_up(t, r, first, end, heat)
        reads.counts[FIRST_TOUCHES] += stored
        if learns:
            value_path(t, first, end, learned)
        if ranks:
            for i in range(first, end):
                block = t.ids[i]
                if not is_ranking[block] and heat.touches[block] >= RANK_TOUCHES_MIN:
                    is_ranking[block] = True
                    ranking[ranked] = block
                    ranked += 1
        least = least_worth(learned, margin)
        if duels:
            serve_shadows(t, r, first, end, run, heat, s, duel, learned.worth, ghosts, stored * budget, least, margin)
        tier.levels[TOKENS] += stored * budget
        touch_all(t, first, end, heat, tier, learned.worth)
        if duel.leader[0] == BY_WORTH:
            admit_worthy(t, r, first, end, heat, tier, learned.worth, least, margin)
        elif duel.leader[0] == GHOSTS:
            admit_request(t, r, first, end, heat, tier, GHOST, 0, tier_ghosts)
        elif duel.leader[0] != RANKED:
            admit_guarded(t, r, first, end, heat, tier, duel.leader[0] - FIRST + 1, learned.worth)
        settle(t, first, end, tier)
        if duels and (r + 1) % TURN_REQUESTS == 0:
            end_turn(duel, s, (r + 1) // TURN_REQUESTS)
        first = end
