"""The fold: log entries in, state and plans out. No clock, no I/O, no randomness (ARCHITECTURE.md, section 3).

Folding the same entries again gives the same state and the same plans byte for byte within one policy version; `digest`
is the proof. The live service, recovery and replay all run this class.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from advisor.entries import (
    Control,
    EntryKind,
    LogEntry,
    Measurement,
    MoveStep,
    OperatorEntry,
    SettingsEntry,
    Tick,
    VolumeEntry,
    decode_control,
)
from advisor.index import Block, BlockIndex, Key, Place, PlaceKey
from advisor.moves import IllegalMove, Move, MoveTable, Trigger
from advisor.policies.eviction import eviction_order
from advisor.policies.tiering import Limits, Plan, Volume, plan_moves
from event_plane import wire
from event_plane.schema import (
    LOCATION_ALL,
    NAMESPACE_ALL,
    RECORD_DTYPE,
    Batch,
    BatchKind,
    EventType,
    Namespace,
    RecordFlag,
    Records,
)

REFUSALS_KEPT_MAX = 256
RATE_WEIGHT = 0.3
"""Weight of the newest measurement in a volume's smoothed rate."""

_STORE, _REMOVE, _ACCESS, _CLEAR = (
    int(kind) for kind in (EventType.STORE, EventType.REMOVE, EventType.ACCESS, EventType.CLEAR)
)
_FIRST, _COUNTED, _COPY = (int(flag) for flag in (RecordFlag.FIRST, RecordFlag.COUNTED, RecordFlag.COPY))

_COLUMNS = [name for name in RECORD_DTYPE.names or () if name != "reserved"]

Row = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int, int, int, int, int, int, int]
"""A record's fields in `RECORD_DTYPE`'s order, without `reserved`."""


def rows_of(records: Records) -> list[Row]:
    rows: list[Row] = np.ascontiguousarray(records)[_COLUMNS].tolist()
    return rows


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


@dataclass(slots=True)
class VolumeState:
    """A registered volume: its owner's description, its place in the index, measured rates in bytes/s."""

    descriptor: dict[str, Any]
    agent: str
    producer: int
    place: Place
    rates: dict[str, float] = field(default_factory=dict)

    @property
    def volume_id(self) -> str:
        return str(self.descriptor["id"])

    def as_planned(self) -> Volume:
        return Volume(
            volume_id=self.volume_id,
            agent=self.agent,
            place=self.place,
            tier=int(self.descriptor["tier"]),
            speed_rank=int(self.descriptor["speed_rank"]),
            capacity_blocks=int(self.descriptor["capacity_blocks"]),
            high_watermark=float(self.descriptor["high_watermark"]),
            low_watermark=float(self.descriptor["low_watermark"]),
            read_bytes_per_s=self.rates.get("read"),
        )


@dataclass(frozen=True, slots=True)
class RefusalNote:
    at_us: int
    key: Key
    volume: str
    reason: str


class Fold:
    """The folded state. One writer; readers hold the writer's lock. Mutated by `apply` alone."""

    def __init__(self) -> None:
        self.index = BlockIndex()
        self.namespaces: dict[int, Namespace] = {}
        self.producers: dict[int, ProducerState] = {}
        self.volumes: dict[str, VolumeState] = {}
        self.moves = MoveTable()
        self.refusals: deque[RefusalNote] = deque(maxlen=REFUSALS_KEPT_MAX)
        self.refusals_total = 0
        self.limits = Limits()
        self.settings: dict[str, Any] = {}
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
        self._touched: dict[Block, None] = {}
        self._plans_digest = b""

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
            case SettingsEntry():
                self._apply_settings(control)
            case VolumeEntry():
                self._apply_volume(control)
            case OperatorEntry():
                self._apply_operator(control)
            case Measurement():
                self._apply_measurement(control)

    def tick(self, now_us: int, position: int) -> Plan:
        """Advance time (never backwards) and plan. The plan's moves are open when it returns."""
        self.now_us = max(self.now_us, now_us)
        if "" in self.paused:
            return Plan()
        plan = plan_moves(
            self.index,
            [volume.as_planned() for volume in self.volumes.values()],
            self.moves,
            [block for block in self._touched if block.placements],
            self.limits,
            self.now_us,
            frozenset(self.paused),
        )
        self._touched.clear()
        self.moves.add(
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
            )
            for number, proposal in enumerate(plan.proposals)
        )
        self.refusals.extend(RefusalNote(self.now_us, r.key, r.volume, r.reason) for r in plan.refusals)
        self.refusals_total += plan.refused
        self._plans_digest = _digest([self._plans_digest, position, *_plan_rows(plan)])
        return plan

    def _apply_step(self, step: MoveStep) -> None:
        for move_id in step.move_ids:
            try:
                self.moves.step(move_id, Trigger(step.trigger), self.now_us, step.reason)
            except (IllegalMove, ValueError):
                self.skipped["illegal move step"] += 1

    def _apply_settings(self, entry: SettingsEntry) -> None:
        before = self.limits.eviction
        self.settings = entry.settings
        self.policy_version = entry.policy_version
        self.limits = msgspec.convert(entry.settings.get("policy", {}), Limits, strict=False)
        if self.limits.eviction != before:
            for volume in self.volumes.values():
                self.index.set_order(volume.place, eviction_order(self.limits.eviction))

    def _apply_volume(self, entry: VolumeEntry) -> None:
        volume_id = str(entry.descriptor["id"])
        known = self.volumes.pop(volume_id, None)
        if known is not None:
            known.place.volume = False
            self.index.set_order(known.place, None)
        if not entry.registered:
            for move in [m for m in self.moves.open.values() if volume_id in (m.source, m.target)]:
                if Trigger.ABORT in move.triggers:
                    self.moves.step(move.move_id, Trigger.ABORT, self.now_us, f"{volume_id} was unregistered")
            return
        place = self.index.place(PlaceKey(entry.producer, int(entry.descriptor["tier"]), volume_id))
        place.volume = True
        self.index.set_order(place, eviction_order(self.limits.eviction))
        rates = known.rates if known is not None else {}
        self.volumes[volume_id] = VolumeState(entry.descriptor, entry.agent, entry.producer, place, rates)

    def _apply_operator(self, entry: OperatorEntry) -> None:
        if entry.action == "pause":
            self.paused.add(entry.volume)
        elif entry.action == "resume":
            self.paused.discard(entry.volume)
        else:
            self.skipped[f"operator action {entry.action}"] += 1

    def _apply_measurement(self, entry: Measurement) -> None:
        volume = self.volumes.get(entry.volume)
        if volume is None or entry.seconds <= 0:
            self.skipped["measurement of an unknown volume"] += 1
            return
        rate = entry.transferred_bytes / entry.seconds
        old = volume.rates.get(entry.operation, rate)
        volume.rates[entry.operation] = old + RATE_WEIGHT * (rate - old)

    # -- batches

    def _apply_batch(self, batch: Batch, source: str) -> None:
        producer = self.producers.get(batch.producer)
        if producer is None:
            producer = self.producers[batch.producer] = ProducerState(source, batch.epoch)
        elif producer.epoch != batch.epoch:
            self._clear_producer(batch.producer)
            producer.epoch = batch.epoch
            producer.epochs_closed += 1
            producer.partial = False
            producer.note = ""
        producer.name = source or producer.name
        producer.batches += 1
        producer.sequence = batch.sequence
        if batch.kind is BatchKind.EVENTS:
            for namespace, namespace_id in zip(batch.namespaces, batch.namespace_ids, strict=True):
                self.namespaces.setdefault(namespace_id, namespace)
            producer.events += len(batch.records)
            self.apply_rows(batch.producer, batch.namespace_ids, batch.locations, rows_of(batch.records))
        elif batch.kind is BatchKind.LOST:
            through = batch.snapshot.through if batch.snapshot is not None else batch.sequence
            self._clear_producer(batch.producer)
            producer.sequence = through
            producer.gaps += 1
            producer.partial = True
            producer.note = f"batches {batch.sequence}–{through} could not be had; what it placed before is forgotten"
        elif batch.kind is not BatchKind.HEARTBEAT:
            self.skipped[f"{batch.kind.name.lower()} batch"] += 1

    def _clear_producer(self, producer_id: int) -> None:
        self.index.clear([place for key, place in self.index.places.items() if key.producer == producer_id])

    def apply_rows(
        self, producer_id: int, namespace_ids: Sequence[int], locations: Sequence[str], rows: Sequence[Row]
    ) -> None:
        """Fold records of one producer in order. One that makes no sense is counted in `skipped`; the rest goes on."""
        index = self.index
        place_of: dict[tuple[int, int], Place] = {}
        reannounced_until = 0
        self.events_total += len(rows)
        for i, row in enumerate(rows):
            (
                event_type, flags, tier, group, depth, hash_lo, hash_hi, _, _, parent_lo, parent_hi,
                block_bytes, block_tokens, location, namespace, _, _, _, hits,
            ) = row  # fmt: skip
            if event_type == _CLEAR:
                self._apply_clear(producer_id, namespace_ids, locations, tier, location, namespace)
                continue
            if not 1 <= event_type <= 4:
                self.skipped["unknown event type"] += 1
                continue
            if namespace >= len(namespace_ids) or location >= len(locations):
                self.skipped["namespace or location outside its table"] += 1
                continue
            if not 1 <= tier <= 4 or not (hash_lo or hash_hi):
                self.skipped["no tier" if hash_lo or hash_hi else "no sequence hash"] += 1
                continue
            place = place_of.get((tier, location))
            if place is None:
                place = index.place(PlaceKey(producer_id, tier, locations[location]))
                place_of[tier, location] = place
            namespace_id = namespace_ids[namespace]
            key = Key(namespace_id, group, hash_hi << 64 | hash_lo)
            if event_type == _STORE:
                if i >= reannounced_until and flags & _COUNTED and flags & _FIRST and not (parent_lo or parent_hi):
                    reannounced_until = self._reannounced(rows, i, namespace_id, place)
                parent = Key(namespace_id, group, parent_hi << 64 | parent_lo) if parent_lo or parent_hi else None
                self._store(key, place, parent, depth, block_bytes, block_tokens, flags, i < reannounced_until)
                continue
            block = index.get(key)
            if block is None:
                verb = "remove of" if event_type == _REMOVE else "access to"
                self.skipped[f"{verb} an unknown block"] += 1
            elif event_type == _REMOVE:
                placement = block.placements.get(place)
                if placement is None:
                    self.skipped["remove of an unknown block"] += 1
                elif flags & _COUNTED and placement.references > 1:
                    placement.references -= 1
                else:
                    index.remove(block, place)
            else:
                hits = hits or 1
                index.touch(block, place, hits, self.now_us)
                place.reads += hits
                self.hits_by_tier[tier] += hits
                self._note_touched(block)

    def _store(
        self,
        key: Key,
        place: Place,
        parent: Key | None,
        depth: int,
        block_bytes: int,
        block_tokens: int,
        flags: int,
        reannounced: bool,
    ) -> None:
        try:
            block, entered = self.index.store(key, place, parent, depth, block_bytes, block_tokens)
        except ValueError as fault:
            self.skipped[str(fault)] += 1
            return
        if flags & _COUNTED and not entered and not reannounced:
            block.placements[place].references += 1
        if not flags & _COPY:
            self.index.touch(block, place, 1, self.now_us, entered=entered)
            self._note_touched(block)
            # An engine that counts references tells nothing of what it found again: a share of it would be made up.
            if place.key.tier == 1 and not flags & _COUNTED:
                self.recomputed += 1

    def _note_touched(self, block: Block) -> None:
        for place in block.placements:
            if place.volume:
                self._touched[block] = None
                return

    def _reannounced(self, rows: Sequence[Row], start: int, namespace_id: int, place: Place) -> int:
        """End of the foreign event at `start` if it only announces again what is live, else `start`.

        The counting rule of vLLM: a Store without a parent whose hashes are all live adds no references.
        """
        end = start
        while end < len(rows):
            event_type, flags, group, hash_lo, hash_hi = rows[end][0], rows[end][1], rows[end][3], *rows[end][5:7]
            if event_type != _STORE or (end > start and flags & _FIRST):
                break
            block = self.index.blocks.get(Key(namespace_id, group, hash_hi << 64 | hash_lo))
            if block is None or place not in block.placements:
                return start
            end += 1
        return end

    def _apply_clear(
        self,
        producer_id: int,
        namespace_ids: Sequence[int],
        locations: Sequence[str],
        tier: int,
        location: int,
        namespace: int,
    ) -> None:
        if location != LOCATION_ALL and location >= len(locations):
            self.skipped["namespace or location outside its table"] += 1
            return
        if namespace != NAMESPACE_ALL and namespace >= len(namespace_ids):
            self.skipped["namespace or location outside its table"] += 1
            return
        name = None if location == LOCATION_ALL else locations[location]
        places = [
            place
            for key, place in self.index.places.items()
            if key.producer == producer_id and (not tier or key.tier == tier) and (name is None or key.location == name)
        ]
        if namespace == NAMESPACE_ALL:
            self.index.clear(places)
            if not tier and name is None:
                producer = self.producers.get(producer_id)
                if producer is not None:
                    producer.partial, producer.note = False, ""
        else:
            wanted = namespace_ids[namespace]
            self.index.clear(places, lambda key: key.namespace_id == wanted)

    # -- proof

    def digest(self) -> str:
        """Hex digest of the whole state and of every plan made so far; equal for equal histories."""
        index = self.index
        place_names = {place: list(key) for key, place in index.places.items()}
        rows: list[Any] = [
            [self.position, self.now_us, self.events_total, self.recomputed, self.refusals_total, self.policy_version],
            [sorted(self.paused), self.settings, sorted(self.skipped.items()), sorted(self.hits_by_tier.items())],
            self._plans_digest,
        ]
        for producer_id in sorted(self.producers):
            p = self.producers[producer_id]
            rows.append([producer_id, p.name, p.epoch, p.sequence, p.partial, p.note, p.batches, p.events, p.gaps])
        for volume_id in sorted(self.volumes):
            v = self.volumes[volume_id]
            rows.append([volume_id, v.agent, v.producer, v.descriptor, sorted(v.rates.items())])
        for key in sorted(index.blocks):
            b = index.blocks[key]
            rows.append(
                [
                    [key.namespace_id, key.group, f"{key.sequence_hash:x}"],
                    f"{b.parent.key.sequence_hash:x}" if b.parent is not None else "",
                    [b.depth, b.block_tokens, b.touches, b.first_touch_us, b.last_touch_us],
                    sorted([*place_names[p], x.block_bytes, x.references] for p, x in b.placements.items()),
                ]
            )
        for place_key in sorted(index.places):
            place = index.places[place_key]
            order = [[b.key.namespace_id, b.key.group, f"{b.key.sequence_hash:x}"] for b in place.coldest()]
            rows.append([list(place_key), place.volume, place.reads, place.block_bytes, order])
        rows += [
            [move.move_id, move.kind, move.state, move.source, move.target, move.reason, move.note]
            for move in [*self.moves.open.values(), *self.moves.finished]
        ]
        rows.append([f"{b.key.sequence_hash:x}" for b in self._touched])
        return _digest(rows).hex()


def _plan_rows(plan: Plan) -> list[Any]:
    return [
        *([p.kind, f"{p.block.key.sequence_hash:x}", p.source, p.target, p.reason] for p in plan.proposals),
        *([f"{r.key.sequence_hash:x}", r.volume, r.reason] for r in plan.refusals),
        plan.refused,
    ]


def _digest(rows: list[Any]) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(rows), digest_size=16).digest()
