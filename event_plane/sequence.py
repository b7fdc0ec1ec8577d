"""The sequence gate: which arrivals go into the log, in which order, and what to ask for when some are missing.

Pure: no clock, no I/O. It holds many producers, each a stream of its own. Rules: ARCHITECTURE.md, section 5; the tables
in words: docs/gaps.md.

An arrival *stands* somewhere relative to what its producer sent before (`Standing`), and the table of its kind of
producer says what follows (`OWN_VERDICTS`, `FOREIGN_VERDICTS`). What is missing is a *gap*; what is tried to fill it,
and in which order, is a table too (`OWN_REMEDIES`, `FOREIGN_REMEDIES`). A foreign producer that may have been replaced
unseen stands behind a *fence* until its last known batch has come again.
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
    `begins_snapshot`: it opens our producer's list of everything it has placed, which supersedes all before it.
    `payload_bytes`: what holding it costs.
    """

    producer: int
    epoch: int | None
    sequence: int
    checksum: int
    item: Any = None
    begins_snapshot: bool = False
    payload_bytes: int = 0


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
    A source that cannot resend answers with `SequenceGate.cannot_resend` at once.
    """

    producer: int
    from_sequence: int


@dataclass(frozen=True, slots=True)
class AskSnapshot:
    """Ask our producer for a snapshot: what is missing is older than anything it can send again.

    A source that cannot ask answers with `SequenceGate.give_up` at once.
    """

    producer: int
    epoch: int


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


Action = Accept | Duplicate | AskResend | AskSnapshot | Lost | Refused


class Standing(StrEnum):
    """Where an arrival stands relative to what its producer sent before."""

    NEXT = "next"
    AHEAD = "ahead"
    """Something before it is missing."""
    SNAPSHOT_AHEAD = "ahead, and a snapshot's beginning"
    FENCED = "next or ahead, behind a fence"
    HELD = "held"
    """Ahead, and held already."""
    HELD_OTHER = "held, other bytes"
    BEHIND = "behind"
    BEHIND_OTHER = "behind, other bytes or none kept"
    LATE = "declared lost"
    UNSEEN_EPOCH = "unseen epoch"
    CLOSED_EPOCH = "closed epoch"


class Verdict(StrEnum):
    ACCEPT = "accept"
    SUPERSEDE = "supersede"
    """Accept it, and never mind what was missing or is held below it."""
    HOLD = "hold"
    DROP = "drop"
    DROP_LATE = "drop as late"
    OPEN_EPOCH = "open epoch"
    """Close the epoch before for good, then judge the arrival again as the first of its own."""
    REFUSE = "refuse"


# Our own batches say their epoch, so what lies behind the cursor in it can only be a copy.
OWN_VERDICTS: Final[dict[Standing, Verdict]] = {
    Standing.NEXT: Verdict.ACCEPT,
    Standing.AHEAD: Verdict.HOLD,
    Standing.SNAPSHOT_AHEAD: Verdict.SUPERSEDE,
    Standing.HELD: Verdict.DROP,
    Standing.HELD_OTHER: Verdict.DROP,
    Standing.BEHIND: Verdict.DROP,
    Standing.BEHIND_OTHER: Verdict.DROP,
    Standing.LATE: Verdict.DROP_LATE,
    Standing.UNSEEN_EPOCH: Verdict.OPEN_EPOCH,
    Standing.CLOSED_EPOCH: Verdict.REFUSE,
}

# The checksum fence: a foreign engine restarts without saying so; other bytes under a known number are how it shows.
FOREIGN_VERDICTS: Final[dict[Standing, Verdict]] = {
    Standing.NEXT: Verdict.ACCEPT,
    Standing.AHEAD: Verdict.HOLD,
    Standing.FENCED: Verdict.HOLD,
    Standing.HELD: Verdict.DROP,
    Standing.HELD_OTHER: Verdict.OPEN_EPOCH,
    Standing.BEHIND: Verdict.DROP,
    Standing.BEHIND_OTHER: Verdict.OPEN_EPOCH,
    Standing.LATE: Verdict.DROP_LATE,
    Standing.UNSEEN_EPOCH: Verdict.OPEN_EPOCH,
}


class Remedy(StrEnum):
    """What fills a gap."""

    RESEND = "resend"
    SNAPSHOT = "snapshot"


# What is tried when a remedy has been asked for often enough; None: what is missing is lost.
OWN_REMEDIES: Final[dict[Remedy, Remedy | None]] = {Remedy.RESEND: Remedy.SNAPSHOT, Remedy.SNAPSHOT: None}
FOREIGN_REMEDIES: Final[dict[Remedy, Remedy | None]] = {Remedy.RESEND: None}

REASON_CLOSED_EPOCH: Final = "closed epoch"
REASON_EPOCH_ENDED: Final = "epoch ended while held"
REASON_KIND: Final = "producer is both foreign and our own"
REASON_DISCONNECTED: Final = "connection lost while held"
REASON_LATE: Final = "late after loss"
REASON_SUPERSEDED: Final = "superseded by a snapshot"
REASON_CROWDED: Final = "no more room behind a gap"
REASON_PRODUCERS: Final = "too many producers"

FIRST_FOREIGN_EPOCH: Final = 1
PRODUCERS_MAX: Final = 65_536
"""Streams that a gate keeps; arrivals of more are refused."""
CLOSED_EPOCHS_MAX: Final = 16_384
"""Closed epochs that are remembered of each of our producers: a batch of an older one would open it anew."""
LOST_RANGES_MAX: Final = 64
"""Ranges declared lost that are remembered for each producer's epoch, newest last."""


@dataclass(frozen=True, slots=True)
class StreamState:
    """What the gate remembers of one producer: its cursor, closed epochs, and (sequence, checksum) pairs kept.

    `lost`: ranges of its epoch, first and last sequence, that were declared lost. `unproven`: see `_Stream.known`.
    """

    producer: int
    foreign: bool
    epoch: int | None
    last: int
    accepted: bool
    closed: list[int]
    checksums: list[tuple[int, int]]
    lost: list[tuple[int, int]] = field(default_factory=list)
    unproven: int | None = None


@dataclass(slots=True)
class _Gap:
    """Open while something is missing below `nearest`: the lowest held, or one past the last that was announced.

    `attempts` counts the asks for `remedy` since the gap last shrank.
    """

    nearest: int
    deadline_us: int
    remedy: Remedy = Remedy.RESEND
    attempts: int = 1


@dataclass(slots=True)
class _Fence:
    """Stands until batch `sequence` has come again, or nobody can send it: with other bytes the engine is another.

    `holds`: what follows waits meanwhile. `deadline_us` None: nothing waits yet, so that the engine may be away for as
    long as it likes. `from_start`: it answered with nothing, as one does that began anew and is not that far, and was
    asked for all it has.
    """

    sequence: int
    holds: bool
    deadline_us: int | None
    attempts: int = 1
    from_start: bool = False


@dataclass(slots=True)
class _Stream:
    """One producer. `last` is the last sequence accepted or given up in `epoch`, -1 before the first.

    `announced` is the last one that a heartbeat told of.
    """

    producer: int
    foreign: bool
    epoch: int | None = None
    last: int = -1
    accepted: bool = False
    announced: int = -1
    closed: dict[int, None] = field(default_factory=dict)
    """Epochs closed for good, oldest first."""
    held: dict[int, Arrival] = field(default_factory=dict)
    """Changed by `keep`, `take` and `forget` alone, which count its bytes."""
    held_bytes: int = 0
    gap: _Gap | None = None
    fence: _Fence | None = None
    suspect_after_us: int = 0
    """When a late arrival may next raise a fence."""
    lost: list[tuple[int, int]] = field(default_factory=list)
    unproven: int | None = None
    """Where a fence was lowered unanswered: what was accepted since may be another engine's."""
    checksums: OrderedDict[int, int] = field(default_factory=OrderedDict)

    def known(self) -> int | None:
        """The batch whose bytes tell whether a foreign engine is still the same; None where none is kept.

        An engine that has sent `unproven` itself has sent all that was accepted since.
        """
        kept = (sequence for sequence in (self.unproven, self.last) if sequence in self.checksums)
        return next(kept, None)

    def standing(self, arrival: Arrival) -> Standing:
        if self.epoch is None:
            return Standing.UNSEEN_EPOCH
        if not self.foreign and arrival.epoch != self.epoch:
            return Standing.CLOSED_EPOCH if arrival.epoch in self.closed else Standing.UNSEEN_EPOCH
        sequence = arrival.sequence
        if sequence <= self.last:
            if any(first <= sequence <= through for first, through in self.lost):
                return Standing.LATE
            return Standing.BEHIND if self.checksums.get(sequence) == arrival.checksum else Standing.BEHIND_OTHER
        if sequence in self.held:
            same = self.held[sequence].checksum == arrival.checksum
            return Standing.HELD if same else Standing.HELD_OTHER
        if self.fence is not None and self.fence.holds:
            return Standing.FENCED
        if sequence == self.last + 1:
            return Standing.NEXT
        return Standing.SNAPSHOT_AHEAD if arrival.begins_snapshot and not self.foreign else Standing.AHEAD

    def keep(self, arrival: Arrival) -> None:
        assert arrival.sequence not in self.held
        self.held[arrival.sequence] = arrival
        self.held_bytes += arrival.payload_bytes

    def take(self, sequence: int) -> Arrival:
        arrival = self.held.pop(sequence)
        self.held_bytes -= arrival.payload_bytes
        return arrival

    def forget(self) -> None:
        self.held = {}
        self.held_bytes = 0

    def open_epoch(self, epoch: int) -> list[Action]:
        """Forget the epoch before but for its number; what was held of it is refused."""
        refused: list[Action] = [Refused(held, REASON_EPOCH_ENDED) for held in self.held.values()]
        if self.epoch is not None and not self.foreign:
            self.closed[self.epoch] = None
            if len(self.closed) > CLOSED_EPOCHS_MAX:
                del self.closed[next(iter(self.closed))]
        self.epoch = epoch
        self.last = self.announced = -1
        self.accepted = False
        self.forget()
        self.gap = None
        self.fence = None
        self.lost = []
        self.unproven = None
        self.checksums = OrderedDict()
        return refused

    def lose(self, from_sequence: int, through: int) -> None:
        # Whoever it was: what was placed so far is forgotten.
        self.unproven = None
        self.lost = [*self.lost, (from_sequence, through)][-LOST_RANGES_MAX:]
        self.last = through


class SequenceGate:
    """Puts every producer's arrivals in order, each once; says what is missing. Not thread-safe.

    A gap holds at most `hold_max` arrivals and `hold_bytes_max` bytes a producer. Past it a foreign gap is given up,
    or the newest held go while a new life is read from its start; of our own producer the oldest go, since the
    snapshot that is then awaited supersedes them. A resend is awaited for `resend_wait_us` since the last arrival
    that it brought and asked for `resend_attempts_max` times, a snapshot for `snapshot_wait_us` and
    `snapshot_attempts_max`; then what is missing is given up. `checksums_kept` checksums are kept for each foreign
    producer.
    """

    def __init__(
        self,
        *,
        hold_max: int = 4096,
        hold_bytes_max: int = 256 * 1024 * 1024,
        resend_wait_us: int = 1_000_000,
        resend_attempts_max: int = 3,
        snapshot_wait_us: int = 3_000_000,
        snapshot_attempts_max: int = 3,
        checksums_kept: int = 16_384,
    ) -> None:
        limits = {
            "hold_max": hold_max,
            "hold_bytes_max": hold_bytes_max,
            "resend_wait_us": resend_wait_us,
            "resend_attempts_max": resend_attempts_max,
            "snapshot_wait_us": snapshot_wait_us,
            "snapshot_attempts_max": snapshot_attempts_max,
            "checksums_kept": checksums_kept,
        }
        if min(limits.values()) < 1:
            given = ", ".join(f"{name}={value}" for name, value in limits.items())
            raise ValueError(f"each limit of the gate must be at least 1: {given}")
        self._hold_max = hold_max
        self._hold_bytes_max = hold_bytes_max
        self._wait_us = {Remedy.RESEND: resend_wait_us, Remedy.SNAPSHOT: snapshot_wait_us}
        self._attempts_max = {Remedy.RESEND: resend_attempts_max, Remedy.SNAPSHOT: snapshot_attempts_max}
        self._checksums_kept = checksums_kept
        self._streams: dict[int, _Stream] = {}

    # -- memory

    def export(self) -> list[StreamState]:
        """What the gate remembers of each producer, without what is held: that is not in the log yet."""
        return [
            StreamState(
                s.producer, s.foreign, s.epoch, s.last, s.accepted, list(s.closed), list(s.checksums.items()),
                list(s.lost), s.unproven,
            )
            for s in self._streams.values()
        ]  # fmt: skip

    def load(self, states: Iterable[StreamState]) -> None:
        """Take up what `export` gave, before anything is restored or offered."""
        for state in states:
            self._streams[state.producer] = _Stream(
                state.producer,
                state.foreign,
                state.epoch,
                state.last,
                state.accepted,
                closed=dict.fromkeys(state.closed),
                lost=list(state.lost),
                unproven=state.unproven,
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
            stream.lose(sequence, through)

    # -- what comes

    def has_room(self, producer: int) -> bool:
        """Whether its stream is kept, or could be: of more than `PRODUCERS_MAX` nothing is remembered at all."""
        return producer in self._streams or len(self._streams) < PRODUCERS_MAX

    def offer(self, arrival: Arrival, now_us: int) -> list[Action]:
        """Judge one arrival. Accepts come in the order in which they must be logged."""
        foreign = arrival.epoch is None
        stream = self._stream(arrival, foreign)
        if isinstance(stream, Refused):
            return [stream]
        actions: list[Action] = []
        verdicts = FOREIGN_VERDICTS if foreign else OWN_VERDICTS
        verdict = verdicts[stream.standing(arrival)]
        if verdict is Verdict.OPEN_EPOCH:
            actions += stream.open_epoch(_next_epoch(stream) if arrival.epoch is None else arrival.epoch)
            verdict = verdicts[stream.standing(arrival)]
        match verdict:
            case Verdict.ACCEPT:
                stream.keep(arrival)
                actions += self._release(stream, now_us)
            case Verdict.SUPERSEDE:
                actions += self._supersede(stream, arrival, now_us)
            case Verdict.HOLD:
                actions += self._hold(stream, arrival, now_us)
            case Verdict.DROP:
                actions.append(Duplicate(arrival))
                if arrival.sequence == stream.unproven:
                    stream.unproven = None
                if stream.fence is not None and stream.fence.sequence == arrival.sequence:
                    stream.fence = None
                    actions += self._release(stream, now_us)
            case Verdict.DROP_LATE:
                actions.append(Refused(arrival, REASON_LATE))
                actions += self._suspect(stream, now_us)
            case Verdict.REFUSE:
                actions.append(Refused(arrival, REASON_CLOSED_EPOCH))
        return actions

    def heartbeat(self, producer: int, epoch: int, last_sequence: int, now_us: int) -> list[Action]:
        """Our producer says what it sent last: what of it has not come is missing."""
        said = Arrival(producer, epoch, last_sequence, 0)
        stream = self._stream(said, foreign=False)
        if isinstance(stream, Refused):
            return [stream]
        actions: list[Action] = []
        if epoch != stream.epoch:
            if epoch in stream.closed:
                return [Refused(said, REASON_CLOSED_EPOCH)]
            actions += stream.open_epoch(epoch)
        stream.announced = max(stream.announced, last_sequence)
        return actions if stream.gap is not None else actions + self._settle(stream, now_us)

    def connected(self, producer: int, now_us: int) -> list[Action]:
        """The producer can be heard from now on, or again: ask for what it sent meanwhile.

        A foreign one may be another by now, and its numbers may have passed the cursor: what was held of it is dropped,
        for it may be the former's, and what it sends waits until its answer has shown which it is.
        """
        stream = self._streams.get(producer)
        if stream is None:
            return []
        stream.gap = None
        dropped: list[Action] = []
        if stream.foreign:
            dropped = [Refused(held, REASON_DISCONNECTED) for held in stream.held.values()]
            stream.forget()
        # What came since an unanswered probe may be of another engine already.
        known = stream.known() if stream.fence is None else stream.fence.sequence
        if stream.foreign and known is not None and known in stream.checksums:
            stream.fence = _Fence(known, holds=True, deadline_us=None)
            return [*dropped, AskResend(producer, known)]
        following = stream.last + 1 if stream.foreign else max(stream.last, 0)
        return dropped + (self._settle(stream, now_us) or [AskResend(producer, following)])

    def probe(self, producer: int, now_us: int) -> list[Action]:
        """Ask a silent foreign producer for its last known batch: what follows it was lost, other bytes are a restart.

        Nothing waits for the answer.
        """
        stream = self._streams.get(producer)
        if stream is None or not stream.foreign or stream.gap is not None or stream.fence is not None:
            return []
        known = stream.known()
        if known is None:
            return [AskResend(producer, stream.last + 1)]
        stream.fence = _Fence(known, holds=False, deadline_us=now_us + self._wait_us[Remedy.RESEND])
        return [AskResend(producer, known)]

    def restart(self, producer: int) -> list[Action]:
        """Begin a foreign producer's next epoch: what was logged of it was read wrongly."""
        stream = self._streams.get(producer)
        return [] if stream is None or not stream.accepted else stream.open_epoch(_next_epoch(stream))

    # -- what does not come

    def resend_ended(self, producer: int, now_us: int) -> list[Action]:
        """The publisher has sent all it holds. What is still missing is asked for again, or given up."""
        stream = self._streams.get(producer)
        if stream is None:
            return []
        if stream.fence is not None:
            return self._fence_unanswered(stream, stream.fence, now_us)
        if stream.gap is not None and stream.gap.remedy is Remedy.RESEND:
            return self._insist(stream, stream.gap, now_us)
        return []

    def cannot_resend(self, producer: int, now_us: int) -> list[Action]:
        """Nobody can send anything of this producer again: what is missing needs another remedy, or is lost."""
        stream = self._streams.get(producer)
        if stream is None:
            return []
        if stream.fence is not None:
            stream.lost = []
            return self._lower_fence(stream, now_us)
        if stream.gap is not None and stream.gap.remedy is Remedy.RESEND:
            return self._next_remedy(stream, stream.gap, now_us)
        return []

    def give_up(self, producer: int, now_us: int) -> list[Action]:
        """Nobody can fill the producer's gap: declare it lost, release what follows it."""
        stream = self._streams.get(producer)
        if stream is None:
            return []
        if stream.fence is not None:
            return self._lower_fence(stream, now_us)
        return [] if stream.gap is None else self._give_up(stream, stream.gap, now_us)

    def tick(self, now_us: int) -> list[Action]:
        """Ask again for what did not come in time, or give it up and release what was held."""
        actions: list[Action] = []
        for stream in self._streams.values():
            gap, fence = stream.gap, stream.fence
            if fence is not None and fence.deadline_us is not None and now_us >= fence.deadline_us:
                actions += self._insist_on_fence(stream, fence, now_us)
            elif gap is not None and now_us >= gap.deadline_us:
                actions += self._insist(stream, gap, now_us)
        return actions

    # -- figures

    def cursor(self, producer: int) -> tuple[int, int] | None:
        """(epoch, last sequence accepted or given up); None before the first of the epoch."""
        stream = self._streams.get(producer)
        return None if stream is None or stream.epoch is None or stream.last < 0 else (stream.epoch, stream.last)

    def producers(self) -> list[int]:
        """Every producer seen or restored."""
        return list(self._streams)

    def waiting(self) -> int:
        """Arrivals held behind gaps and fences, over all producers."""
        return sum(len(stream.held) for stream in self._streams.values())

    def incomplete(self) -> list[int]:
        """Producers with an open gap."""
        return [stream.producer for stream in self._streams.values() if stream.gap is not None]

    # -- order

    def _stream(self, arrival: Arrival, foreign: bool) -> _Stream | Refused:
        stream = self._streams.get(arrival.producer)
        if stream is None:
            if not self.has_room(arrival.producer):
                return Refused(arrival, REASON_PRODUCERS)
            stream = self._streams[arrival.producer] = _Stream(arrival.producer, foreign)
        return stream if stream.foreign == foreign else Refused(arrival, REASON_KIND)

    def _advance(self, stream: _Stream, sequence: int, checksum: int | None) -> None:
        stream.last = sequence
        stream.accepted = True
        if stream.foreign and checksum is not None:
            stream.checksums[sequence] = checksum
            if len(stream.checksums) > self._checksums_kept:
                stream.checksums.popitem(last=False)

    def _release(self, stream: _Stream, now_us: int) -> list[Action]:
        """Accept what follows the cursor without a hole; what then remains held is behind another gap."""
        actions: list[Action] = []
        assert stream.epoch is not None
        while stream.last + 1 in stream.held:
            arrival = stream.take(stream.last + 1)
            actions.append(Accept(arrival, stream.epoch, new_epoch=not stream.accepted))
            self._advance(stream, arrival.sequence, arrival.checksum)
        return actions + self._settle(stream, now_us)

    def _settle(self, stream: _Stream, now_us: int) -> list[Action]:
        """Open, keep or close the stream's gap, as what is held and announced says."""
        gap = stream.gap
        if gap is not None and stream.last < gap.nearest - 1:
            if gap.remedy is Remedy.RESEND:
                gap.attempts, gap.deadline_us = 1, now_us + self._wait_us[Remedy.RESEND]
            return []
        stream.gap = None
        return [self._open_gap(stream, now_us)] if stream.held or stream.announced > stream.last else []

    def _supersede(self, stream: _Stream, arrival: Arrival, now_us: int) -> list[Action]:
        below = sorted(sequence for sequence in stream.held if sequence < arrival.sequence)
        actions: list[Action] = [Refused(stream.take(sequence), REASON_SUPERSEDED) for sequence in below]
        stream.gap = None
        stream.last = arrival.sequence - 1
        stream.keep(arrival)
        return actions + self._release(stream, now_us)

    def _hold(self, stream: _Stream, arrival: Arrival, now_us: int) -> list[Action]:
        stream.keep(arrival)
        full = self._is_full(stream)
        if stream.fence is not None and stream.fence.holds:
            if full:
                actions = self._lower_fence(stream, now_us)
                overfull = stream.gap is not None and self._is_full(stream)
                return actions + self.give_up(stream.producer, now_us) if overfull else actions
            stream.fence.deadline_us = stream.fence.deadline_us or now_us + self._wait_us[Remedy.RESEND]
            return []
        if stream.gap is None:
            return [self._open_gap(stream, now_us)]
        if arrival.sequence < stream.gap.nearest:
            # The gap shrinks from above: a resend is under way that begins after the gap's start.
            stream.gap.nearest = arrival.sequence
            if stream.gap.remedy is Remedy.RESEND:
                stream.gap.attempts, stream.gap.deadline_us = 1, now_us + self._wait_us[Remedy.RESEND]
        if not full:
            return []
        if not stream.foreign:
            return self._shed(stream, stream.gap, now_us)
        if stream.last < 0 and stream.epoch != FIRST_FOREIGN_EPOCH:
            # A restart showed by what was sent again; the rest of that need not wait, for all was asked for anew.
            return [Refused(stream.take(max(stream.held)), REASON_CROWDED)]
        return self._give_up(stream, stream.gap, now_us)

    def _is_full(self, stream: _Stream) -> bool:
        return len(stream.held) > self._hold_max or stream.held_bytes > self._hold_bytes_max

    def _shed(self, stream: _Stream, gap: _Gap, now_us: int) -> list[Action]:
        """Let the oldest held go, many at a time: the snapshot, which is asked for if it was not, supersedes them."""
        oldest = sorted(stream.held)[: max(1, len(stream.held) // 4)]
        actions: list[Action] = [Refused(stream.take(sequence), REASON_CROWDED) for sequence in oldest]
        gap.nearest = min(stream.held, default=max(oldest[-1], stream.announced) + 1)
        return actions + (self._next_remedy(stream, gap, now_us) if gap.remedy is Remedy.RESEND else [])

    # -- gaps

    def _open_gap(self, stream: _Stream, now_us: int) -> Action:
        # A gap's own ask is from the last known batch on as well.
        stream.fence = None
        nearest = min(stream.held, default=stream.announced + 1)
        stream.gap = _Gap(nearest, now_us + self._wait_us[Remedy.RESEND])
        return self._ask(stream, Remedy.RESEND)

    def _insist(self, stream: _Stream, gap: _Gap, now_us: int) -> list[Action]:
        if gap.attempts >= self._attempts_max[gap.remedy]:
            return self._next_remedy(stream, gap, now_us)
        gap.attempts += 1
        gap.deadline_us = now_us + self._wait_us[gap.remedy]
        return [self._ask(stream, gap.remedy)]

    def _next_remedy(self, stream: _Stream, gap: _Gap, now_us: int) -> list[Action]:
        remedy = (FOREIGN_REMEDIES if stream.foreign else OWN_REMEDIES)[gap.remedy]
        if remedy is None:
            return self._give_up(stream, gap, now_us)
        stream.gap = _Gap(gap.nearest, now_us + self._wait_us[remedy], remedy)
        return [self._ask(stream, remedy)]

    def _ask(self, stream: _Stream, remedy: Remedy) -> Action:
        assert stream.epoch is not None
        if remedy is Remedy.SNAPSHOT:
            return AskSnapshot(stream.producer, stream.epoch)
        known = stream.known()
        return AskResend(stream.producer, stream.last + 1 if known is None else known)

    def _give_up(self, stream: _Stream, gap: _Gap, now_us: int) -> list[Action]:
        """Declare the gap lost and release what follows it, up to the next gap."""
        assert stream.epoch is not None
        lost = Lost(stream.producer, stream.epoch, stream.last + 1, gap.nearest - 1)
        stream.lose(lost.from_sequence, lost.through)
        return [lost, *self._release(stream, now_us)]

    # -- fences

    def _suspect(self, stream: _Stream, now_us: int) -> list[Action]:
        """A number that was declared lost came: a late copy, or the beginning of an engine's next life."""
        if now_us < stream.suspect_after_us:
            return []
        stream.suspect_after_us = now_us + self._wait_us[Remedy.RESEND]
        return self.probe(stream.producer, now_us)

    def _insist_on_fence(self, stream: _Stream, fence: _Fence, now_us: int) -> list[Action]:
        if fence.attempts >= self._attempts_max[Remedy.RESEND]:
            # An engine that never resends sends no late copies either: what comes under a lost number is a new life.
            stream.lost = []
            return self._lower_fence(stream, now_us)
        fence.attempts += 1
        fence.deadline_us = now_us + self._wait_us[Remedy.RESEND]
        return [AskResend(stream.producer, 0 if fence.from_start else fence.sequence)]

    def _fence_unanswered(self, stream: _Stream, fence: _Fence, now_us: int) -> list[Action]:
        """The resend ended, and the fence's batch was not in it."""
        if fence.sequence == stream.unproven and fence.attempts >= self._attempts_max[Remedy.RESEND]:
            # Its buffer has passed that one, so it will never tell; of what happens from now on the last one does.
            stream.unproven = None
            fence.sequence, fence.attempts = stream.last, 0
        if fence.sequence == stream.unproven or fence.attempts == 0:
            return self._insist_on_fence(stream, fence, now_us)
        if stream.last + 1 in stream.held:
            # No gap would show between what we know and what follows, which may well be another life's.
            if fence.from_start or fence.attempts >= self._attempts_max[Remedy.RESEND]:
                return [*stream.open_epoch(_next_epoch(stream)), AskResend(stream.producer, 0)]
            return self._insist_on_fence(stream, fence, now_us)
        if fence.from_start or stream.held or stream.last > fence.sequence:
            return self._lower_fence(stream, now_us)
        # Every engine can send its newest batch again: this one has not come as far as the one that we knew.
        stream.lost = []
        fence.from_start = True
        fence.attempts = 1
        if fence.deadline_us is not None:
            fence.deadline_us = now_us + self._wait_us[Remedy.RESEND]
        return [AskResend(stream.producer, 0)]

    def _lower_fence(self, stream: _Stream, now_us: int) -> list[Action]:
        """Go on though nobody has answered."""
        if stream.fence is not None:
            stream.unproven = stream.fence.sequence
        stream.fence = None
        return self._release(stream, now_us)


def _next_epoch(stream: _Stream) -> int:
    return FIRST_FOREIGN_EPOCH if stream.epoch is None else stream.epoch + 1
