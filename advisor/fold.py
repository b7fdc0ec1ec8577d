"""The fold: log entries in, state and plans out. No clock, no I/O, no randomness (ARCHITECTURE.md, section 3).

Folding the same entries again gives the same state and the same plans byte for byte within one policy version; `digest`
is the proof. The live service, recovery and replay all run this class.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
import numpy.typing as npt

from advisor.compactions import (
    Compaction,
    CompactionState,
    CompactionTable,
    IllegalCompactionStep,
    keys_to_save,
)
from advisor.deletion_planning import DeletionTick, KeptOut, Standing
from advisor.deletion_state import save_deletions
from advisor.deletions import DeletionTable, IllegalDeletion, Scope
from advisor.entries import (
    CompactionStep,
    Control,
    DeletionStep,
    EntryKind,
    LayoutEntry,
    LogEntry,
    Measurement,
    MoveStep,
    OperatorEntry,
    SettingsEntry,
    Tick,
    VolumeEntry,
    decode_control,
)
from advisor.index import ArrayIndex, Key, PlaceKey
from advisor.index.views import Figures
from advisor.moves import CANCELLED_IN, IllegalMove, Move, MoveState, MoveTable, Trigger
from advisor.plan_desk import HeldPlan, IllegalPlanStep, PlanDesk, PlanTrigger
from advisor.policies.compaction import CompactionProposal, charge, plan_compactions
from advisor.policies.limits import Limits
from advisor.policies.plan import Plan, Proposal, Volume
from advisor.policies.registry import eviction_of
from advisor.policies.reopening import still_possible
from advisor.policies.state import PolicyState
from advisor.policies.tiering import plan_moves
from advisor.shadow_comparison import Comparison, terms_of
from advisor.snapshots import Chunk, PendingSnapshot, replace_placements
from event_plane import wire
from event_plane.schema import Batch, BatchKind, Namespace, Records

REFUSALS_KEPT_MAX = 256
NOTED_ACTIONS: frozenset[str] = frozenset(
    {
        *("register", "unregister", "resize", "scrub"),
        *("login", "logout", "settings"),
        *("record", "stop recording", "upload recording", "delete recording"),
        *("replay", "cancel replay", "delete replay"),
    }
)
"""Operator actions that are logged for the audit alone."""
NAMESPACES_KEPT_MAX = 16_384
"""Past it those without a block are forgotten."""
RATE_WEIGHT = 0.3
"""Weight of the newest measurement in a volume's smoothed rate."""
PEAK_FADE = 0.995
"""What a volume's best rate keeps of itself at each measurement."""
DAY_US = 86_400_000_000
TRUSTED_BYTES = 64 << 20
"""A measured rate decides about moves from so many bytes on."""

@dataclass(slots=True)
class ProducerState:
    """What the fold knows of one producer. `partial`: something was missed, `note` says what."""

    name: str
    epoch: int
    sequence: int = -1
    partial: bool = False
    note: str = ""
    batches: int = 0
    events: int = 0
    gaps: int = 0
    epochs_closed: int = 0
    snapshots: int = 0
    """Those that were whole, and are taken for all that it has placed."""


class Drain(NamedTuple):
    """When a volume's blocks began to leave, in the fold's time, and how many there were."""

    since_us: int
    blocks: int
    obstacle: str = ""
    """Why some block did not leave, in the last plan; empty where it has nothing against any."""


class WrittenBytes(NamedTuple):
    """What a volume was written on one day, counted from the epoch in UTC, and on the day before it."""

    day: int = 0
    today: int = 0
    yesterday: int = 0

    def on(self, now_us: int) -> WrittenBytes:
        """As it stands at that time."""
        day = now_us // DAY_US
        if day == self.day:
            return self
        return WrittenBytes(day, 0, self.today if day == self.day + 1 else 0)


NOTHING_WRITTEN = WrittenBytes()

@dataclass(slots=True)
class VolumeState:
    """A registered volume: its owner's description, its place's id in the index, measured rates in bytes/s."""

    descriptor: dict[str, Any]
    agent: str
    producer: int
    place: int
    rates: dict[str, float] = field(default_factory=dict)
    """Smoothed, by operation."""
    peaks: dict[str, float] = field(default_factory=dict)
    """The best lately, by operation."""
    measured: dict[str, int] = field(default_factory=dict)
    """Bytes measured so far, by operation."""
    away: str = ""
    """Why it cannot be used now; empty where it can."""
    drain: Drain | None = None
    """Since it is drained."""
    watermarks: tuple[float, float] | None = None
    """Low and high, in the place of the descriptor's."""
    written: WrittenBytes = NOTHING_WRITTEN

    @property
    def optional(self) -> bool:
        """It may be away without that being a fault."""
        return bool(self.descriptor.get("optional", False))

    @property
    def volume_id(self) -> str:
        return str(self.descriptor["id"])

    @property
    def low_watermark(self) -> float:
        return float(self.descriptor["low_watermark"]) if self.watermarks is None else self.watermarks[0]

    @property
    def high_watermark(self) -> float:
        return float(self.descriptor["high_watermark"]) if self.watermarks is None else self.watermarks[1]

    def measure(self, operation: str, rate: float, transferred_bytes: int, now_us: int) -> None:
        old = self.rates.get(operation, rate)
        self.rates[operation] = old + RATE_WEIGHT * (rate - old)
        self.peaks[operation] = max(self.rates[operation], PEAK_FADE * self.peaks.get(operation, 0.0))
        self.measured[operation] = self.measured.get(operation, 0) + transferred_bytes
        if operation == "write":
            written = self.written.on(now_us)
            self.written = written._replace(today=written.today + transferred_bytes)

    def known_rate(self, operation: str) -> float | None:
        """As its owner declares it, else as measured."""
        return float(self.descriptor.get(f"{operation}_bytes_per_s", 0.0)) or self.rates.get(operation)

    def as_read(self) -> Volume:
        """As an engine finds it now: at its measured rate, else the declared one."""
        return replace(self.as_planned(), read_bytes_per_s=self.rates.get("read") or self.known_rate("read"))

    @property
    def rates_trusted(self) -> bool:
        return bool(self.descriptor.get("read_bytes_per_s")) or self.measured.get("read", 0) >= TRUSTED_BYTES

    @property
    def strain(self) -> float:
        """Newest rate over the known one, of the operations measured enough the lower; 1 where none is."""
        shares = [1.0]
        for operation, rate in self.rates.items():
            known = float(self.descriptor.get(f"{operation}_bytes_per_s", 0.0)) or self.peaks.get(operation, rate)
            if self.measured.get(operation, 0) >= TRUSTED_BYTES and known > 0:
                shares.append(rate / known)
        return min(shares)

    def as_planned(self) -> Volume:
        return Volume(
            volume_id=self.volume_id,
            agent=self.agent,
            place=self.place,
            tier=int(self.descriptor["tier"]),
            speed_rank=int(self.descriptor["speed_rank"]),
            capacity_blocks=int(self.descriptor["capacity_blocks"]),
            high_watermark=self.high_watermark,
            low_watermark=self.low_watermark,
            read_bytes_per_s=self.known_rate("read"),
            write_bytes_per_s=self.known_rate("write"),
            rates_trusted=self.rates_trusted,
            strain=self.strain,
            cost_per_gb_month=float(self.descriptor.get("cost_per_gb_month", 0.0)),
            cost_per_gb_moved=float(self.descriptor.get("cost_per_gb_moved", 0.0)),
            endurance_bytes_per_day=float(self.descriptor.get("endurance_bytes_per_day", 0.0)),
            retention_s=float(self.descriptor.get("retention_s", 0.0)),
            tenants=tuple(self.descriptor.get("tenants", ())),
            draining=self.drain is not None,
        )


@dataclass(frozen=True, slots=True)
class RefusalNote:
    at_us: int
    key: Key
    volume: str
    reason: str


class Fold:
    """The folded state. One writer; readers hold the writer's lock. Mutated by `apply` alone."""

    def __init__(self, index: ArrayIndex | None = None) -> None:
        self.index = index if index is not None else ArrayIndex()
        self.namespaces: dict[int, Namespace] = {}
        self._namespaces_max = NAMESPACES_KEPT_MAX
        self.producers: dict[int, ProducerState] = {}
        self.pending: dict[int, PendingSnapshot] = {}
        """By producer: the snapshot whose end has not come."""
        self.volumes: dict[str, VolumeState] = {}
        self.moves = MoveTable()
        self.plans = PlanDesk()
        self.deletions = DeletionTable()
        self.compactions = CompactionTable()
        self.refusals: deque[RefusalNote] = deque(maxlen=REFUSALS_KEPT_MAX)
        self.refusals_total = 0
        self.limits = Limits()
        self.policies = PolicyState()
        """What the planner remembers beside the index."""
        self.comparison: Comparison | None = None
        """With the policies of the settings' `shadow`."""
        self.settings: dict[str, Any] = {}
        """In force."""
        self.file_settings: dict[str, Any] = {}
        """As the last start read them, of file and environment."""
        self.changed_settings: dict[str, Any] = {}
        """What an operator set otherwise: fields of `policy`, and `shadow`."""
        self.policy_version = ""
        self.paused: set[str] = set()
        """Paused volumes; the empty name pauses all planning."""
        self.position = 0
        self.now_us = 0
        self.events_total = 0
        self.recomputed = 0
        """Blocks stored in G1 that are no copy: computed by an engine, one that also tells which it found there."""
        self.hits_by_tier: Counter[int] = Counter()
        self.skipped: Counter[str] = Counter()
        """Records and entries that made no sense, by reason."""
        self.plans_digest = b""
        """Chained over every plan made so far."""

    # -- entries

    def apply(self, entry: LogEntry, batch: Batch | None = None) -> None:
        """Fold one entry. `batch` spares decoding where the caller has already decoded a batch entry's payload."""
        if entry.kind is EntryKind.BATCH:
            self._apply_batch(batch if batch is not None else wire.decode(entry.payload), entry.source)
        else:
            self._apply_control(decode_control(entry.payload), entry.position)
        self.position = entry.position

    def _apply_control(self, control: Control, position: int) -> None:
        match control:
            case Tick():
                self.tick(control.now_us, position)
            case MoveStep():
                self._apply_step(control)
            case DeletionStep():
                self._apply_deletion_step(control)
            case CompactionStep():
                self._apply_compaction_step(control)
            case LayoutEntry():
                if control.volume in self.volumes:
                    self.compactions.learn(control.volume, control.fragmentation, self.now_us)
            case SettingsEntry():
                self._apply_settings(control, position)
            case VolumeEntry():
                self._apply_volume(control)
            case OperatorEntry():
                self._apply_operator(control, position)
            case Measurement():
                self._apply_measurement(control)

    def tick(self, now_us: int, position: int) -> Plan:
        """Advance time (never backwards) and plan. The plan's moves are open when it returns, or wait for a person."""
        self.now_us = max(self.now_us, now_us)
        orders = self._deletion_orders(position)
        if "" in self.paused:
            return Plan()
        self.plans.lapse(self.now_us, position, self.limits.approve_within_s)
        if self.plans.waiting is None:
            plan = self._plan_after_shadows(orders)
            self._note_refusals(plan)
            self._note_stuck(plan)
        else:
            plan = Plan()
            for order in orders:
                plan.propose(order)
        moves = self._moves_of(plan, position)
        if self.limits.dry_run:
            self.moves.add_dry(moves)
        elif self.limits.approve:
            self.moves.add(move for move in moves if move.deletion)
            self._hold([move for move in moves if not move.deletion], plan, str(position))
        else:
            self.moves.add(moves)
        compactions = self._plan_compactions(position)
        self.plans_digest = _digest([self.plans_digest, position, *_plan_rows(plan), *_compaction_rows(compactions)])
        return plan

    def _plan_after_shadows(self, orders: Sequence[Proposal] = ()) -> Plan:
        """Plan on all that was used since the last plan."""
        touched = self.index.touched_since_drain()
        with self.index.lock.open_to_readers():
            return self._think(touched, orders)

    def _think(self, touched: npt.NDArray[Any], orders: Sequence[Proposal]) -> Plan:
        """Changes what the policies and their shadows remember, and nothing else: others may read meanwhile."""
        if self.comparison is not None:
            volumes, book, out = self.volumes_by_speed(), self.policies.book, self._out_of_use()
            refused, since_us = frozenset(self.deletions.refused), self.policies.planned_us
            self.comparison.tick(
                self.index, volumes, touched, book, since_us, self.now_us, out, self.namespaces, refused
            )
        return self._plan(touched, self.now_us, self.policies, orders)

    def _moves_of(self, plan: Plan, position: int) -> list[Move]:
        return [
            Move(
                move_id=f"{position}-{number}",
                kind=proposal.kind,
                key=proposal.block.key,
                source=proposal.source,
                target=proposal.target,
                block_bytes=proposal.block_bytes,
                reason=proposal.reason,
                planned_us=self.now_us,
                changed_us=self.now_us,
                deletion=proposal.deletion,
            )
            for number, proposal in enumerate(plan.proposals)
        ]

    def _note_refusals(self, plan: Plan) -> None:
        self.refusals.extend(RefusalNote(self.now_us, r.key, r.volume, r.reason) for r in plan.refusals)
        self.refusals_total += plan.refused

    def _note_stuck(self, plan: Plan) -> None:
        for volume in self.volumes.values():
            if volume.drain is not None:
                volume.drain = volume.drain._replace(obstacle=plan.stuck.get(volume.volume_id, ""))

    def _hold(self, moves: list[Move], plan: Plan, plan_id: str) -> None:
        """Have a person decide on moves; of none there is nothing to decide."""
        if moves:
            self.plans.hold(HeldPlan(plan_id, self.now_us, moves, plan.refusals, plan.refused))

    def _plan_compactions(self, position: int) -> list[CompactionProposal]:
        volumes = [volume.as_planned() for volume in self.volumes.values()]
        proposals = plan_compactions(
            self.index, volumes, self.compactions, self.policies.buckets, self.limits, self.now_us,
            self._out_of_use(),
        )
        for number, proposal in enumerate(proposals):
            self.compactions.add(
                Compaction(
                    compaction_id=f"{position}-compaction-{number}",
                    volume=proposal.volume,
                    kind=proposal.kind,
                    reason=proposal.reason,
                    planned_us=self.now_us,
                    changed_us=self.now_us,
                    before=proposal.before,
                    keys=keys_to_save(proposal.keys),
                    blocks=len(proposal.keys),
                    state=CompactionState.DRY if self.limits.dry_run else CompactionState.PLANNED,
                )
            )
        return proposals

    def preview(self, now_us: int) -> Plan:
        """The plan that a tick at `now_us` would make. Changes nothing; copies what the policies remember."""
        return self._plan(self.index.touched(), max(self.now_us, now_us), copy.deepcopy(self.policies))

    def reopened(self, moves: Sequence[Move]) -> Plan:
        """A plan of moves that were planned before, as far as they are possible now. Changes nothing."""
        return still_possible(
            self.index,
            [volume.as_planned() for volume in self.volumes.values()],
            self.moves,
            moves,
            self.limits,
            self.now_us,
            self._out_of_plans(),
            state=self.policies,
            namespaces=self.namespaces,
            kept_out=KeptOut(self.deletions, self.index, self.namespaces),
            spared=self._last_copies_spared(),
        )

    def _deletion_orders(self, position: int) -> list[Proposal]:
        """What deletions want to be freed now."""
        if not (self.deletions.open or self.deletions.suspects):
            return []
        with self.index.lock:
            tick = DeletionTick(
                self.deletions,
                self.index,
                self.moves,
                self.namespaces,
                [Standing(volume.volume_id, volume.place, self.held_back(volume)) for volume in self.volumes.values()],
                {producer_id: (state.epoch, state.sequence) for producer_id, state in self.producers.items()},
                now_us=self.now_us,
                moves_max=self.limits.delete_moves_max,
            )
            return tick.work(f"{position}-again")

    def held_back(self, volume: VolumeState) -> str:
        """Why nothing leaves a volume now; empty where something may."""
        if volume.away:
            return volume.away
        if "" in self.paused or volume.volume_id in self.paused:
            return "paused by an operator: resume it"
        return "policy.dry_run is on: nothing is carried out" if self.limits.dry_run else ""

    def _plan(
        self, touched: npt.NDArray[Any], now_us: int, state: PolicyState, orders: Sequence[Proposal] = ()
    ) -> Plan:
        """Over the volumes that are neither paused nor away."""
        return plan_moves(
            self.index,
            [volume.as_planned() for volume in self.volumes.values()],
            self.moves,
            touched,
            self.limits,
            now_us,
            self._out_of_plans(),
            state=state,
            namespaces=self.namespaces,
            orders=orders,
            kept_out=KeptOut(self.deletions, self.index, self.namespaces),
            spared=self._last_copies_spared(),
        )

    def _out_of_plans(self) -> frozenset[str]:
        return frozenset(self.paused | {volume.volume_id for volume in self.volumes.values() if volume.away})

    def _out_of_use(self) -> frozenset[str]:
        """And those that are drained: nothing is laid out anew there, and shadows do without them."""
        return self._out_of_plans() | {volume.volume_id for volume in self.volumes.values() if volume.drain is not None}

    def _last_copies_spared(self) -> str:
        """Why no last copy is deleted for room: the slowest volume alone does so, and not while it is paused, away or
        being drained; then another is the slowest of those that are planned for. Empty where one may be. No optional
        volume that is away is waited for.
        """
        lasting = [v.as_planned() for v in self.volumes.values() if not (v.away and v.optional)]
        slowest = max(lasting, key=lambda volume: volume.order, default=None)
        if slowest is None:
            return ""
        if slowest.volume_id in self._out_of_plans():
            return f"{slowest.volume_id} is paused or away"
        return f"{slowest.volume_id} is being drained" if slowest.draining else ""

    def _apply_step(self, step: MoveStep) -> None:
        for move_id in step.move_ids:
            try:
                self._step(move_id, Trigger(step.trigger), step.reason)
            except (IllegalMove, ValueError):
                # Cancelled, or its volume lost, while the step was on its way into the log: no fault.
                if not self.moves.was_aborted(move_id):
                    self.skipped["illegal move step"] += 1

    def _apply_deletion_step(self, step: DeletionStep) -> None:
        try:
            self.deletions.answered(step)
        except IllegalDeletion:
            self.skipped["illegal deletion step"] += 1

    def _apply_compaction_step(self, step: CompactionStep) -> None:
        try:
            compaction = self.compactions.step(step, self.now_us)
        except (IllegalCompactionStep, ValueError):
            # Cancelled, or its volume lost, while the step was on its way into the log: no fault.
            if not self.compactions.was_aborted(step.compaction):
                self.skipped["illegal compaction step"] += 1
            return
        volume = self.volumes.get(compaction.volume)
        written_bytes = max(step.moved_bytes, step.freed_bytes)
        if volume is not None and written_bytes:
            charge(self.policies.buckets, volume.as_planned(), self.limits, written_bytes, self.now_us)

    def _abort_compactions(self, why: str, volume: str = "", compaction_id: str = "") -> None:
        """Of one volume, of one id, or all that are open."""
        wanted = [
            each
            for each in self.compactions.open.values()
            if volume in ("", each.volume) and compaction_id in ("", each.compaction_id)
        ]
        self.compactions.abort(why, self.now_us, wanted)

    def _apply_settings(self, entry: SettingsEntry, position: int) -> None:
        before = self.limits
        self.settings = entry.settings
        self.file_settings, self.changed_settings = entry.file, entry.changed
        self.policy_version = entry.policy_version
        self.limits = msgspec.convert(entry.settings.get("policy", {}), Limits, strict=False)
        if self.plans.waiting is not None and self.limits != before:
            self.plans.end(PlanTrigger.WITHDRAW, self.now_us, position)
        if self.limits.dry_run:
            self._abort("dry run", [move for move in self.moves.open.values() if move.state is MoveState.PLANNED])
        if self.limits.dry_run or not self.limits.compaction:
            self._abort_compactions("dry run" if self.limits.dry_run else "compaction was switched off")
        self._compare()
        order = self._index_order()
        for volume in self.volumes.values():
            if self.index.order(volume.place) != order:
                self.index.set_order(volume.place, order)

    def _compare(self) -> None:
        """Begin a comparison with the settings' shadows, unless one of the same terms goes on."""
        terms, before = terms_of(self.settings, self.policy_version, self.limits), self.comparison
        if terms is None:
            self.comparison = None
        elif before is None or before.terms != terms:
            note = "" if before is None else "begun anew: the settings of a shadow or of the live policy changed"
            self.comparison = Comparison(terms, self.index.lock, note)

    def volumes_by_speed(self) -> list[Volume]:
        """Registered volumes as planned for, fastest first."""
        return sorted((volume.as_planned() for volume in self.volumes.values()), key=lambda volume: volume.order)

    def _index_order(self) -> str:
        """The order that the index keeps of volumes, under the chosen eviction."""
        return eviction_of(self.limits).index_order

    def _apply_volume(self, entry: VolumeEntry) -> None:
        volume_id = str(entry.descriptor["id"])
        if not entry.registered or entry.away:
            self.deletions.lose(volume_id)
            why = entry.away or f"{volume_id} was unregistered"
            self._abort_compactions(why, volume_id)
            self._abort(why, [move for move in self.moves.open.values() if volume_id in (move.source, move.target)])
        known = self.volumes.get(volume_id)
        if known is not None and entry.registered and (known.descriptor, known.producer) == (
            entry.descriptor, entry.producer
        ):  # fmt: skip
            known.agent, known.away = entry.agent, entry.away
            return
        self.volumes.pop(volume_id, None)
        if known is not None:
            self.index.set_volume(known.place, False)
            self.index.set_order(known.place, "lru")
        if not entry.registered:
            self.compactions.forget(volume_id)
            return
        place = self.index.place(PlaceKey(entry.producer, int(entry.descriptor["tier"]), volume_id))
        self.index.set_volume(place, True)
        self.index.set_order(place, self._index_order())
        state = VolumeState(entry.descriptor, entry.agent, entry.producer, place, away=entry.away)
        if known is not None:
            state.rates, state.peaks, state.measured = known.rates, known.peaks, known.measured
            state.drain, state.watermarks, state.written = known.drain, known.watermarks, known.written
        self.deletions.suspect(self.deletions.refused)
        self.volumes[volume_id] = state

    def _abort(self, why: str, moves: Iterable[Move]) -> None:
        """End moves that must not go on. A promotion past its switch is done but for the word: it keeps its source."""
        for move in moves:
            if Trigger.ABORT in move.triggers:
                self._step(move.move_id, Trigger.ABORT, why)
            elif Trigger.KEEP in move.triggers:
                self._step(move.move_id, Trigger.KEEP)

    def _step(self, move_id: str, trigger: Trigger, note: str = "") -> None:
        """Advance a move, and all that counts on it. Raises `IllegalMove`."""
        move = self.moves.step(move_id, trigger, self.now_us, note)
        if move.deletion:
            self.deletions.moved(move)
        if self.comparison is not None and not move.is_open:
            self.comparison.moved(move, self.now_us)

    def _apply_operator(self, entry: OperatorEntry, position: int) -> None:
        if entry.action == "pause":
            self.paused.add(entry.volume)
        elif entry.action == "resume":
            self.paused.discard(entry.volume)
        elif entry.action == "cancel":
            wanted = [move for move in self.moves.open.values() if entry.move in ("", move.move_id)]
            self._abort(f"cancelled by {entry.actor}", [move for move in wanted if move.state in CANCELLED_IN])
            self._abort_compactions(f"cancelled by {entry.actor}", compaction_id=entry.move)
        elif entry.action in ("drain", "undrain", "watermarks"):
            self._apply_volume_order(entry)
        elif entry.action in ("apply", "approve", "reject", "retry"):
            try:
                self._apply_plan_order(entry, position)
            except (IllegalPlanStep, IllegalMove):
                self.skipped[f"operator action {entry.action} that cannot be"] += 1
        elif entry.action in ("delete", "abandon", "enable"):
            try:
                self._apply_deletion_order(entry)
            except (IllegalDeletion, ValueError):
                self.skipped[f"operator action {entry.action} that cannot be"] += 1
        elif entry.action not in NOTED_ACTIONS:
            self.skipped[f"operator action {entry.action}"] += 1

    def _apply_volume_order(self, entry: OperatorEntry) -> None:
        volume = self.volumes.get(entry.volume)
        low, high = entry.low_watermark, entry.high_watermark
        if volume is None or (entry.action == "watermarks" and not 0 < low < high <= 1):
            self.skipped[f"operator action {entry.action} that cannot be"] += 1
        elif entry.action == "watermarks":
            volume.watermarks = (low, high)
        elif entry.action == "undrain":
            volume.drain = None
        elif volume.drain is None:
            volume.drain = Drain(self.now_us, self.index.place_figures(volume.place).blocks)
            why = f"{entry.volume} is being drained"
            coming = [move for move in self.moves.open.values() if move.target == entry.volume]
            self._abort(why, [move for move in coming if move.state in CANCELLED_IN])
            self._abort_compactions(why, entry.volume)

    def _apply_plan_order(self, entry: OperatorEntry, position: int) -> None:
        """Raises `IllegalPlanStep` and `IllegalMove`, and changes nothing then."""
        if entry.action != "reject":
            self.require_unpaused()
        if entry.action == "apply":
            if self.plans.waiting is not None:
                self.plans.end(PlanTrigger.WITHDRAW, self.now_us, position, entry.actor)
            plan = self._plan_after_shadows()
            self._note_refusals(plan)
            self.plans_digest = _digest([self.plans_digest, position, *_plan_rows(plan)])
            self.plans.hold(HeldPlan(str(position), self.now_us, self._moves_of(plan, position), [], 0))
            self._open_held(entry.actor, position)
        elif entry.action == "retry":
            self.moves.add([self.retried(entry.move, entry.actor, f"{position}-0")])
        else:
            self.plans.require_waiting(entry.move, self.now_us, self.limits.approve_within_s)
            if entry.action == "approve":
                self._open_held(entry.actor, position)
            else:
                self.plans.end(PlanTrigger.REJECT, self.now_us, position, entry.actor)

    def require_unpaused(self) -> None:
        """Raises `IllegalPlanStep` while all moves are paused."""
        if "" in self.paused:
            raise IllegalPlanStep("all moves are paused by an operator: POST /api/v1/resume first")

    def _open_held(self, actor: str, position: int) -> None:
        """Open the moves of the plan that waits, as far as they are possible now."""
        held = self.plans.end(PlanTrigger.APPROVE, self.now_us, position, actor)
        plan = self.reopened(held.moves)
        possible = {proposal.block.key for proposal in plan.proposals}
        moves = [move for move in held.moves if move.key in possible]
        for move in moves:
            move.changed_us = self.now_us
        self.moves.add(moves)
        self.plans.opened(held, moves, plan.refusals, plan.refused)
        self._note_refusals(plan)

    def retried(self, move_id: str, actor: str, fresh_id: str) -> Move:
        """A move of the same block, source and target as an aborted one; not opened yet. Raises `IllegalMove`."""
        old = self.moves.last_ended(move_id)
        if old is None or old.state is not MoveState.ABORTED:
            raise IllegalMove(f"move {move_id} is not aborted, or not kept any more: GET /api/v1/moves?state=aborted")
        if old.deletion:
            raise IllegalMove(f"move {move_id} is deletion {old.deletion}'s, which frees its block by itself")
        plan = self.reopened([old])
        if plan.refusals:
            raise IllegalMove(f"move {move_id} is not possible any more: {plan.refusals[0].reason}")
        reason = f"retried by {actor}; {old.reason}"
        (proposal,) = plan.proposals
        return Move(
            fresh_id, old.kind, old.key, old.source, old.target, proposal.block_bytes, reason, self.now_us, self.now_us
        )

    def _apply_deletion_order(self, entry: OperatorEntry) -> None:
        """Raises `IllegalDeletion`, and `ValueError` for a prefix that is no hash."""
        if entry.action == "delete":
            scope = Scope(entry.tenant, entry.namespace_id, int(entry.prefix or "0", 16))
            self.deletions.order(entry.deletion, scope, entry.actor, self.now_us)
        elif entry.action == "abandon":
            self.deletions.abandon(entry.deletion, entry.actor, self.now_us)
        else:
            self.deletions.enable(entry.tenant)

    def _apply_measurement(self, entry: Measurement) -> None:
        volume = self.volumes.get(entry.volume)
        if volume is None or entry.seconds <= 0:
            self.skipped["measurement of an unknown volume"] += 1
            return
        rate = entry.transferred_bytes / entry.seconds
        volume.measure(entry.operation, rate, entry.transferred_bytes, self.now_us)

    # -- batches

    def _learn(self, batch: Batch) -> None:
        """Keep the batch's namespaces. Past a bound, those that hold no block go: each life of an engine brings one."""
        for namespace, namespace_id in zip(batch.namespaces, batch.namespace_ids, strict=True):
            self.namespaces.setdefault(namespace_id, namespace)
        if len(self.namespaces) > self._namespaces_max:
            holding = {each for each, figures in self.index.totals().by_namespace.items() if figures.blocks}
            kept = holding | set(batch.namespace_ids)
            self.namespaces = {each: namespace for each, namespace in self.namespaces.items() if each in kept}
            self._namespaces_max = max(NAMESPACES_KEPT_MAX, 2 * len(self.namespaces))

    def _apply_batch(self, batch: Batch, source: str) -> None:
        producer = self._producer_of(batch, source)
        skipped = max(batch.sequence - producer.sequence - 1, 0)
        producer.batches += 1
        producer.sequence = batch.sequence
        self._learn(batch)
        if self.deletions.refused and any(v.producer == batch.producer for v in self.volumes.values()):
            self.deletions.suspect(namespace.tenant for namespace in batch.namespaces)
        match batch.kind:
            case BatchKind.EVENTS:
                if batch.producer in self.pending:
                    self._forget(batch.producer, "its snapshot was broken off; what it placed before is forgotten")
                producer.events += len(batch.records)
                self.apply_records(batch.producer, batch.namespace_ids, batch.locations, batch.records)
                self._show_puts(batch)
            case BatchKind.SNAPSHOT_BEGIN:
                self.pending[batch.producer] = PendingSnapshot(batch.sequence)
                if skipped:
                    producer.partial = True
                    producer.note = f"{skipped} batches before its snapshot are missing; its end will make up for them"
            case BatchKind.SNAPSHOT_CHUNK:
                self._take_chunk(batch)
            case BatchKind.SNAPSHOT_END:
                self._end_snapshot(batch, producer)
            case BatchKind.LOST:
                through = batch.snapshot.through if batch.snapshot is not None else batch.sequence
                why = f"batches {batch.sequence}–{through} could not be had; what it placed before is forgotten"
                self._forget(batch.producer, why)
                producer.sequence = through
                producer.gaps += 1

    def _producer_of(self, batch: Batch, source: str) -> ProducerState:
        """The producer's state in the batch's epoch: another one ends what was known of it before.

        Where a snapshot begins the epoch, what was placed before stays until the snapshot takes its place.
        """
        producer = self.producers.get(batch.producer)
        if producer is None:
            producer = self.producers[batch.producer] = ProducerState(source, batch.epoch)
        elif producer.epoch != batch.epoch:
            self.pending.pop(batch.producer, None)
            if batch.kind is not BatchKind.SNAPSHOT_BEGIN:
                self.index.clear_producer(batch.producer)
            producer.epoch = batch.epoch
            producer.sequence = -1
            producer.epochs_closed += 1
            producer.partial, producer.note = False, ""
        producer.name = source or producer.name
        return producer

    def _forget(self, producer_id: int, why: str) -> None:
        """Something of the producer is missing: what it has placed is unknown until its next whole statement."""
        self.pending.pop(producer_id, None)
        self.index.clear_producer(producer_id)
        producer = self.producers[producer_id]
        producer.partial, producer.note = True, why

    def _take_chunk(self, batch: Batch) -> None:
        pending = self.pending.get(batch.producer)
        if pending is None:
            self.skipped["snapshot chunk without a beginning"] += 1
            return
        pending.add(Chunk(batch.records, batch.namespace_ids, batch.locations))
        if pending.records > self.index.size.placements_max:
            self.skipped["snapshot larger than the index"] += 1
            self._forget(batch.producer, "its snapshot names more blocks than the index holds: raise its memory limit")

    def _end_snapshot(self, batch: Batch, producer: ProducerState) -> None:
        pending = self.pending.pop(batch.producer, None)
        if pending is None:
            self.skipped["snapshot end without a beginning"] += 1
            return
        replaced = replace_placements(self.index, batch.producer, pending.chunks, self.now_us)
        self.events_total += replaced.records
        self.skipped.update(replaced.skipped)
        producer.events += replaced.records
        producer.snapshots += 1
        producer.partial, producer.note = False, ""

    def _show_puts(self, batch: Batch) -> None:
        """Let the shadows see what clients put on volumes."""
        if self.comparison is None:
            return
        owned = {v.volume_id for v in self.volumes.values() if v.producer == batch.producer}
        if owned:
            volumes, tables = self.volumes_by_speed(), (batch.namespace_ids, batch.locations)
            self.comparison.put(volumes, owned, *tables, batch.records, self.moves, self.now_us)

    def apply_records(
        self, producer_id: int, namespace_ids: Sequence[int], locations: Sequence[str], records: Records
    ) -> None:
        """Fold records of one producer in order. One that makes no sense is counted in `skipped`; the rest goes on."""
        applied = self.index.apply(
            records, producer=producer_id, namespace_ids=namespace_ids, locations=locations, now_us=self.now_us
        )
        self.events_total += applied.events
        self.recomputed += applied.recomputed
        self.hits_by_tier.update(applied.hits_by_tier)
        self.skipped.update(applied.skipped)
        if applied.cleared_all and producer_id in self.producers:
            producer = self.producers[producer_id]
            producer.partial, producer.note = False, ""

    def tenant_totals(self) -> dict[str, Figures]:
        """Blocks placed anywhere, and the bytes of all their placements, by tenant: sums over its namespaces."""
        totals: dict[str, Figures] = {}
        for namespace_id, figures in self.index.totals().by_namespace.items():
            namespace = self.namespaces.get(namespace_id)
            tenant = namespace.tenant if namespace is not None else ""
            blocks, block_bytes = totals.get(tenant, Figures(0, 0))
            totals[tenant] = Figures(blocks + figures.blocks, block_bytes + figures.block_bytes)
        return totals

    def count_served(self, tier: int, events: int, hits: int) -> None:
        """Count events that `ArrayIndex.serve_from` has applied already: a replay's."""
        self.events_total += events
        self.hits_by_tier[tier] += hits

    # -- proof

    def digest(self) -> str:
        """Hex digest of the whole state and of every plan made so far; equal for equal histories."""
        index = self.index
        rows: list[Any] = [
            [self.position, self.now_us, self.events_total, self.recomputed, self.refusals_total, self.policy_version],
            [sorted(self.paused), self.settings, sorted(self.skipped.items()), sorted(self.hits_by_tier.items())],
            self.plans_digest,
            self.moves.dry_total,
            [self.file_settings, self.changed_settings],
            self.plans.described(),
        ]
        for producer_id in sorted(self.producers):
            p = self.producers[producer_id]
            rows.append([producer_id, p.name, p.epoch, p.sequence, p.partial, p.note, p.batches, p.events, p.gaps])
            rows.append([p.snapshots])
            if (pending := self.pending.get(producer_id)) is not None:
                rows.append([pending.sequence, *(_pending_row(chunk) for chunk in pending.chunks)])
        for volume_id in sorted(self.volumes):
            v = self.volumes[volume_id]
            rows.append([volume_id, v.agent, v.producer, v.descriptor, sorted(v.rates.items())])
            rows.append([sorted(v.peaks.items()), sorted(v.measured.items()), v.away])
            rows.append([v.drain, v.watermarks, v.written])
        with index.lock:
            rows += _described(index)
            rows += self.policies.described(index)
            if self.comparison is not None:
                rows += self.comparison.described()
                rows += [each for shadow in self.comparison.shadows for each in _described(shadow.index)]
        rows.append(msgspec.msgpack.encode(save_deletions(self.deletions)))
        rows += self.compactions.described()
        rows += [
            [move.move_id, move.kind, move.state, move.source, move.target, move.reason, move.note]
            for move in [*self.moves.open.values(), *self.moves.finished, *self.moves.dry]
        ]
        return _digest(rows).hex()


def _pending_row(chunk: Chunk) -> list[Any]:
    return [chunk.records.tobytes(), chunk.namespace_ids, chunk.locations]


def _described(index: ArrayIndex) -> list[Any]:
    """Everything that the index holds, in an order that does not depend on row numbers."""

    def named(key: Key) -> list[Any]:
        return [key.namespace_id, key.group, f"{key.sequence_hash:x}"]

    rows: list[Any] = []
    after: int | None = -1
    while after is not None:
        blocks, after = index.page(after, 10_000)
        for block in blocks:
            parent = named(index.block(block.parent).key) if block.parent >= 0 else []
            history = [block.depth, block.block_tokens, block.touches, block.first_touch_us, block.last_touch_us]
            placed = sorted([*index.places[p.place], p.block_bytes, p.references] for p in block.placements)
            rows.append([named(block.key), parent, history, placed])
    rows.sort()
    for place in sorted(range(len(index.places)), key=lambda place: index.places[place]):
        figures = index.place_figures(place)
        if figures.blocks or figures.reads or index.is_volume(place):
            order = [named(index.block(row).key) for row in index.coldest(place, figures.blocks)]
            rows.append([list(index.places[place]), index.is_volume(place), index.order(place), list(figures), order])
    rows.append([named(index.block(row).key) for row in index.touched().tolist()])
    return rows


def _plan_rows(plan: Plan) -> list[Any]:
    return [
        *([p.kind, f"{p.block.key.sequence_hash:x}", p.source, p.target, p.reason] for p in plan.proposals),
        *([f"{r.key.sequence_hash:x}", r.volume, r.reason] for r in plan.refusals),
        plan.refused,
    ]


def _compaction_rows(proposals: Sequence[CompactionProposal]) -> list[Any]:
    return [
        [p.kind, p.volume, p.reason, [f"{key.sequence_hash:x}" for key in p.keys]] for p in proposals
    ]


def _digest(rows: list[Any]) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(rows), digest_size=16).digest()
