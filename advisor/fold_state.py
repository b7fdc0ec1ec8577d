"""The fold's state but for the index, as bytes: the part of a checkpoint that is small."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from advisor.compactions import SavedCompactions
from advisor.deletion_state import SavedDeletions, restore_deletions, save_deletions
from advisor.deletions import IllegalDeletion
from advisor.fold import NOTHING_WRITTEN, Drain, Fold, ProducerState, RefusalNote, VolumeState, WrittenBytes
from advisor.index import Key, PlaceKey
from advisor.moves import Move, MoveKind, MoveState
from advisor.plan_desk import HeldPlan, PlanState
from advisor.policies.limits import Limits
from advisor.policies.plan import Refusal
from advisor.policies.state import SavedPolicies
from advisor.shadow_comparison import Comparison, SavedComparison
from advisor.snapshots import Chunk, PendingSnapshot
from event_plane.schema import RECORD_DTYPE, Namespace

STATE_VERSION = 5
"""What is written. Older ones are read too: 1 knew no snapshots, 2 no policies that remember, 3 no deletions, no dry
runs and no volumes that are away, 4 no volumes that are drained, no settings that were changed in the view and no plans
that wait."""


class StateError(Exception):
    """Bytes that are no state of this version; says which part."""


class _Producer(msgspec.Struct, array_like=True):
    producer: int
    name: str
    epoch: int
    sequence: int
    partial: bool
    note: str
    batches: int
    events: int
    gaps: int
    epochs_closed: int
    snapshots: int = 0


class _Chunk(msgspec.Struct, array_like=True):
    records: bytes
    namespace_ids: tuple[int, ...]
    locations: tuple[str, ...]


class _Pending(msgspec.Struct, array_like=True):
    producer: int
    sequence: int
    chunks: list[_Chunk]


class _Volume(msgspec.Struct, array_like=True):
    descriptor: dict[str, Any]
    agent: str
    producer: int
    rates: dict[str, float]
    peaks: dict[str, float] = {}
    measured: dict[str, int] = {}
    away: str = ""
    drain: Drain | None = None
    watermarks: tuple[float, float] | None = None
    written: WrittenBytes = NOTHING_WRITTEN


class _Key(msgspec.Struct, array_like=True):
    """MessagePack has no integers of 128 bits."""

    namespace_id: int
    group: int
    sequence_hash: bytes


class _Move(msgspec.Struct, array_like=True):
    move_id: str
    kind: MoveKind
    key: _Key
    source: str
    target: str
    block_bytes: int
    reason: str
    planned_us: int
    changed_us: int
    state: MoveState
    note: str
    deletion: str = ""


class _Refusal(msgspec.Struct, array_like=True):
    at_us: int
    key: _Key
    volume: str
    reason: str


class _HeldPlan(msgspec.Struct, array_like=True):
    plan_id: str
    planned_us: int
    moves: list[_Move]
    refusals: list[_Refusal]
    refused: int
    state: PlanState
    actor: str
    decided_us: int
    decided_at: int
    opened: list[str]
    opened_total: int


class _State(msgspec.Struct):
    version: int
    position: int
    now_us: int
    events_total: int
    recomputed: int
    refusals_total: int
    policy_version: str
    plans_digest: bytes
    settings: dict[str, Any]
    limits: Limits
    paused: list[str]
    skipped: dict[str, int]
    hits_by_tier: dict[int, int]
    namespaces: list[Namespace]
    producers: list[_Producer]
    volumes: list[_Volume]
    moves_open: list[_Move]
    moves_finished: list[_Move]
    move_counts: list[tuple[MoveKind, MoveState, int]]
    moved_bytes: int
    refusals: list[_Refusal]
    pending: list[_Pending] = []
    policies: SavedPolicies = msgspec.field(default_factory=SavedPolicies)
    comparison: SavedComparison | None = None
    moves_dry: list[_Move] = []
    moves_dry_total: int = 0
    deletions: SavedDeletions = msgspec.field(default_factory=SavedDeletions)
    compactions: SavedCompactions = msgspec.field(default_factory=SavedCompactions)
    file_settings: dict[str, Any] = {}
    changed_settings: dict[str, Any] = {}
    plan_waiting: _HeldPlan | None = None
    plans_ended: list[_HeldPlan] = []


def export_state(fold: Fold) -> bytes:
    """Canonical bytes of everything but the index. Order that matters (volumes, moves, refusals) is kept."""
    moves = fold.moves
    return msgspec.msgpack.encode(
        _State(
            version=STATE_VERSION,
            position=fold.position,
            now_us=fold.now_us,
            events_total=fold.events_total,
            recomputed=fold.recomputed,
            refusals_total=fold.refusals_total,
            policy_version=fold.policy_version,
            plans_digest=fold.plans_digest,
            settings=fold.settings,
            limits=fold.limits,
            paused=sorted(fold.paused),
            skipped=dict(fold.skipped),
            hits_by_tier=dict(fold.hits_by_tier),
            namespaces=list(fold.namespaces.values()),
            producers=[
                _Producer(
                    producer_id, p.name, p.epoch, p.sequence, p.partial, p.note, p.batches, p.events, p.gaps,
                    p.epochs_closed, p.snapshots,
                )
                for producer_id, p in fold.producers.items()
            ],
            volumes=[
                _Volume(
                    v.descriptor, v.agent, v.producer, v.rates, v.peaks, v.measured, v.away, v.drain, v.watermarks,
                    v.written,
                )
                for v in fold.volumes.values()
            ],
            moves_open=[_from_move(move) for move in moves.open.values()],
            moves_finished=[_from_move(move) for move in moves.finished],
            move_counts=[(kind, state, count) for (kind, state), count in moves.counts.items()],
            moved_bytes=moves.moved_bytes,
            refusals=[_Refusal(r.at_us, _from_key(r.key), r.volume, r.reason) for r in fold.refusals],
            pending=[
                _Pending(producer_id, pending.sequence, [_from_chunk(chunk) for chunk in pending.chunks])
                for producer_id, pending in fold.pending.items()
            ],
            policies=fold.policies.saved(),
            comparison=None if fold.comparison is None else fold.comparison.saved(),
            moves_dry=[_from_move(move) for move in moves.dry],
            moves_dry_total=moves.dry_total,
            deletions=save_deletions(fold.deletions),
            compactions=fold.compactions.saved(),
            file_settings=fold.file_settings,
            changed_settings=fold.changed_settings,
            plan_waiting=None if fold.plans.waiting is None else _from_plan(fold.plans.waiting),
            plans_ended=[_from_plan(plan) for plan in fold.plans.ended],
        )
    )  # fmt: skip


def restore_state(fold: Fold, state: bytes) -> None:
    """Fill a fold that is new but for its index, which must be the one that was saved with this state.

    Raises `StateError`, and then the fold must be thrown away.
    """
    try:
        saved = msgspec.msgpack.decode(state, type=_State)
    except msgspec.MsgspecError as fault:
        raise StateError(f"the state cannot be read: {fault}") from fault
    if not 1 <= saved.version <= STATE_VERSION:
        raise StateError(f"the state is of version {saved.version}, this program reads 1 to {STATE_VERSION}")
    fold.position = saved.position
    fold.now_us = saved.now_us
    fold.events_total = saved.events_total
    fold.recomputed = saved.recomputed
    fold.refusals_total = saved.refusals_total
    fold.policy_version = saved.policy_version
    fold.plans_digest = saved.plans_digest
    fold.settings = saved.settings
    fold.file_settings, fold.changed_settings = saved.file_settings, saved.changed_settings
    fold.limits = saved.limits
    fold.paused = set(saved.paused)
    fold.skipped.update(saved.skipped)
    fold.hits_by_tier.update(saved.hits_by_tier)
    fold.namespaces = {namespace.namespace_id: namespace for namespace in saved.namespaces}
    fold.producers = {
        p.producer: ProducerState(
            p.name, p.epoch, p.sequence, p.partial, p.note, p.batches, p.events, p.gaps, p.epochs_closed, p.snapshots
        )
        for p in saved.producers
    }
    for each in saved.pending:
        pending = fold.pending[each.producer] = PendingSnapshot(each.sequence)
        for chunk in each.chunks:
            pending.add(_to_chunk(chunk))
    for volume in saved.volumes:
        volume_id, tier = str(volume.descriptor["id"]), int(volume.descriptor["tier"])
        place = fold.index.place(PlaceKey(volume.producer, tier, volume_id))
        fold.volumes[volume_id] = VolumeState(
            volume.descriptor, volume.agent, volume.producer, place, volume.rates, volume.peaks, volume.measured,
            volume.away, volume.drain, volume.watermarks, volume.written,
        )  # fmt: skip
    try:
        fold.policies.restore(saved.policies)
        if saved.comparison is not None:
            fold.comparison = Comparison.restored(saved.comparison, fold.index.lock)
    except ValueError as fault:
        raise StateError(f"what the policies remember cannot be read: {fault}") from fault
    try:
        restore_deletions(fold.deletions, saved.deletions)
        fold.compactions.restore(saved.compactions)
    except (ValueError, IllegalDeletion) as fault:
        raise StateError(f"the deletions cannot be read: {fault}") from fault
    fold.moves.add(_to_move(move) for move in saved.moves_open)
    fold.moves.finished.extend(_to_move(move) for move in saved.moves_finished)
    fold.moves.counts.update({(kind, state): count for kind, state, count in saved.move_counts})
    fold.moves.moved_bytes = saved.moved_bytes
    fold.moves.dry.extend(_to_move(move) for move in saved.moves_dry)
    fold.moves.dry_total = saved.moves_dry_total
    fold.plans.waiting = None if saved.plan_waiting is None else _to_plan(saved.plan_waiting)
    fold.plans.ended.extend(_to_plan(plan) for plan in saved.plans_ended)
    fold.refusals.extend(RefusalNote(r.at_us, _to_key(r.key), r.volume, r.reason) for r in saved.refusals)


def _from_key(key: Key) -> _Key:
    return _Key(key.namespace_id, key.group, key.sequence_hash.to_bytes(16, "little"))


def _to_key(key: _Key) -> Key:
    return Key(key.namespace_id, key.group, int.from_bytes(key.sequence_hash, "little"))


def _from_chunk(chunk: Chunk) -> _Chunk:
    return _Chunk(chunk.records.tobytes(), chunk.namespace_ids, chunk.locations)


def _to_chunk(chunk: _Chunk) -> Chunk:
    try:
        records = np.frombuffer(chunk.records, RECORD_DTYPE)
    except ValueError as fault:
        raise StateError(f"a snapshot's records cannot be read: {fault}") from fault
    return Chunk(records, chunk.namespace_ids, chunk.locations)


def _from_move(move: Move) -> _Move:
    return _Move(
        move.move_id, move.kind, _from_key(move.key), move.source, move.target, move.block_bytes, move.reason,
        move.planned_us, move.changed_us, move.state, move.note, move.deletion,
    )  # fmt: skip


def _to_move(move: _Move) -> Move:
    return Move(
        move.move_id, move.kind, _to_key(move.key), move.source, move.target, move.block_bytes, move.reason,
        move.planned_us, move.changed_us, move.state, move.note, move.deletion,
    )  # fmt: skip


def _from_plan(plan: HeldPlan) -> _HeldPlan:
    refusals = [_Refusal(plan.planned_us, _from_key(r.key), r.volume, r.reason) for r in plan.refusals]
    return _HeldPlan(
        plan.plan_id, plan.planned_us, [_from_move(move) for move in plan.moves], refusals, plan.refused, plan.state,
        plan.actor, plan.decided_us, plan.decided_at, plan.opened, plan.opened_total,
    )  # fmt: skip


def _to_plan(plan: _HeldPlan) -> HeldPlan:
    refusals = [Refusal(_to_key(r.key), r.volume, r.reason) for r in plan.refusals]
    return HeldPlan(
        plan.plan_id, plan.planned_us, [_to_move(move) for move in plan.moves], refusals, plan.refused, plan.state,
        plan.actor, plan.decided_us, plan.decided_at, plan.opened, plan.opened_total,
    )  # fmt: skip
