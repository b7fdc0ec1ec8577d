"""The life of one request's lookup: from asking for its blocks to the load that takes them."""

from __future__ import annotations

from enum import StrEnum

from kvbm_core.errors import LookupStateError


class LookupState(StrEnum):
    LOOKING = "looking"
    """Blocks are on their way from volumes to the host."""
    FOUND = "found"
    """What can be had is in the host and held there."""
    TAKEN = "taken"
    """A load has the blocks; it lets go of them."""
    DROPPED = "dropped"
    """Nobody wants them: the request ended, or found more on the engine's side."""


class LookupTrigger(StrEnum):
    ARRIVE = "arrive"
    TAKE = "take"
    DROP = "drop"


TRANSITIONS: dict[LookupState, dict[LookupTrigger, LookupState]] = {
    LookupState.LOOKING: {
        LookupTrigger.ARRIVE: LookupState.FOUND,
        LookupTrigger.DROP: LookupState.DROPPED,
    },
    LookupState.FOUND: {
        LookupTrigger.TAKE: LookupState.TAKEN,
        LookupTrigger.DROP: LookupState.DROPPED,
    },
    LookupState.TAKEN: {},
    LookupState.DROPPED: {LookupTrigger.DROP: LookupState.DROPPED},
}


def diagram() -> str:
    """The table as a Mermaid state diagram, as docs/integrations/vllm.md shows it."""
    lines = ["stateDiagram-v2", f"    [*] --> {LookupState.LOOKING}"]
    for state, targets in TRANSITIONS.items():
        lines += [f"    {state} --> {target}: {trigger}" for trigger, target in targets.items() if target is not state]
    lines += [f"    {state} --> [*]" for state in (LookupState.TAKEN, LookupState.DROPPED)]
    return "\n".join(lines)


def next_state(state: LookupState, trigger: LookupTrigger) -> LookupState:
    """Raises `LookupStateError` for a step that the table does not have."""
    try:
        return TRANSITIONS[state][trigger]
    except KeyError:
        raise LookupStateError(f"a lookup that is {state} cannot {trigger}: ask for the blocks again") from None
