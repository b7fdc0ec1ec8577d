"""The life of a replay, as a table. Pure."""

from __future__ import annotations

from enum import StrEnum

from advisor.errors import ActionRefused
from advisor.replay_views import ReplayState, ReplayView


class ReplayTrigger(StrEnum):
    BEGIN = "begin"
    FINISH = "finish"
    FAIL = "fail"
    CANCEL = "cancel"


TRANSITIONS: dict[ReplayState, dict[ReplayTrigger, ReplayState]] = {
    ReplayState.QUEUED: {
        ReplayTrigger.BEGIN: ReplayState.RUNNING,
        ReplayTrigger.FAIL: ReplayState.FAILED,
        ReplayTrigger.CANCEL: ReplayState.CANCELLED,
    },
    ReplayState.RUNNING: {
        ReplayTrigger.FINISH: ReplayState.DONE,
        ReplayTrigger.FAIL: ReplayState.FAILED,
        ReplayTrigger.CANCEL: ReplayState.CANCELLED,
    },
}
"""States that are not here are the last."""


class IllegalReplayStep(ActionRefused):
    """A replay that has ended takes no more."""


def is_open(replay: ReplayView) -> bool:
    return replay.state in TRANSITIONS


def stepped(replay: ReplayView, trigger: ReplayTrigger, now_us: int, note: str = "") -> ReplayView:
    """The replay after `trigger`. Raises `IllegalReplayStep`."""
    allowed = TRANSITIONS.get(replay.state, {})
    if trigger not in allowed:
        raise IllegalReplayStep(
            f"replay {replay.id} is {replay.state} and cannot take {trigger}; it may take"
            f" {', '.join(allowed) or 'nothing'}"
        )
    state = allowed[trigger]
    moment = "started_us" if state is ReplayState.RUNNING else "ended_us"
    return replay.model_copy(update={"state": state, moment: now_us, "note": note or replay.note})
