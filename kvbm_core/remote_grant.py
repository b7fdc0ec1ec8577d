"""One block of a pool's that peers may write: who has ended, and whether what they wrote may be taken. Pure.

A peer's write can arrive as long as the peer has not said that it is through, whatever became of the block meanwhile.
So the block's memory is used again only when all its heads were written or given up.
"""

from __future__ import annotations

from enum import StrEnum

from kvbm_core.errors import BlockStateError


class GrantState(StrEnum):
    OPEN = "Open"
    TAKEN = "Taken"
    """Every head is written and verified: the block may be registered."""
    DOOMED = "Doomed"
    """It will not be taken, and may be written into still."""
    ENDED = "Ended"
    """It was not taken, and nobody writes into it any more."""


class GrantTrigger(StrEnum):
    PART_VERIFIED = "part_verified"
    LAST_VERIFIED = "last_verified"
    FAIL = "fail"
    """Damaged bytes, a writer that gave up, a deadline, or the owner's drop; others have not ended."""
    LAST_FAILED = "last_failed"
    """As `FAIL`, of the last head that was waited for."""
    PART_ENDED = "part_ended"
    LAST_ENDED = "last_ended"


GRANT_TRANSITIONS: dict[GrantState, dict[GrantTrigger, GrantState]] = {
    GrantState.OPEN: {
        GrantTrigger.PART_VERIFIED: GrantState.OPEN,
        GrantTrigger.LAST_VERIFIED: GrantState.TAKEN,
        GrantTrigger.FAIL: GrantState.DOOMED,
        GrantTrigger.LAST_FAILED: GrantState.ENDED,
    },
    GrantState.DOOMED: {
        GrantTrigger.FAIL: GrantState.DOOMED,
        GrantTrigger.LAST_FAILED: GrantState.ENDED,
        GrantTrigger.PART_ENDED: GrantState.DOOMED,
        GrantTrigger.LAST_ENDED: GrantState.ENDED,
    },
    GrantState.TAKEN: {},
    GrantState.ENDED: {},
}


def diagram() -> str:
    """The table as a Mermaid state diagram, as docs/kvbm.md shows it."""
    lines = ["stateDiagram-v2", f"    [*] --> {GrantState.OPEN}"]
    for state, steps in GRANT_TRANSITIONS.items():
        lines += [f"    {state} --> {target}: {trigger}" for trigger, target in steps.items()]
        if not steps:
            lines.append(f"    {state} --> [*]")
    return "\n".join(lines) + "\n"


class Grant:
    """Of a block with `heads` heads, each of which one peer writes. `reason`: why it is not taken, once that is known.

    Every step raises `BlockStateError`, and changes nothing, where the table has no such step.
    """

    def __init__(self, heads: int) -> None:
        self.heads = heads
        self.state = GrantState.OPEN
        self.reason = ""
        self._awaited = set(range(heads))

    @property
    def awaited_heads(self) -> list[int]:
        """Those that may be written still."""
        return sorted(self._awaited)

    def written(self, first: int, count: int, damage: str) -> None:
        """A peer says that its heads lie there; `damage` is what is wrong with them, or ''."""
        if damage:
            self._settle(first, count, GrantTrigger.FAIL, GrantTrigger.LAST_FAILED, damage)
        elif self.state is GrantState.DOOMED:
            self._settle(first, count, GrantTrigger.PART_ENDED, GrantTrigger.LAST_ENDED)
        else:
            self._settle(first, count, GrantTrigger.PART_VERIFIED, GrantTrigger.LAST_VERIFIED)

    def given_up(self, first: int, count: int) -> None:
        """A peer will not write its heads."""
        self._settle(first, count, GrantTrigger.FAIL, GrantTrigger.LAST_FAILED, "a writer gave it up")

    def cut_off(self) -> None:
        """Nobody can write any more: what is awaited does not come."""
        self._step(GrantTrigger.LAST_FAILED)
        self._awaited.clear()
        self.reason = self.reason or "its writers were cut off"

    def fail(self, reason: str) -> None:
        """It is not wanted any more: its time is over, or the owner dropped it."""
        self._step(GrantTrigger.FAIL)
        self.reason = self.reason or reason

    def check_awaited(self, first: int, count: int) -> None:
        """Raises `BlockStateError` unless all these heads may be written still."""
        if not 1 <= count <= self.heads or not set(range(first, first + count)) <= self._awaited:
            raise BlockStateError(
                f"heads {first} to {first + count - 1} of {self.heads} are not awaited, {self.awaited_heads} are: "
                "let one peer write each head, once"
            )

    def _settle(self, first: int, count: int, part: GrantTrigger, last: GrantTrigger, reason: str = "") -> None:
        self.check_awaited(first, count)
        heads = set(range(first, first + count))
        self._step(last if heads == self._awaited else part)
        self._awaited -= heads
        self.reason = self.reason or reason

    def _step(self, trigger: GrantTrigger) -> None:
        allowed = GRANT_TRANSITIONS[self.state]
        if trigger not in allowed:
            raise BlockStateError(f"a block whose grant is {self.state} cannot take {trigger}: it is over")
        self.state = allowed[trigger]
