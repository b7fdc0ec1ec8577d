"""A block that peers write, walked at random: taken only whole and verified, used again only when all have ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvbm_core.errors import BlockStateError
from kvbm_core.remote_grant import GRANT_TRANSITIONS, Grant, GrantState, diagram
from tests.examples import examples

HEADS = 6
PARTS = st.tuples(st.integers(-1, HEADS), st.integers(0, HEADS + 1))


class GrantMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.grant = Grant(HEADS)
        self.verified: set[int] = set()
        self.ended: set[int] = set()
        self.was_failed = False

    def may_settle(self, first: int, count: int) -> bool:
        heads = set(range(first, first + count))
        return bool(heads) and heads <= set(range(HEADS)) - self.ended

    @rule(part=PARTS, damage=st.sampled_from(["", "", "", "head 1 is damaged"]))
    def written(self, part: tuple[int, int], damage: str) -> None:
        first, count = part
        if not self.may_settle(first, count):
            with pytest.raises(BlockStateError, match="are not awaited"):
                self.grant.written(first, count, damage)
            return
        self.grant.written(first, count, damage)
        heads = set(range(first, first + count))
        self.ended |= heads
        if damage:
            self.was_failed = True
        else:
            self.verified |= heads

    @rule(part=PARTS)
    def given_up(self, part: tuple[int, int]) -> None:
        first, count = part
        if not self.may_settle(first, count):
            with pytest.raises(BlockStateError, match="are not awaited"):
                self.grant.given_up(first, count)
            return
        self.grant.given_up(first, count)
        self.ended |= set(range(first, first + count))
        self.was_failed = True

    @rule()
    def fail(self) -> None:
        if len(self.ended) == HEADS:
            with pytest.raises(BlockStateError, match="it is over"):
                self.grant.fail("late")
            return
        self.grant.fail("late")
        self.was_failed = True

    @rule(really=st.sampled_from([False, False, False, True]))
    def cut_off(self, really: bool) -> None:
        if not really:
            return
        if len(self.ended) == HEADS:
            with pytest.raises(BlockStateError, match="it is over"):
                self.grant.cut_off()
            return
        self.grant.cut_off()
        self.ended = set(range(HEADS))
        self.was_failed = True

    @invariant()
    def state_is_what_happened(self) -> None:
        over = len(self.ended) == HEADS
        expected = {
            (False, False): GrantState.OPEN,
            (True, False): GrantState.TAKEN,
            (False, True): GrantState.DOOMED,
            (True, True): GrantState.ENDED,
        }[over, self.was_failed]
        assert self.grant.state is expected
        assert self.grant.awaited_heads == sorted(set(range(HEADS)) - self.ended)
        assert bool(self.grant.reason) == self.was_failed
        if self.grant.state is GrantState.TAKEN:
            assert self.verified == set(range(HEADS))


TestGrantMachine = GrantMachine.TestCase
TestGrantMachine.settings = settings(max_examples=examples(60), stateful_step_count=12, deadline=None)


def test_what_is_over_stays_so() -> None:
    assert [state for state, steps in GRANT_TRANSITIONS.items() if not steps] == [GrantState.TAKEN, GrantState.ENDED]


def test_the_documented_diagram_is_the_table() -> None:
    assert diagram() in (Path(__file__).parents[2] / "docs" / "kvbm.md").read_text()
