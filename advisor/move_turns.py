"""Which moves go next: a command's worth for each way between two volumes. Pure.

Each way goes at its own pace, so that a slow volume holds up no other. On one way, moves that are furthest come first:
what is copied is switched before more is copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

from advisor.moves import FREES_SOURCE, Move, MoveKind, MoveState

COMMAND_MOVES_MAX = 32
"""Moves in one command, so that an agent's reads and writes are never held up by a long one."""


class Way(NamedTuple):
    """From a volume to another; `target` is empty for deletes."""

    source: str
    target: str


def next_turns(
    moves: Iterable[Move], taken: Set[str], paused: Set[str], free_slots: Mapping[str, int]
) -> dict[Way, list[Move]]:
    """For each way, the moves of its next command: of one kind, in one state, at most `COMMAND_MOVES_MAX`.

    `moves`: all that are open, oldest first. `taken`: ids of those that a command carries already. `paused`: volumes,
    or the empty name for all, whose moves are not begun; what has begun goes on. `free_slots`: by volume, those known,
    the slots that nothing lies in. A copy waits where there is none while moves are under way that free some.
    """
    moves = list(moves)
    coming = Counter(move.target for move in moves if move.occupies_target and _is_begun(move, taken))
    leaving = Counter(move.source for move in moves if move.kind in FREES_SOURCE)
    room = {volume: slots - coming[volume] for volume, slots in free_slots.items()}
    turns: dict[Way, list[Move]] = {}
    for move in sorted(moves, key=lambda each: -_ORDER[each.state]):
        if move.move_id in taken or (move.state is MoveState.PLANNED and _is_paused(move, paused)):
            continue
        turn = turns.get(Way(move.source, move.target))
        if turn is not None and not _fits(move, turn):
            continue
        if _needs_slot(move) and move.target in room:
            if room[move.target] <= 0 and leaving[move.target]:
                continue
            room[move.target] -= 1
        turns.setdefault(Way(move.source, move.target), []).append(move)
    return turns


def _fits(move: Move, turn: list[Move]) -> bool:
    return len(turn) < COMMAND_MOVES_MAX and (turn[0].kind, turn[0].state) == (move.kind, move.state)


def _is_begun(move: Move, taken: Set[str]) -> bool:
    return move.state is not MoveState.PLANNED or move.move_id in taken


def _needs_slot(move: Move) -> bool:
    return move.state is MoveState.PLANNED and move.kind in (MoveKind.PROMOTE, MoveKind.DEMOTE)


def _is_paused(move: Move, paused: Set[str]) -> bool:
    return not paused.isdisjoint(("", move.source, move.target))


_ORDER = {state: number for number, state in enumerate(MoveState)}
