"""The plan: what to promote, demote, drop and delete, with reasons.

An admission policy says which blocks are worth a faster volume, an eviction who leaves first. The planner keeps the
laws that hold whatever they say: room below the high watermark, budgets, whose blocks may be where, no move at a loss,
nothing that bounces, and no block on a faster volume than its parent. Pure but for `PolicyState`, which it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from advisor.index import ArrayIndex, BlockRow
from advisor.moves import MoveTable
from advisor.policies.admission import arms_of
from advisor.policies.budgets import Purse
from advisor.policies.draining import drain
from advisor.policies.eviction import EVICTIONS, Eviction
from advisor.policies.limits import Limits
from advisor.policies.plan import Plan, Proposal, Volume
from advisor.policies.policy import Policy
from advisor.policies.promotion import promote
from advisor.policies.registry import eviction_of, policy_named
from advisor.policies.relief import expire, relieve
from advisor.policies.sight import Sight, mean_bytes
from advisor.policies.state import PolicyState
from advisor.tiers.duelling import BY_WORTH
from event_plane.schema import Namespace

Array = npt.NDArray[Any]


def plan_moves(
    index: ArrayIndex,
    volumes: Sequence[Volume],
    moves: MoveTable,
    touched: Sequence[int] | Array,
    limits: Limits,
    now_us: int,
    paused: frozenset[str] = frozenset(),
    *,
    state: PolicyState | None = None,
    namespaces: Mapping[int, Namespace] | None = None,
    orders: Sequence[Proposal] = (),
    kept_out: Callable[[BlockRow], str] = lambda block: "",
    spared: str = "",
) -> Plan:
    """Plan over `volumes`. `touched`: rows of blocks used since the last plan, in order. Paused volumes stay out; those
    that are drained are planned for by `drain` alone.

    `orders`: deletes that people want, of volumes that are not paused; they come first and cost no budget. `kept_out`
    says why a block is brought to no volume, if so; `spared` why the planner itself deletes no last copy, if so.

    Raises `PolicyUnknown` where `limits` name an admission that is not installed.
    """
    state = state if state is not None else PolicyState()
    policy = policy_named(limits.admission)
    eviction = eviction_of(limits)
    usable = sorted((v for v in volumes if v.volume_id not in paused), key=lambda v: v.order)
    ordered = [volume for volume in usable if not volume.draining]
    drained = [volume for volume in usable if volume.draining]
    rows: Array = np.asarray(touched, np.int32)
    with index.lock:
        planned = sum(1 for move in moves.open.values() if not move.deletion)
        purse = Purse(limits, planned, state.buckets, now_us)
        slots, given = state.book.note(index, rows)
        purse.earn(state.book.first_seen)
        state.learning.lose(given)
        if ordered:
            _prepare(index, ordered, policy, eviction, purse, state, now_us)
        inflation = state.ageing_of(ordered[0].volume_id).inflation if ordered else 0.0
        first_us = state.learning.hear(index, rows, slots, eviction.rule, inflation)
        sight = Sight(
            index, ordered, moves, limits, now_us, state, namespaces or {}, eviction, purse, kept_out, drained, spared
        )
        for order in orders:
            sight.take_order(order)
        for volume in ordered:
            expire(sight, volume)
            relieve(sight, volume)
        for volume in drained:
            drain(sight, volume)
        if len(ordered) > 1:
            promote(sight, policy, rows, slots, first_us)
        else:
            state.waiting.clear()
        state.planned_us = now_us
    return sight.plan


def _prepare(
    index: ArrayIndex,
    ordered: Sequence[Volume],
    policy: Policy,
    eviction: Eviction,
    purse: Purse,
    state: PolicyState,
    now_us: int,
) -> None:
    """Tell what learns which arms there are, and what their budgets let through since the last plan.

    Of one volume alone nothing is admitted: there is something to learn only where worth says who leaves.
    """
    fast = ordered[0]
    arms, start = arms_of(policy)
    if len(ordered) == 1:
        arms, start = (1 << BY_WORTH if eviction is EVICTIONS["worth"] else 0), BY_WORTH
    state.learning.prepare(arms, start, max(1, fast.slots_high))
    size = mean_bytes(index, ordered)
    allowed = purse.allowance(fast, size, state.book.first_seen, state.planned_us or now_us)
    state.learning.earn(*allowed)
