"""The move's state table: one block's journey between volumes (ARCHITECTURE.md, section 7). Pure.

Each trigger is a log entry. `switch` is logged before the command that frees the source is sent, so that a block
missing from its source after a crash is explained by the log.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from advisor.errors import AdvisorError
from advisor.index import Key
from advisor.state_diagram import state_diagram


class MoveKind(StrEnum):
    PROMOTE = "promote"
    """Copy to a faster volume; the slower copy stays."""
    DEMOTE = "demote"
    """Copy to a slower volume, or from one that is drained to any, then free the source."""
    DROP = "drop"
    """Free the fast copy after reading and checking the slower one; of a drained volume, after any other."""
    DELETE = "delete"
    """Free the last copy: the slowest volume is past its high watermark. Or any copy, where a person orders it."""


class MoveState(StrEnum):
    PLANNED = "planned"
    COPYING = "copying"
    VERIFIED = "verified"
    SWITCHED = "switched"
    KEPT = "kept"
    FREED = "freed"
    ABORTED = "aborted"


class Trigger(StrEnum):
    BEGIN = "begin"
    VERIFY = "verify"
    SWITCH = "switch"
    KEEP = "keep"
    FREE = "free"
    ABORT = "abort"


_COPY_AND_FREE: dict[MoveState, dict[Trigger, MoveState]] = {
    MoveState.PLANNED: {Trigger.BEGIN: MoveState.COPYING, Trigger.ABORT: MoveState.ABORTED},
    MoveState.COPYING: {Trigger.VERIFY: MoveState.VERIFIED, Trigger.ABORT: MoveState.ABORTED},
    MoveState.VERIFIED: {Trigger.SWITCH: MoveState.SWITCHED, Trigger.ABORT: MoveState.ABORTED},
    MoveState.SWITCHED: {Trigger.FREE: MoveState.FREED, Trigger.ABORT: MoveState.ABORTED},
}

TRANSITIONS: dict[MoveKind, dict[MoveState, dict[Trigger, MoveState]]] = {
    MoveKind.PROMOTE: {
        **_COPY_AND_FREE,
        MoveState.SWITCHED: {Trigger.KEEP: MoveState.KEPT},
    },
    MoveKind.DEMOTE: _COPY_AND_FREE,
    MoveKind.DROP: {
        MoveState.PLANNED: {Trigger.VERIFY: MoveState.VERIFIED, Trigger.ABORT: MoveState.ABORTED},
        MoveState.VERIFIED: {Trigger.SWITCH: MoveState.SWITCHED, Trigger.ABORT: MoveState.ABORTED},
        MoveState.SWITCHED: {Trigger.FREE: MoveState.FREED, Trigger.ABORT: MoveState.ABORTED},
    },
    MoveKind.DELETE: {
        MoveState.PLANNED: {Trigger.SWITCH: MoveState.SWITCHED, Trigger.ABORT: MoveState.ABORTED},
        MoveState.SWITCHED: {Trigger.FREE: MoveState.FREED, Trigger.ABORT: MoveState.ABORTED},
    },
}
"""States without an entry are final."""

OPEN_STATES = frozenset(state for table in TRANSITIONS.values() for state in table)
"""States that a move has not ended in."""

FREES_SOURCE = frozenset({MoveKind.DEMOTE, MoveKind.DROP, MoveKind.DELETE})

CANCELLED_IN = frozenset({MoveState.PLANNED, MoveState.COPYING, MoveState.VERIFIED})
"""States that a move can be cancelled in: past the switch its source is being freed."""

FINISHED_KEPT_MAX = 512
"""Finished moves that stay in the state, to be shown; as many that a dry run planned."""


class IllegalMove(AdvisorError):
    """A trigger that the table does not allow; the move is as it was."""


@dataclass(slots=True)
class Move:
    """One move. `target` is empty for a delete; for a drop it is the volume whose copy is checked."""

    move_id: str
    kind: MoveKind
    key: Key
    source: str
    target: str
    block_bytes: int
    reason: str
    planned_us: int
    changed_us: int
    state: MoveState = MoveState.PLANNED
    note: str = ""
    deletion: str = ""
    """The deletion that ordered it; empty where the planner wanted it."""

    @property
    def triggers(self) -> frozenset[Trigger]:
        """What it may take now."""
        return frozenset(TRANSITIONS[self.kind].get(self.state, {}))

    def next_state(self, trigger: Trigger) -> MoveState:
        """Raises `IllegalMove`."""
        state = TRANSITIONS[self.kind].get(self.state, {}).get(trigger)
        if state is None:
            raise IllegalMove(
                f"move {self.move_id} ({self.kind}) is {self.state} and cannot take {trigger}; "
                f"it may take {', '.join(TRANSITIONS[self.kind].get(self.state, {})) or 'nothing'}"
            )
        return state

    @property
    def is_open(self) -> bool:
        return self.state in TRANSITIONS[self.kind]

    @property
    def occupies_target(self) -> bool:
        """Whether it needs a slot on its target that may not be there yet."""
        return self.kind in (MoveKind.PROMOTE, MoveKind.DEMOTE) and self.state in (
            MoveState.PLANNED,
            MoveState.COPYING,
            MoveState.VERIFIED,
        )


class MoveTable:
    """Open moves by id, at most one a block, the last finished ones, and those that a dry run planned."""

    def __init__(self) -> None:
        self.open: dict[str, Move] = {}
        self.finished: deque[Move] = deque(maxlen=FINISHED_KEPT_MAX)
        self.counts: Counter[tuple[MoveKind, MoveState]] = Counter()
        self.moved_bytes = 0
        self.dry: deque[Move] = deque(maxlen=FINISHED_KEPT_MAX)
        """Planned, and never carried out."""
        self.dry_total = 0
        self._by_key: dict[Key, Move] = {}

    def of(self, key: Key) -> Move | None:
        """The open move of a block."""
        return self._by_key.get(key)

    def add(self, moves: Iterable[Move]) -> None:
        for move in moves:
            assert move.key not in self._by_key, f"{move.key} has an open move already"
            self.open[move.move_id] = move
            self._by_key[move.key] = move

    def add_dry(self, moves: Iterable[Move]) -> None:
        for move in moves:
            self.dry.append(move)
            self.dry_total += 1

    def planned_at(self, position: int, *, dry: bool) -> list[Move]:
        """What was planned at `position` and is open still; of a dry run all that is kept."""
        known = self.dry if dry else self.open.values()
        return [move for move in known if move.move_id.startswith(f"{position}-")]

    def last_ended(self, move_id: str) -> Move | None:
        """Of the finished moves that are kept."""
        return next((move for move in reversed(self.finished) if move.move_id == move_id), None)

    def was_aborted(self, move_id: str) -> bool:
        """Of the finished moves that are kept."""
        ended = self.last_ended(move_id)
        return ended is not None and ended.state is MoveState.ABORTED

    def step(self, move_id: str, trigger: Trigger, now_us: int, note: str = "") -> Move:
        """Advance one move; raises `IllegalMove` (also for a move that is not open) and changes nothing then."""
        move = self.open.get(move_id)
        if move is None:
            raise IllegalMove(f"move {move_id} is not open and cannot take {trigger}")
        move.state = move.next_state(trigger)
        move.changed_us = now_us
        if note:
            move.note = note
        if not move.is_open:
            del self.open[move_id]
            del self._by_key[move.key]
            self.finished.append(move)
            self.counts[move.kind, move.state] += 1
            if move.kind in (MoveKind.PROMOTE, MoveKind.DEMOTE) and move.state is not MoveState.ABORTED:
                self.moved_bytes += move.block_bytes
        return move


def diagram() -> str:
    """The table as Mermaid state diagrams, for the documentation."""
    parts = []
    for kind, table in TRANSITIONS.items():
        parts.append(f"### {kind}\n\n{state_diagram(MoveState.PLANNED, table)}")
    return "\n".join(parts)
