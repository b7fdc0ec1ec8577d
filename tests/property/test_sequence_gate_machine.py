"""A publisher, a network that loses, doubles and reorders, crashes on both sides: the gate's log stays right.

When the noise stops and asks are answered, the log ends with the producer's stream since its last snapshot, each batch
once and in order.
"""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from event_plane.sequence import Accept, Action, Arrival, AskResend, AskSnapshot, Duplicate, Lost, Refused, SequenceGate
from tests.examples import examples

PRODUCER = 1
HOLD_MAX = 5
LIMITS = {
    "hold_max": HOLD_MAX, "resend_wait_us": 10, "resend_attempts_max": 2, "snapshot_wait_us": 20,
    "snapshot_attempts_max": 2, "checksums_kept": 1_000,
}  # fmt: skip
FIRST_EPOCH = 100
"""Of our own publisher; its lives are numbered from 0."""


class GateMachine(RuleBasedStateMachine):
    """`sent` has an item a batch of the present life: whether it begins a snapshot."""

    foreign: ClassVar[bool]

    def __init__(self) -> None:
        super().__init__()
        self.gate = SequenceGate(**LIMITS)
        self.now_us = 0
        self.life = 0
        self.sent: list[bool] = []
        self.lives: list[int] = []
        self.asked: AskResend | None = None
        self.snapshot_asked: AskSnapshot | None = None
        self.log: list[Accept | Lost] = []
        self.unprovable: set[tuple[int, int]] = set()
        """Epoch and sequence after which another life may have gone on unseen, and nothing will tell any more."""

    def arrival(self, life: int, sequence: int, begins: bool = False) -> Arrival:
        epoch = None if self.foreign else life + FIRST_EPOCH
        return Arrival(PRODUCER, epoch, sequence, 1_000_000 * life + sequence, begins_snapshot=begins)

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Accept() | Lost():
                    self.log.append(action)
                case AskResend():
                    assert action.producer == PRODUCER
                    assert action.from_sequence >= 0
                    self.asked = action
                case AskSnapshot():
                    assert not self.foreign
                    self.snapshot_asked = action
                case Duplicate() | Refused():
                    pass

    def offer(self, life: int, sequence: int, begins: bool = False) -> None:
        self.take(self.gate.offer(self.arrival(life, sequence, begins), self.now_us))

    def offer_sent(self, sequence: int) -> None:
        self.offer(self.life, sequence, self.sent[sequence])

    # -- the publisher and the network

    @rule(count=st.integers(1, 8), kept=st.lists(st.booleans(), min_size=8, max_size=8))
    def publish(self, count: int, kept: list[bool]) -> None:
        for i in range(count):
            self.sent.append(False)
            if kept[i]:
                self.offer_sent(len(self.sent) - 1)

    @precondition(lambda self: not self.foreign)
    @rule(kept=st.lists(st.booleans(), min_size=3, max_size=3))
    def publish_a_snapshot(self, kept: list[bool]) -> None:
        self.snapshot_asked = None
        for begins, arrives in zip((True, False, False), kept, strict=True):
            self.sent.append(begins)
            if arrives:
                self.offer_sent(len(self.sent) - 1)

    @precondition(lambda self: not self.foreign and self.sent)
    @rule()
    def beat(self) -> None:
        epoch = self.life + FIRST_EPOCH
        self.take(self.gate.heartbeat(PRODUCER, epoch, len(self.sent) - 1, self.now_us))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def deliver_an_old_one(self, data: st.DataObject) -> None:
        self.offer_sent(data.draw(st.integers(0, len(self.sent) - 1)))

    @precondition(lambda self: self.lives and not self.foreign and self.sent)
    @rule(data=st.data())
    def deliver_one_of_a_closed_life(self, data: st.DataObject) -> None:
        self.offer_sent(0)
        before = len(self.log)
        life = data.draw(st.integers(0, len(self.lives) - 1))
        if any(each.epoch == life + FIRST_EPOCH for each in self.log):
            self.offer(life, data.draw(st.integers(0, self.lives[life])))
            assert len(self.log) == before

    @precondition(lambda self: self.asked is not None)
    @rule(buffered=st.integers(0, 12), truncated=st.integers(0, 3), ends=st.booleans())
    def serve_the_resend(self, buffered: int, truncated: int, ends: bool) -> None:
        assert self.asked is not None
        start = max(self.asked.from_sequence, len(self.sent) - buffered)
        self.asked = None
        for sequence in range(start, len(self.sent) - truncated):
            self.offer_sent(sequence)
        if ends:
            unproven = self.unproven()
            self.take(self.gate.resend_ended(PRODUCER, self.now_us))
            if self.unproven() != unproven:
                self.unprovable |= unproven

    def unproven(self) -> set[tuple[int, int]]:
        """Where the gate knows that it went on unanswered."""
        return {(s.epoch, s.unproven) for s in self.gate.export() if s.epoch is not None and s.unproven is not None}

    @rule(passed_us=st.integers(0, 25))
    def wait(self, passed_us: int) -> None:
        self.now_us += passed_us
        self.take(self.gate.tick(self.now_us))

    @rule()
    def restart_publisher(self) -> None:
        self.lives.append(len(self.sent))
        self.life += 1
        self.sent = []
        self.asked = self.snapshot_asked = None
        # Its end breaks the connection, which the transport tells when it stands again.
        self.reconnect()

    # -- the subscriber

    @rule()
    def reconnect(self) -> None:
        self.take(self.gate.connected(PRODUCER, self.now_us))

    @rule()
    def probe(self) -> None:
        self.take(self.gate.probe(PRODUCER, self.now_us))

    @rule(resends=st.booleans())
    def cannot_ask(self, resends: bool) -> None:
        if resends:
            self.take(self.gate.cannot_resend(PRODUCER, self.now_us))
        elif self.snapshot_asked is not None:
            self.take(self.gate.give_up(PRODUCER, self.now_us))

    @rule(exported=st.booleans())
    def restart_gate(self, exported: bool) -> None:
        cursor = self.gate.cursor(PRODUCER)
        states, unproven = self.gate.export(), self.unproven()
        self.gate = SequenceGate(**LIMITS)
        self.asked = self.snapshot_asked = None
        if exported:
            self.gate.load(states)
        else:
            # The log does not say that nobody answered.
            self.unprovable |= unproven
            for entry in self.log:
                self.restore(entry)
        if cursor is not None:
            assert self.gate.cursor(PRODUCER) == cursor
        self.reconnect()

    def restore(self, entry: Accept | Lost) -> None:
        if isinstance(entry, Accept):
            arrival = entry.arrival
            self.gate.restore(PRODUCER, entry.epoch, arrival.sequence, arrival.checksum, self.foreign)
        else:
            self.gate.restore(PRODUCER, entry.epoch, entry.from_sequence, None, self.foreign, entry.through)

    # -- what holds

    @invariant()
    def log_covers_each_epoch_once_and_in_order(self) -> None:
        next_sequence: dict[int, int] = defaultdict(int)
        opened: list[int] = []
        for entry in self.log:
            if isinstance(entry, Accept):
                sequence = entry.arrival.sequence
                expected = next_sequence[entry.epoch]
                assert sequence == expected or (entry.arrival.begins_snapshot and sequence > expected)
                assert entry.new_epoch == (entry.epoch not in opened)
                next_sequence[entry.epoch] = sequence + 1
                opened += [entry.epoch] * entry.new_epoch
            else:
                assert entry.from_sequence == next_sequence[entry.epoch]
                assert entry.through >= entry.from_sequence
                next_sequence[entry.epoch] = entry.through + 1
        epochs = list(dict.fromkeys(entry.epoch for entry in self.log))
        assert [entry.epoch for entry in self.log] == sorted((e.epoch for e in self.log), key=epochs.index)

    @invariant()
    def held_is_bounded(self) -> None:
        assert self.gate.waiting() <= HOLD_MAX

    @invariant()
    def nothing_is_held_for_ever(self) -> None:
        gate, now_us = deepcopy(self.gate), self.now_us
        for _ in range(6 * HOLD_MAX):
            now_us += 20
            gate.tick(now_us)
        assert gate.waiting() == 0
        assert gate.incomplete() == []

    def teardown(self) -> None:
        """The noise stops, the connection is made anew, and whatever is asked is answered."""
        before = len(self.log)
        self.take(self.gate.connected(PRODUCER, self.now_us))
        self.sent.append(False)
        self.offer_sent(len(self.sent) - 1)
        for _ in range(30):
            self.answer()
        assert (self.gate.waiting(), self.gate.incomplete()) == (0, [])
        # A foreign gap is given up when more came than may be held.
        assert self.foreign or not any(isinstance(entry, Lost) for entry in self.log[before:])
        self.log_covers_each_epoch_once_and_in_order()
        epoch = self.log[-1].epoch
        tail: list[Arrival] = []
        for entry in reversed(self.log):
            if isinstance(entry, Lost) or entry.epoch != epoch:
                break
            tail.append(entry.arrival)
            if entry.arrival.begins_snapshot:
                break
        tail = self.without_an_unseen_former_life(epoch, tail[::-1])
        expected = [self.arrival(self.life, n, begins) for n, begins in enumerate(self.sent)]
        assert tail == expected[-len(tail) :]

    def without_an_unseen_former_life(self, epoch: int, tail: list[Arrival]) -> list[Arrival]:
        """`tail` from where the last life goes on after another, if that is where nothing could tell."""
        former = [each.sequence for each in tail if each.checksum // 1_000_000 != self.life]
        unseen = former and any(epoch == e and sequence <= former[-1] for e, sequence in self.unprovable)
        return tail[len(former) :] if unseen else tail

    def answer(self) -> None:
        """One turn of a publisher that resends, ours the last 3 batches, and of a clock."""
        if self.snapshot_asked is not None:
            self.publish_whole_snapshot()
        elif self.asked is not None:
            start = max(self.asked.from_sequence, 0 if self.foreign else len(self.sent) - 3)
            self.asked = None
            for sequence in range(start, len(self.sent)):
                self.offer_sent(sequence)
            self.take(self.gate.resend_ended(PRODUCER, self.now_us))
        else:
            self.now_us += 5
            self.take(self.gate.tick(self.now_us))

    def publish_whole_snapshot(self) -> None:
        self.snapshot_asked = None
        for begins in (True, False, False):
            self.sent.append(begins)
            self.offer_sent(len(self.sent) - 1)


class OwnGateMachine(GateMachine):
    foreign = False


class ForeignGateMachine(GateMachine):
    foreign = True


TestOwnGate = OwnGateMachine.TestCase
TestOwnGate.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)
TestForeignGate = ForeignGateMachine.TestCase
TestForeignGate.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)


def overtaken_unseen(machine: ForeignGateMachine) -> None:
    """An engine restarts, cannot resend, and the first batch that comes is the one after the cursor."""
    machine.publish(3, [True, False, True] + [False] * 5)
    machine.offer_sent(1)
    machine.restart_publisher()
    machine.cannot_ask(True)
    machine.publish(4, [False, False, False, True] + [False] * 4)


def test_overtaking_restart_that_nobody_could_resend_is_told_when_asks_are_answered() -> None:
    machine = ForeignGateMachine()
    overtaken_unseen(machine)
    machine.probe()
    machine.teardown()
    assert [(entry.epoch, entry.arrival.sequence) for entry in machine.log if isinstance(entry, Accept)] == [
        *((1, sequence) for sequence in range(4)), *((2, sequence) for sequence in range(5)),
    ]  # fmt: skip


def test_overtaking_restart_that_nobody_could_resend_is_never_told_by_a_gate_that_knows_the_log_alone() -> None:
    machine = ForeignGateMachine()
    overtaken_unseen(machine)
    machine.restart_gate(exported=False)
    machine.teardown()
    assert [entry.epoch for entry in machine.log] == [1] * 5
    assert machine.unprovable == {(1, 2)}
