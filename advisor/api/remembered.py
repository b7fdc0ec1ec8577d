"""Writes that were asked for under an Idempotency-Key, and what was answered. Pure: time is a parameter."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

KEPT_US = 24 * 3_600 * 1_000_000
ENTRIES_MAX = 10_000
BYTES_MAX = 64 << 20
"""Of all answers kept. What was answered longest ago goes first."""


class State(StrEnum):
    ABSENT = "absent"
    UNDER_WAY = "under way"
    ANSWERED = "answered"
    UNKNOWN = "unknown"
    """The service or the connection ended meanwhile, or the answer was too large to keep."""


class Trigger(StrEnum):
    BEGIN = "begin"
    ANSWER = "answer"
    FAIL = "fail"
    """It was not done: the key may be used again."""
    LOSE = "lose"
    DROP = "drop"
    """For its age, or to make room."""


TRANSITIONS: dict[State, dict[Trigger, State]] = {
    State.ABSENT: {Trigger.BEGIN: State.UNDER_WAY},
    State.UNDER_WAY: {
        Trigger.ANSWER: State.ANSWERED,
        Trigger.FAIL: State.ABSENT,
        Trigger.LOSE: State.UNKNOWN,
    },
    State.ANSWERED: {Trigger.DROP: State.ABSENT},
    State.UNKNOWN: {Trigger.DROP: State.ABSENT},
}


class IllegalStep(ValueError):
    """A trigger that an entry does not take in its state. Nothing was changed."""


class Answer(NamedTuple):
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @property
    def kept_bytes(self) -> int:
        return len(self.body) + sum(len(name) + len(value) for name, value in self.headers)


@dataclass(slots=True)
class Entry:
    """One key of one identity. `slot` and `fingerprint` are digests: of the key, and of what was asked under it."""

    slot: bytes
    fingerprint: bytes
    begun_us: int
    state: State = State.ABSENT
    answer: Answer | None = None

    def take(self, trigger: Trigger) -> None:
        """Raises `IllegalStep`."""
        after = TRANSITIONS[self.state].get(trigger)
        if after is None:
            raise IllegalStep(f"an entry that is {self.state} does not take {trigger}")
        self.state = after


class Verdict(StrEnum):
    FRESH = "fresh"
    """Nobody asked under this key: do it, then `answer`, `fail` or `lose`."""
    REPEATED = "repeated"
    DIFFERENT = "different"
    """The key stands for another request."""
    UNDER_WAY = "under way"
    UNKNOWN = "unknown"
    FULL = "full"
    """All places are taken by requests under way."""


class Begun(NamedTuple):
    verdict: Verdict
    answer: Answer | None
    """Of `REPEATED`."""
    dropped: list[bytes]
    """Slots that went to make room, or for their age."""


class Remembered:
    """At most `ENTRIES_MAX` entries, oldest first, and `BYTES_MAX` of answers."""

    def __init__(
        self, entries: Iterable[Entry] = (), *, entries_max: int = ENTRIES_MAX, bytes_max: int = BYTES_MAX
    ) -> None:
        """`entries`: kept from before, oldest first. Those under way then are of unknown end now."""
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._entries_max = entries_max
        self._bytes_max = bytes_max
        self.kept_bytes = 0
        for entry in entries:
            if entry.state is State.UNDER_WAY:
                entry.take(Trigger.LOSE)
            self._entries[entry.slot] = entry
            self.kept_bytes += _size(entry)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, slot: bytes) -> Entry | None:
        return self._entries.get(slot)

    def begin(self, slot: bytes, fingerprint: bytes, now_us: int) -> Begun:
        """Whether to do what is asked under `slot`; if so it is under way from here on."""
        dropped = self._drop_aged(now_us)
        entry = self._entries.get(slot)
        if entry is not None:
            return Begun(self._known(entry, fingerprint), entry.answer, dropped)
        dropped += self._drop_for(entries=1)
        if len(self._entries) >= self._entries_max:
            return Begun(Verdict.FULL, None, dropped)
        entry = Entry(slot, fingerprint, now_us)
        entry.take(Trigger.BEGIN)
        self._entries[slot] = entry
        return Begun(Verdict.FRESH, None, dropped)

    def answer(self, slot: bytes, answer: Answer) -> list[bytes]:
        """What was answered to a request under way. Returns the slots that went to make room for it."""
        entry = self._entries[slot]
        entry.take(Trigger.ANSWER)
        entry.answer = answer
        self.kept_bytes += _size(entry)
        return self._drop_for(entries=0)

    def fail(self, slot: bytes) -> None:
        self._entries[slot].take(Trigger.FAIL)
        del self._entries[slot]

    def lose(self, slot: bytes) -> None:
        self._entries[slot].take(Trigger.LOSE)

    @staticmethod
    def _known(entry: Entry, fingerprint: bytes) -> Verdict:
        if entry.fingerprint != fingerprint:
            return Verdict.DIFFERENT
        if entry.state is State.UNDER_WAY:
            return Verdict.UNDER_WAY
        return Verdict.REPEATED if entry.state is State.ANSWERED else Verdict.UNKNOWN

    def _drop_aged(self, now_us: int) -> list[bytes]:
        aged = []
        for slot, entry in self._entries.items():
            if now_us - entry.begun_us < KEPT_US:
                break
            if entry.state is not State.UNDER_WAY:
                aged.append(slot)
        return self._drop(aged)

    def _drop_for(self, *, entries: int) -> list[bytes]:
        """Make room for so many more, and for the answers that are kept."""
        going: list[bytes] = []
        over_bytes = self.kept_bytes - self._bytes_max
        over_entries = len(self._entries) + entries - self._entries_max
        for slot, entry in self._entries.items():
            if over_bytes <= 0 and over_entries <= 0:
                break
            if entry.state is State.UNDER_WAY:
                continue
            going.append(slot)
            over_bytes -= _size(entry)
            over_entries -= 1
        return self._drop(going)

    def _drop(self, slots: list[bytes]) -> list[bytes]:
        for slot in slots:
            entry = self._entries.pop(slot)
            entry.take(Trigger.DROP)
            self.kept_bytes -= _size(entry)
        return slots


def _size(entry: Entry) -> int:
    return entry.answer.kept_bytes if entry.answer is not None else 0
