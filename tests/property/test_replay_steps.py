"""A replay's life: whatever is tried, it takes the table's steps alone, and ends once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.replay_orders import ReplayOrder
from advisor.replay_steps import TRANSITIONS, IllegalReplayStep, ReplayTrigger, is_open, stepped
from advisor.replay_views import ReplayState, ReplayView

QUEUED = ReplayView(
    id="r-000000000001", state=ReplayState.QUEUED, order=ReplayOrder(recording="evening"), actor="ann", note="",
    requested_us=1, started_us=0, ended_us=0, results=0, results_wanted=1, has_report=False,
)  # fmt: skip


@given(st.lists(st.sampled_from(ReplayTrigger), max_size=8))
def test_steps_are_those_of_the_table_and_times_are_set_once(triggers: list[ReplayTrigger]) -> None:
    replay = QUEUED
    for now_us, trigger in enumerate(triggers, 10):
        allowed = TRANSITIONS.get(replay.state, {})
        if trigger not in allowed:
            with pytest.raises(IllegalReplayStep, match=f"{replay.id} is {replay.state} and cannot take {trigger}"):
                stepped(replay, trigger, now_us)
            continue
        before, replay = replay, stepped(replay, trigger, now_us, "why" if trigger is ReplayTrigger.FAIL else "")
        assert replay.state == allowed[trigger]
        assert (replay.started_us or now_us) <= now_us
        assert replay.ended_us == (0 if is_open(replay) else now_us)
        assert before.ended_us == 0
    assert is_open(replay) == (replay.ended_us == 0)


def test_every_open_state_can_be_cancelled_and_can_fail() -> None:
    for allowed in TRANSITIONS.values():
        assert allowed[ReplayTrigger.CANCEL] is ReplayState.CANCELLED
        assert allowed[ReplayTrigger.FAIL] is ReplayState.FAILED
