"""Eviction order by frequency, for the places that ask for it (`LfuOrder` of advisor/policies/eviction.py).

A place has a list of steps, one for each count of uses that occurs in it, lowest first; a step has its placements, the
least recently promoted first. All of it can be made again from `uses` and the recency order, so it is never saved.
"""

from __future__ import annotations

from advisor.index.jit import inlined, routine
from advisor.index.keep import keep_placement
from advisor.index.layout import LOW_32, NONE, STEP_FREE, STEP_TOP, Array, Tables, int64


@inlined
def make_step(places: Array, steps: Array, s: Array, place: int, uses: int, lower: int) -> int:
    """A step of `uses` after step `lower` (-1: as the lowest)."""
    step = s[STEP_FREE]
    if step >= 0:
        s[STEP_FREE] = int64(steps[step].higher)
    else:
        step = s[STEP_TOP]
        s[STEP_TOP] += 1
    higher = int64(places[place].lowest) if lower < 0 else int64(steps[lower].higher)
    z = steps[step]
    z.uses = uses
    z.oldest = NONE
    z.newest = NONE
    z.lower = lower
    z.higher = higher
    if lower < 0:
        places[place].lowest = step
    else:
        steps[lower].higher = step
    if higher >= 0:
        steps[higher].lower = step
    return step


@inlined
def drop_step(places: Array, steps: Array, s: Array, place: int, step: int) -> None:
    lower = int64(steps[step].lower)
    higher = int64(steps[step].higher)
    if lower < 0:
        places[place].lowest = higher
    else:
        steps[lower].higher = higher
    if higher >= 0:
        steps[higher].lower = lower
    steps[step].higher = s[STEP_FREE]
    steps[step].uses = 0
    s[STEP_FREE] = step


@routine
def rank_first(places: Array, ranks: Array, steps: Array, s: Array, place: int, p: int, uses: int, near: int) -> None:
    """Enter a placement as the most recently promoted of its step. The search starts at step `near`, -1 the lowest."""
    lower = int64(near)
    higher = int64(places[place].lowest) if near < 0 else int64(steps[near].higher)
    if near >= 0 and steps[near].uses == uses:
        higher = int64(near)
    else:
        while higher >= 0 and steps[higher].uses < uses:
            lower = higher
            higher = int64(steps[higher].higher)
    step = higher
    if higher < 0 or steps[higher].uses != uses:
        step = make_step(places, steps, s, place, uses, lower)
    newest = int64(steps[step].newest)
    ranks[p].older = newest
    ranks[p].newer = NONE
    ranks[p].step = step
    if newest >= 0:
        ranks[newest].newer = p
    else:
        steps[step].oldest = p
    steps[step].newest = p


@routine
def unrank(places: Array, ranks: Array, steps: Array, s: Array, place: int, p: int) -> None:
    older = int64(ranks[p].older)
    newer = int64(ranks[p].newer)
    step = int64(ranks[p].step)
    if older >= 0:
        ranks[older].newer = newer
    else:
        steps[step].oldest = newer
    if newer >= 0:
        ranks[newer].older = older
    else:
        steps[step].newest = older
    if older < 0 and newer < 0:
        drop_step(places, steps, s, place, step)


@routine
def promote(places: Array, ranks: Array, steps: Array, s: Array, place: int, p: int, uses: int) -> None:
    """Move a placement to the step of its new count."""
    step = int64(ranks[p].step)
    rank_near = step
    if steps[step].oldest == p and steps[step].newest == p:
        # The step goes with its last placement; search from the one below.
        rank_near = int64(steps[step].lower)
    unrank(places, ranks, steps, s, place, p)
    rank_first(places, ranks, steps, s, place, p, min(uses, LOW_32), rank_near)


@routine
def rank_all(t: Tables, place: int, restart: bool) -> None:
    """Enter a place's placements in recency order. `restart` counts their uses from 1 again."""
    t.places[place].lowest = NONE
    p = int64(t.places[place].oldest)
    while p >= 0:
        if restart:
            keep_placement(t, p)
            t.placements[p].uses = 1
        rank_first(t.places, t.ranks, t.steps, t.state, place, p, int64(t.placements[p].uses), -1)
        p = int64(t.placements[p].newer)


@routine
def unrank_all(places: Array, steps: Array, s: Array, place: int) -> None:
    step = int64(places[place].lowest)
    while step >= 0:
        higher = int64(steps[step].higher)
        steps[step].higher = s[STEP_FREE]
        steps[step].uses = 0
        s[STEP_FREE] = step
        step = higher
    places[place].lowest = NONE
