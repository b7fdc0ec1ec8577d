"""Compactions of volumes: their state table, the open ones and the last that ended, what is known of each volume. Pure.

A compaction is one rewrite on one volume, in commands of at most `KEYS_PER_COMMAND` blocks. Each step is a log entry,
written before the next command is sent; a command asked again does no harm.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from advisor.entries import CompactionStep
from advisor.errors import AdvisorError
from advisor.index import Key
from advisor.state_diagram import state_diagram
from storage_agent.port import Fragmentation

KEYS_PER_COMMAND = 256
FINISHED_KEPT_MAX = 64
ABORTED_REST_S = 60.0
"""Nothing is planned for a volume so soon after one there was aborted."""


class CompactionKind(StrEnum):
    GATHER = "gather"
    """Lay chains out, each in one piece."""
    RECLAIM = "reclaim"
    """Give back what is dead: files and objects mostly of deleted blocks, large slots that hold small blocks."""


class CompactionState(StrEnum):
    PLANNED = "planned"
    RUNNING = "running"
    DONE = "done"
    ABORTED = "aborted"
    DRY = "dry"
    """Planned in a dry run, and never begun."""


class CompactionTrigger(StrEnum):
    BEGIN = "begin"
    ADVANCE = "advance"
    """A command was carried out."""
    FINISH = "finish"
    ABORT = "abort"


_State, _Trigger = CompactionState, CompactionTrigger
TRANSITIONS: dict[CompactionState, dict[CompactionTrigger, CompactionState]] = {
    _State.PLANNED: {_Trigger.BEGIN: _State.RUNNING, _Trigger.ABORT: _State.ABORTED},
    _State.RUNNING: {
        _Trigger.ADVANCE: _State.RUNNING,
        _Trigger.FINISH: _State.DONE,
        _Trigger.ABORT: _State.ABORTED,
    },
}


class IllegalCompactionStep(AdvisorError):
    """A trigger that the table does not allow. Nothing was changed."""


class Compaction(msgspec.Struct):
    """One of them. `before` are the volume's figures when it was planned, `after` those that its agent last told."""

    compaction_id: str
    volume: str
    kind: CompactionKind
    reason: str
    planned_us: int
    changed_us: int
    before: Fragmentation
    keys: list[tuple[int, int, bytes]] = []
    """Blocks in the order wanted, chain by chain: namespace, group, hash. Dropped when it ends."""
    blocks: int = 0
    state: CompactionState = CompactionState.PLANNED
    commands_done: int = 0
    after: Fragmentation | None = None
    moved_blocks: int = 0
    moved_bytes: int = 0
    freed_bytes: int = 0
    extents_before: int = 0
    """Of its chains."""
    extents_after: int = 0
    seconds: float = 0.0
    note: str = ""
    """Why it was aborted, else empty."""

    @property
    def is_open(self) -> bool:
        return self.state in TRANSITIONS

    @property
    def commands(self) -> int:
        return max(1, -(-self.blocks // KEYS_PER_COMMAND))

    def command_keys(self) -> list[Key]:
        """Of the command that is next; none for one that reclaims."""
        part = self.keys[self.commands_done * KEYS_PER_COMMAND : (self.commands_done + 1) * KEYS_PER_COMMAND]
        return [Key(namespace, group, int.from_bytes(each, "little")) for namespace, group, each in part]

    def take(self, trigger: CompactionTrigger) -> None:
        """Raises `IllegalCompactionStep`."""
        state = TRANSITIONS.get(self.state, {}).get(trigger)
        if state is None:
            raise IllegalCompactionStep(
                f"compaction {self.compaction_id} is {self.state} and cannot take {trigger}; it may take "
                f"{', '.join(TRANSITIONS.get(self.state, {})) or 'nothing'}"
            )
        self.state = state


class VolumeLayout(msgspec.Struct):
    """What the planner knows of how a volume's blocks lie, and of the compactions there."""

    figures: Fragmentation
    """As its agent last told."""
    cursor: int = -1
    """Row of the index after which the chains of this round are not laid out yet; -1: no round is under way."""
    settled: Fragmentation | None = None
    """The figures after the last round: another begins when they are worse than these."""
    reclaimed: Fragmentation | None = None
    """The figures after the last reclaiming, likewise."""
    round_ended: bool = False
    """And its rest has not begun."""
    rest_us: int = 0
    """Nothing is planned before."""
    rest_s: float = 0.0
    """How long the last rest was; it doubles while rounds gain nothing."""
    gained: int = 0
    """Extents that this round saved."""
    reads: int = 0
    """Blocks read from it up to `since_us`."""
    since_us: int = 0
    reads_per_s: float = 0.0
    note: str = ""
    """Why nothing is planned; empty where something is."""
    told_us: int = 0
    """When `figures` were, by the last tick before; 0: not known."""


class SavedCompactions(msgspec.Struct):
    """`CompactionTable` in a checkpoint."""

    open: list[Compaction] = []
    finished: list[Compaction] = []
    counts: dict[CompactionState, int] = {}
    moved_bytes: int = 0
    freed_bytes: int = 0
    layouts: dict[str, VolumeLayout] = {}


@dataclass(slots=True)
class CompactionTable:
    """Open compactions by volume, one on each at most, the last ended ones, and what is known of volumes."""

    open: dict[str, Compaction] = field(default_factory=dict)
    finished: deque[Compaction] = field(default_factory=lambda: deque(maxlen=FINISHED_KEPT_MAX))
    counts: Counter[CompactionState] = field(default_factory=Counter)
    """Ended ones, by how."""
    moved_bytes: int = 0
    freed_bytes: int = 0
    layouts: dict[str, VolumeLayout] = field(default_factory=dict)

    def learn(self, volume: str, figures: Fragmentation, now_us: int) -> None:
        """An agent told how a volume's blocks lie."""
        layout = self.layouts.get(volume)
        if layout is None:
            self.layouts[volume] = VolumeLayout(figures, told_us=now_us)
        else:
            layout.figures, layout.told_us = figures, now_us

    def add(self, compaction: Compaction) -> None:
        """A planned one; or, in the state `dry`, one that ended with that."""
        assert compaction.volume not in self.open, f"{compaction.volume} is being compacted already"
        if compaction.is_open:
            self.open[compaction.volume] = compaction
        else:
            self._end(compaction)

    def step(self, step: CompactionStep, now_us: int) -> Compaction:
        """Advance one. Raises `IllegalCompactionStep`, also where it is not open, and changes nothing then."""
        compaction = next((each for each in self.open.values() if each.compaction_id == step.compaction), None)
        if compaction is None:
            raise IllegalCompactionStep(f"compaction {step.compaction} is not open and cannot take {step.trigger}")
        trigger = CompactionTrigger(step.trigger)
        compaction.take(trigger)
        compaction.changed_us = now_us
        compaction.note = step.reason or compaction.note
        if trigger is CompactionTrigger.ADVANCE:
            self._count(compaction, step, now_us)
        if not compaction.is_open:
            del self.open[compaction.volume]
            self._end(compaction)
            layout = self.layouts.get(compaction.volume)
            if layout is not None and trigger is CompactionTrigger.ABORT:
                layout.rest_us = max(layout.rest_us, now_us + round(ABORTED_REST_S * 1e6))
        return compaction

    def abort(self, why: str, now_us: int, compactions: Sequence[Compaction]) -> None:
        for each in compactions:
            self.step(CompactionStep(each.compaction_id, str(CompactionTrigger.ABORT), why), now_us)

    def was_aborted(self, compaction_id: str) -> bool:
        """One that ended so lately."""
        ended = (each for each in self.finished if each.compaction_id == compaction_id)
        return any(each.state is CompactionState.ABORTED for each in ended)

    def forget(self, volume: str) -> None:
        """A volume is unregistered."""
        self.layouts.pop(volume, None)

    def _count(self, compaction: Compaction, step: CompactionStep, now_us: int) -> None:
        compaction.commands_done += 1
        compaction.moved_blocks += step.moved_blocks
        compaction.moved_bytes += step.moved_bytes
        compaction.freed_bytes += step.freed_bytes
        compaction.extents_before += step.extents_before
        compaction.extents_after += step.extents_after
        compaction.seconds += step.seconds
        self.moved_bytes += step.moved_bytes
        self.freed_bytes += step.freed_bytes
        if step.fragmentation is not None:
            compaction.after = step.fragmentation
            self.learn(compaction.volume, step.fragmentation, now_us)
        layout = self.layouts.get(compaction.volume)
        if layout is not None:
            layout.gained += max(0, step.extents_before - step.extents_after)

    def _end(self, compaction: Compaction) -> None:
        compaction.keys = []
        self.finished.append(compaction)
        self.counts[compaction.state] += 1
        layout = self.layouts.get(compaction.volume)
        if layout is None or compaction.state is CompactionState.ABORTED:
            return
        if compaction.kind is CompactionKind.RECLAIM:
            layout.reclaimed = layout.figures
        elif layout.cursor < 0:
            layout.settled, layout.round_ended = layout.figures, True

    def saved(self) -> SavedCompactions:
        return SavedCompactions(
            list(self.open.values()),
            list(self.finished),
            dict(self.counts),
            self.moved_bytes,
            self.freed_bytes,
            self.layouts,
        )

    def restore(self, saved: SavedCompactions) -> None:
        self.open = {each.volume: each for each in saved.open}
        self.finished.extend(saved.finished)
        self.counts.update(saved.counts)
        self.moved_bytes, self.freed_bytes = saved.moved_bytes, saved.freed_bytes
        self.layouts = dict(saved.layouts)

    def described(self) -> list[Any]:
        """For a digest: no row numbers. Empty where nothing was ever known."""
        if not self.layouts and not self.finished:
            return []
        saved = self.saved()
        layouts = [[volume, msgspec.structs.replace(each, cursor=0)] for volume, each in sorted(saved.layouts.items())]
        return [saved.open, saved.finished, sorted(saved.counts.items()), saved.moved_bytes, saved.freed_bytes, layouts]


def keys_to_save(keys: Sequence[Key]) -> list[tuple[int, int, bytes]]:
    """MessagePack has no integers of 128 bits."""
    return [(key.namespace_id, key.group, key.sequence_hash.to_bytes(16, "little")) for key in keys]


def diagram() -> str:
    """For the documentation."""
    return state_diagram(CompactionState.PLANNED, TRANSITIONS)
