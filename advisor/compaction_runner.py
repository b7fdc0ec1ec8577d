"""Carries out compactions, and tells the log how volumes' blocks lie: the shell around `advisor.compactions`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import structlog

from advisor.compactions import Compaction, CompactionKind, CompactionState, CompactionTrigger
from advisor.entries import CompactionStep, Control, LayoutEntry
from advisor.fold import Fold
from advisor.pipeline import StoppedError
from advisor.turnstile import Turnstile
from storage_agent.errors import AgentUnreachable, StaleTerm, StorageAgentError
from storage_agent.port import AgentPort, BlockKey, CompactReport, Fragmentation

LOOK_S = 0.5
LAYOUT_TICKS = 5
LAYOUT_S_MAX = 30.0
"""Figures are asked for once in so many ticks, and so often at least."""
CHANGED_SHARE = 0.02
"""Figures that changed by less are not logged."""
UNREACHABLE_PAUSE_S = 2.0

_log = structlog.get_logger()


class CompactionRunner(threading.Thread):
    """For one agent, on a connection of its own: a rewrite holds up no move. One command at a time.

    The open compaction is read from the fold, so that a restart goes on where the log ends.
    """

    def __init__(
        self,
        name: str,
        agent: AgentPort,
        fold: Fold,
        lock: Turnstile,
        submit: Callable[[Control], Future[int]],
        *,
        stopping: threading.Event,
        fail: Callable[[BaseException], None],
        tick_interval_s: float,
        term: int,
    ) -> None:
        super().__init__(name=f"kvadvisor-compaction-{name}", daemon=True)
        self._agent_name = name
        self._agent = agent
        self._fold = fold
        self._lock = lock
        self._submit = submit
        self._stopping = stopping
        self._fail = fail
        self._layout_interval_s = min(LAYOUT_S_MAX, LAYOUT_TICKS * tick_interval_s)
        self._pause_s = min(LOOK_S, tick_interval_s)
        self._term = term

    def run(self) -> None:
        looked_s = float("-inf")
        try:
            while not self._stopping.is_set():
                try:
                    if time.monotonic() - looked_s >= self._layout_interval_s or self._knows_too_little():
                        looked_s = time.monotonic()
                        self._tell_layouts()
                    if not self._carry_on():
                        self._stopping.wait(self._pause_s)
                except AgentUnreachable:  # the mover says so
                    self._stopping.wait(UNREACHABLE_PAUSE_S)
        except StoppedError:
            return
        except Exception as fault:  # noqa: BLE001 -- reported by the service, which stops everything
            self._fail(fault)

    def _volumes(self) -> set[str]:
        """Of this agent, without those that are away. The caller holds the lock."""
        return {v.volume_id for v in self._fold.volumes.values() if v.agent == self._agent_name and not v.away}

    def _knows_too_little(self) -> bool:
        """A volume was registered since the last look."""
        with self._lock:
            return not self._volumes() <= self._fold.compactions.layouts.keys()

    def _tell_layouts(self) -> None:
        stat = self._agent.stat()
        with self._lock:
            known = self._volumes()
            told = {name: layout.figures for name, layout in self._fold.compactions.layouts.items()}
        for volume in stat.volumes:
            name, figures = volume.descriptor.id, volume.fragmentation
            if name in known and _is_news(told.get(name), figures):
                self._log(LayoutEntry(name, figures))

    def _carry_on(self) -> bool:
        """One command of one open compaction. False: there is none, or it is paused."""
        with self._lock:
            compaction = self._next()
            keys = [BlockKey(*key) for key in compaction.command_keys()] if compaction is not None else []
        if compaction is None:
            return False
        if compaction.state is CompactionState.PLANNED:
            self._step(compaction, CompactionTrigger.BEGIN)
        if compaction.commands_done < compaction.commands:
            self._send(compaction, keys)
        if compaction.commands_done >= compaction.commands:
            self._step(compaction, CompactionTrigger.FINISH)
        return True

    def _send(self, compaction: Compaction, keys: list[BlockKey]) -> None:
        """The command that is next, and what it came to into the log."""
        started_s = time.monotonic()
        try:
            report = self._ask(compaction, keys)
        except (AgentUnreachable, StaleTerm):
            raise  # asked again; another advisor has taken over, and the service ends
        except StorageAgentError as fault:
            self._step(compaction, CompactionTrigger.ABORT, str(fault))
            return
        if compaction.is_open:
            self._advance(compaction, report, time.monotonic() - started_s)

    def _next(self) -> Compaction | None:
        fold = self._fold
        for volume, compaction in fold.compactions.open.items():
            state = fold.volumes.get(volume)
            if state is not None and state.agent == self._agent_name and not {"", volume} & fold.paused:
                return compaction
        return None

    def _ask(self, compaction: Compaction, keys: list[BlockKey]) -> CompactReport:
        """The same command id each time, so that an agent that is asked again answers as before."""
        command_id = f"{compaction.compaction_id}-{compaction.commands_done}"
        if compaction.kind is CompactionKind.GATHER:
            return self._agent.compact(command_id, compaction.volume, keys, term=self._term)
        return self._agent.compact(command_id, compaction.volume, term=self._term)

    def _advance(self, compaction: Compaction, report: CompactReport, seconds: float) -> None:
        self._log(
            CompactionStep(
                compaction.compaction_id,
                str(CompactionTrigger.ADVANCE),
                moved_blocks=report.moved_blocks,
                moved_bytes=report.moved_bytes,
                freed_bytes=report.freed_bytes,
                extents_before=report.extents_before,
                extents_after=report.extents_after,
                seconds=seconds,
                fragmentation=report.fragmentation,
            )
        )

    def _step(self, compaction: Compaction, trigger: CompactionTrigger, reason: str = "") -> None:
        """Unless it was cancelled meanwhile."""
        if compaction.is_open:
            self._log(CompactionStep(compaction.compaction_id, str(trigger), reason))

    def _log(self, control: Control) -> None:
        """Returns when the entry is committed and applied. Raises `StoppedError` when the service stops first."""
        self._submit(control).result()


def _is_news(told: Fragmentation | None, figures: Fragmentation) -> bool:
    if told is None:
        return True
    pairs = (
        (told.held_bytes, figures.held_bytes),
        (told.live_bytes, figures.live_bytes),
        (told.reclaimable_bytes, figures.reclaimable_bytes),
        (told.objects, figures.objects),
        (told.extents, figures.extents),
        (told.extents_least, figures.extents_least),
    )
    return any(abs(after - before) > CHANGED_SHARE * max(before, after) for before, after in pairs)
