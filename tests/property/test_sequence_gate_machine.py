"""A publisher, a network that loses, doubles and reorders, crashes on both sides: the gate's log stays right."""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from event_plane.sequence import Accept, Action, Arrival, AskResend, Lost, SequenceGate

PRODUCER = 1
HOLD_MAX = 5
LIMITS = {"hold_max": HOLD_MAX, "resend_wait_us": 10, "resend_attempts_max": 2, "checksums_kept": 6}


class GateMachine(RuleBasedStateMachine):
    """The publisher's lives are numbered from 0; `sent` counts the batches of the present one."""

    foreign: ClassVar[bool]

    def __init__(self) -> None:
        super().__init__()
        self.gate = SequenceGate(**LIMITS)
        self.now_us = 0
        self.life = 0
        self.sent = 0
        self.lives: list[int] = []
        self.asked: AskResend | None = None
        self.log: list[Accept | Lost] = []

    def arrival(self, life: int, sequence: int) -> Arrival:
        checksum = 1_000_000 * life + sequence
        return Arrival(PRODUCER, None if self.foreign else life + 100, sequence, checksum)

    def take(self, actions: list[Action]) -> None:
        self.log += [action for action in actions if isinstance(action, Accept | Lost)]
        for action in actions:
            if isinstance(action, AskResend):
                assert action.producer == PRODUCER
                assert action.from_sequence >= 0
                self.asked = action

    def offer(self, life: int, sequence: int) -> None:
        self.take(self.gate.offer(self.arrival(life, sequence), self.now_us))

    @rule(count=st.integers(1, 8), kept=st.lists(st.booleans(), min_size=8, max_size=8))
    def publish(self, count: int, kept: list[bool]) -> None:
        for i in range(count):
            if kept[i]:
                self.offer(self.life, self.sent + i)
        self.sent += count

    @rule(data=st.data())
    def deliver_an_old_one(self, data: st.DataObject) -> None:
        if self.sent:
            self.offer(self.life, data.draw(st.integers(0, self.sent - 1)))

    @rule(data=st.data())
    def deliver_one_of_a_closed_life(self, data: st.DataObject) -> None:
        if self.lives and not self.foreign and self.sent:
            self.offer(self.life, 0)
            before = len(self.log)
            life = data.draw(st.integers(0, len(self.lives) - 1))
            if any(isinstance(each, Accept) and each.epoch == life + 100 for each in self.log):
                self.offer(life, data.draw(st.integers(0, self.lives[life])))
                assert len(self.log) == before

    @rule(buffered=st.integers(0, 12), truncated=st.integers(0, 3), ends=st.booleans())
    def serve_the_resend(self, buffered: int, truncated: int, ends: bool) -> None:
        if self.asked is None:
            return
        start = max(self.asked.from_sequence, self.sent - buffered)
        self.asked = None
        for sequence in range(start, self.sent - truncated):
            self.offer(self.life, sequence)
        if ends:
            self.take(self.gate.resend_ended(PRODUCER, self.now_us))

    @rule(passed_us=st.integers(1, 15))
    def wait(self, passed_us: int) -> None:
        self.now_us += passed_us
        self.take(self.gate.tick(self.now_us))

    @rule()
    def restart_publisher(self) -> None:
        self.lives.append(self.sent)
        self.life += 1
        self.sent = 0
        self.asked = None

    @rule()
    def restart_gate(self) -> None:
        cursor = self.gate.cursor(PRODUCER)
        self.gate = SequenceGate(**LIMITS)
        self.asked = None
        for entry in self.log:
            if isinstance(entry, Accept):
                arrival = entry.arrival
                self.gate.restore(PRODUCER, entry.epoch, arrival.sequence, arrival.checksum, self.foreign)
            else:
                self.gate.restore(PRODUCER, entry.epoch, entry.from_sequence, None, self.foreign, entry.through)
        if cursor is not None:
            assert self.gate.cursor(PRODUCER) == cursor

    @invariant()
    def log_covers_each_epoch_once_and_in_order(self) -> None:
        next_sequence: dict[int, int] = defaultdict(int)
        opened: list[int] = []
        for entry in self.log:
            if isinstance(entry, Accept):
                assert entry.arrival.sequence == next_sequence[entry.epoch]
                assert entry.new_epoch == (entry.epoch not in opened)
                next_sequence[entry.epoch] += 1
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
        for _ in range(LIMITS["resend_attempts_max"] * HOLD_MAX):
            now_us += LIMITS["resend_wait_us"]
            gate.tick(now_us)
        assert gate.waiting() == 0

    def teardown(self) -> None:
        """The noise stops and everything of the present life is offered again."""
        given_up = any(isinstance(entry, Lost) for entry in self.log)
        if self.foreign and (given_up or (self.gate.waiting() and self.life)):
            # A foreign batch that was given up has no checksum: by the fence it opens a new epoch if it comes late.
            # What is held may be of the life before: nothing tells until the present one sends that number too.
            return
        before = len(self.log)
        for sequence in range(self.sent):
            self.offer(self.life, sequence)
        if self.sent:
            assert self.gate.waiting() == 0
            cursor = self.gate.cursor(PRODUCER)
            assert cursor is not None
            assert cursor[1] == self.sent - 1
        self.log_covers_each_epoch_once_and_in_order()
        assert not any(isinstance(entry, Lost) for entry in self.log[before:])


class OwnGateMachine(GateMachine):
    foreign = False


class ForeignGateMachine(GateMachine):
    foreign = True


TestOwnGate = OwnGateMachine.TestCase
TestOwnGate.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestForeignGate = ForeignGateMachine.TestCase
TestForeignGate.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
