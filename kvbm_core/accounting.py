"""What requests asked for and what became of it, in separate columns; never one "cache hit".

A block of a request is counted in exactly one column of where it was when it was asked for: ready in the device, on
its way, found in a lower tier, or absent. What was then moved, and how long that took, are columns of their own.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field

from event_plane.schema import Tier
from kvbm_core.estimate import PathRate, RateLine
from kvbm_core.paths import TransferPath

LATENCY_BOUNDS_S = tuple(2.0**exponent * 1e-6 for exponent in range(1, 28))
"""Upper bounds of the latency buckets: 2 µs to 134 s, doubling."""


@dataclass(slots=True)
class Latency:
    """Durations in doubling buckets, so that quantiles are kept without the samples."""

    count: int = 0
    seconds: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_S) + 1))

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds
        self.buckets[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1

    def quantile_s(self, share: float) -> float:
        """An upper bound, within a factor of two, of the time that `share` of all took at most; 0 where none was."""
        seen, wanted = 0, share * self.count
        for bound, held in zip(LATENCY_BOUNDS_S, self.buckets, strict=False):
            seen += held
            if self.count and seen >= wanted:
                return bound
        return float("inf") if self.count else 0.0


@dataclass(slots=True)
class RequestAccount:
    """The columns of one request, or the totals of all. Blocks, unless named.

    `asked` = `ready` + `waiting` + the sum of `found` + `absent` + `untried`; the sum of `found` is that of `loaded`
    and `not_loaded`.
    """

    asked: int = 0
    tokens_asked: int = 0
    """The denominator: tokens of the blocks asked for, wherever they were."""
    ready: int = 0
    """Registered in the device."""
    waiting: int = 0
    """Being brought to the device for another request already."""
    found: Counter[Tier] = field(default_factory=Counter)
    """By the tier that gave them, or failed to: G2, G3 or G4."""
    absent: int = 0
    """In no tier."""
    untried: int = 0
    """Behind a block that could not be had, and not looked for on volumes."""
    loaded: Counter[str] = field(default_factory=Counter)
    """Brought to the device, verified, by source: `G2`, or a volume's name."""
    not_loaded: Counter[str] = field(default_factory=Counter)
    """Not brought, by reason."""
    tokens_matched: int = 0
    """Tokens of blocks that the request got on the device."""
    bytes_asked: int = 0
    """Of the blocks asked for."""
    bytes_moved: Counter[TransferPath] = field(default_factory=Counter)
    load_seconds: dict[TransferPath, float] = field(default_factory=dict)
    """Summed over the calls of each path; calls at once count each."""

    def add(self, other: RequestAccount) -> None:
        """Sum another's columns into this one's."""
        for name in ("asked", "tokens_asked", "ready", "waiting", "absent", "untried", "tokens_matched", "bytes_asked"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.found.update(other.found)
        self.loaded.update(other.loaded)
        self.not_loaded.update(other.not_loaded)
        self.bytes_moved.update(other.bytes_moved)
        for path, seconds in other.load_seconds.items():
            self.load_seconds[path] = self.load_seconds.get(path, 0.0) + seconds

    def moved(self, path: TransferPath, moved_bytes: int, seconds: float) -> None:
        self.bytes_moved[path] += moved_bytes
        self.load_seconds[path] = self.load_seconds.get(path, 0.0) + seconds


@dataclass(slots=True)
class PathTotals:
    """One path since the start. `failures`: blocks not moved, by reason."""

    blocks: int = 0
    moved_bytes: int = 0
    latency: Latency = field(default_factory=Latency)
    failures: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class CoreTotals:
    """Everything since the start."""

    requests: RequestAccount = field(default_factory=RequestAccount)
    registered: int = 0
    """Computed blocks registered in the device pool, duplicates included."""
    offload_skipped: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Blocks not offloaded, by target tier (empty before one was chosen) and `offload_policy.Skip`."""
    put: Counter[str] = field(default_factory=Counter)
    """Blocks durable on a volume after a put, by volume; those there before are included."""
    put_refused: Counter[str] = field(default_factory=Counter)
    """Blocks that no volume took, by the last volume's reason."""
    put_fell_back: Counter[str] = field(default_factory=Counter)
    """Blocks that a full volume passed on to the next one of its list, by the full volume."""
    paths: dict[TransferPath, PathTotals] = field(default_factory=dict)
    events_lost: int = 0
    """Events not announced, because the publisher was closed first."""


class Accounts:
    """The totals and the measured rates, behind one lock. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = CoreTotals(paths={path: PathTotals() for path in TransferPath})
        self._rates = {path: PathRate() for path in TransferPath}

    def moved(self, path: TransferPath, blocks: int, moved_bytes: int, seconds: float) -> None:
        """One call of a path moved so many blocks well."""
        with self._lock:
            totals = self._totals.paths[path]
            totals.blocks += blocks
            totals.moved_bytes += moved_bytes
            totals.latency.add(seconds)
            self._rates[path].add(moved_bytes, seconds, time.monotonic())

    def failed(self, path: TransferPath, reason: str, blocks: int = 1) -> None:
        """A path did not move so many blocks."""
        with self._lock:
            self._totals.paths[path].failures[reason] += blocks

    def skipped(self, target: str, reason: str, blocks: int = 1) -> None:
        """So many blocks were not offloaded to `target`; empty where they left for none."""
        if blocks:
            with self._lock:
                self._totals.offload_skipped[target, reason] += blocks

    def registered(self, blocks: int) -> None:
        with self._lock:
            self._totals.registered += blocks

    def put(self, volume: str) -> None:
        with self._lock:
            self._totals.put[volume] += 1

    def put_refused(self, reason: str) -> None:
        with self._lock:
            self._totals.put_refused[reason] += 1

    def put_fell_back(self, volume: str, blocks: int) -> None:
        with self._lock:
            self._totals.put_fell_back[volume] += blocks

    def served(self, request: RequestAccount) -> None:
        """Add what one call did for a request."""
        with self._lock:
            self._totals.requests.add(request)

    def totals(self) -> CoreTotals:
        """A copy, of one moment."""
        with self._lock:
            return deepcopy(self._totals)

    def rates(self) -> dict[TransferPath, RateLine]:
        """Of the paths that were measured lately."""
        now_s = time.monotonic()
        with self._lock:
            lines = {path: rate.line(now_s) for path, rate in self._rates.items()}
        return {path: line for path, line in lines.items() if line is not None}
