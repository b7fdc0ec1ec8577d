"""Records a live stream: decoded and gated as the service does it, or its messages as they come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import zmq

from advisor.entries import NewEntry
from advisor.foreign import SourceFacts
from advisor.hearing import hearing
from advisor.intake import Intake
from advisor.pipeline import now_us
from event_plane import wire
from event_plane.errors import WireError
from event_plane.parquet import ParquetRecorder
from event_plane.recording import CaptureRecorder, frames_of
from event_plane.transport import Message, Subscriber

_GROUP_MESSAGES_MAX = 64
_POLL_MS = 50
_FLUSH_S = 1.0

Say = Callable[[str], None]
"""Told, in a sentence, why there is no connection."""


class Limits:
    """When a recording ends: at so many events or messages, after so many seconds, or when `stopping` is set."""

    def __init__(self, events: int | None, seconds: float | None, stopping: threading.Event) -> None:
        self.stopping = stopping
        self._events = events
        self._deadline_s = None if seconds is None else time.monotonic() + seconds

    def reached(self, events: int) -> bool:
        late = self._deadline_s is not None and time.monotonic() >= self._deadline_s
        return late or self.stopping.is_set() or (self._events is not None and events >= self._events)


class _Watch:
    """Tells of a connection's problem once, when it comes."""

    def __init__(self, subscriber: Subscriber, say: Say) -> None:
        self._subscriber = subscriber
        self._say = say
        self._said = ""

    def look(self) -> None:
        problem = self._subscriber.connection().problem
        if problem and problem != self._said:
            self._say(problem)
        self._said = problem


class _RecordingLog:
    """What the log thread appends to, in place of a log."""

    def __init__(self, recorder: ParquetRecorder) -> None:
        self._recorder = recorder

    def append(self, entries: Sequence[NewEntry], recorded_us: int) -> int:
        first = self._recorder.batches + 1
        for entry in entries:
            self._recorder.write(wire.decode(entry.payload), entry.source, received_us=recorded_us)
        return first

    def last_position(self) -> int:
        return self._recorder.batches


def record_batches(
    subscriber: Subscriber, facts: SourceFacts, recorder: ParquetRecorder, limits: Limits, say: Say
) -> dict[str, int]:
    """Record until `limits` are reached; closes the subscriber. Returns what could not be used, by reason.

    What is missing is asked for again, and what nobody has is recorded as lost. Raises what ended it before its time.
    """
    intake = Intake([facts])
    watch = _Watch(subscriber, say)
    ending = threading.Event()
    events = 0
    with hearing(subscriber, intake, _RecordingLog(recorder), ending) as heard:
        while not (limits.reached(events) or ending.is_set()):
            watch.look()
            events += sum(len(batch.records) for batch in heard(_POLL_MS / 1000))
    # What waits behind a gap is recorded too; that the gap is lost is all that can be said of it now.
    for accepted in intake.give_up(facts.name, now_us()).accepted:
        recorder.write(accepted.batch, accepted.entry.source, received_us=now_us())
    return dict(intake.refused)


def record_messages(
    subscriber: Subscriber, recorder: CaptureRecorder, limits: Limits, say: Say, *, numbered: bool
) -> None:
    """Record messages as they come until `limits` are reached, nothing asked again; closes the subscriber.

    `numbered`: the transport numbers them (`frames_of`).
    """
    received = 0
    flushed_s = time.monotonic()
    watch = _Watch(subscriber, say)
    try:
        while not limits.reached(received):
            watch.look()
            poller = zmq.Poller()
            for pollable in subscriber.pollables():
                poller.register(pollable, zmq.POLLIN)
            poller.poll(_POLL_MS)
            for message in subscriber.receive(_GROUP_MESSAGES_MAX):
                if isinstance(message, Message):
                    received += 1
                    recorder.write(frames_of(message, numbered=numbered))
                    _acknowledge(subscriber, message)
            if time.monotonic() - flushed_s >= _FLUSH_S:
                flushed_s = time.monotonic()
                recorder.flush()
    finally:
        subscriber.close()


def _acknowledge(subscriber: Subscriber, message: Message) -> None:
    """Else a stream that waits for it, or our publisher's window, would stand still."""
    if wire.is_batch(message.payload):
        try:
            batch = wire.decode(message.payload)
        except WireError:
            return
        subscriber.acknowledge(batch.producer, batch.epoch, batch.sequence)
