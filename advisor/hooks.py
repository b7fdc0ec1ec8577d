"""Hooks: a vendor's own workflows, started by what was folded. They run beside the fold and change nothing of it.

Each hook has a thread and a bounded queue of its own: one that is slow loses events, which are counted, and one that
fails is counted and called again with what comes next. Neither holds up ingest nor ends the service.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any, NamedTuple

import structlog

from advisor.entries import EntryKind, LogEntry
from advisor.errors import AdvisorError
from advisor.fold import Fold
from advisor.moves import Move, MoveKind
from advisor.turnstile import Turnstile
from event_plane.schema import Batch, BatchKind, EventType, Namespace, Records

GROUP = "kvadvisor.hooks"
QUEUE_MAX = 1_024
"""Batches and plans that wait for one hook."""
QUIET_S = 60.0
"""After a failure or loss was logged, more of the same hook's is only counted for so long."""
STOP_WAIT_S = 5.0

_log = structlog.get_logger()


class HookUnknown(AdvisorError):
    """No hook of that name, or what its package offers is none."""


class BlockEvent(NamedTuple):
    """One Store or Remove. `location`: a volume's id, or the producer's own word for a place."""

    namespace: Namespace
    group: int
    sequence_hash: int
    parent_hash: int
    tier: int
    location: str
    block_bytes: int
    block_tokens: int
    timestamp_us: int
    """The producer's clock."""


@dataclass(frozen=True)
class BlockEvents:
    """Events of one batch, of one kind, in order: an iteration gives each, `records` are the same in columns."""

    position: int
    """Of the batch in the log."""
    producer: int
    source: str
    batch: Batch
    records: Records

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[BlockEvent]:
        namespaces, locations = self.batch.namespaces, self.batch.locations
        names = self.records.dtype.names or ()
        for record in self.records.tolist():
            row = dict(zip(names, record, strict=True))
            if row["namespace"] >= len(namespaces):
                continue  # it makes no sense, and the fold has counted it
            yield BlockEvent(
                namespaces[row["namespace"]],
                row["group"],
                row["sequence_hash_hi"] << 64 | row["sequence_hash_lo"],
                row["parent_hash_hi"] << 64 | row["parent_hash_lo"],
                row["tier"],
                locations[row["storage_location"]] if row["storage_location"] < len(locations) else "",
                row["block_size"],
                row["block_tokens"],
                row["timestamp_us"],
            )


class PlannedMove(NamedTuple):
    """One move of a plan; `namespace_id`, `group` and `sequence_hash` name its block."""

    move_id: str
    kind: MoveKind
    namespace_id: int
    group: int
    sequence_hash: int
    source: str
    target: str
    block_bytes: int
    reason: str


@dataclass(frozen=True)
class PlanMade:
    """What a tick planned, or a person approved of what one had. `dry`: it will not be carried out."""

    position: int
    now_us: int
    dry: bool
    moves: tuple[PlannedMove, ...]


class Hook:
    """To be inherited from: each method is called with what was logged and folded, in order, on the hook's own thread.

    What happened before the service started is not told again, nor what was lost while the queue was full.
    """

    def on_store(self, events: BlockEvents) -> None:
        """Blocks were placed."""

    def on_remove(self, events: BlockEvents) -> None:
        """Blocks left a place."""

    def on_plan(self, plan: PlanMade) -> None:
        """A tick planned moves; not called for an empty plan."""


Happening = BlockEvents | PlanMade


@dataclass(slots=True)
class HookFigures:
    calls: int = 0
    failures: int = 0
    dropped: int = 0
    """Batches and plans that found the queue full."""
    last_failure: str = ""


def hook_named(name: str) -> Hook:
    """Of an installed package. Raises `HookUnknown`."""
    points = entry_points(group=GROUP)
    point = next(iter(points.select(name=name)), None)
    if point is None:
        known = ", ".join(sorted(points.names)) or "none"
        raise HookUnknown(f"hook {name!r} is not installed: those under {GROUP} are {known}")
    try:
        offered: Any = point.load()
        hook = offered() if isinstance(offered, type) else offered
    except Exception as fault:  # another package's code runs
        raise HookUnknown(f"hook {name!r} of {point.value} cannot be loaded: {fault}") from fault
    if not isinstance(hook, Hook):
        raise HookUnknown(f"hook {name!r} of {point.value} is a {type(hook).__name__}: inherit advisor.hooks.Hook")
    return hook


class HookThread(threading.Thread):
    """Calls one hook with what is offered. `offer` is called by one thread and never waits."""

    def __init__(self, name: str, hook: Hook) -> None:
        super().__init__(name=f"kvadvisor-hook-{name}", daemon=True)
        self.figures = HookFigures()
        self._hook = hook
        self._label = name
        self._waiting: queue.Queue[tuple[str, Happening] | None] = queue.Queue(QUEUE_MAX)
        self._said_s: dict[str, float] = {}

    def wants(self, method: str) -> bool:
        """Whether the hook has a method of its own for it."""
        return getattr(type(self._hook), method) is not getattr(Hook, method)

    def offer(self, method: str, happening: Happening) -> None:
        try:
            self._waiting.put_nowait((method, happening))
        except queue.Full:
            self.figures.dropped += 1
            self._say("a hook is too slow: what it missed is counted")

    def stop(self) -> None:
        """What waits is dropped; a call under way is waited for a while."""
        while True:
            try:
                self._waiting.put_nowait(None)
                break
            except queue.Full:
                self._drop_one()
        if self.is_alive():
            self.join(STOP_WAIT_S)

    def _drop_one(self) -> None:
        try:
            self._waiting.get_nowait()
            self.figures.dropped += 1
        except queue.Empty:
            return

    def run(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            self.figures.calls += 1
            method, happening = waiting
            try:
                getattr(self._hook, method)(happening)
            except (Exception, SystemExit) as fault:  # noqa: BLE001 -- another's code: its faults are counted and never ours
                self.figures.failures += 1
                self.figures.last_failure = f"{type(fault).__name__}: {fault}"
                self._say("a hook failed", fault)

    def _say(self, what: str, fault: BaseException | None = None) -> None:
        if time.monotonic() - self._said_s.get(what, float("-inf")) >= QUIET_S:
            self._said_s[what] = time.monotonic()
            _log.warning(what, hook=self._label, exc_info=fault)


class HookDesk:
    """Tells hooks of what the fold thread applied. `tell` is called by that thread alone."""

    def __init__(self, hooks: Mapping[str, Hook], fold: Fold, lock: Turnstile) -> None:
        self.threads = {name: HookThread(name, hook) for name, hook in hooks.items()}
        self._fold = fold
        self._lock = lock

    @cached_property
    def _wanting(self) -> dict[str, list[HookThread]]:
        methods = ("on_store", "on_remove", "on_plan")
        return {method: [each for each in self.threads.values() if each.wants(method)] for method in methods}

    def start(self) -> None:
        for thread in self.threads.values():
            thread.start()

    def stop(self) -> None:
        for thread in self.threads.values():
            thread.stop()

    def tell(self, entries: Sequence[tuple[LogEntry, Batch | None]]) -> None:
        """Never waits for a hook."""
        for entry, batch in entries:
            if batch is not None and batch.kind in (BatchKind.EVENTS, BatchKind.SNAPSHOT_CHUNK):
                self._tell_events(entry, batch, EventType.STORE, "on_store")
                self._tell_events(entry, batch, EventType.REMOVE, "on_remove")
            elif self._wanting["on_plan"]:
                self._tell_plan(entry)

    def _tell_events(self, entry: LogEntry, batch: Batch, kind: EventType, method: str) -> None:
        if not self._wanting[method]:
            return
        records = batch.records[batch.records["event_type"] == kind]
        if len(records):
            events = BlockEvents(entry.position, batch.producer, entry.source, batch, records)
            for thread in self._wanting[method]:
                thread.offer(method, events)

    def _tell_plan(self, entry: LogEntry) -> None:
        """Of a tick what it planned, of an operator's approval what that opened."""
        if entry.kind not in (EntryKind.TICK, EntryKind.OPERATOR):
            return
        with self._lock:
            moves, plans, now_us = self._fold.moves, self._fold.plans, self._fold.now_us
            if entry.kind is EntryKind.TICK:
                position, dry = entry.position, self._fold.limits.dry_run
                planned = moves.planned_at(position, dry=dry)
            else:
                position, dry = plans.approved_at(entry.position), False
                planned = [move for move in moves.planned_at(position, dry=dry) if not move.deletion]
            told = tuple(_planned(move) for move in planned)
        if told:
            plan = PlanMade(position, now_us, dry, told)
            for thread in self._wanting["on_plan"]:
                thread.offer("on_plan", plan)


def _planned(move: Move) -> PlannedMove:
    return PlannedMove(
        move.move_id, move.kind, *move.key, move.source, move.target, move.block_bytes, move.reason
    )
