"""What a recorded stream holds: who published what, what is missing, and how it was spread over time. Pure.

One pass; memory does not grow with the stream: what could be many (producers, epochs, places, seconds) is bounded, and
what is past a bound is counted in a sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from event_plane.parquet_rows import EVENT_NAMES, RecordedBatch
from event_plane.schema import LOCATION_ALL, NAMESPACE_ALL, Batch, BatchKind, Tier
from event_plane.wire import encode

PRODUCERS_MAX: Final = 1_000
EPOCHS_MAX: Final = 100
"""Epochs of one producer that are told apart."""
NAMES_MAX: Final = 1_000
"""Locations, and likewise namespaces, that are told apart."""
BINS_MAX: Final = 240
"""Spans of time that events are counted by; past it the spans double."""
OTHERS: Final = "(others)"
EVERY: Final = "(every)"
UNKNOWN: Final = "(unknown)"
TIERS: Final = (*Tier, 0)
"""Tiers in the order of `Rates.events`; 0 is all tiers, or none of ours."""

_BIN_US_MIN: Final = 1_000
_TIER_NAMES: Final = {0: "all"} | {tier.value: tier.name for tier in Tier}


class EpochReport(msgspec.Struct):
    """One life of a producer. Sequences are -1 before the first."""

    epoch: int
    first_sequence: int = -1
    last_sequence: int = -1
    batches: int = 0
    events: int = 0
    gaps: int = 0
    missing: int = 0
    """Sequences that the stream lacks between its first and its last, those declared lost included."""
    duplicates: int = 0
    """Batches at or below a sequence that came before."""
    snapshots: int = 0


class ProducerReport(msgspec.Struct):
    name: str
    producer: int
    epochs: list[EpochReport]
    epochs_untold: int = 0

    @property
    def lives(self) -> int:
        return len(self.epochs) + self.epochs_untold


class Rates(msgspec.Struct):
    """`events[bin]` counts events by tier, in the order of `TIERS`; a bin is `bin_us` long, the first at `start_us`."""

    start_us: int
    bin_us: int
    events: list[list[int]]


class Report(msgspec.Struct):
    """All figures. Times are µs since 1970, those of reception where they are known, else the producers'; 0: none."""

    batches: int
    events: int
    wire_bytes: int
    """Of all batches in the wire format."""
    first_us: int
    last_us: int
    kinds: dict[str, int]
    """Batches by kind."""
    types: dict[str, dict[str, int]]
    """Events by type and tier."""
    locations: dict[str, int]
    namespaces: dict[str, int]
    """Events by `tenant/model` and whatever else is said of a namespace."""
    batch_events: dict[str, int]
    """Batches by number of events, in powers of two: key `16` counts 16 to 31."""
    producers: list[ProducerReport]
    producers_untold: int
    rates: Rates

    @property
    def span_s(self) -> float:
        return (self.last_us - self.first_us) / 1_000_000

    @property
    def missing(self) -> int:
        return sum(epoch.missing for producer in self.producers for epoch in producer.epochs)

    @property
    def duplicates(self) -> int:
        return sum(epoch.duplicates for producer in self.producers for epoch in producer.epochs)


@dataclass(slots=True)
class RateSeries:
    """Counts over time in at most `BINS_MAX` bins, whose width doubles as the time grows."""

    start_us: int = 0
    bin_us: int = _BIN_US_MIN
    counts: list[list[int]] = field(default_factory=list)

    def add(self, at_us: int, counts: list[int]) -> None:
        """What lies before the first time, as a clock set back says, counts there."""
        if not self.counts:
            self.start_us = at_us
        place = max(at_us - self.start_us, 0) // self.bin_us
        while place >= BINS_MAX:
            self.bin_us *= 2
            place //= 2
            pairs = [self.counts[n : n + 2] for n in range(0, len(self.counts), 2)]
            self.counts = [[sum(each) for each in zip(*pair, strict=True)] for pair in pairs]
        while len(self.counts) <= place:
            self.counts.append([0] * len(TIERS))
        self.counts[place] = [a + b for a, b in zip(self.counts[place], counts, strict=True)]


class StreamReport:
    """Takes batches in the order of the recording; `report` gives the figures so far."""

    def __init__(self) -> None:
        self._batches = self._events = self._wire_bytes = 0
        self._first_us = self._last_us = 0
        self._kinds: Counter[str] = Counter()
        self._types: Counter[tuple[int, int]] = Counter()
        self._locations: Counter[str] = Counter()
        self._namespaces: Counter[str] = Counter()
        self._batch_events: Counter[int] = Counter()
        self._producers: dict[int, ProducerReport] = {}
        self._producers_untold: set[int] = set()
        self._rates = RateSeries()

    def add(self, recorded: RecordedBatch) -> None:
        batch = recorded.batch
        self._batches += 1
        self._events += len(batch.records)
        self._wire_bytes += len(encode(batch))
        self._kinds[BatchKind(batch.kind).name.lower()] += 1
        self._batch_events[_power_of_two(len(batch.records))] += 1
        at_us = recorded.received_us or batch.timestamp_us
        if at_us:
            self._first_us = min(self._first_us or at_us, at_us)
            self._last_us = max(self._last_us, at_us)
        self._add_to_producer(recorded)
        by_tier = self._add_records(batch)
        if at_us and len(batch.records):
            self._rates.add(at_us, by_tier)

    def report(self) -> Report:
        types: dict[str, dict[str, int]] = {}
        for (event_type, tier), events in sorted(self._types.items()):
            by_tier = types.setdefault(EVENT_NAMES[event_type], {})
            by_tier[tier_name(tier)] = by_tier.get(tier_name(tier), 0) + events
        return Report(
            batches=self._batches,
            events=self._events,
            wire_bytes=self._wire_bytes,
            first_us=self._first_us,
            last_us=self._last_us,
            kinds=dict(self._kinds),
            types=types,
            locations=dict(self._locations.most_common()),
            namespaces=dict(self._namespaces.most_common()),
            batch_events={str(size): batches for size, batches in sorted(self._batch_events.items())},
            producers=list(self._producers.values()),
            producers_untold=len(self._producers_untold),
            rates=Rates(self._rates.start_us, self._rates.bin_us, self._rates.counts),
        )

    def _add_to_producer(self, recorded: RecordedBatch) -> None:
        batch = recorded.batch
        producer = self._producers.get(batch.producer)
        if producer is None:
            if len(self._producers) >= PRODUCERS_MAX:
                if len(self._producers_untold) < PRODUCERS_MAX:
                    self._producers_untold.add(batch.producer)
                return
            producer = self._producers[batch.producer] = ProducerReport(recorded.source, batch.producer, [])
        if not producer.epochs or producer.epochs[-1].epoch != batch.epoch:
            if len(producer.epochs) >= EPOCHS_MAX:
                producer.epochs_untold += 1
                producer.epochs.pop()
            producer.epochs.append(EpochReport(batch.epoch))
        _add_to_epoch(producer.epochs[-1], batch)

    def _add_records(self, batch: Batch) -> list[int]:
        """Returns the events by tier, in the order of `TIERS`."""
        records = batch.records
        if not len(records):
            return [0] * len(TIERS)
        pairs = np.bincount(records["event_type"].astype(np.intp) * 256 + records["tier"])
        by_tier = [0] * len(TIERS)
        for pair in np.flatnonzero(pairs):
            event_type, tier = divmod(int(pair), 256)
            events = int(pairs[pair])
            self._types[event_type, tier] += events
            by_tier[TIERS.index(tier) if tier in TIERS else -1] += events
        _count_named(self._locations, records["storage_location"], batch.locations, LOCATION_ALL)
        names = [_namespace_name(batch, number) for number in range(len(batch.namespaces))]
        _count_named(self._namespaces, records["namespace"], names, NAMESPACE_ALL)
        return by_tier


def tier_name(tier: int) -> str:
    return _TIER_NAMES.get(tier, str(tier))


def _add_to_epoch(epoch: EpochReport, batch: Batch) -> None:
    if batch.kind is BatchKind.HEARTBEAT:
        # It has no number of its own.
        return
    epoch.batches += 1
    epoch.events += len(batch.records)
    epoch.snapshots += batch.kind is BatchKind.SNAPSHOT_END
    if epoch.first_sequence < 0:
        epoch.first_sequence = batch.sequence
    elif batch.sequence <= epoch.last_sequence:
        epoch.duplicates += 1
        return
    elif batch.sequence > epoch.last_sequence + 1:
        epoch.gaps += 1
        epoch.missing += batch.sequence - epoch.last_sequence - 1
    epoch.last_sequence = batch.sequence
    if batch.kind is BatchKind.LOST and batch.snapshot is not None and batch.snapshot.through >= batch.sequence:
        epoch.gaps += 1
        epoch.missing += batch.snapshot.through - batch.sequence + 1
        epoch.last_sequence = batch.snapshot.through


def _count_named(
    counts: Counter[str], indexes: npt.NDArray[np.unsignedinteger[Any]], names: Sequence[str], every: int
) -> None:
    for index, events in zip(*np.unique(indexes, return_counts=True), strict=True):
        name = names[index] if index < len(names) else EVERY if index == every else UNKNOWN
        counts[name if name in counts or len(counts) < NAMES_MAX else OTHERS] += int(events)


def _namespace_name(batch: Batch, number: int) -> str:
    namespace = batch.namespaces[number]
    said = [namespace.tenant, namespace.model or "-", namespace.revision, namespace.adapter, namespace.kv_dtype]
    return "/".join(part for part in said if part)


def _power_of_two(number: int) -> int:
    return 1 << number.bit_length() - 1 if number else 0
