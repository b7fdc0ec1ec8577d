"""Keys begun, answered, failed, lost and begun again in any order: what is answered once is not done again."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from advisor.api.remembered import KEPT_US, TRANSITIONS, Answer, Entry, IllegalStep, Remembered, State, Trigger, Verdict
from tests.examples import examples

ENTRIES_MAX = 4
BYTES_MAX = 100
SLOTS = [bytes([number]) for number in range(7)]
ASKED = [b"this", b"that"]


class Keys(RuleBasedStateMachine):
    under_way = Bundle("under_way")

    def __init__(self) -> None:
        super().__init__()
        self.now_us = 0
        self.remembered = Remembered(entries_max=ENTRIES_MAX, bytes_max=BYTES_MAX)
        self.model: dict[bytes, tuple[bytes, int, State, Answer | None]] = {}

    @rule(target=under_way, slot=st.sampled_from(SLOTS), asked=st.sampled_from(ASKED))
    def begin(self, slot: bytes, asked: bytes) -> object:
        known = self.model.get(slot)
        begun = self.remembered.begin(slot, asked, self.now_us)
        self.forget(begun.dropped)
        if slot in self.model:
            assert known is not None
            assert begun.verdict is (
                Verdict.DIFFERENT if known[0] != asked
                else {State.UNDER_WAY: Verdict.UNDER_WAY, State.ANSWERED: Verdict.REPEATED}.get(
                    known[2], Verdict.UNKNOWN
                )
            )  # fmt: skip
            assert begun.answer == known[3]
            return multiple()
        if len(self.model) == ENTRIES_MAX:
            assert begun.verdict is Verdict.FULL
            assert all(state is State.UNDER_WAY for _, _, state, _ in self.model.values())
            return multiple()
        assert begun.verdict is Verdict.FRESH
        self.model[slot] = (asked, self.now_us, State.UNDER_WAY, None)
        return slot

    def is_under_way(self, slot: bytes) -> bool:
        return slot in self.model and self.model[slot][2] is State.UNDER_WAY

    def forget(self, dropped: list[bytes]) -> None:
        for slot in dropped:
            assert self.model.pop(slot)[2] is not State.UNDER_WAY

    @rule(slot=under_way, size=st.integers(0, 60))
    def answer(self, slot: bytes, size: int) -> None:
        if not self.is_under_way(slot):
            return
        given = Answer(200, (("a", "b"),), b"x" * size)
        asked, begun_us, _, _ = self.model[slot]
        self.model[slot] = (asked, begun_us, State.ANSWERED, given)
        self.forget(self.remembered.answer(slot, given))

    @rule(slot=under_way)
    def fail(self, slot: bytes) -> None:
        if self.is_under_way(slot):
            self.remembered.fail(slot)
            del self.model[slot]

    @rule(slot=under_way)
    def lose(self, slot: bytes) -> None:
        if self.is_under_way(slot):
            self.remembered.lose(slot)
            asked, begun_us, _, _ = self.model[slot]
            self.model[slot] = (asked, begun_us, State.UNKNOWN, None)

    @rule(passed_us=st.sampled_from([1, KEPT_US // 2, KEPT_US]))
    def wait(self, passed_us: int) -> None:
        self.now_us += passed_us

    @rule()
    def restart(self) -> None:
        kept = [
            Entry(slot, asked, begun_us, state, answer) for slot, (asked, begun_us, state, answer) in self.model.items()
        ]
        self.remembered = Remembered(kept, entries_max=ENTRIES_MAX, bytes_max=BYTES_MAX)
        for slot, (asked, begun_us, state, answer) in self.model.items():
            lost = State.UNKNOWN if state is State.UNDER_WAY else state
            self.model[slot] = (asked, begun_us, lost, answer)

    @invariant()
    def bounded_and_counted(self) -> None:
        assert len(self.remembered) == len(self.model) <= ENTRIES_MAX
        assert self.remembered.kept_bytes == sum(a.kept_bytes for _, _, _, a in self.model.values() if a) <= BYTES_MAX

    @rule(slot=st.sampled_from(SLOTS), trigger=st.sampled_from(Trigger))
    def take_what_is_not_in_the_table(self, slot: bytes, trigger: Trigger) -> None:
        entry = self.remembered.get(slot)
        if entry is None or trigger in TRANSITIONS[entry.state]:
            return
        before = entry.state
        try:
            entry.take(trigger)
        except IllegalStep:
            assert entry.state is before
        else:
            raise AssertionError(f"{before} took {trigger}")


Keys.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)
TestKeys = Keys.TestCase
