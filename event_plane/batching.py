"""When events become a batch, and in which order they travel in it. Pure: time is a parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

import msgspec

from event_plane.schema import (
    DEPTH_UNKNOWN,
    EXTENSION_BYTES_MAX,
    LOCATION_ALL,
    RECORD_COUNT_MAX,
    Batch,
    BatchTables,
    EventRecord,
    EventType,
    Namespace,
    to_records,
)

FLUSH_INTERVAL_US_MAX: Final = 60_000_000
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
    """A batch is closed at `events` events, or when its oldest event has waited `interval_us`.

    Raises `ValueError` naming the value that is out of range.
    """

    events: int = 512
    interval_us: int = 1_000_000

    def __post_init__(self) -> None:
        if not 1 <= self.events <= RECORD_COUNT_MAX:
            raise ValueError(f"flush at {self.events} events is out of range: 1 to {RECORD_COUNT_MAX}")
        if not 0 <= self.interval_us <= FLUSH_INTERVAL_US_MAX:
            limits = f"0 to {FLUSH_INTERVAL_US_MAX} µs"
            raise ValueError(f"flush interval of {self.interval_us} µs is out of range: {limits}")


def check_event(event: EventRecord) -> None:
    """Raises `ValueError` naming the field of `event` that no record can carry."""
    for name, bits in _BITS.items():
        value = getattr(event, name)
        if not 0 <= value < 1 << bits:
            raise ValueError(f"event field {name} is {value}: it must fit in {bits} bits")
    try:
        table_bytes = _table_bytes(event)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"event field extra, namespace or location cannot be said in MessagePack: {error}") from error
    if table_bytes > _TABLES_BYTES_MAX:
        raise ValueError(f"event field extra brings {table_bytes} bytes: a batch's extension has {_TABLES_BYTES_MAX}")


class Batcher:
    """Collects one producer's events and cuts them into batches numbered from 0.

    Not thread-safe. Events must have passed `check_event`. Times are µs of one clock that never steps back.
    """

    def __init__(self, rule: FlushRule, *, producer: int, epoch: int) -> None:
        self._rule = rule
        self._producer = producer
        self._epoch = epoch
        self._waiting: list[EventRecord] = []
        self._waiting_since_us = 0
        self._tables = _TableSize()
        self._next_sequence = 0
        self._next_event_sequence = 0

    @property
    def next_sequence(self) -> int:
        """Number that the next batch will get."""
        return self._next_sequence

    @property
    def due_us(self) -> int | None:
        """When the waiting events must go; None when none wait."""
        return self._waiting_since_us + self._rule.interval_us if self._waiting else None

    def add(self, events: Iterable[EventRecord], now_us: int) -> list[Batch]:
        """Take events; returns the batches that size or age closed, oldest first."""
        closed = []
        for event in events:
            if not self._tables.take(event):
                closed.append(self._close(now_us))
                self._tables.take(event)
            if not self._waiting:
                self._waiting_since_us = now_us
            self._waiting.append(event)
            if len(self._waiting) >= self._rule.events:
                closed.append(self._close(now_us))
        return closed + self.tick(now_us)

    def tick(self, now_us: int) -> list[Batch]:
        """The batch that age closed, if any."""
        due_us = self.due_us
        return [] if due_us is None or now_us < due_us else [self._close(now_us)]

    def flush(self, now_us: int) -> list[Batch]:
        """Close what waits."""
        return [self._close(now_us)] if self._waiting else []

    def _close(self, now_us: int) -> Batch:
        tables = BatchTables()
        records = to_records(list(in_travel_order(self._waiting)), tables, self._next_event_sequence)
        batch = Batch(
            producer=self._producer,
            epoch=self._epoch,
            sequence=self._next_sequence,
            records=records,
            first_event_sequence=self._next_event_sequence,
            timestamp_us=now_us,
            namespaces=tuple(tables.namespaces),
            locations=tuple(tables.locations),
            extra=tuple(tables.extra),
        )
        self._next_sequence += 1
        self._next_event_sequence += len(records)
        self._waiting = []
        self._tables = _TableSize()
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


class _TableSize:
    """An upper bound on the extension bytes of the events taken so far."""

    def __init__(self) -> None:
        self._namespaces: set[Namespace] = set()
        self._locations: set[str] = set()
        self._bytes = 0

    def take(self, event: EventRecord) -> bool:
        """Count `event` in; False, and nothing counted, where the extension could then pass its limit."""
        namespace_known = event.namespace in self._namespaces
        location_known = event.location in self._locations
        size = self._bytes + _table_bytes(event, namespace_known=namespace_known, location_known=location_known)
        if size > _TABLES_BYTES_MAX or (not location_known and len(self._locations) == LOCATION_ALL):
            return False
        self._bytes = size
        if event.namespace is not None:
            self._namespaces.add(event.namespace)
        if event.location is not None:
            self._locations.add(event.location)
        return True


def _table_bytes(event: EventRecord, *, namespace_known: bool = False, location_known: bool = False) -> int:
    size = 0
    if event.extra:
        size += len(msgspec.msgpack.encode(dict(event.extra)))
    if event.namespace is not None and not namespace_known:
        size += len(msgspec.msgpack.encode(event.namespace))
    if event.location is not None and not location_known:
        size += len(msgspec.msgpack.encode(event.location))
    return size
