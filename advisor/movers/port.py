"""The mover's port: what the advisor asks of whoever moves bytes between volumes. Pure.

A move takes one or two commands: `copy` (or `check`, where a copy is there already), then `free`. The step between
them is logged before the second is sent, so whatever a mover answers, a source is freed on a verified copy alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from advisor.errors import AdvisorError
from advisor.moves import Move, MoveKind
from storage_agent.port import AgentStat, BlockKey, CommandOutcome, Result


class Phase(StrEnum):
    COPY = "copy"
    """Copy from source to target, make durable, read back and verify."""
    CHECK = "check"
    """Read and verify the copy that `target` should hold; where it is none, copy it there."""
    FREE = "free"
    """Free the copy on source."""


GOOD: dict[Phase, frozenset[Result]] = {
    Phase.COPY: frozenset({Result.COPIED, Result.PRESENT}),
    Phase.CHECK: frozenset({Result.COPIED, Result.PRESENT}),
    # A block that is gone already was freed by this command before a crash.
    Phase.FREE: frozenset({Result.DELETED, Result.MISS}),
}
"""Answers on a block after which its move goes on; any other one aborts it."""


class MoveBlock(msgspec.Struct, frozen=True):
    """One block of a command, and why its move was planned."""

    key: BlockKey
    block_bytes: int
    reason: str = ""


class MoveCommand(msgspec.Struct, frozen=True):
    """What is to be done now, of moves of one kind on one way. Asked again with one `command_id` it is one command.

    `term`: of the advisor that asks; whoever has heard of a higher one refuses.
    """

    command_id: str
    term: int
    kind: MoveKind
    phase: Phase
    source: str
    target: str
    """Empty where a last copy is freed."""
    blocks: tuple[MoveBlock, ...]

    @property
    def keys(self) -> list[BlockKey]:
        return [block.key for block in self.blocks]


class DeadlinePassed(AdvisorError):
    """A command was not answered by its deadline, and whoever gets it later must not carry it out."""


class MoverPort(Protocol):
    """Carries out commands for one agent's volumes. Thread-safe: several commands are asked at once."""

    def stat(self) -> AgentStat:
        """The volumes it moves blocks between, now, and the producer that their events come from.

        Raises `storage_agent.errors.AgentUnreachable`.
        """

    def carry_out(self, command: MoveCommand) -> CommandOutcome:
        """Do it, or what of it is not done yet, and answer for each block. Waits.

        Raises `AgentUnreachable` where nothing is known (the command is asked again, under the same id), and
        `CommandRefused` or `DeadlinePassed` where it will not be done: then its moves are aborted. `StaleTerm` ends the
        service.
        """

    def close(self) -> None:
        """End what waits, with `AgentUnreachable`. Idempotent."""


def command_for(phase: Phase, moves: Sequence[Move], term: int) -> MoveCommand:
    """Of moves of one kind on one way. The id is made of the phase and the moves: after a crash it is the same."""
    ids = "\n".join(sorted(move.move_id for move in moves))
    prefix = "delete" if phase is Phase.FREE else "copy"
    return MoveCommand(
        command_id=f"{prefix}-{hashlib.blake2b(ids.encode(), digest_size=12).hexdigest()}",
        term=term,
        kind=moves[0].kind,
        phase=phase,
        source=moves[0].source,
        target=moves[0].target,
        blocks=tuple(MoveBlock(BlockKey(*move.key), move.block_bytes, move.reason) for move in moves),
    )
