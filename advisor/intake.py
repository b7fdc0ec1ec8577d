"""From messages to log entries: decode, gate, name what to ask again. Pure; the log thread and replay use it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
from zlib_ng.zlib_ng import crc32

from advisor.entries import EntryKind, LogEntry, NewEntry
from advisor.foreign import AUTO, OURS, Senders, sender_name
from advisor.foreign import SourceFacts as SourceFacts
from event_plane import wire
from event_plane.dialects.protocol import Dialect
from event_plane.errors import DialectError, WireError
from event_plane.schema import RECORD_DTYPE, Batch, BatchKind, SnapshotRange, producer_id
from event_plane.sequence import (
    Accept,
    Action,
    Arrival,
    AskResend,
    AskSnapshot,
    Duplicate,
    Lost,
    SequenceGate,
    StreamState,
)
from event_plane.transport import Message

UNKNOWN_SOURCE = "message of an unknown source"
UNDECODABLE_BATCH = "undecodable batch"
UNDECODABLE_MESSAGE = "undecodable message"
MISREAD = "dialect told only after messages were read as another"
DETAIL_CHARACTERS_MAX = 200
SNAPSHOT_ASKS_MAX = 3
SNAPSHOT_WAIT_US = 10_000_000
"""How often, and how long after each other, a snapshot is asked for that no gap waits for."""

_NO_RECORDS = np.empty(0, dtype=RECORD_DTYPE)


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
    """What a step of the intake asks its shell to do, in this order: append, acknowledge, ask."""

    accepted: list[Accepted] = field(default_factory=list)
    acknowledged: list[tuple[str, int, int, int]] = field(default_factory=list)
    """(source, producer, epoch, sequence) to acknowledge once everything in `accepted` is durable."""
    resends: list[tuple[str, int | None, int]] = field(default_factory=list)
    """(source, producer, first sequence) to ask for again; producer None: of whoever the source carries."""
    snapshots: list[tuple[str, int, int]] = field(default_factory=list)
    """(source, producer, epoch) to ask for a snapshot."""
    unreadable: list[Unreadable] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Item:
    """What the gate carries for us: a decoded batch of ours, or a foreign message and the dialect to decode it in."""

    message: Message
    name: str
    read: Batch | Dialect


@dataclass(slots=True)
class _Wanted:
    """A snapshot that nothing but our asking will bring."""

    epoch: int
    due_us: int
    attempts: int = 0


class Cursors(msgspec.Struct, array_like=True):
    """The gate's memory, the names of its producers and the dialects of its senders, at one position of the log."""

    streams: list[StreamState] = []
    names: dict[int, str] = {}
    dialects: dict[str, str] = {}


class Intake:
    """Takes messages of several sources; gives batches that are next in their producer's order."""

    def __init__(self, sources: Iterable[SourceFacts], gate: SequenceGate | None = None) -> None:
        self.gate = gate if gate is not None else SequenceGate()
        self.refused: Counter[str] = Counter()
        """Messages and foreign events that could not be used, by reason. Reasons are few: none quotes a message."""
        self.resends: Counter[int] = Counter()
        """Resends asked for, by producer."""
        self.snapshots: Counter[int] = Counter()
        """Snapshots asked for, by producer."""
        self.duplicates: Counter[int] = Counter()
        self.lost: Counter[int] = Counter()
        """Batches that nobody had, by producer."""
        self.heartbeats: Counter[str] = Counter()
        """By source."""
        self._facts = {facts.name: facts for facts in sources}
        self._source_of: dict[int, str] = {}
        self._name_of: dict[int, str] = {}
        self._foreign_producers: set[int] = set()
        self._senders = Senders()
        self._wanted: dict[int, _Wanted] = {}
        """Our own producers that are known in part only, until they say all they have."""
        self._heard_us: dict[int, int] = {}
        """When a producer's stream was last heard, begun or probed."""

    # -- memory

    def restore(self, entry: LogEntry, batch: Batch) -> None:
        """Move the producer's cursor past a batch that is in the log already."""
        foreign = entry.foreign_crc is not None
        through = batch.snapshot.through if batch.kind is BatchKind.LOST and batch.snapshot is not None else None
        if not foreign and through == batch.sequence:
            # One number of our own: most likely its publisher's own mark, whose copy is acknowledged as any batch's is.
            through = None
        self._name(batch.producer, entry.source, foreign=foreign)
        if foreign:
            self._senders.restore(entry.source, batch.namespaces)
        self.gate.restore(batch.producer, batch.epoch, batch.sequence, entry.foreign_crc, foreign, through)

    def cursors(self) -> Cursors:
        """What must be kept with a checkpoint: every producer's cursor, and the name it was logged under."""
        return Cursors(self.gate.export(), dict(self._name_of), self._senders.told())

    def load(self, cursors: Cursors) -> None:
        """Take up what `cursors` gave, before anything is restored or offered."""
        self.gate.load(cursors.streams)
        self._senders.load(cursors.dialects)
        for stream in cursors.streams:
            self._name(stream.producer, cursors.names.get(stream.producer, ""), foreign=stream.foreign)

    def _name(self, producer: int, name: str, *, foreign: bool) -> None:
        source = name.partition("/")[0]
        if source in self._facts:
            self._source_of[producer] = source
            self._name_of[producer] = name
        if foreign:
            self._foreign_producers.add(producer)

    def resume(self, source: str) -> dict[int, tuple[int, int]]:
        """By producer of `source`: the epoch and the last sequence that the log has."""
        cursors = {producer: self.gate.cursor(producer) for producer in self._of(source)}
        return {producer: cursor for producer, cursor in cursors.items() if cursor is not None}

    # -- what comes

    def offer(self, message: Message, now_us: int) -> Taken:
        """One message as received. Bad bytes are counted in `refused`, never raised."""
        facts = self._facts.get(message.source)
        if facts is None:
            self.refused[UNKNOWN_SOURCE] += 1
            return Taken()
        ours = wire.is_batch(message.payload) if facts.dialect == AUTO else facts.dialect == OURS
        return self._offer_ours(message, now_us) if ours else self._offer_foreign(message, facts, now_us)

    def connected(self, source: str, now_us: int) -> Taken:
        """`source` can be heard, for the first time or again: what was sent meanwhile must be asked for."""
        taken = Taken()
        for producer in self._of(source):
            self._heard_us[producer] = now_us
            self._carry_out(self.gate.connected(producer, now_us), taken)
        if not taken.resends:
            taken.resends.append((source, None, 0))
        return taken

    def probe(self, source: str, silent_us: int, now_us: int) -> Taken:
        """Ask the foreign producers of `source` that were silent for so long whether something of theirs was lost.

        Where none was ever heard of, whoever is there is asked for all it has.
        """
        taken = Taken()
        producers = self._of(source)
        for producer in producers:
            if producer in self._foreign_producers and now_us - self._heard_us.get(producer, 0) >= silent_us:
                self._heard_us[producer] = now_us
                self._carry_out(self.gate.probe(producer, now_us), taken)
        if not producers and source in self._facts:
            taken.resends.append((source, None, 0))
        return taken

    # -- what does not come

    def resend_ended(self, source: str, now_us: int, producer: int | None = None) -> Taken:
        """The source has sent all it still holds, of `producer` or (None) of everyone."""
        taken = Taken()
        for each in self._of(source) if producer is None else [producer]:
            self._carry_out(self.gate.resend_ended(each, now_us), taken)
        return taken

    def cannot_resend(self, source: str, now_us: int, producer: int | None = None) -> Taken:
        """The source sends nothing again."""
        taken = Taken()
        for each in self._of(source) if producer is None else [producer]:
            self._carry_out(self.gate.cannot_resend(each, now_us), taken)
        return taken

    def cannot_ask_snapshot(self, producer: int, now_us: int) -> Taken:
        """Nobody can be asked for a snapshot of `producer`."""
        return self._carry_out(self.gate.give_up(producer, now_us))

    def give_up(self, source: str, now_us: int) -> Taken:
        """Nothing more comes of `source`, as at the end of a file: release all that is held behind gaps."""
        taken = Taken()
        for producer in self._of(source):
            while actions := self.gate.give_up(producer, now_us):
                self._carry_out(actions, taken)
        taken.resends = []
        return taken

    def tick(self, now_us: int) -> Taken:
        """Deadlines of resends and snapshots."""
        taken = self._carry_out(self.gate.tick(now_us))
        for producer, wanted in list(self._wanted.items()):
            if now_us < wanted.due_us:
                continue
            if wanted.attempts == SNAPSHOT_ASKS_MAX:
                del self._wanted[producer]
                continue
            wanted.attempts += 1
            wanted.due_us = now_us + SNAPSHOT_WAIT_US
            self._ask_snapshot(producer, wanted.epoch, taken)
        return taken

    def want_snapshot(self, producer: int, epoch: int) -> None:
        """Ask for it with the next ticks, a few times, until it comes."""
        if producer not in self._foreign_producers:
            self._wanted[producer] = _Wanted(epoch, 0)

    # -- figures

    def gaps_open(self) -> dict[str, int]:
        """Producers that something is missing of, by source."""
        return Counter(self._source_of[producer] for producer in self.gate.incomplete())

    def by_source(self, counts: Mapping[int, int]) -> Counter[str]:
        """Sums of producers' `counts`. From any thread."""
        sums: Counter[str] = Counter()
        for producer, count in list(counts.items()):
            sums[self._source_of.get(producer, "")] += count
        return sums

    # -- reading

    def _of(self, source: str) -> list[int]:
        return [producer for producer, name in self._source_of.items() if name == source]

    def _refuse(self, unreadable: Unreadable, taken: Taken) -> Taken:
        self.refused[unreadable.reason] += 1
        taken.unreadable.append(unreadable)
        return taken

    def _known(self, producer: int, source: str, name: str) -> None:
        self._source_of[producer] = source
        self._name_of[producer] = name

    def _offer_ours(self, message: Message, now_us: int) -> Taken:
        try:
            batch = wire.decode(message.payload)
            _check_lost(batch)
        except WireError as fault:
            unreadable = Unreadable(message.source, UNDECODABLE_BATCH, str(fault)[:DETAIL_CHARACTERS_MAX])
            return self._refuse(unreadable, Taken())
        if self.gate.has_room(batch.producer):
            self._known(batch.producer, message.source, message.source)
        if batch.kind is BatchKind.HEARTBEAT:
            self.heartbeats[message.source] += 1
            return self._carry_out(self.gate.heartbeat(batch.producer, batch.epoch, batch.sequence, now_us))
        arrival = Arrival(
            batch.producer,
            batch.epoch,
            batch.sequence,
            _stored_crc(message.payload),
            _Item(message, message.source, batch),
            begins_snapshot=batch.kind is BatchKind.SNAPSHOT_BEGIN,
            payload_bytes=len(message.payload),
        )
        return self._carry_out(self.gate.offer(arrival, now_us))

    def _offer_foreign(self, message: Message, facts: SourceFacts, now_us: int) -> Taken:
        dialect, misread = self._senders.dialect(facts, message)
        try:
            origin = dialect.origin(message)
        except DialectError as fault:
            unreadable = Unreadable(message.source, UNDECODABLE_MESSAGE, str(fault)[:DETAIL_CHARACTERS_MAX])
            return self._refuse(unreadable, Taken())
        sender = sender_name(facts.name, message)
        name = f"{sender}/{origin.part}"
        producer = producer_id(name)
        taken = Taken()
        if misread:
            self.refused[MISREAD] += 1
            for each in [each for each, named in self._name_of.items() if named.rpartition("/")[0] == sender]:
                self._carry_out(self.gate.restart(each), taken)
        if self.gate.has_room(producer):
            self._known(producer, message.source, name)
            self._foreign_producers.add(producer)
            self._heard_us[producer] = now_us
        arrival = Arrival(
            producer, None, origin.sequence, crc32(message.payload), _Item(message, name, dialect),
            payload_bytes=len(message.payload),
        )  # fmt: skip
        return self._carry_out(self.gate.offer(arrival, now_us), taken)

    # -- what the gate says

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
                    if (source := self._source_of.get(action.producer)) is not None:
                        taken.resends.append((source, action.producer, action.from_sequence))
                case AskSnapshot():
                    self._ask_snapshot(action.producer, action.epoch, taken)
                case Lost():
                    self._lose(action, taken)
                case _:
                    self.refused[action.reason] += 1
        return taken

    def _ask_snapshot(self, producer: int, epoch: int, taken: Taken) -> None:
        self.snapshots[producer] += 1
        if (source := self._source_of.get(producer)) is not None:
            taken.snapshots.append((source, producer, epoch))

    def _accept(self, action: Accept, taken: Taken) -> None:
        arrival = action.arrival
        item: _Item = arrival.item
        if isinstance(item.read, Batch):
            batch, payload, crc = item.read, item.message.payload, None
        else:
            batch = self._decode(item.read, item.message, action, taken)
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
        if batch.kind is BatchKind.LOST:
            # Said by the publisher itself: it gave something up. Its snapshot mends that.
            self.want_snapshot(batch.producer, batch.epoch)
        elif action.new_epoch or batch.kind is BatchKind.SNAPSHOT_END:
            self._wanted.pop(batch.producer, None)

    def _decode(self, dialect: Dialect, message: Message, action: Accept, taken: Taken) -> Batch:
        arrival = action.arrival
        try:
            batch, skipped = dialect.decode(
                message.payload, producer=arrival.producer, epoch=action.epoch, sequence=arrival.sequence
            )
        except DialectError as fault:
            # The sequence is consumed all the same, by an empty batch: the stream goes on.
            detail = str(fault)[:DETAIL_CHARACTERS_MAX]
            self._refuse(Unreadable(message.source, UNDECODABLE_MESSAGE, detail), taken)
            return Batch(arrival.producer, action.epoch, arrival.sequence, _NO_RECORDS)
        self.refused.update(skipped)
        return batch

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
            source=self._name_of.get(action.producer, ""),
            # No payload was received; 0 says that the producer is foreign, and no later batch is taken for this one.
            foreign_crc=0 if action.producer in self._foreign_producers else None,
        )
        taken.accepted.append(Accepted(entry, batch))


def _check_lost(batch: Batch) -> None:
    """A publisher's own mark of a loss stands for itself alone."""
    if batch.kind is BatchKind.LOST and (batch.snapshot is None or batch.snapshot.through != batch.sequence):
        through = "nothing" if batch.snapshot is None else batch.snapshot.through
        raise WireError(f"lost batch {batch.sequence} says through {through}: a publisher's own says its own number")


def _stored_crc(payload: bytes) -> int:
    """The checksum that our batch carries of itself; decoding has verified it."""
    return int.from_bytes(payload[wire.CRC_OFFSET : wire.CRC_OFFSET + 4], "little")
