"""Moves that a person opens, of a plan that waited or again after one was aborted: held to the laws as they are now.

Nothing is charged: they were paid for when they were planned. Pure, and changes nothing that policies remember.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from advisor.index import ArrayIndex, BlockRow
from advisor.moves import FREES_SOURCE, Move, MoveKind, MoveTable
from advisor.policies.budgets import Purse
from advisor.policies.limits import Limits
from advisor.policies.plan import NamedRow, Plan, Proposal, Volume
from advisor.policies.registry import eviction_of
from advisor.policies.sight import NOWHERE, Sight
from advisor.policies.state import PolicyState
from event_plane.schema import Namespace

GONE = -1
"""The row of a block that is not known any more."""


def still_possible(
    index: ArrayIndex,
    volumes: Sequence[Volume],
    moves: MoveTable,
    wanted: Sequence[Move],
    limits: Limits,
    now_us: int,
    paused: frozenset[str],
    *,
    state: PolicyState,
    namespaces: Mapping[int, Namespace],
    kept_out: Callable[[BlockRow], str],
    spared: str,
) -> Plan:
    """A plan of `wanted`, in order, as far as each is possible after those before it; the others are refused.

    `spared`: why no last copy is deleted, if so.
    """
    usable = sorted((v for v in volumes if v.volume_id not in paused), key=lambda v: v.order)
    ordered = [volume for volume in usable if not volume.draining]
    drained = [volume for volume in usable if volume.draining]
    with index.lock:
        purse = Purse(limits, sum(1 for move in moves.open.values() if not move.deletion), state.buckets, now_us)
        eviction = eviction_of(limits)
        sight = Sight(
            index, ordered, moves, limits, now_us, state, namespaces, eviction, purse, kept_out, drained, spared
        )
        for move in wanted:
            _reopen(sight, move)
    return sight.plan


def _reopen(sight: Sight, move: Move) -> None:
    block = sight.index.get(move.key)
    source = _named(move.source, (*sight.ordered, *sight.drained))
    target = _named(move.target, sight.ordered)
    placed = None if block is None or source is None else block.placed_in(source.place)
    if source is None or (move.target and target is None):
        missing = move.source if source is None else move.target
        why = f"{missing} is paused, away, being drained or not registered any more"
    elif block is None or placed is None:
        why = f"its block is not on {move.source} any more"
    else:
        why = _obstacle(sight, move, block, source, target, placed.block_bytes)
    if why or block is None or source is None or placed is None:
        sight.plan.refuse(block or NamedRow(GONE, move.key), move.target or move.source, f"{move.kind}: {why}")
        return
    proposal = Proposal(move.kind, block, move.source, move.target, placed.block_bytes, move.reason)
    sight.reopen(proposal, source, target)


def _named(volume_id: str, volumes: Sequence[Volume]) -> Volume | None:
    return next((volume for volume in volumes if volume.volume_id == volume_id), None)


def _obstacle(
    sight: Sight, move: Move, block: BlockRow, source: Volume, target: Volume | None, size: int
) -> str:
    """Why a move of a block that is where it was cannot be; empty where it can."""
    other = sight.moves.of(block.key)
    if other is not None:
        return f"its block has an open move already, {other.move_id}"
    if block.row in sight.plan.rows:
        return "its block moves already"
    if sight.purse.moves < 1:
        return f"{sight.limits.moves_open_max} moves are open, the most that policy.moves_open_max allows"
    if target is None:
        return _obstacle_to_delete(sight, block, source)
    copies = block.placed_in(target.place) is None
    if move.kind is MoveKind.DROP and copies:
        return f"{target.volume_id} holds no copy any more"
    why = _out_of_order(sight, move, block, source, target)
    if why or move.kind is MoveKind.DROP:
        return why
    why = sight.kept_out(block) or sight.barred(target, sight.tenant(block), size)
    if not why and copies and sight.occupied[target.volume_id] >= target.slots_high:
        why = f"{target.volume_id} has no room below its high watermark"
    return why


def _out_of_order(sight: Sight, move: Move, block: BlockRow, source: Volume, target: Volume) -> str:
    """Whether the move goes the wrong way by now, or would bring a block to a faster volume than its parent's."""
    rank = sight.ordered.index(target)
    if move.kind in FREES_SOURCE:
        if source.draining:
            return ""  # it leaves wherever there is room
        if rank < sight.ordered.index(source):
            return f"{target.volume_id} is faster than {source.volume_id} by now"
        if min(rank, sight.rank(block, source)) > sight.fastest_child(block):
            return "its children would be on a faster volume than it"
        return ""
    if sight.rank(block) <= rank:
        return f"{target.volume_id} or a faster volume holds it already"
    if block.parent >= 0 and sight.rank(sight.index.block(block.parent)) > rank:
        return f"its parent is not on {target.volume_id}, so a read would stop before it"
    return ""


def _obstacle_to_delete(sight: Sight, block: BlockRow, source: Volume) -> str:
    """A last copy goes where its volume still needs the room, or has kept it for long enough."""
    if source.draining:
        return f"{source.volume_id} is being drained: its blocks leave for other volumes"
    if sight.spared:
        return sight.spared
    if any(sight.index.is_volume(each.place) for each in block.placements if each.place != source.place):
        return "another volume holds a copy by now"
    if sight.fastest_child(block) not in (NOWHERE, len(sight.ordered) - 1):
        return "its children would be on a faster volume than it"
    placed = block.placed_in(source.place)
    used_us = max(block.last_touch_us, placed.last_use_us if placed is not None else 0)
    expired = 0 < source.retention_s * 1e6 <= sight.now_us - used_us
    if not expired and sight.occupied[source.volume_id] <= source.slots_low:
        return f"{source.volume_id} is at its low watermark, so nothing need be deleted"
    return ""
