"""Replay: recordings and traces through the live fold (ARCHITECTURE.md, section 3).

`advisor.caches` replays traces through policies that the fold has not, and through all of them a hundred times as fast;
the fold's own two give the same figures. Here a trace's request becomes Access for each block that is present and Store
for each that is absent; a full cache asks the live eviction order for its coldest block, which comes back as Remove.
Definitions: data README, "How reference.json counts".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from advisor.caches import CacheFigures
from advisor.entries import EntryKind, LogEntry, SettingsEntry, Tick, VolumeEntry, encode_control
from advisor.errors import AdvisorError
from advisor.fold import Fold
from advisor.index import ORDERS, PlaceKey
from advisor.path_hashes import NAMESPACE
from advisor.policies.registry import POLICY_VERSION
from advisor.recorded import Reading, opened_log, read_recorded
from advisor.traces import Trace
from event_plane.pacing import Pace
from event_plane.schema import Records, Tier

_CACHE = "cache"
_PRODUCER = 1

CUT = "entry that retention has cut from the log"

Progress = Callable[[int], None]
"""Told how much has been done since it was last told."""


class ReplayError(AdvisorError):
    """A replay that cannot be run as asked."""


@dataclass(frozen=True, slots=True)
class TraceResult:
    """One policy at one capacity; see `caches.CacheFigures`."""

    policy: str
    capacity_blocks: int
    run_blocks: int
    run_tokens: int
    seq_block_hits: int

    @classmethod
    def of(cls, policy: str, capacity_blocks: int, figures: CacheFigures) -> TraceResult:
        return cls(policy, capacity_blocks, figures.run_blocks, figures.run_tokens, figures.seq_block_hits)


NAMESPACE_ID = NAMESPACE.namespace_id


class TraceReplay:
    """Runs a trace through a fold whose one volume is a cache of `capacity_blocks`, evicting in `policy`'s order."""

    def __init__(self, policy: str, capacity_blocks: int) -> None:
        if policy not in ORDERS:
            known = ", ".join(sorted(ORDERS))
            raise ReplayError(f"policy {policy!r} is none of the live service's: choose one of {known} with --speed")
        self.policy = policy
        self.capacity_blocks = capacity_blocks
        self.fold = Fold()
        self._position = 0
        self._enter(
            EntryKind.SETTINGS,
            encode_control(SettingsEntry({"policy": {"eviction": policy}}, policy_version=POLICY_VERSION)),
        )
        self._enter(EntryKind.VOLUME, encode_control(VolumeEntry(_descriptor(capacity_blocks), "replay", _PRODUCER)))
        self._cache = self.fold.index.place(PlaceKey(_PRODUCER, Tier.G3, _CACHE))
        self._run_blocks = self._run_tokens = self._hits = 0
        self._now_ms = -1.0

    def request(self, trace: Trace, number: int) -> Records:
        """One request at its arrival. Returns the events that it came to, as a live producer would have sent them."""
        timestamp_ms = trace.timestamps_ms[number]
        if timestamp_ms != self._now_ms:
            self._now_ms = timestamp_ms
            self._enter(EntryKind.TICK, encode_control(Tick(now_us=int(timestamp_ms * 1000))))
        index = self.fold.index
        first, end = trace.ends[number - 1] if number else 0, trace.ends[number]
        run = index.match(NAMESPACE_ID, 0, trace.hashes[first:end], self._cache)
        self._run_blocks += run
        whole = run == end - first
        self._run_tokens += trace.input_tokens[number] if whole and run else run * trace.block_tokens[number]
        hits, events = index.serve_from(
            trace.records[first:end],
            place=self._cache,
            namespace_id=NAMESPACE_ID,
            capacity_blocks=self.capacity_blocks,
            now_us=self.fold.now_us,
        )
        self._hits += hits
        self.fold.count_served(Tier.G3, len(events), hits)
        return events

    def result(self) -> TraceResult:
        return TraceResult(self.policy, self.capacity_blocks, self._run_blocks, self._run_tokens, self._hits)

    def _enter(self, kind: EntryKind, payload: bytes) -> None:
        self._position += 1
        self.fold.apply(LogEntry(self._position, kind, payload))


def _descriptor(capacity_blocks: int) -> dict[str, object]:
    # Watermarks at the brim: the planner never moves anything, the capacity alone evicts.
    return {
        "id": _CACHE,
        "tier": int(Tier.G3),
        "speed_rank": 0,
        "capacity_blocks": capacity_blocks,
        "high_watermark": 1.0,
        "low_watermark": 1.0,
    }


def replay_trace(
    trace: Trace,
    policy: str,
    capacity_blocks: int,
    progress: Progress = lambda _: None,
    pace: Pace | None = None,
) -> TraceReplay:
    """Run the whole trace; `progress` is told how many requests have been done since it was last told."""
    replay = TraceReplay(policy, capacity_blocks)
    told = 0
    for number in range(trace.requests):
        _sleep(pace, int(trace.timestamps_ms[number] * 1000))
        replay.request(trace, number)
        if number - told >= 256:
            progress(number - told)
            told = number
    progress(trace.requests - told)
    return replay


@dataclass(frozen=True, slots=True)
class RecordingReplay:
    """A recording after its last batch. `refused` counts what could not be read, by reason."""

    fold: Fold
    messages: int
    refused: dict[str, int]


def replay_recording(path: Path, progress: Progress = lambda _: None, pace: Pace | None = None) -> RecordingReplay:
    """Run a capture's or a Parquet recording's batches through the fold, as the live service does.

    Raises `RecordingError` for a file that is damaged or that none of ours reads. Events that make no sense, and
    batches that the file lacks, are counted.
    """
    fold = Fold()
    reading = Reading()
    for recorded in read_recorded(path, reading):
        _sleep(pace, recorded.received_us or recorded.batch.timestamp_us)
        entry = LogEntry(recorded.position, EntryKind.BATCH, b"", source=recorded.source)
        fold.apply(entry, recorded.batch)
        progress(1)
    return RecordingReplay(fold, reading.messages, dict(reading.refused))


def replay_log(place: Path, progress: Progress = lambda _: None, pace: Pace | None = None) -> RecordingReplay:
    """Fold an advisor's log again, ticks and plans included, from its oldest entry.

    Entries that retention has cut are counted as not used: state that began in them is missing. Raises `LogError` for
    a log that is damaged.
    """
    fold = Fold()
    batches = cut = 0
    with opened_log(place) as entries:
        for entry, batch in entries:
            if fold.position == 0:
                cut = entry.position - 1
            _sleep(pace, entry.recorded_us)
            fold.apply(entry, batch)
            batches += batch is not None
            progress(1)
    return RecordingReplay(fold, batches, {CUT: cut} if cut else {})


def _sleep(pace: Pace | None, recorded_us: int) -> None:
    if pace is not None and (wait_s := pace.wait_s(recorded_us, time.monotonic())):
        time.sleep(wait_s)


def live_blocks(fold: Fold) -> list[int]:
    """Low 64 bits of the hash of each block that is placed somewhere, sorted."""
    live: list[int] = []
    after: int | None = -1
    while after is not None:
        blocks, after = fold.index.page(after, 10_000)
        live += [block.key.sequence_hash & 0xFFFF_FFFF_FFFF_FFFF for block in blocks]
    return sorted(live)


def as_json(result: TraceResult) -> dict[str, object]:
    return dict(msgspec.to_builtins(result))
