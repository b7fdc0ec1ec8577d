"""What log entries say of one block, one after the other, the newest first. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from advisor.block_views import BlockStep
from advisor.entries import (
    DeletionStep,
    EntryKind,
    LogEntry,
    MoveStep,
    OperatorEntry,
    OutcomeBatch,
    decode_control,
)
from advisor.moves import Move
from advisor.wording import bytes_text
from event_plane import wire
from event_plane.errors import WireError
from event_plane.schema import NAMESPACE_ALL, Batch, BatchKind, EventType, RecordFlag, Records

STEPS_AN_ENTRY_MAX = 64
"""A batch that names the block in more places than these tells of the first."""
_LOW_64 = (1 << 64) - 1
_SNAPSHOT = frozenset({BatchKind.SNAPSHOT_BEGIN, BatchKind.SNAPSHOT_CHUNK, BatchKind.SNAPSHOT_END})


class DamagedEntry(ValueError):
    """An entry whose bytes are no batch and no control entry: says which."""


@dataclass(frozen=True, slots=True)
class Sought:
    """A block whose history is wanted, and what the fold knows that the log's entries alone do not tell.

    `namespace_id`, `group` and `tenant` of None leave out none.
    """

    sequence_hash: int
    namespace_id: int | None = None
    group: int | None = None
    tenant: str | None = None
    moves: Mapping[str, Move] = field(default_factory=dict)
    """Its moves that the fold still knows, by id."""
    deletions: frozenset[str] = frozenset()
    """Ids of deletions that the fold still knows and that cover it."""
    volumes: frozenset[tuple[int, str]] = frozenset()
    """Registered ones, by their owner's producer id and their own."""
    producers: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    """Name and present epoch, by id."""
    placers: frozenset[int] = frozenset()
    """Producers that place it now."""


class _Told(NamedTuple):
    """What a record says, but for its uses: a batch says each thing once here."""

    event_type: int
    is_copy: bool
    tier: int
    group: int
    place: str
    namespace_id: int | None
    block_bytes: int


class Trail:
    """Follows a block back through entries that are given newest first.

    A step that only may concern it, a producer's Clear, is held until it is known whether that producer ever placed it.
    """

    def __init__(self, sought: Sought, told: Callable[[LogEntry], str]) -> None:
        """`told` gives an entry's sentence."""
        self._sought = sought
        self._told = told
        # A move's id begins with the position of the entry that it was planned at.
        self._planned = {int(move_id.partition("-")[0]): move for move_id, move in sought.moves.items()}
        self._outcomes: dict[OutcomeBatch, MoveStep] = {}
        self._unexplained: dict[OutcomeBatch, list[int]] = {}
        """Records' steps that no outcome is known of, by their batch: numbers in `_steps`."""
        self._steps: list[tuple[int | None, BlockStep]] = []
        """With the producer whose Clear it is, else None."""
        self._placers = set(sought.placers)

    def __len__(self) -> int:
        """Steps so far, those that are held among them."""
        return len(self._steps)

    def follow(self, entry: LogEntry) -> None:
        """Take the next older entry. Raises `DamagedEntry`."""
        try:
            if entry.kind is EntryKind.BATCH:
                self._follow_batch(entry, wire.decode(entry.payload))
            elif entry.kind in (EntryKind.TICK, EntryKind.MOVE, EntryKind.OPERATOR):
                self._follow_control(entry)
        except (WireError, msgspec.MsgspecError) as error:
            raise DamagedEntry(f"entry {entry.position} of the log is damaged ({error})") from error

    def steps(self) -> list[BlockStep]:
        """All that is known to concern the block, newest first."""
        return [step for clearer, step in self._steps if clearer is None or clearer in self._placers]

    # -- batches

    def _follow_batch(self, entry: LogEntry, batch: Batch) -> None:
        if batch.kind is BatchKind.LOST:
            self._hold(entry, batch, "forgotten", "batches of its producer are lost: what it had placed is not known")
        records = batch.records
        mine = records["sequence_hash_lo"] == self._sought.sequence_hash & _LOW_64
        mine &= records["sequence_hash_hi"] == self._sought.sequence_hash >> 64
        mine |= records["event_type"] == EventType.CLEAR
        rows = np.flatnonzero(mine)
        if len(rows):
            self._follow_records(entry, batch, records[rows])

    def _follow_records(self, entry: LogEntry, batch: Batch, records: Records) -> None:
        uses: dict[_Told, int] = {}
        for record in records[::-1].tolist():
            event_type, flags, tier, group, *_, block_bytes, _, location, namespace, _, _, _, hits, _ = record
            if not self._admits(batch, event_type, group, namespace):
                continue
            place = batch.locations[location] if location < len(batch.locations) else ""
            named = batch.namespace_ids[namespace] if namespace < len(batch.namespaces) else None
            told = _Told(event_type, bool(flags & RecordFlag.COPY), tier, group, place, named, block_bytes)
            if told in uses or len(uses) < STEPS_AN_ENTRY_MAX:
                uses[told] = uses.get(told, 0) + max(hits, 1)
        for told, hits in uses.items():
            self._add_record(entry, batch, told, hits)

    def _admits(self, batch: Batch, event_type: int, group: int, namespace: int) -> bool:
        sought = self._sought
        if event_type == EventType.CLEAR and namespace == NAMESPACE_ALL:
            return True
        if namespace >= len(batch.namespaces):
            return False
        if event_type != EventType.CLEAR and sought.group not in (None, group):
            return False
        of_tenant = sought.tenant in (None, batch.namespaces[namespace].tenant)
        return of_tenant and sought.namespace_id in (None, batch.namespace_ids[namespace])

    def _add_record(self, entry: LogEntry, batch: Batch, told: _Told, uses: int) -> None:
        hits = 0
        if told.event_type == EventType.CLEAR:
            where = f" in {told.place}" if told.place else f" in G{told.tier}" if told.tier else ""
            self._hold(entry, batch, "cleared", f"everything that its producer had placed{where} was cleared")
            return
        if told.event_type == EventType.STORE:
            kind, text = "stored", self._stored_text(batch, told)
        elif told.event_type == EventType.ACCESS:
            kind, text, hits = "accessed", f"used {uses} times" if uses > 1 else "used once", uses
        elif told.event_type == EventType.REMOVE:
            kind, text = "removed", "no longer there"
        else:
            return
        self._placers.add(batch.producer)
        of_record = {
            "namespace_id": "" if told.namespace_id is None else f"{told.namespace_id:016x}",
            "group": told.group,
            "place": self._place_name(batch.producer, told.place, entry.source),
            "tier": told.tier,
            "hits": hits,
        }
        step = self._step(entry, kind, text, batch=batch).model_copy(update=of_record)
        if kind != "accessed":
            holding = OutcomeBatch(batch.producer, batch.epoch, batch.sequence)
            if holding in self._outcomes:
                step = self._explained(step, self._outcomes[holding])
            else:
                self._unexplained.setdefault(holding, []).append(len(self._steps))
        self._steps.append((None, step))

    def _explained(self, step: BlockStep, outcome: MoveStep) -> BlockStep:
        """A record's step, of a batch that a move's outcome names."""
        is_alone = len(outcome.move_ids) == 1 and self._sought.tenant is None
        text = f"{step.text}, when {self._moves_text(outcome.move_ids)} took {outcome.trigger}"
        return step.model_copy(update={"text": text, "move": outcome.move_ids[0] if is_alone else ""})

    def _moves_text(self, move_ids: list[str]) -> str:
        if len(move_ids) == 1:
            return "its move"
        positions = {move_id.partition("-")[0] for move_id in move_ids}
        where = f" planned at position {positions.pop()}" if len(positions) == 1 and self._sought.tenant is None else ""
        return f"one of {len(move_ids)} moves{where}"

    def _stored_text(self, batch: Batch, told: _Told) -> str:
        if batch.kind in _SNAPSHOT:
            text = "stands in a snapshot of its producer"
        else:
            text = "copied there" if told.is_copy else "stored"
        if told.block_bytes:
            text += f", {bytes_text(told.block_bytes)}"
        _, epoch = self._sought.producers.get(batch.producer, ("", batch.epoch))
        if epoch != batch.epoch:
            text += "; that life of its producer is over, and what it placed was forgotten with it"
        return text

    def _place_name(self, producer: int, location: str, source: str) -> str:
        if (producer, location) in self._sought.volumes:
            return location
        return f"{self._producer_name(producer, source)}/{location}"

    def _producer_name(self, producer: int, source: str) -> str:
        name, _ = self._sought.producers.get(producer, (source, 0))
        return name or f"{producer:016x}"

    def _hold(self, entry: LogEntry, batch: Batch, kind: str, text: str) -> None:
        self._steps.append((batch.producer, self._step(entry, kind, text, batch=batch)))

    # -- moves and deletions

    def _follow_control(self, entry: LogEntry) -> None:
        move = self._planned.get(entry.position)
        if move is not None:
            way = f"{move.source} → {move.target}" if move.target else f"from {move.source}"
            text = f"{move.kind} {way} planned: {move.reason}"
            self._steps.append((None, self._step(entry, "planned", text, move=move.move_id)))
        match decode_control(entry.payload):
            case MoveStep() as step:
                if step.outcome is not None:
                    self._learn_outcome(step.outcome, step)
                for move_id in step.move_ids:
                    if move_id in self._sought.moves:
                        self._steps.append((None, self._moved(entry, step, self._sought.moves[move_id])))
            case DeletionStep(deletion=deletion) if deletion in self._sought.deletions:
                self._steps.append((None, self._step(entry, "deletion", self._told(entry))))
            case OperatorEntry(action="delete", deletion=deletion) if deletion in self._sought.deletions:
                self._steps.append((None, self._step(entry, "deletion", f"its deletion was ordered: {deletion}")))

    def _learn_outcome(self, holding: OutcomeBatch, step: MoveStep) -> None:
        """An outcome may come to the log before or after the batch that it names."""
        self._outcomes[holding] = step
        for number in self._unexplained.pop(holding, ()):
            clearer, told = self._steps[number]
            self._steps[number] = clearer, self._explained(told, step)

    def _moved(self, entry: LogEntry, step: MoveStep, move: Move) -> BlockStep:
        text = f"{move.kind}: {step.trigger}" + (f", {step.reason}" if step.reason else "")
        return self._step(entry, "moved", text, move=move.move_id)

    def _step(
        self, entry: LogEntry, kind: str, text: str, *, batch: Batch | None = None, move: str = ""
    ) -> BlockStep:
        return BlockStep(
            position=entry.position if self._sought.tenant is None else None,
            time_us=entry.recorded_us,
            kind=kind,
            namespace_id="",
            group=None,
            place="",
            tier=None,
            producer="" if batch is None else self._producer_name(batch.producer, entry.source),
            epoch="" if batch is None else f"{batch.epoch:x}",
            hits=0,
            # A move's id begins with its position.
            move=move if self._sought.tenant is None else "",
            text=text,
        )
