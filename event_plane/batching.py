"""When events become a batch, and in which order they travel in it. Pure: time is a parameter.

The rule (docs/transports.md gives it as a formula): a batch leaves when its oldest event has waited the interval, when
it is full, or when it holds as many events as are worth a message and the pace allows one more. So a lone event waits
for the interval at most, and the rate of messages has a ceiling however fast events come: batches grow instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Final

import msgspec
import numpy as np

from event_plane.schema import (
    DEPTH_UNKNOWN,
    EXTENSION_BYTES_MAX,
    LOCATION_ALL,
    NAMESPACE_ALL,
    RECORD_COUNT_MAX,
    RECORD_DTYPE,
    Batch,
    BatchKind,
    BatchTables,
    EventRecord,
    EventType,
    Namespace,
    Records,
    SnapshotRange,
    to_records,
)
from event_plane.wire import BATCH_BYTES_MAX, HEADER, LOCATIONS_MAX

FLUSH_INTERVAL_US_MAX: Final = 60_000_000
ADAPTIVE_EVENTS: Final = 512
"""Events worth a message of their own, where the rule is adaptive."""
MESSAGES_PER_S_MAX: Final = 100
"""Messages a second of an adaptive publisher, but for full ones."""
SNAPSHOT_CHUNK_RECORDS_MAX: Final = 4_096
_HITS_MAX = 0xFFFF_FFFF
_KEYS_BYTES = 256
"""More than the extension's own keys and array heads take."""
_TABLES_BYTES_MAX = EXTENSION_BYTES_MAX - _KEYS_BYTES
_BITS: Final = {
    "event_type": 8, "flags": 8, "tier": 8, "group": 8, "depth": 32, "sequence_hash": 128, "prefix_hash": 128,
    "parent_hash": 128, "block_size": 32, "block_tokens": 16, "timestamp_us": 64, "hits": 32,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FlushRule:
    """A batch is closed when its oldest event has waited `interval_us`, when it is full (`RECORD_COUNT_MAX` or the
    transport's bytes), or when it holds `events` and the one before was closed at least `pace_us` ago.

    `pace_us` 0: batches of `events`. Else they grow with the load: over any time T in which E events come, at most
    T / min(pace_us, interval_us) + E / RECORD_COUNT_MAX + 1 are closed by this rule.
    Raises `ValueError` naming the value that is out of range.
    """

    events: int = ADAPTIVE_EVENTS
    interval_us: int = 1_000_000
    pace_us: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.events <= RECORD_COUNT_MAX:
            raise ValueError(f"flush at {self.events} events is out of range: 1 to {RECORD_COUNT_MAX}")
        limits = f"0 to {FLUSH_INTERVAL_US_MAX} µs"
        if not 0 <= self.interval_us <= FLUSH_INTERVAL_US_MAX:
            raise ValueError(f"flush interval of {self.interval_us} µs is out of range: {limits}")
        if not 0 <= self.pace_us <= FLUSH_INTERVAL_US_MAX:
            raise ValueError(f"pace of {self.pace_us} µs between batches is out of range: {limits}")

    @property
    def events_max(self) -> int:
        """Events that close a batch whatever the pace."""
        return RECORD_COUNT_MAX if self.pace_us else self.events


def adaptive_rule(interval_us: int, messages_per_s_max: int = MESSAGES_PER_S_MAX) -> FlushRule:
    """The rule whose batches grow with the load. Raises `ValueError` naming the value that is out of range."""
    if not 1 <= messages_per_s_max <= 1_000_000:
        raise ValueError(f"{messages_per_s_max} messages a second is out of range: 1 to 1000000")
    return FlushRule(ADAPTIVE_EVENTS, interval_us, 1_000_000 // messages_per_s_max)


@dataclass(frozen=True, slots=True)
class Columns:
    """Events as records that index the tables given. A `Batcher` takes the array, contiguous, over and writes to it."""

    records: Records
    namespaces: tuple[Namespace, ...]
    locations: tuple[str, ...]


def joined(pieces: Sequence[Records]) -> Records:
    """A contiguous copy of all of them: as bytes, since numpy copies structured arrays field by field."""
    return np.concatenate([np.ascontiguousarray(piece).view(np.uint8) for piece in pieces]).view(RECORD_DTYPE)


def check_event(event: EventRecord, payload_bytes_max: int = BATCH_BYTES_MAX) -> None:
    """Raises `ValueError` naming the field of `event` that no record, or no batch of that size, can carry."""
    for name, bits in _BITS.items():
        value = getattr(event, name)
        if not 0 <= value < 1 << bits:
            raise ValueError(f"event field {name} is {value}: it must fit in {bits} bits")
    try:
        table_bytes = _table_bytes(event)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"event field extra, namespace or location cannot be said in MessagePack: {error}") from error
    room = _tables_bytes_max(payload_bytes_max, records=1)
    if table_bytes > room:
        raise ValueError(f"event field extra brings {table_bytes} bytes: a batch's extension has {room}")


def check_columns(columns: Columns, payload_bytes_max: int = BATCH_BYTES_MAX) -> None:
    """Raises `ValueError` naming what of `columns` no batch can carry. Looks at whole columns, never at one event."""
    records = columns.records
    if records.ndim != 1 or records.dtype != RECORD_DTYPE:
        raise ValueError(f"records have shape {records.shape} and dtype {records.dtype}: give 1-d RECORD_DTYPE")
    if len(columns.locations) > LOCATIONS_MAX:
        raise ValueError(f"location table has {len(columns.locations)} entries, the limit is {LOCATIONS_MAX}")
    table_bytes = _columns_table_bytes(columns)
    if table_bytes > (room := _tables_bytes_max(payload_bytes_max, records=1)):
        raise ValueError(f"namespace and location tables bring {table_bytes} bytes: a batch's extension has {room}")
    if not len(records):
        return
    low, high = int(records["event_type"].min()), int(records["event_type"].max())
    if low < min(EventType) or high > max(EventType):
        wrong = low if low < min(EventType) else high
        raise ValueError(f"records have event_type {wrong}: use {min(EventType)} to {max(EventType)}")
    _check_indexes(records, "namespace", len(columns.namespaces), NAMESPACE_ALL)
    _check_indexes(records, "storage_location", len(columns.locations), LOCATION_ALL)
    if records["extra"].any():
        raise ValueError(f"records have extra {int(records['extra'].max())}: columns carry none, use publish")


def _check_indexes(records: Records, column: str, table_entries: int, every: int) -> None:
    indexes = records[column]
    # One pass suffices unless some record means all.
    if int(indexes.max()) < table_entries:
        return
    outside = indexes[(indexes >= table_entries) & (indexes != every)]
    if len(outside):
        raise ValueError(f"records have {column} {int(outside[0])}: its table has {table_entries} entries")


def check_snapshot(events: Iterable[EventRecord], payload_bytes_max: int = BATCH_BYTES_MAX) -> None:
    """Raises `ValueError` naming what of a producer's whole state no snapshot can carry."""
    for event in events:
        if event.event_type != EventType.STORE:
            raise ValueError(f"snapshot holds an event of type {event.event_type}: a snapshot is Stores alone")
        check_event(event, payload_bytes_max)


class Batcher:
    """Collects one producer's events and cuts them into batches numbered from 0.

    Not thread-safe. Events must have passed `check_event`, columns `check_columns`. Times are µs of one clock that
    never steps back. A batch is at most `payload_bytes_max` bytes when encoded.
    """

    def __init__(
        self, rule: FlushRule, *, producer: int, epoch: int, payload_bytes_max: int = BATCH_BYTES_MAX
    ) -> None:
        self._rule = rule
        self._producer = producer
        self._epoch = epoch
        self._payload_bytes_max = payload_bytes_max
        self._waiting = _WaitingEvents(payload_bytes_max)
        self._columns = _WaitingColumns()
        self._waiting_since_us = 0
        self._paced_until_us = 0
        self._next_sequence = 0
        self._next_event_sequence = 0

    @property
    def next_sequence(self) -> int:
        """Number that the next batch will get."""
        return self._next_sequence

    @property
    def due_us(self) -> int | None:
        """When the waiting events must go; None when none wait."""
        count = self._count
        if not count:
            return None
        aged_us = self._waiting_since_us + self._rule.interval_us
        return min(aged_us, self._paced_until_us) if count >= self._rule.events else aged_us

    def add(self, events: Iterable[EventRecord], now_us: int) -> list[Batch]:
        """Take events; returns the batches that size or age closed, oldest first."""
        closed = self.flush(now_us) if self._columns.count else []
        for event in events:
            if not self._waiting.take(event):
                closed.append(self._close(now_us))
                self._waiting.take(event)
            if len(self._waiting.events) == 1:
                self._waiting_since_us = now_us
            if self._is_ready(now_us):
                closed.append(self._close(now_us))
        return closed + self.tick(now_us)

    def add_columns(self, columns: Columns, now_us: int) -> list[Batch]:
        """Take events in columns, which share batches only with columns of the same tables; otherwise as `add`."""
        mixed = self._waiting.events or not self._columns.fits(columns)
        closed = self.flush(now_us) if mixed else self.tick(now_us)
        records_max = (
            self._payload_bytes_max - HEADER.size - _KEYS_BYTES - _columns_table_bytes(columns)
        ) // RECORD_DTYPE.itemsize
        full = min(records_max, self._rule.events_max)
        start = 0
        while start < len(columns.records):
            # What the pace lets go at once leaves at the size that is worth a message, as single events do.
            paced = now_us < self._paced_until_us
            end = start + (full if paced else min(full, self._rule.events)) - self._columns.count
            if not self._columns.count:
                self._waiting_since_us = now_us
            self._columns.take(columns, start, end)
            start = end
            if self._columns.count >= full or self._is_ready(now_us):
                closed.append(self._close(now_us))
        return closed + self.tick(now_us)

    def tick(self, now_us: int) -> list[Batch]:
        """The batch that is due, if any."""
        due_us = self.due_us
        return [] if due_us is None or now_us < due_us else [self._close(now_us)]

    def flush(self, now_us: int) -> list[Batch]:
        """Close what waits."""
        return [self._close(now_us)] if self._count else []

    def snapshot(self, events: Iterable[EventRecord], now_us: int) -> Iterator[Batch]:
        """What waits, then the producer's whole state: begin, chunks, end, numbered like any batch.

        To be read to its end before anything else is asked of this batcher.
        """
        yield from self.flush(now_us)
        as_of = SnapshotRange(as_of=max(self._next_sequence - 1, 0))
        yield self._numbered(BatchKind.SNAPSHOT_BEGIN, now_us, snapshot=as_of)
        chunk = _WaitingEvents(self._payload_bytes_max)
        for event in _by_depth(list(events), descending=False):
            if len(chunk.events) == SNAPSHOT_CHUNK_RECORDS_MAX or not chunk.take(event):
                yield self._from_events(BatchKind.SNAPSHOT_CHUNK, chunk.events, now_us, as_of)
                chunk = _WaitingEvents(self._payload_bytes_max)
                chunk.take(event)
        if chunk.events:
            yield self._from_events(BatchKind.SNAPSHOT_CHUNK, chunk.events, now_us, as_of)
        yield self._numbered(BatchKind.SNAPSHOT_END, now_us, snapshot=as_of)

    def lost(self, reason: str, now_us: int) -> list[Batch]:
        """What waits, then a batch that says that events after it were given up by their source."""
        waiting = self.flush(now_us)
        itself = SnapshotRange(through=self._next_sequence)
        return [*waiting, self._numbered(BatchKind.LOST, now_us, snapshot=itself, extra=({"reason": reason},))]

    def heartbeat(self, now_us: int) -> Batch | None:
        """A batch without records or a number of its own, which names the last one closed; None before the first."""
        if not self._next_sequence:
            return None
        return Batch(
            producer=self._producer,
            epoch=self._epoch,
            sequence=self._next_sequence - 1,
            records=np.empty(0, RECORD_DTYPE),
            kind=BatchKind.HEARTBEAT,
            first_event_sequence=self._next_event_sequence,
            timestamp_us=now_us,
        )

    @property
    def _count(self) -> int:
        return len(self._waiting.events) or self._columns.count

    def _is_ready(self, now_us: int) -> bool:
        count = self._count
        return count >= self._rule.events_max or (count >= self._rule.events and now_us >= self._paced_until_us)

    def _close(self, now_us: int) -> Batch:
        if self._waiting.events:
            batch = self._from_events(BatchKind.EVENTS, list(in_travel_order(self._waiting.events)), now_us, None)
            self._waiting = _WaitingEvents(self._payload_bytes_max)
        else:
            records, namespaces, locations = self._columns.concatenated()
            records["event_sequence"] = np.arange(
                self._next_event_sequence, self._next_event_sequence + len(records), dtype=np.uint64
            )
            batch = self._numbered(
                BatchKind.EVENTS, now_us, records=records, namespaces=namespaces, locations=locations
            )
            self._columns = _WaitingColumns()
        self._paced_until_us = now_us + self._rule.pace_us
        return batch

    def _from_events(
        self, kind: BatchKind, events: list[EventRecord], now_us: int, snapshot: SnapshotRange | None
    ) -> Batch:
        tables = BatchTables()
        return self._numbered(
            kind,
            now_us,
            records=to_records(events, tables, self._next_event_sequence),
            namespaces=tuple(tables.namespaces),
            locations=tuple(tables.locations),
            extra=tuple(tables.extra),
            snapshot=snapshot,
        )

    def _numbered(self, kind: BatchKind, now_us: int, **fields: Any) -> Batch:
        """A batch of `fields`, with the next number."""
        records = fields.pop("records", None)
        batch = Batch(
            producer=self._producer,
            epoch=self._epoch,
            sequence=self._next_sequence,
            records=np.empty(0, RECORD_DTYPE) if records is None else records,
            kind=kind,
            first_event_sequence=self._next_event_sequence,
            timestamp_us=now_us,
            **fields,
        )
        self._next_sequence += 1
        self._next_event_sequence += len(batch.records)
        return batch


def in_travel_order(events: Iterable[EventRecord]) -> Iterator[EventRecord]:
    """Creates by ascending depth, removes by descending, accesses folded to one a block; within a run of one type.

    A run in which a depth is unknown keeps the order it came in, which is the only thing then known about it.
    """
    for event_type, run in groupby(events, key=lambda event: event.event_type):
        match event_type:
            case EventType.STORE:
                yield from _by_depth(list(run), descending=False)
            case EventType.REMOVE:
                yield from _by_depth(list(run), descending=True)
            case EventType.ACCESS:
                yield from _fold_accesses(run)
            case _:
                yield from run


def _by_depth(run: list[EventRecord], *, descending: bool) -> list[EventRecord]:
    if any(event.depth == DEPTH_UNKNOWN for event in run):
        return run
    return sorted(run, key=lambda event: event.depth, reverse=descending)


def _fold_accesses(run: Iterable[EventRecord]) -> Iterable[EventRecord]:
    """One record a block and place, `hits` summed, at the place of its last access: recency order stays true."""
    folded: dict[tuple[object, ...], EventRecord] = {}
    for event in run:
        place = (event.namespace, event.group, event.sequence_hash, event.tier, event.location)
        earlier = folded.pop(place, None)
        hits = max(event.hits, 1) + (earlier.hits if earlier else 0)
        folded[place] = replace(event, hits=min(hits, _HITS_MAX))
    return folded.values()


class _WaitingEvents:
    """Events of one batch, and an upper bound on what they take in it."""

    def __init__(self, payload_bytes_max: int) -> None:
        self.events: list[EventRecord] = []
        self._payload_bytes_max = payload_bytes_max
        self._namespaces: set[Namespace] = set()
        self._locations: set[str] = set()
        self._table_bytes = 0

    def take(self, event: EventRecord) -> bool:
        """Add `event`; False, and nothing added, where the batch could then pass a limit."""
        namespace_known = event.namespace in self._namespaces
        location_known = event.location in self._locations
        size = self._table_bytes + _table_bytes(
            event, namespace_known=namespace_known, location_known=location_known
        )
        if size > _tables_bytes_max(self._payload_bytes_max, records=len(self.events) + 1):
            return False
        if not location_known and len(self._locations) == LOCATION_ALL:
            return False
        self._table_bytes = size
        if event.namespace is not None:
            self._namespaces.add(event.namespace)
        if event.location is not None:
            self._locations.add(event.location)
        self.events.append(event)
        return True


@dataclass(slots=True)
class _WaitingColumns:
    """Records of one batch, in pieces that index the same tables."""

    pieces: list[Columns] = field(default_factory=list)
    count: int = 0

    def fits(self, columns: Columns) -> bool:
        if not self.pieces:
            return True
        first = self.pieces[0]
        return first.namespaces == columns.namespaces and first.locations == columns.locations

    def take(self, columns: Columns, start: int, end: int) -> None:
        piece = columns.records[start:end]
        self.pieces.append(Columns(piece, columns.namespaces, columns.locations))
        self.count += len(piece)

    def concatenated(self) -> tuple[Records, tuple[Namespace, ...], tuple[str, ...]]:
        first = self.pieces[0]
        records = first.records if len(self.pieces) == 1 else joined([piece.records for piece in self.pieces])
        return records, first.namespaces, first.locations


def _tables_bytes_max(payload_bytes_max: int, records: int) -> int:
    """Bytes that a batch with so many records has for its tables."""
    return min(_TABLES_BYTES_MAX, payload_bytes_max - HEADER.size - _KEYS_BYTES - records * RECORD_DTYPE.itemsize)


def _columns_table_bytes(columns: Columns) -> int:
    return len(msgspec.msgpack.encode((columns.namespaces, columns.locations)))


def _table_bytes(event: EventRecord, *, namespace_known: bool = False, location_known: bool = False) -> int:
    size = 0
    if event.extra:
        size += len(msgspec.msgpack.encode(dict(event.extra)))
    if event.namespace is not None and not namespace_known:
        size += len(msgspec.msgpack.encode(event.namespace))
    if event.location is not None and not location_known:
        size += len(msgspec.msgpack.encode(event.location))
    return size
