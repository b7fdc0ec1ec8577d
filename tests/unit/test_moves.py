from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.index import Key
from advisor.moves import TRANSITIONS, IllegalMove, Move, MoveKind, MoveState, MoveTable, Trigger, diagram


def move(kind: MoveKind, move_id: str = "1-0", h: int = 1) -> Move:
    return Move(move_id, kind, Key(1, 0, h), "slow", "fast", 4096, "why", 5, 5)


@given(st.sampled_from(MoveKind), st.lists(st.sampled_from(Trigger), max_size=12))
def test_any_triggers_follow_the_table_or_change_nothing(kind: MoveKind, triggers: list[Trigger]) -> None:
    table = MoveTable()
    table.add([move(kind)])
    state: MoveState | None = MoveState.PLANNED
    for trigger in triggers:
        target = TRANSITIONS[kind].get(state, {}).get(trigger) if state is not None else None
        if target is None:
            with pytest.raises(IllegalMove, match="1-0"):
                table.step("1-0", trigger, 9)
        else:
            assert table.step("1-0", trigger, 9).state is target
            state = target if target in TRANSITIONS[kind] else None
        assert ("1-0" in table.open) is (state is not None)
        assert (table.of(Key(1, 0, 1)) is not None) is (state is not None)


@pytest.mark.parametrize("kind", MoveKind)
def test_the_source_is_freed_only_after_the_switch(kind: MoveKind) -> None:
    for state, edges in TRANSITIONS[kind].items():
        if Trigger.FREE in edges:
            assert state is MoveState.SWITCHED


@pytest.mark.parametrize("kind", [MoveKind.PROMOTE, MoveKind.DEMOTE, MoveKind.DROP])
def test_a_switch_needs_a_verified_copy(kind: MoveKind) -> None:
    for state, edges in TRANSITIONS[kind].items():
        if Trigger.SWITCH in edges:
            assert state is MoveState.VERIFIED


def test_finished_copies_are_counted_in_bytes_and_aborted_ones_are_not() -> None:
    table = MoveTable()
    table.add([move(MoveKind.PROMOTE), move(MoveKind.DEMOTE, "1-1", 2)])
    for trigger in (Trigger.BEGIN, Trigger.VERIFY, Trigger.SWITCH, Trigger.KEEP):
        table.step("1-0", trigger, 9)
    table.step("1-1", Trigger.ABORT, 9, "slow is full")
    assert table.moved_bytes == 4096
    assert table.counts == {(MoveKind.PROMOTE, MoveState.KEPT): 1, (MoveKind.DEMOTE, MoveState.ABORTED): 1}
    assert table.finished[-1].note == "slow is full"


def test_the_documented_diagram_is_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "moves.md"
    assert diagram() in page.read_text(), "regenerate docs/moves.md from advisor.moves.diagram()"
