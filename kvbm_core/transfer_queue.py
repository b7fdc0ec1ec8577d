"""One path's queue: what waits, in which order it goes, how much runs at once, and what is in doubt. Pure.

Time is a parameter, in seconds of any clock that never steps back. Not thread-safe: one thread owns a queue.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from math import inf
from typing import Generic, TypeVar

from kvbm_core.errors import TransferQueueFullError, TransferStateError
from kvbm_core.progress import NO_GATE, Gate, ModelProgress

ItemT = TypeVar("ItemT")
_STALE_MIN = 64


class TransferState(StrEnum):
    QUEUED = "queued"
    """Waits for its gate, or for its turn."""
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    """Its deadline passed before it began."""
    IN_DOUBT = "in_doubt"
    """Given up while it ran: nobody waits for it, but it may still write its target, which stays out of use."""
    SETTLED = "settled"
    """It was in doubt and has ended: its target is free again."""


class TransferTrigger(StrEnum):
    TAKE = "take"
    FINISH = "finish"
    CANCEL = "cancel"
    EXPIRE = "expire"


TRANSITIONS: dict[TransferState, dict[TransferTrigger, TransferState]] = {
    TransferState.QUEUED: {
        TransferTrigger.TAKE: TransferState.RUNNING,
        TransferTrigger.CANCEL: TransferState.CANCELLED,
        TransferTrigger.EXPIRE: TransferState.EXPIRED,
    },
    TransferState.RUNNING: {
        TransferTrigger.FINISH: TransferState.DONE,
        TransferTrigger.CANCEL: TransferState.IN_DOUBT,
        TransferTrigger.EXPIRE: TransferState.IN_DOUBT,
    },
    TransferState.IN_DOUBT: {TransferTrigger.FINISH: TransferState.SETTLED},
    TransferState.DONE: {},
    TransferState.CANCELLED: {},
    TransferState.EXPIRED: {},
    TransferState.SETTLED: {},
}


def diagram() -> str:
    """The table as a Mermaid state diagram, as docs/kvbm.md shows it."""
    lines = ["stateDiagram-v2", f"    [*] --> {TransferState.QUEUED}"]
    for state, steps in TRANSITIONS.items():
        lines += [f"    {state} --> {target}: {trigger}" for trigger, target in steps.items()]
        if not steps:
            lines.append(f"    {state} --> [*]")
    return "\n".join(lines) + "\n"


@dataclass(slots=True, eq=False)
class Entry(Generic[ItemT]):
    """One block's transfer in a queue. Changed by its queue alone."""

    item: ItemT
    priority: int
    order: int
    deadline_s: float
    gate: Gate
    state: TransferState = TransferState.QUEUED

    def step(self, trigger: TransferTrigger) -> None:
        """Raises `TransferStateError`, with nothing changed, where the table has no such step."""
        try:
            self.state = TRANSITIONS[self.state][trigger]
        except KeyError:
            allowed = ", ".join(TRANSITIONS[self.state]) or "nothing"
            raise TransferStateError(f"a {self.state} transfer cannot take {trigger}: it allows {allowed}") from None


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """Entries of a queue by what happens to them."""

    queued: int
    running: int
    in_doubt: int


IDLE = QueueDepth(0, 0, 0)


class TransferQueue(Generic[ItemT]):
    """Orders entries by priority (lower first), then age; gives them out in batches, so many batches at once.

    A batch that is in doubt still counts as running: a device that hangs is not given ever more to do.
    """

    def __init__(self, *, entries_max: int, batch_entries: int, batches_max: int) -> None:
        self._entries_max = entries_max
        self._batch_entries = batch_entries
        self._batches_max = batches_max
        self._order = count()
        self._open: list[tuple[int, int, Entry[ItemT]]] = []
        self._held: list[Entry[ItemT]] = []
        self._deadlines: list[tuple[float, int, Entry[ItemT]]] = []
        self._queued = 0
        self._running_batches = 0
        self._running = 0
        self._in_doubt = 0

    def push(
        self, item: ItemT, *, priority: int = 0, deadline_s: float = inf, gate: Gate = NO_GATE
    ) -> Entry[ItemT]:
        """Add one. Raises `TransferQueueFullError` when `entries_max` wait already."""
        if self._queued >= self._entries_max:
            raise TransferQueueFullError(
                f"{self._queued} transfers wait already, and the queue takes {self._entries_max}: "
                f"ask again when some are done, or raise the queue's size"
            )
        entry = Entry(item, priority, next(self._order), deadline_s, gate)
        self._queued += 1
        if gate == NO_GATE:
            heapq.heappush(self._open, (priority, entry.order, entry))
        else:
            self._held.append(entry)
        if deadline_s != inf:
            self._watch(entry)
        return entry

    def take(self, progress: ModelProgress) -> list[Entry[ItemT]]:
        """The next batch, now running; empty where none waits whose gate has been passed, or enough run."""
        self._pass_gates(progress)
        if self._running_batches >= self._batches_max:
            return []
        batch: list[Entry[ItemT]] = []
        while self._open and len(batch) < self._batch_entries:
            entry = heapq.heappop(self._open)[2]
            if entry.state is TransferState.QUEUED:
                entry.step(TransferTrigger.TAKE)
                batch.append(entry)
        self._queued -= len(batch)
        self._running += len(batch)
        self._running_batches += bool(batch)
        return batch

    def finish(self, batch: list[Entry[ItemT]]) -> list[Entry[ItemT]]:
        """A batch that was taken has ended. Those that somebody still waits for, in order."""
        done = []
        for entry in batch:
            entry.step(TransferTrigger.FINISH)
            if entry.state is TransferState.DONE:
                done.append(entry)
        self._running_batches -= 1
        self._running -= len(done)
        self._in_doubt -= len(batch) - len(done)
        return done

    def cancel(self, entry: Entry[ItemT]) -> bool:
        """Nobody waits for it any more. False where it has ended or was given up already."""
        return self._give_up(entry, TransferTrigger.CANCEL)

    def expire(self, now_s: float) -> list[Entry[ItemT]]:
        """Give up what is past its deadline, queued (`EXPIRED`) or running (`IN_DOUBT`)."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            entry = heapq.heappop(self._deadlines)[2]
            if self._give_up(entry, TransferTrigger.EXPIRE):
                expired.append(entry)
        return expired

    def next_deadline_s(self) -> float:
        """When `expire` may next have something to do; infinity where nothing has a deadline."""
        while self._deadlines and not _may_expire(self._deadlines[0][2]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else inf

    def depth(self) -> QueueDepth:
        return QueueDepth(self._queued, self._running, self._in_doubt)

    def _watch(self, entry: Entry[ItemT]) -> None:
        heapq.heappush(self._deadlines, (entry.deadline_s, entry.order, entry))
        if len(self._deadlines) > 2 * (self._queued + self._running) + _STALE_MIN:
            self._deadlines = [each for each in self._deadlines if _may_expire(each[2])]
            heapq.heapify(self._deadlines)

    def _give_up(self, entry: Entry[ItemT], trigger: TransferTrigger) -> bool:
        if trigger not in TRANSITIONS[entry.state]:
            return False
        was_running = entry.state is TransferState.RUNNING
        entry.step(trigger)
        if was_running:
            self._running -= 1
            self._in_doubt += 1
        else:
            self._queued -= 1
            self._drop_stale()
        return True

    def _drop_stale(self) -> None:
        """What was given up stays where it waited until it surfaces; this bounds how much."""
        if len(self._open) > 2 * self._queued + _STALE_MIN:
            self._open = [each for each in self._open if each[2].state is TransferState.QUEUED]
            heapq.heapify(self._open)
        if len(self._held) > 2 * self._queued + _STALE_MIN:
            self._held = [entry for entry in self._held if entry.state is TransferState.QUEUED]

    def _pass_gates(self, progress: ModelProgress) -> None:
        still_held = []
        for entry in self._held:
            if entry.state is not TransferState.QUEUED:
                continue
            if progress.passed(entry.gate):
                heapq.heappush(self._open, (entry.priority, entry.order, entry))
            else:
                still_held.append(entry)
        self._held = still_held


def _may_expire(entry: Entry[ItemT]) -> bool:
    return TransferTrigger.EXPIRE in TRANSITIONS[entry.state]
