"""The publishing thread: takes events from any thread, batches, sends, serves resends. A `Carrier` moves the bytes."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice
from typing import Final, Protocol, TypedDict, Unpack

from event_plane.batching import (
    MESSAGES_PER_S_MAX,
    Batcher,
    Columns,
    FlushRule,
    adaptive_rule,
    check_columns,
    check_event,
    check_snapshot,
    joined,
)
from event_plane.errors import TransportError
from event_plane.resend import AckWindow, ResendBuffer
from event_plane.schema import RECORD_COUNT_MAX, Batch, EventRecord, Namespace, Records
from event_plane.snapshot_answers import SnapshotAnswers
from event_plane.wire import encode

RESEND_END: Final = 0xFFFF_FFFF_FFFF_FFFF
"""Sequence of the empty message that ends a resend."""
_U64_MAX: Final = 0xFFFF_FFFF_FFFF_FFFF
_RESENDS_MAX: Final = 64
"""Resends in progress; an ask beyond is refused, its asker times out and asks again."""
_RESEND_BATCHES: Final = 64
"""Batches that all resends together may send, or one each, before the thread looks at everything else again."""
_BATCHES_PER_TURN: Final = 64
"""Likewise of what is published: a long snapshot keeps no request waiting."""
_HEARTBEAT_S_MAX: Final = 3_600.0
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


@dataclass(frozen=True, slots=True)
class SnapshotAsk:
    """A subscriber cannot fill a gap of (producer, epoch) and wants the whole state, published in the stream."""

    peer: bytes
    producer: int
    epoch: int


Request = Ask | Acknowledgement | SnapshotAsk


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
    slow_reader_drops: int
    """Times that some subscriber was too slow for a batch, or for several in a row, as far as the transport tells."""
    payload_bytes_max: int
    """Largest payload that is carried; fixed once opened."""

    def send(self, sequence: int, payload: bytes) -> None:
        """To every subscriber that is there; never waits for long, drops for one that is too slow."""

    def send_heartbeat(self, sequence: int, payload: bytes) -> None:
        """Likewise, once: names a sequence that was sent already. Nothing, where the transport keeps what it took."""

    def resend(self, peer: bytes, sequence: int, payload: bytes) -> Reply:
        """To one asker; never waits."""

    def wait(self, timeout_s: float | None) -> list[Request]:
        """The next requests; returns without any when woken or after `timeout_s`."""

    def wake(self) -> None:
        """End a `wait`, from any thread."""

    def close(self) -> None:
        """Send what is queued, within a second, then release everything."""


class PublisherOptions(TypedDict, total=False):
    """Options of every publisher, with their defaults."""

    epoch: int | None
    """u64 number of this life of the producer; None or absent: a random one."""
    flush_events: int | None
    """Events that close a batch. None or absent: adaptive, batches grow with the load (`batching.adaptive_rule`)."""
    flush_interval_s: float
    """1.0. Age of the oldest event that closes a batch, at most 60."""
    messages_per_s_max: int
    """100. Of an adaptive publisher: messages a second past which batches grow, but for full ones."""
    buffer_batches: int
    """1,024. Batches kept for resends."""
    buffer_bytes: int
    """64 MiB. Bytes kept for resends."""
    window_batches: int
    """128. Unacknowledged batches past which `publish` waits, once a subscriber acknowledges."""
    window_wait_s: float
    """2.0. How long it waits at most for a subscriber, which is then no longer waited for until it acknowledges."""
    heartbeat_s: float
    """5.0. Silence after which a heartbeat names the last sequence, so that a lost tail shows; 0: none."""
    on_snapshot: Callable[[], None] | None
    """See `BatchPublisher.serve_snapshots`."""
    snapshot_interval_s: float
    """1.0. Least time between two answers to asks for a snapshot."""


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
    snapshots: int
    """Snapshots published, asked for or not."""
    snapshot_asks: int
    heartbeats: int
    slow_reader_drops: int
    """Times that some subscriber was too slow for a batch or several in a row; its gap heals by resend."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    events: tuple[EventRecord, ...]


@dataclass(frozen=True, slots=True)
class _Loss:
    reason: str


_Item = tuple[EventRecord, ...] | Columns | _Snapshot | _Loss
"""What one call hands over."""


@dataclass(slots=True)
class _Turn:
    """Batches of what was handed over up to call `handed_over`, made while they are sent."""

    batches: Iterator[Batch]
    handed_over: int
    flushing: bool
    closing: bool


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
        self.producer = producer
        self.epoch = secrets.randbits(64) if epoch is None else epoch
        for name, value in (("producer", self.producer), ("epoch", self.epoch)):
            if not 0 <= value <= _U64_MAX:
                raise ValueError(f"{name} {value} is no u64: see schema.producer_id()")
        flush_rule = _flush_rule(options)
        self._batch_events = flush_rule.events
        self._window_wait_s = options.get("window_wait_s", 2.0)
        self._heartbeat_s = options.get("heartbeat_s", 5.0)
        if not 0 <= self._heartbeat_s <= _HEARTBEAT_S_MAX:
            raise ValueError(f"heartbeat_s of {self._heartbeat_s} is out of range: 0 (none) to {_HEARTBEAT_S_MAX:.0f}")
        self._snapshot_interval_s = options.get("snapshot_interval_s", 1.0)
        self._buffer = ResendBuffer(
            options.get("buffer_batches", 1024), options.get("buffer_bytes", 64 * 1024 * 1024)
        )
        self._turn: _Turn | None = None
        self._resends: dict[bytes, int] = {}
        self._resends_wait_s: float | None = None
        self._clock_offset_us = time.time_ns() // 1000 - time.monotonic_ns() // 1000
        self._sent_s = time.monotonic()

        self._changed = threading.Condition()
        # The condition's lock guards everything below, and every wake: the carrier is closed only after `_running`.
        self._window = AckWindow(options.get("window_batches", 128))
        self._inbox: deque[_Item] = deque()
        self._inbox_events = 0
        self._unsent_events = 0
        """Of the turn under way."""
        self._handed_over = 0
        self._flush_up_to = 0
        self._flushed_up_to = 0
        self._last_sequence = -1
        self._events_sent = 0
        self._window_timeouts = 0
        self._resend_count = 0
        self._requests_refused = 0
        self._snapshots = 0
        self._snapshot_asks = 0
        self._heartbeats = 0
        self._answers: SnapshotAnswers | None = None
        self._closing = False
        self._running = True
        self._carrier = open_carrier()
        self._payload_bytes_max = self._carrier.payload_bytes_max
        self._batcher = Batcher(
            flush_rule, producer=producer, epoch=self.epoch, payload_bytes_max=self._payload_bytes_max
        )
        self._thread = threading.Thread(target=self._run, name=f"publisher-{producer:016x}", daemon=True)
        self._thread.start()
        if (on_snapshot := options.get("on_snapshot")) is not None:
            self.serve_snapshots(on_snapshot)

    @property
    def last_sequence(self) -> int:
        """Sequence of the last batch sent, -1 before the first."""
        with self._changed:
            return self._last_sequence

    def publish(self, events: Sequence[EventRecord], flush: bool = False) -> None:
        """See `Publisher.publish`."""
        for event in events:
            check_event(event, self._payload_bytes_max)
        with self._changed:
            self._wait_for_room()
            if events:
                self._hand_over(tuple(events), len(events))
        if flush:
            self.flush()

    def publish_records(
        self, records: Records, namespaces: Sequence[Namespace], locations: Sequence[str], flush: bool = False
    ) -> None:
        """See `Publisher.publish_records`. The array is copied, and is the caller's again afterwards."""
        tables = tuple(namespaces), tuple(locations)
        check_columns(Columns(records, *tables), self._payload_bytes_max)
        for start in range(0, len(records), RECORD_COUNT_MAX):
            piece = joined([records[start : start + RECORD_COUNT_MAX]])
            with self._changed:
                self._wait_for_room()
                self._hand_over(Columns(piece, *tables), len(piece))
        if flush:
            self.flush()

    def publish_snapshot(self, events: Sequence[EventRecord]) -> None:
        """See `Publisher.publish_snapshot`."""
        check_snapshot(events, self._payload_bytes_max)
        with self._changed:
            self._wait_for_room()
            self._hand_over(_Snapshot(tuple(events)), len(events))
            self._snapshots += 1

    def publish_lost(self, reason: str) -> None:
        """See `Publisher.publish_lost`."""
        with self._changed:
            self._wait_for_room()
            self._hand_over(_Loss(reason), 1)

    def serve_snapshots(self, announce: Callable[[], None]) -> None:
        """See `Publisher.serve_snapshots`."""
        answers = SnapshotAnswers(
            announce, interval_s=self._snapshot_interval_s, name=f"snapshots-{self.producer:016x}"
        )
        with self._changed:
            closing = self._closing
            unused = answers if closing else self._answers
            self._answers = self._answers if closing else answers
        if unused is not None:
            unused.close()
        if closing:
            raise TransportError(self._closed_reason())

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
                snapshots=self._snapshots,
                snapshot_asks=self._snapshot_asks,
                heartbeats=self._heartbeats,
                slow_reader_drops=self._carrier.slow_reader_drops,
            )

    def close(self) -> None:
        """See `Publisher.close`. Not under a lock that `serve_snapshots`' callback takes."""
        with self._changed:
            self._closing = True
            if self._running:
                self._carrier.wake()
            answers = self._answers
        self._thread.join()
        if answers is not None:
            answers.close()

    def _wait_for_room(self) -> None:
        deadline = time.monotonic() + self._window_wait_s
        while not self._closing and self._running:
            # What was handed over and not yet sent counts as sent: small batches would pass the window unseen.
            waiting = (self._inbox_events + self._unsent_events) // self._batch_events
            if self._window.is_full(self._last_sequence + waiting):
                if not self._changed.wait(max(deadline - time.monotonic(), 0)):
                    self._window.forget_stragglers(self._last_sequence)
                    self._window_timeouts += 1
            elif self._inbox_events >= _INBOX_EVENTS_MAX:
                self._changed.wait()
            else:
                return
        raise TransportError(self._closed_reason())

    def _hand_over(self, item: _Item, events: int) -> None:
        if not self._inbox:  # else the thread has yet to come for what is there
            self._carrier.wake()
        self._inbox.append(item)
        self._inbox_events += events
        self._handed_over += 1

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
            if self._turn is None:
                self._turn = self._next_turn()
            self._changed.notify_all()
        turn = self._turn
        if self._send_some(turn.batches):
            self._end(turn)
            self._turn = None
        self._beat()
        self._serve_resends()
        return self._turn is not None or not turn.closing

    def _next_turn(self) -> _Turn:
        items = list(self._inbox)
        self._inbox.clear()
        self._unsent_events, self._inbox_events = self._inbox_events, 0
        flushing = self._closing or self._flush_up_to > self._flushed_up_to
        return _Turn(self._batches(items, flushing), self._handed_over, flushing, self._closing)

    def _batches(self, items: list[_Item], flushing: bool) -> Iterator[Batch]:
        """The batches that `items` or the time closed."""
        for item in items:
            match item:
                case Columns():
                    yield from self._batcher.add_columns(item, self._now_us())
                case _Snapshot(events):
                    yield from self._batcher.snapshot(events, self._now_us())
                case _Loss(reason):
                    yield from self._batcher.lost(reason, self._now_us())
                case _:
                    yield from self._batcher.add(item, self._now_us())
        yield from self._batcher.flush(self._now_us()) if flushing else self._batcher.tick(self._now_us())

    def _wait_s(self) -> float | None:
        """How long nothing is to be done unless a request or an event comes; None for ever."""
        with self._changed:
            if self._turn or self._inbox or self._closing or self._flush_up_to > self._flushed_up_to:
                return 0.0
        waits_s = [] if self._resends_wait_s is None else [self._resends_wait_s]
        if (due_us := self._batcher.due_us) is not None:
            waits_s.append(max(due_us - self._now_us(), 0) / 1_000_000)
        if (beat_s := self._beat_due_s()) is not None:
            waits_s.append(max(beat_s - time.monotonic(), 0))
        return min(waits_s, default=None)

    def _now_us(self) -> int:
        """µs since 1970 that never step back."""
        return time.monotonic_ns() // 1000 + self._clock_offset_us

    def _take_request(self, request: Request) -> None:
        match request:
            case Acknowledgement(peer, self.producer, self.epoch, sequence) if sequence <= self._last_sequence:
                self._window.acknowledge(peer, sequence)
            case Ask(peer, from_sequence) if peer in self._resends or len(self._resends) < _RESENDS_MAX:
                self._resends[peer] = from_sequence
                self._resend_count += 1
            case SnapshotAsk(_, self.producer, self.epoch) if self._answers is not None:
                self._answers.ask()
                self._snapshot_asks += 1
            case _:
                self._requests_refused += 1

    def _send_some(self, batches: Iterator[Batch]) -> bool:
        """Send the next part of a turn. Whether that was all of it."""
        count = 0
        for batch in islice(batches, _BATCHES_PER_TURN):
            count += 1
            payload = encode(batch)
            self._carrier.send(batch.sequence, payload)
            with self._changed:
                self._buffer.append(batch.sequence, payload)
                self._last_sequence = batch.sequence
                self._events_sent += len(batch.records)
                self._unsent_events = max(self._unsent_events - len(batch.records), 0)
        if count:
            self._sent_s = time.monotonic()
        return count < _BATCHES_PER_TURN

    def _end(self, turn: _Turn) -> None:
        with self._changed:
            self._unsent_events = 0
            if turn.flushing:
                self._flushed_up_to = turn.handed_over
            self._changed.notify_all()

    def _beat_due_s(self) -> float | None:
        """When silence has lasted; None where there is nothing to name or nobody wants it."""
        return self._sent_s + self._heartbeat_s if self._heartbeat_s and self._batcher.next_sequence else None

    def _beat(self) -> None:
        due_s = self._beat_due_s()
        if self._turn is not None or due_s is None or time.monotonic() < due_s:
            return
        heartbeat = self._batcher.heartbeat(self._now_us())
        if heartbeat is not None:
            self._carrier.send_heartbeat(heartbeat.sequence, encode(heartbeat))
            self._sent_s = time.monotonic()
            with self._changed:
                self._heartbeats += 1

    def _serve_resends(self) -> None:
        self._resends_wait_s = None
        count_max = max(1, _RESEND_BATCHES // max(1, len(self._resends)))
        for peer, from_sequence in list(self._resends.items()):
            following = self._resend_some(peer, from_sequence, count_max)
            if following is None:
                del self._resends[peer]
                continue
            self._resends[peer] = following
            moved = following > from_sequence
            self._resends_wait_s = 0.0 if moved or self._resends_wait_s == 0.0 else _RESEND_RETRY_S

    def _resend_some(self, peer: bytes, from_sequence: int, count_max: int) -> int | None:
        """Send the next part of a resend. Returns where to go on; None when it has ended or its asker is gone."""
        following = from_sequence
        for sequence, payload in self._buffer.since(from_sequence, count_max) or [(RESEND_END, b"")]:
            match self._carrier.resend(peer, sequence, payload):
                case Reply.FULL:
                    return following
                case Reply.GONE:
                    return None
            if sequence == RESEND_END:
                return None
            following = sequence + 1
        return following


def _flush_rule(options: PublisherOptions) -> FlushRule:
    events = options.get("flush_events")
    interval_us = round(options.get("flush_interval_s", 1.0) * 1_000_000)
    if events is None:
        return adaptive_rule(interval_us, options.get("messages_per_s_max", MESSAGES_PER_S_MAX))
    return FlushRule(events, interval_us)
