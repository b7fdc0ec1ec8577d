"""From messages to log entries: decode, gate, name what to ask again. Pure; the log thread and replay use it."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from advisor.entries import EntryKind, LogEntry, NewEntry
from event_plane import wire
from event_plane.dialects.vllm import VllmDialect
from event_plane.errors import DialectError, WireError
from event_plane.schema import RECORD_DTYPE, Batch, BatchKind, Namespace, SnapshotRange, producer_id
from event_plane.sequence import Accept, Action, Arrival, AskResend, Duplicate, Lost, SequenceGate, StreamState
from event_plane.transport import Message

UNKNOWN_SOURCE = "message of an unknown source"
UNDECODABLE_BATCH = "undecodable batch"
UNDECODABLE_MESSAGE = "undecodable message"
DETAIL_CHARACTERS_MAX = 200

_NO_RECORDS = np.empty(0, dtype=RECORD_DTYPE)


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """What configuration says about a subscription: tenant and model of a foreign stream, and its dialect."""

    name: str
    dialect: str = "auto"
    namespace: Namespace = field(default_factory=Namespace)
    hash_root_shared: bool = False


@dataclass(frozen=True, slots=True)
class Accepted:
    """A batch to append, decoded, and where to acknowledge it."""

    entry: NewEntry
    batch: Batch


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A message that could not be read at all. `reason` is one of few, for counting; `detail` is a sentence."""

    source: str
    reason: str
    detail: str


@dataclass(slots=True)
class Taken:
    """What a step of the intake asks its shell to do, in this order: append, acknowledge, ask again."""

    accepted: list[Accepted] = field(default_factory=list)
    acknowledged: list[tuple[str, int, int, int]] = field(default_factory=list)
    """(source, producer, epoch, sequence) to acknowledge once everything in `accepted` is durable."""
    resends: list[tuple[str, int]] = field(default_factory=list)
    """(source, first sequence) to ask for again."""
    unreadable: list[Unreadable] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Item:
    """What the gate carries for us: a decoded batch of ours, or a foreign message still to be decoded."""

    message: Message
    name: str
    batch: Batch | None


class Cursors(msgspec.Struct, array_like=True):
    """The gate's memory and the names of its producers, at one position of the log."""

    streams: list[StreamState] = []
    names: dict[int, str] = {}


class Intake:
    """Takes messages of several sources; gives batches that are next in their producer's order."""

    def __init__(self, sources: Iterable[SourceFacts], gate: SequenceGate | None = None) -> None:
        self.gate = gate if gate is not None else SequenceGate()
        self.refused: Counter[str] = Counter()
        """Messages and foreign events that could not be used, by reason. Reasons are few: none quotes a message."""
        self.resends: Counter[int] = Counter()
        self.duplicates: Counter[int] = Counter()
        self.lost: Counter[int] = Counter()
        """Batches that nobody had, by producer."""
        self._facts = {facts.name: facts for facts in sources}
        self._source_of: dict[int, str] = {}
        self._name_of: dict[int, str] = {}
        self._foreign_producers: set[int] = set()
        self._dialects: dict[str, VllmDialect] = {}

    def restore(self, entry: LogEntry, batch: Batch) -> None:
        """Move the producer's cursor past a batch that is in the log already."""
        through = batch.snapshot.through if batch.kind is BatchKind.LOST and batch.snapshot is not None else None
        self._name(batch.producer, entry.source, foreign=entry.foreign_crc is not None)
        self.gate.restore(
            batch.producer, batch.epoch, batch.sequence, entry.foreign_crc, entry.foreign_crc is not None, through
        )

    def cursors(self) -> Cursors:
        """What must be kept with a checkpoint: every producer's cursor, and the name it was logged under."""
        return Cursors(self.gate.export(), dict(self._name_of))

    def load(self, cursors: Cursors) -> None:
        """Take up what `cursors` gave, before anything is restored or offered."""
        self.gate.load(cursors.streams)
        for stream in cursors.streams:
            self._name(stream.producer, cursors.names.get(stream.producer, ""), foreign=stream.foreign)

    def _name(self, producer: int, name: str, *, foreign: bool) -> None:
        source = name.partition("/")[0]
        if source in self._facts:
            self._source_of[producer] = source
            self._name_of[producer] = name
        if foreign:
            self._foreign_producers.add(producer)

    def first_wanted(self, source: str) -> int:
        """The sequence to ask a source to send again from when connecting: the last one known, 0 where none is."""
        cursors = [self.gate.cursor(producer) for producer, name in self._source_of.items() if name == source]
        return max(0, min((cursor[1] for cursor in cursors if cursor is not None), default=0))

    def offer(self, message: Message, now_us: int) -> Taken:
        """One message as received. Bad bytes are counted in `refused`, never raised."""
        facts = self._facts.get(message.source)
        if facts is None:
            self.refused[UNKNOWN_SOURCE] += 1
            return Taken()
        ours = wire.is_batch(message.payload) if facts.dialect == "auto" else facts.dialect == "kvadvisor"
        arrival = self._ours(message) if ours else self._foreign(message, facts)
        if isinstance(arrival, Unreadable):
            return self._refuse(arrival, Taken())
        self._source_of[arrival.producer] = message.source
        self._name_of[arrival.producer] = arrival.item.name
        if not ours:
            self._foreign_producers.add(arrival.producer)
        return self._carry_out(self.gate.offer(arrival, now_us))

    def resend_ended(self, source: str, now_us: int) -> Taken:
        """The source has sent all it still holds."""
        taken = Taken()
        for producer, name in list(self._source_of.items()):
            if name == source:
                self._carry_out(self.gate.resend_ended(producer, now_us), taken)
        return taken

    def tick(self, now_us: int) -> Taken:
        """Deadlines of resends."""
        return self._carry_out(self.gate.tick(now_us))

    def _refuse(self, unreadable: Unreadable, taken: Taken) -> Taken:
        self.refused[unreadable.reason] += 1
        taken.unreadable.append(unreadable)
        return taken

    def _ours(self, message: Message) -> Arrival | Unreadable:
        """The arrival, or why there is none."""
        try:
            batch = wire.decode(message.payload)
        except WireError as fault:
            return Unreadable(message.source, UNDECODABLE_BATCH, str(fault)[:DETAIL_CHARACTERS_MAX])
        item = _Item(message, message.source, batch)
        return Arrival(batch.producer, batch.epoch, batch.sequence, zlib.crc32(message.payload), item)

    def _foreign(self, message: Message, facts: SourceFacts) -> Arrival | Unreadable:
        dialect = self._dialect(facts)
        try:
            rank = dialect.rank(message.payload)
        except DialectError as fault:
            return Unreadable(message.source, UNDECODABLE_MESSAGE, str(fault)[:DETAIL_CHARACTERS_MAX])
        topic = message.topic.decode("utf-8", "replace")
        name = "/".join(part for part in (facts.name, topic, f"dp{rank}") if part)
        item = _Item(message, name, None)
        return Arrival(producer_id(name), None, message.transport_sequence, zlib.crc32(message.payload), item)

    def _dialect(self, facts: SourceFacts) -> VllmDialect:
        dialect = self._dialects.get(facts.name)
        if dialect is None:
            dialect = VllmDialect(namespace=facts.namespace, hash_root_shared=facts.hash_root_shared)
            self._dialects[facts.name] = dialect
        return dialect

    def _carry_out(self, actions: Iterable[Action], taken: Taken | None = None) -> Taken:
        taken = Taken() if taken is None else taken
        for action in actions:
            match action:
                case Accept():
                    self._accept(action, taken)
                case Duplicate():
                    self.duplicates[action.arrival.producer] += 1
                    self._acknowledge(action.arrival.producer, taken)
                case AskResend():
                    self.resends[action.producer] += 1
                    taken.resends.append((self._source_of[action.producer], action.from_sequence))
                case Lost():
                    self._lose(action, taken)
                case _:
                    self.refused[action.reason] += 1
        return taken

    def _accept(self, action: Accept, taken: Taken) -> None:
        arrival = action.arrival
        item: _Item = arrival.item
        facts = self._facts[item.message.source]
        if item.batch is not None:
            batch, payload, crc = item.batch, item.message.payload, None
        else:
            try:
                batch, skipped = self._dialect(facts).decode(
                    item.message.payload, producer=arrival.producer, epoch=action.epoch, sequence=arrival.sequence
                )
                self.refused.update(skipped)
            except DialectError as fault:
                # The sequence is consumed all the same, by an empty batch: the stream goes on.
                detail = str(fault)[:DETAIL_CHARACTERS_MAX]
                self._refuse(Unreadable(facts.name, UNDECODABLE_MESSAGE, detail), taken)
                batch = Batch(arrival.producer, action.epoch, arrival.sequence, _NO_RECORDS)
            payload, crc = wire.encode(batch), arrival.checksum
        taken.accepted.append(
            Accepted(
                NewEntry(
                    kind=EntryKind.BATCH,
                    payload=payload,
                    producer=batch.producer,
                    epoch=batch.epoch,
                    sequence=batch.sequence,
                    source=item.name,
                    foreign_crc=crc,
                ),
                batch,
            )
        )
        self._acknowledge(batch.producer, taken)

    def _acknowledge(self, producer: int, taken: Taken) -> None:
        cursor = self.gate.cursor(producer)
        source = self._source_of.get(producer)
        if cursor is not None and source is not None:
            taken.acknowledged = [a for a in taken.acknowledged if a[1] != producer]
            taken.acknowledged.append((source, producer, *cursor))

    def _lose(self, action: Lost, taken: Taken) -> None:
        self.lost[action.producer] += action.through - action.from_sequence + 1
        batch = Batch(
            action.producer,
            action.epoch,
            action.from_sequence,
            _NO_RECORDS,
            kind=BatchKind.LOST,
            snapshot=SnapshotRange(through=action.through),
        )
        entry = NewEntry(
            kind=EntryKind.BATCH,
            payload=wire.encode(batch),
            producer=batch.producer,
            epoch=batch.epoch,
            sequence=batch.sequence,
            source=self._name_of[action.producer],
            # No payload was received; 0 says that the producer is foreign, and no later batch is taken for this one.
            foreign_crc=0 if action.producer in self._foreign_producers else None,
        )
        taken.accepted.append(Accepted(entry, batch))
