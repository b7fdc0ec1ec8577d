"""The publishing thread: takes events from any thread, batches, sends, serves resends. A `Carrier` moves the bytes."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Protocol, TypedDict, Unpack

from event_plane.batching import Batcher, FlushRule, check_event
from event_plane.errors import TransportError
from event_plane.resend import AckWindow, ResendBuffer
from event_plane.schema import Batch, EventRecord
from event_plane.wire import encode

RESEND_END: Final = 0xFFFF_FFFF_FFFF_FFFF
"""Sequence of the empty message that ends a resend."""
_U64_MAX: Final = 0xFFFF_FFFF_FFFF_FFFF
_RESENDS_MAX: Final = 64
"""Resends in progress; an ask beyond is refused, its asker times out and asks again."""
_RESEND_BATCHES: Final = 64
"""Batches a resend may send before the thread looks at everything else again."""
_RESEND_RETRY_S: Final = 0.01
_INBOX_EVENTS_MAX: Final = 65_536
"""Events handed over and not yet batched; past it `publish` waits for the thread."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A subscriber wants everything from `from_sequence` on, sent to `peer`."""

    peer: bytes
    from_sequence: int


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """Everything of (producer, epoch) up to `sequence` is durable at `peer`."""

    peer: bytes
    producer: int
    epoch: int
    sequence: int


class Reply(Enum):
    """What became of one resent message."""

    SENT = auto()
    FULL = auto()
    """The reader is slow: try again later."""
    GONE = auto()


class Carrier(Protocol):
    """Moves a publisher's bytes. Used by the publishing thread alone, but for `wake`."""

    malformed: int
    """Requests that could not be read."""

    def send(self, sequence: int, payload: bytes) -> None:
        """To every subscriber that is there; never waits, drops for one that is too slow."""

    def resend(self, peer: bytes, sequence: int, payload: bytes) -> Reply:
        """To one asker; never waits."""

    def wait(self, timeout_s: float | None) -> list[Ask | Acknowledgement]:
        """The next requests; returns without any when woken or after `timeout_s`."""

    def wake(self) -> None:
        """End a `wait`, from any thread."""

    def close(self) -> None:
        """Send what is queued, within a second, then release everything."""


class PublisherOptions(TypedDict, total=False):
    """Options of every publisher, with their defaults."""

    epoch: int | None
    """u64 number of this life of the producer; None or absent: a random one."""
    flush_events: int
    """512. Events that close a batch."""
    flush_interval_s: float
    """1.0. Age of the oldest event that closes a batch, at most 60."""
    buffer_batches: int
    """1,024. Batches kept for resends."""
    buffer_bytes: int
    """64 MiB. Bytes kept for resends."""
    window_batches: int
    """128. Unacknowledged batches past which `publish` waits, once a subscriber acknowledges."""
    window_wait_s: float
    """2.0. How long it waits at most for a subscriber, which is then no longer waited for until it acknowledges."""


@dataclass(frozen=True, slots=True)
class PublisherStat:
    """A publisher as it is now. Sequences are -1 before the first; counts are since the start."""

    batches: int
    events: int
    last_sequence: int
    acknowledged_sequence: int
    """Up to which every subscriber that acknowledges has everything; -1 where none does."""
    acknowledging_subscribers: int
    buffered_batches: int
    buffered_bytes: int
    window_timeouts: int
    """Times that a subscriber kept the window full for `window_wait_s` and was no longer waited for."""
    resends: int
    requests_refused: int


class BatchPublisher:
    """A `Publisher` over any carrier, with one thread of its own. Thread-safe.

    Once a subscriber acknowledges, `publish` waits while more than the window is unacknowledged, at most
    `window_wait_s`; a subscriber that is slower than that is not waited for until it acknowledges again.
    """

    def __init__(
        self, open_carrier: Callable[[], Carrier], *, producer: int, **options: Unpack[PublisherOptions]
    ) -> None:
        """Raises `ValueError` naming an option out of range, before `open_carrier` is called."""
        epoch = options.get("epoch")
        flush_interval_s = options.get("flush_interval_s", 1.0)
        flush_rule = FlushRule(options.get("flush_events", 512), round(flush_interval_s * 1_000_000))
        self.producer = producer
        self.epoch = secrets.randbits(64) if epoch is None else epoch
        for name, value in (("producer", self.producer), ("epoch", self.epoch)):
            if not 0 <= value <= _U64_MAX:
                raise ValueError(f"{name} {value} is no u64: see schema.producer_id()")
        self._window_wait_s = options.get("window_wait_s", 2.0)
        self._batcher = Batcher(flush_rule, producer=producer, epoch=self.epoch)
        self._buffer = ResendBuffer(
            options.get("buffer_batches", 1024), options.get("buffer_bytes", 64 * 1024 * 1024)
        )
        self._resends: dict[bytes, int] = {}
        self._resends_wait_s: float | None = None
        self._clock_offset_us = time.time_ns() // 1000 - time.monotonic_ns() // 1000

        self._changed = threading.Condition()
        # The condition's lock guards everything below, and every wake: the carrier is closed only after `_running`.
        self._window = AckWindow(options.get("window_batches", 128))
        self._inbox: deque[Sequence[EventRecord]] = deque()
        self._inbox_events = 0
        self._handed_over = 0
        self._flush_up_to = 0
        self._flushed_up_to = 0
        self._last_sequence = -1
        self._events_sent = 0
        self._window_timeouts = 0
        self._resend_count = 0
        self._requests_refused = 0
        self._closing = False
        self._running = True
        self._carrier = open_carrier()
        self._thread = threading.Thread(target=self._run, name=f"publisher-{producer:016x}", daemon=True)
        self._thread.start()

    @property
    def last_sequence(self) -> int:
        """Sequence of the last batch sent, -1 before the first."""
        with self._changed:
            return self._last_sequence

    def publish(self, events: Sequence[EventRecord], flush: bool = False) -> None:
        """See `Publisher.publish`."""
        for event in events:
            check_event(event)
        with self._changed:
            self._wait_for_room()
            if events:
                self._inbox.append(tuple(events))
                self._inbox_events += len(events)
                self._handed_over += 1
                self._carrier.wake()
        if flush:
            self.flush()

    def flush(self) -> int:
        """See `Publisher.flush`."""
        with self._changed:
            ticket = self._handed_over
            self._flush_up_to = ticket
            if self._running:
                self._carrier.wake()
            self._changed.wait_for(lambda: self._flushed_up_to >= ticket or not self._running)
            if self._flushed_up_to < ticket:
                raise TransportError(self._closed_reason())
            return self._last_sequence

    def stat(self) -> PublisherStat:
        """Figures of this moment."""
        with self._changed:
            acknowledged = self._window.acknowledged
            return PublisherStat(
                batches=self._last_sequence + 1,
                events=self._events_sent,
                last_sequence=self._last_sequence,
                acknowledged_sequence=-1 if acknowledged is None else acknowledged,
                acknowledging_subscribers=len(self._window),
                buffered_batches=len(self._buffer),
                buffered_bytes=self._buffer.payload_bytes,
                window_timeouts=self._window_timeouts,
                resends=self._resend_count,
                requests_refused=self._requests_refused + self._carrier.malformed,
            )

    def close(self) -> None:
        """See `Publisher.close`."""
        with self._changed:
            self._closing = True
            if self._running:
                self._carrier.wake()
        self._thread.join()

    def _wait_for_room(self) -> None:
        deadline = time.monotonic() + self._window_wait_s
        while not self._closing and self._running:
            if self._window.is_full(self._last_sequence):
                if not self._changed.wait(max(deadline - time.monotonic(), 0)):
                    self._window.forget_stragglers(self._last_sequence)
                    self._window_timeouts += 1
            elif self._inbox_events >= _INBOX_EVENTS_MAX:
                self._changed.wait()
            else:
                return
        raise TransportError(self._closed_reason())

    def _closed_reason(self) -> str:
        why = "was closed" if self._closing else "lost its thread to an error"
        return f"publisher {self.producer:016x} {why}: open another to publish more"

    def _run(self) -> None:
        try:
            while self._step():
                pass
        finally:
            with self._changed:
                self._running = False
                self._changed.notify_all()
            self._carrier.close()

    def _step(self) -> bool:
        """One turn of the thread: requests, events, resends. False when closed and everything is sent."""
        requests = self._carrier.wait(self._wait_s())
        with self._changed:
            for request in requests:
                self._take_request(request)
            inbox = [event for events in self._inbox for event in events]
            self._inbox.clear()
            self._inbox_events = 0
            handed_over = self._handed_over
            closing = self._closing
            flushing = closing or self._flush_up_to > self._flushed_up_to
            self._changed.notify_all()
        now_us = self._now_us()
        batches = self._batcher.add(inbox, now_us)
        if flushing:
            batches += self._batcher.flush(now_us)
        self._send(batches, handed_over if flushing else None)
        self._serve_resends()
        return not closing

    def _wait_s(self) -> float | None:
        """How long nothing is to be done unless a request or an event comes; None for ever."""
        waits_s = [] if self._resends_wait_s is None else [self._resends_wait_s]
        if (due_us := self._batcher.due_us) is not None:
            waits_s.append(max(due_us - self._now_us(), 0) / 1_000_000)
        return min(waits_s, default=None)

    def _now_us(self) -> int:
        """µs since 1970 that never step back."""
        return time.monotonic_ns() // 1000 + self._clock_offset_us

    def _take_request(self, request: Ask | Acknowledgement) -> None:
        match request:
            case Acknowledgement(peer, self.producer, self.epoch, sequence) if sequence <= self._last_sequence:
                self._window.acknowledge(peer, sequence)
            case Ask(peer, from_sequence) if peer in self._resends or len(self._resends) < _RESENDS_MAX:
                self._resends[peer] = from_sequence
                self._resend_count += 1
            case _:
                self._requests_refused += 1

    def _send(self, batches: Sequence[Batch], flushed_up_to: int | None) -> None:
        for batch in batches:
            payload = encode(batch)
            self._carrier.send(batch.sequence, payload)
            with self._changed:
                self._buffer.append(batch.sequence, payload)
                self._last_sequence = batch.sequence
                self._events_sent += len(batch.records)
        with self._changed:
            if flushed_up_to is not None:
                self._flushed_up_to = flushed_up_to
            self._changed.notify_all()

    def _serve_resends(self) -> None:
        self._resends_wait_s = None
        for peer, from_sequence in list(self._resends.items()):
            following = self._resend_some(peer, from_sequence)
            if following is None:
                del self._resends[peer]
                continue
            self._resends[peer] = following
            moved = following > from_sequence
            self._resends_wait_s = 0.0 if moved or self._resends_wait_s == 0.0 else _RESEND_RETRY_S

    def _resend_some(self, peer: bytes, from_sequence: int) -> int | None:
        """Send the next part of a resend. Returns where to go on; None when it has ended or its asker is gone."""
        following = from_sequence
        for sequence, payload in self._buffer.since(from_sequence, _RESEND_BATCHES) or [(RESEND_END, b"")]:
            match self._carrier.resend(peer, sequence, payload):
                case Reply.FULL:
                    return following
                case Reply.GONE:
                    return None
            if sequence == RESEND_END:
                return None
            following = sequence + 1
        return following
