"""The plan: what to promote, demote, drop and delete, with reasons.

An admission policy says which blocks are worth a faster volume, an eviction who leaves first. The planner keeps the
laws that hold whatever they say: room below the high watermark, budgets, whose blocks may be where, no move at a loss,
nothing that bounces, and no block on a faster volume than its parent. Pure but for `PolicyState`, which it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from advisor.index import ArrayIndex, BlockRow
from advisor.moves import MoveTable
from advisor.policies.budgets import Purse
from advisor.policies.limits import Limits
from advisor.policies.plan import Plan, Proposal, Volume
from advisor.policies.promotion import promote
from advisor.policies.registry import eviction_of, policy_named
from advisor.policies.relief import expire, relieve
from advisor.policies.sight import Sight
from advisor.policies.state import PolicyState
from event_plane.schema import Namespace


def plan_moves(
    index: ArrayIndex,
    volumes: Sequence[Volume],
    moves: MoveTable,
    touched: Iterable[int],
    limits: Limits,
    now_us: int,
    paused: frozenset[str] = frozenset(),
    *,
    state: PolicyState | None = None,
    namespaces: Mapping[int, Namespace] | None = None,
    orders: Sequence[Proposal] = (),
    kept_out: Callable[[BlockRow], str] = lambda block: "",
) -> Plan:
    """Plan over `volumes`. `touched`: rows of blocks used since the last plan, in order. Paused volumes stay out.

    `orders`: deletes that people want, of volumes that are not paused; they come first and cost no budget. `kept_out`
    says why a block is brought to no volume, if so.

    Raises `PolicyUnknown` where `limits` name an admission that is not installed.
    """
    state = state if state is not None else PolicyState()
    policy = policy_named(limits.admission)
    eviction = eviction_of(limits)
    ordered = sorted((v for v in volumes if v.volume_id not in paused), key=lambda v: v.order)
    rows = np.fromiter(touched, np.int32)
    with index.lock:
        planned = sum(1 for move in moves.open.values() if not move.deletion)
        purse = Purse(limits, planned, state.buckets, now_us)
        inflation = state.ageing_of(ordered[0].volume_id).inflation if ordered else 0.0
        slots = state.book.note(index, rows, eviction.rule, inflation)
        purse.earn(state.book.first_seen)
        if ordered and policy.duels:
            notes, roots = state.book.notes[slots], int((index.tables.blocks["depth"][rows] == 0).sum())
            state.duel.touch(notes["tag"].tolist(), notes["touches"].tolist(), roots, ordered[0].slots_high)
        sight = Sight(index, ordered, moves, limits, now_us, state, namespaces or {}, eviction, purse, kept_out)
        for order in orders:
            sight.take_order(order)
        state.wait(rows.tolist())
        for volume in ordered:
            expire(sight, volume)
            relieve(sight, volume)
        if len(ordered) > 1:
            promote(sight, policy, pinned=set(rows.tolist()))
        else:
            state.waiting.clear()
    return sight.plan
