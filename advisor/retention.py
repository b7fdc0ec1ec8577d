"""How much of the log is kept: the rule, and the thread that applies it beside the writer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from advisor import checkpoint
from advisor.checkpointer import Checkpointer
from advisor.entries import EventLog, LogStat
from advisor.errors import AdvisorError

INTERVAL_S = 1.0
CHECKPOINTS_IN_LIMIT = 3
"""The log is cut at the second-newest checkpoint, so two, and one that is being made, must lie within the limits."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Decision:
    """`through`: the last position to drop, 0 for none. `ask`: a checkpoint is wanted at or past it, 0 for none."""

    through: int = 0
    ask: int = 0


def entries_allowed(stat: LogStat, retention_bytes: int, first_of_age: int) -> int | None:
    """How many entries the limits let the log keep, its size taken from the mean; None for no limit.

    `retention_bytes` 0: no limit by bytes. `first_of_age`: the oldest entry that is young enough, 0: no limit by age.
    """
    entries = stat.last_position - stat.first_position + 1
    allowed: list[int] = []
    if retention_bytes and stat.stored_bytes:
        allowed.append(retention_bytes * entries // stat.stored_bytes)
    if first_of_age:
        allowed.append(stat.last_position - first_of_age + 1)
    return min(allowed, default=None)


def decide(stat: LogStat, allowed: int | None, checkpoints: Sequence[int]) -> Decision:
    """What to drop and whether to ask for a checkpoint. `checkpoints`: positions of the good ones, newest first."""
    entries = stat.last_position - stat.first_position + 1
    if allowed is None or entries <= 0:
        return Decision()
    newest = checkpoints[0] if checkpoints else 0
    wanted = stat.last_position - allowed
    floor = checkpoints[1] if len(checkpoints) > 1 else 0
    through = min(wanted, floor)
    since = stat.last_position - newest
    is_due = entries > allowed // 2 and since >= max(1, allowed // CHECKPOINTS_IN_LIMIT)
    is_late = wanted > floor and wanted >= stat.first_position and since > 0
    return Decision(
        through=through if through >= stat.first_position else 0,
        ask=stat.last_position if is_due or is_late else 0,
    )


class Retention(threading.Thread):
    """Keeps a log within bytes and age, never past the second-newest good checkpoint."""

    def __init__(
        self,
        log: EventLog,
        checkpoints: Path,
        checkpointer: Checkpointer,
        *,
        retention_bytes: int,
        retention_age_s: float,
        now_us: Callable[[], int],
        stopping: threading.Event,
        fail: Callable[[BaseException], None],
    ) -> None:
        super().__init__(name="kvadvisor-retention", daemon=True)
        self.problem = ""
        """Why the log could not be cut, else empty."""
        self._log = log
        self._checkpoints = checkpoints
        self._checkpointer = checkpointer
        self._retention_bytes = retention_bytes
        self._retention_age_us = int(retention_age_s * 1_000_000)
        self._now_us = now_us
        self._stopping = stopping
        self._fail = fail
        self._known: dict[int, bool] = {}
        """By a checkpoint's position: whether it is good. Each is read once."""

    def run(self) -> None:
        try:
            while not self._stopping.wait(INTERVAL_S):
                try:
                    self.step()
                    self.problem = ""
                except AdvisorError as fault:
                    # The log's writer meets the same fault and ends the service; if not, the next round may do better.
                    if str(fault) != self.problem:
                        _log.warning("the log is not cut for now", reason=str(fault))
                    self.problem = str(fault)
        except Exception as fault:  # noqa: BLE001 -- reported by the service, which stops everything
            self._fail(fault)

    def step(self) -> Decision:
        """One round. Raises `LogError`."""
        stat = self._log.stat()
        first_of_age = 0
        if self._retention_age_us and stat.last_position:
            first_of_age = first_recorded_since(self._log, stat, self._now_us() - self._retention_age_us)
        allowed = entries_allowed(stat, self._retention_bytes, first_of_age)
        written = checkpoint.positions(self._checkpoints)
        decision = decide(stat, allowed, written)
        if decision.ask:
            self._checkpointer.ask(decision.ask)
        if decision.through:
            # Read only now that the log is to be cut: a large one takes a while.
            decision = decide(stat, allowed, [position for position in written if self._is_good(position)])
            if decision.through:
                self._log.prune(decision.through)
        return decision

    def _is_good(self, position: int) -> bool:
        if position not in self._known:
            fault = checkpoint.fault_of(checkpoint.checkpoint_path(self._checkpoints, position))
            self._known[position] = not fault
            if fault:
                _log.warning("the log is not cut past a checkpoint that cannot be used", reason=fault)
        return self._known[position]


def first_recorded_since(log: EventLog, stat: LogStat, since_us: int) -> int:
    """Position of the oldest entry recorded at or after `since_us`, in some 30 reads; the newest where none is."""
    low, high = stat.first_position, stat.last_position
    if stat.first_recorded_us >= since_us:
        return low
    while low < high:
        middle = (low + high) // 2
        entry = next(iter(log.read(middle, middle)), None)
        if entry is not None and entry.recorded_us >= since_us:
            high = middle
        else:
            low = middle + 1
    return low
