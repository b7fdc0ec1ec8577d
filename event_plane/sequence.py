"""The sequence gate: which arrivals go into the log, in which order, and what to ask for when some are missing.

Pure: no clock, no I/O. It holds many producers, each a stream of its own. Rules: ARCHITECTURE.md, section 5.

An arrival *stands* somewhere relative to what its producer sent before (`Standing`), and the table of its kind of
producer says what follows (`OWN_VERDICTS`, `FOREIGN_VERDICTS`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Arrival:
    """One batch as received. `epoch` None: a foreign producer, whose epochs the gate assigns.

    `checksum` is the CRC-32 of the payload as received; `item` is the caller's and is never looked at.
    """

    producer: int
    epoch: int | None
    sequence: int
    checksum: int
    item: Any = None


@dataclass(frozen=True, slots=True)
class Accept:
    """Log this one now, under `epoch`. `new_epoch`: the first accepted of its epoch."""

    arrival: Arrival
    epoch: int
    new_epoch: bool


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Seen before: changes nothing."""

    arrival: Arrival


@dataclass(frozen=True, slots=True)
class AskResend:
    """Ask the producer for everything from `from_sequence` on, inclusive.

    A foreign producer is asked from the last accepted sequence, whose checksum then tells a silent restart.
    A source that cannot resend answers with `SequenceGate.resend_ended` at once.
    """

    producer: int
    from_sequence: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Sequences `from_sequence` … `through` can never be had: log that, it clears what the producer had placed."""

    producer: int
    epoch: int
    from_sequence: int
    through: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Dropped for `reason`, to be counted."""

    arrival: Arrival
    reason: str


Action = Accept | Duplicate | AskResend | Lost | Refused


class Standing(StrEnum):
    """Where an arrival stands relative to what its producer sent before."""

    NEXT = "next"
    AHEAD = "ahead"
    """Something before it is missing."""
    HELD = "held"
    """Ahead, and held already."""
    HELD_OTHER = "held, other bytes"
    BEHIND = "behind"
    BEHIND_OTHER = "behind, other bytes or none kept"
    UNSEEN_EPOCH = "unseen epoch"
    CLOSED_EPOCH = "closed epoch"


class Verdict(StrEnum):
    ACCEPT = "accept"
    HOLD = "hold"
    DROP = "drop"
    OPEN_EPOCH = "open epoch"
    """Close the epoch before for good, then judge the arrival again as the first of its own."""
    REFUSE = "refuse"


# Our own batches say their epoch, so what lies behind the cursor in it can only be a copy.
OWN_VERDICTS: Final[dict[Standing, Verdict]] = {
    Standing.NEXT: Verdict.ACCEPT,
    Standing.AHEAD: Verdict.HOLD,
    Standing.HELD: Verdict.DROP,
    Standing.HELD_OTHER: Verdict.DROP,
    Standing.BEHIND: Verdict.DROP,
    Standing.BEHIND_OTHER: Verdict.DROP,
    Standing.UNSEEN_EPOCH: Verdict.OPEN_EPOCH,
    Standing.CLOSED_EPOCH: Verdict.REFUSE,
}

# The checksum fence: a foreign engine restarts without saying so; other bytes under a known number are how it shows.
FOREIGN_VERDICTS: Final[dict[Standing, Verdict]] = {
    Standing.NEXT: Verdict.ACCEPT,
    Standing.AHEAD: Verdict.HOLD,
    Standing.HELD: Verdict.DROP,
    Standing.HELD_OTHER: Verdict.OPEN_EPOCH,
    Standing.BEHIND: Verdict.DROP,
    Standing.BEHIND_OTHER: Verdict.OPEN_EPOCH,
    Standing.UNSEEN_EPOCH: Verdict.OPEN_EPOCH,
}

REASON_CLOSED_EPOCH: Final = "closed epoch"
REASON_EPOCH_ENDED: Final = "epoch ended while held"
REASON_KIND: Final = "producer is both foreign and our own"


@dataclass(frozen=True, slots=True)
class StreamState:
    """What the gate remembers of one producer: its cursor, closed epochs, and (sequence, checksum) pairs kept."""

    producer: int
    foreign: bool
    epoch: int | None
    last: int
    accepted: bool
    closed: list[int]
    checksums: list[tuple[int, int]]


@dataclass(slots=True)
class _Gap:
    """Open while arrivals are held. `nearest` is the lowest held; `attempts` counts the asks since it last shrank."""

    nearest: int
    attempts: int
    deadline_us: int


@dataclass(slots=True)
class _Stream:
    """One producer. `last` is the last sequence accepted or given up in `epoch`, -1 before the first."""

    producer: int
    foreign: bool
    epoch: int | None = None
    last: int = -1
    accepted: bool = False
    closed: set[int] = field(default_factory=set)
    held: dict[int, Arrival] = field(default_factory=dict)
    gap: _Gap | None = None
    checksums: OrderedDict[int, int] = field(default_factory=OrderedDict)

    def standing(self, arrival: Arrival) -> Standing:
        if self.epoch is None:
            return Standing.UNSEEN_EPOCH
        if not self.foreign and arrival.epoch != self.epoch:
            return Standing.CLOSED_EPOCH if arrival.epoch in self.closed else Standing.UNSEEN_EPOCH
        if arrival.sequence <= self.last:
            kept = self.checksums.get(arrival.sequence)
            return Standing.BEHIND if kept == arrival.checksum else Standing.BEHIND_OTHER
        if arrival.sequence in self.held:
            same = self.held[arrival.sequence].checksum == arrival.checksum
            return Standing.HELD if same else Standing.HELD_OTHER
        return Standing.NEXT if arrival.sequence == self.last + 1 else Standing.AHEAD

    def open_epoch(self, epoch: int) -> None:
        if self.epoch is not None and not self.foreign:
            self.closed.add(self.epoch)
        self.epoch = epoch
        self.last = -1
        self.accepted = False
        self.held = {}
        self.gap = None
        self.checksums = OrderedDict()


class SequenceGate:
    """Puts every producer's arrivals in order, each once; says what is missing. Not thread-safe.

    A gap holds at most `hold_max` arrivals a producer. A resend is awaited for `resend_wait_us` since the last arrival
    that it brought and asked for `resend_attempts_max` times; then what is missing is given up.
    `checksums_kept` checksums are kept for each foreign producer.
    """

    def __init__(
        self,
        *,
        hold_max: int = 4096,
        resend_wait_us: int = 1_000_000,
        resend_attempts_max: int = 3,
        checksums_kept: int = 16_384,
    ) -> None:
        if min(hold_max, resend_wait_us, resend_attempts_max, checksums_kept) < 1:
            limits = f"{hold_max=}, {resend_wait_us=}, {resend_attempts_max=}, {checksums_kept=}"
            raise ValueError(f"each limit of the gate must be at least 1: {limits}")
        self._hold_max = hold_max
        self._resend_wait_us = resend_wait_us
        self._resend_attempts_max = resend_attempts_max
        self._checksums_kept = checksums_kept
        self._streams: dict[int, _Stream] = {}

    def export(self) -> list[StreamState]:
        """What the gate remembers of each producer, without what is held: that is not in the log yet."""
        return [
            StreamState(
                s.producer, s.foreign, s.epoch, s.last, s.accepted, sorted(s.closed), list(s.checksums.items())
            )
            for s in self._streams.values()
        ]

    def load(self, states: Iterable[StreamState]) -> None:
        """Take up what `export` gave, before anything is restored or offered."""
        for state in states:
            self._streams[state.producer] = _Stream(
                state.producer,
                state.foreign,
                state.epoch,
                state.last,
                state.accepted,
                set(state.closed),
                checksums=OrderedDict(state.checksums),
            )

    def restore(
        self,
        producer: int,
        epoch: int,
        sequence: int,
        checksum: int | None,
        foreign: bool,
        through: int | None = None,
    ) -> None:
        """Take in one logged batch, in log order, before the first offer. `through` is set for a `lost` batch."""
        stream = self._streams.setdefault(producer, _Stream(producer, foreign))
        if epoch != stream.epoch:
            stream.open_epoch(epoch)
        if through is None:
            self._advance(stream, sequence, checksum)
        else:
            stream.last = through

    def offer(self, arrival: Arrival, now_us: int) -> list[Action]:
        """Judge one arrival. Accepts come in the order in which they must be logged."""
        foreign = arrival.epoch is None
        stream = self._streams.setdefault(arrival.producer, _Stream(arrival.producer, foreign))
        if stream.foreign != foreign:
            return [Refused(arrival, REASON_KIND)]
        actions: list[Action] = []
        verdicts = FOREIGN_VERDICTS if foreign else OWN_VERDICTS
        verdict = verdicts[stream.standing(arrival)]
        if verdict is Verdict.OPEN_EPOCH:
            actions += [Refused(held, REASON_EPOCH_ENDED) for held in stream.held.values()]
            stream.open_epoch((stream.epoch or 0) + 1 if arrival.epoch is None else arrival.epoch)
            verdict = verdicts[stream.standing(arrival)]
        match verdict:
            case Verdict.ACCEPT:
                stream.held[arrival.sequence] = arrival
                actions += self._release(stream, now_us)
            case Verdict.HOLD:
                actions += self._hold(stream, arrival, now_us)
            case Verdict.DROP:
                actions.append(Duplicate(arrival))
            case Verdict.REFUSE:
                actions.append(Refused(arrival, REASON_CLOSED_EPOCH))
        return actions

    def resend_ended(self, producer: int, now_us: int) -> list[Action]:
        """The publisher has sent all it holds. What is still missing is asked for again, or given up."""
        stream = self._streams.get(producer)
        return [] if stream is None or stream.gap is None else self._insist(stream, stream.gap, now_us)

    def tick(self, now_us: int) -> list[Action]:
        """Ask again for what did not come in time, or give it up and release what was held."""
        actions: list[Action] = []
        for stream in self._streams.values():
            if stream.gap is not None and now_us >= stream.gap.deadline_us:
                actions += self._insist(stream, stream.gap, now_us)
        return actions

    def cursor(self, producer: int) -> tuple[int, int] | None:
        """(epoch, last sequence accepted or given up); None before the first of the epoch."""
        stream = self._streams.get(producer)
        return None if stream is None or stream.epoch is None or stream.last < 0 else (stream.epoch, stream.last)

    def producers(self) -> list[int]:
        """Every producer seen or restored."""
        return list(self._streams)

    def waiting(self) -> int:
        """Arrivals held behind gaps, over all producers."""
        return sum(len(stream.held) for stream in self._streams.values())

    def _advance(self, stream: _Stream, sequence: int, checksum: int | None) -> None:
        stream.last = sequence
        stream.accepted = True
        if stream.foreign and checksum is not None:
            stream.checksums[sequence] = checksum
            if len(stream.checksums) > self._checksums_kept:
                stream.checksums.popitem(last=False)

    def _hold(self, stream: _Stream, arrival: Arrival, now_us: int) -> list[Action]:
        stream.held[arrival.sequence] = arrival
        if stream.gap is None:
            return [self._open_gap(stream, now_us)]
        if arrival.sequence < stream.gap.nearest:
            # The gap shrinks from above: a resend is under way that begins after the gap's start.
            stream.gap = _Gap(arrival.sequence, 1, now_us + self._resend_wait_us)
        return self._give_up(stream, stream.gap, now_us) if len(stream.held) > self._hold_max else []

    def _release(self, stream: _Stream, now_us: int) -> list[Action]:
        """Accept what follows the cursor without a hole; what then remains held is behind another gap."""
        actions: list[Action] = []
        assert stream.epoch is not None
        nearest = stream.gap.nearest if stream.gap else 0
        while (arrival := stream.held.pop(stream.last + 1, None)) is not None:
            actions.append(Accept(arrival, stream.epoch, new_epoch=not stream.accepted))
            self._advance(stream, arrival.sequence, arrival.checksum)
        if not stream.held:
            stream.gap = None
        elif stream.last < nearest:
            stream.gap = _Gap(nearest, 1, now_us + self._resend_wait_us)
        else:
            actions.append(self._open_gap(stream, now_us))
        return actions

    def _open_gap(self, stream: _Stream, now_us: int) -> AskResend:
        stream.gap = _Gap(min(stream.held), 1, now_us + self._resend_wait_us)
        return self._ask(stream)

    def _insist(self, stream: _Stream, gap: _Gap, now_us: int) -> list[Action]:
        if gap.attempts == self._resend_attempts_max:
            return self._give_up(stream, gap, now_us)
        gap.attempts += 1
        gap.deadline_us = now_us + self._resend_wait_us
        return [self._ask(stream)]

    def _ask(self, stream: _Stream) -> AskResend:
        fenced = stream.last in stream.checksums
        return AskResend(stream.producer, stream.last if fenced else stream.last + 1)

    def _give_up(self, stream: _Stream, gap: _Gap, now_us: int) -> list[Action]:
        """Declare the gap lost and release what follows it, up to the next gap."""
        assert stream.epoch is not None
        lost = Lost(stream.producer, stream.epoch, stream.last + 1, gap.nearest - 1)
        stream.last = gap.nearest - 1
        return [lost, *self._release(stream, now_us)]
