"""A path's queue against a plain model: order, gates, deadlines, batches at once, and one end for every transfer."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvbm_core.errors import ProgressError, TransferQueueFullError, TransferStateError
from kvbm_core.progress import NO_GATE, WHOLE_ITERATION, Gate, ModelProgress
from kvbm_core.transfer_queue import TRANSITIONS, Entry, TransferQueue, TransferState, TransferTrigger, diagram
from tests.examples import examples

ENTRIES_MAX, BATCH_ENTRIES, BATCHES_MAX, LAYERS = 12, 3, 2, 3
ENDED = {state for state, steps in TRANSITIONS.items() if not steps}


@dataclass(eq=False)
class Pushed:
    entry: Entry[int]
    state: TransferState = TransferState.QUEUED
    history: list[TransferState] = field(default_factory=list)


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue = TransferQueue[int](
            entries_max=ENTRIES_MAX, batch_entries=BATCH_ENTRIES, batches_max=BATCHES_MAX
        )
        self.progress = ModelProgress(LAYERS)
        self.now_s = 0.0
        self.pushed: list[Pushed] = []
        self.batches: list[list[Entry[int]]] = []

    def by_entry(self, entry: Entry[int]) -> Pushed:
        return self.pushed[entry.item]

    def waiting(self) -> list[Pushed]:
        return [each for each in self.pushed if each.state is TransferState.QUEUED]

    @rule(
        priority=st.integers(0, 2),
        lasts_s=st.sampled_from([inf, 1.0, 3.0]),
        ahead=st.integers(0, 1),
        layer=st.sampled_from([WHOLE_ITERATION, 0, LAYERS - 1]),
        is_gated=st.booleans(),
    )
    def a_transfer_is_asked_for(self, priority: int, lasts_s: float, ahead: int, layer: int, is_gated: bool) -> None:
        gate = Gate(self.progress.iteration + ahead, layer) if is_gated else NO_GATE
        deadline_s = self.now_s + lasts_s
        if len(self.waiting()) >= ENTRIES_MAX:
            with pytest.raises(TransferQueueFullError, match=f"takes {ENTRIES_MAX}"):
                self.queue.push(0, priority=priority, deadline_s=deadline_s, gate=gate)
            return
        entry = self.queue.push(len(self.pushed), priority=priority, deadline_s=deadline_s, gate=gate)
        self.pushed.append(Pushed(entry))

    @rule()
    def a_batch_is_taken(self) -> None:
        open_now = [each for each in self.waiting() if self.is_open(each.entry.gate)]
        expected = sorted(open_now, key=lambda each: (each.entry.priority, each.entry.order))[:BATCH_ENTRIES]
        if len(self.batches) >= BATCHES_MAX:
            expected = []
        batch = self.queue.take(self.progress)
        assert batch == [each.entry for each in expected]
        for each in expected:
            each.state = TransferState.RUNNING
        if batch:
            self.batches.append(batch)

    @precondition(lambda self: self.batches)
    @rule(number=st.integers(0, BATCHES_MAX - 1))
    def a_batch_ends(self, number: int) -> None:
        batch = self.batches.pop(number % len(self.batches))
        awaited = [entry for entry in batch if self.by_entry(entry).state is TransferState.RUNNING]
        assert self.queue.finish(batch) == awaited
        for entry in batch:
            was_running = self.by_entry(entry).state is TransferState.RUNNING
            self.by_entry(entry).state = TransferState.DONE if was_running else TransferState.SETTLED

    @precondition(lambda self: self.pushed)
    @rule(number=st.integers(0, 1_000))
    def a_transfer_is_cancelled(self, number: int) -> None:
        each = self.pushed[number % len(self.pushed)]
        ends = {TransferState.QUEUED: TransferState.CANCELLED, TransferState.RUNNING: TransferState.IN_DOUBT}
        assert self.queue.cancel(each.entry) is (each.state in ends)
        each.state = ends.get(each.state, each.state)

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        ends = {TransferState.QUEUED: TransferState.EXPIRED, TransferState.RUNNING: TransferState.IN_DOUBT}
        late = [each for each in self.pushed if each.entry.deadline_s <= self.now_s and each.state in ends]
        assert {entry.item for entry in self.queue.expire(self.now_s)} == {each.entry.item for each in late}
        for each in late:
            each.state = ends[each.state]

    @rule(what=st.sampled_from(["begin", "layer", "end"]))
    def the_model_goes_on(self, what: str) -> None:
        done = self.progress.layers_done
        steps = {
            "begin": (not self.progress.is_running, ModelProgress.began),
            "layer": (self.progress.is_running and done < LAYERS, lambda progress: progress.layer_ended(done)),
            "end": (self.progress.is_running, ModelProgress.ended),
        }
        is_allowed, step = steps[what]
        if is_allowed:
            self.progress = step(self.progress)
        else:
            with pytest.raises(ProgressError):
                step(self.progress)

    def is_open(self, gate: Gate) -> bool:
        """The rule, said another way than the queue says it."""
        if gate.iteration < self.progress.iteration:
            return True
        if gate.iteration > self.progress.iteration:
            return False
        return not self.progress.is_running or 0 <= gate.layer < self.progress.layers_done

    @invariant()
    def counts_and_states_are_the_models(self) -> None:
        states = [each.state for each in self.pushed]
        assert [each.entry.state for each in self.pushed] == states
        depth = self.queue.depth()
        assert depth.queued == states.count(TransferState.QUEUED)
        assert depth.running == states.count(TransferState.RUNNING)
        assert depth.in_doubt == states.count(TransferState.IN_DOUBT)

    @invariant()
    def no_state_is_left_once_it_is_final(self) -> None:
        for each in self.pushed:
            if not each.history or each.history[-1] is not each.state:
                assert not each.history or each.history[-1] not in ENDED
                each.history.append(each.state)

    @invariant()
    def the_next_deadline_is_the_earliest_that_counts(self) -> None:
        live = {TransferState.QUEUED, TransferState.RUNNING}
        deadlines = [each.entry.deadline_s for each in self.pushed if each.state in live]
        assert self.queue.next_deadline_s() == min(deadlines, default=inf)


QueueMachine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=35, deadline=None)
TestTransferQueue = QueueMachine.TestCase


@pytest.mark.parametrize("state", list(TransferState))
@pytest.mark.parametrize("trigger", list(TransferTrigger))
def test_a_step_that_the_table_lacks_raises_and_changes_nothing(state: TransferState, trigger: TransferTrigger) -> None:
    entry = Entry(item=0, priority=0, order=0, deadline_s=inf, gate=NO_GATE, state=state)
    if trigger in TRANSITIONS[state]:
        entry.step(trigger)
        assert entry.state is TRANSITIONS[state][trigger]
        return
    with pytest.raises(TransferStateError, match=f"a {state} transfer cannot take {trigger}"):
        entry.step(trigger)
    assert entry.state is state


def test_the_diagram_in_the_documents_is_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "kvbm.md").read_text(encoding="utf-8")
    assert f"```mermaid\n{diagram()}```" in page


def test_what_was_given_up_does_not_fill_a_queue_that_stands_still() -> None:
    queue = TransferQueue[int](entries_max=4, batch_entries=1, batches_max=1)
    queue.push(0)
    queue.take(ModelProgress(1))
    for number in range(1_000):
        queue.cancel(queue.push(number, deadline_s=1e9, gate=Gate(number % 2)))
    assert len(queue._held) < 100
    assert len(queue._open) < 100
    assert len(queue._deadlines) < 100
