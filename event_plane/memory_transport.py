"""Publisher and subscriber within one process, `memory://name`: the same contract as over ZeroMQ, without sockets."""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final, Unpack

from event_plane.errors import TransportError
from event_plane.publishing import (
    RESEND_END,
    Acknowledgement,
    Ask,
    BatchPublisher,
    Carrier,
    PublisherOptions,
    Reply,
    Request,
    SnapshotAsk,
)
from event_plane.transport import Connection, Message, Received, Reconnected, ResendEnd, WhenSlow, parse_url
from event_plane.wire import BATCH_BYTES_MAX

_RESENT_WAITING_MAX: Final = 256
_REQUESTS_MAX: Final = 4096

_Delivery = tuple[int, bytes]
"""Sequence and payload."""


@dataclass(slots=True)
class _Channel:
    """What the two sides of one name share; `changed`'s lock guards all of it."""

    name: str
    changed: threading.Condition = field(default_factory=threading.Condition)
    publisher: MemoryCarrier | None = None
    subscribers: list[MemorySubscriber] = field(default_factory=list)
    requests: deque[Request] = field(default_factory=lambda: deque(maxlen=_REQUESTS_MAX))
    resent: dict[bytes, tuple[MemorySubscriber, deque[_Delivery]]] = field(default_factory=dict)
    """By asker, until its resend ends: who asked and what waits for it."""
    asks_made: int = 0


_channels: dict[str, _Channel] = {}
_channels_lock = threading.Lock()


def _attach(name: str, side: MemoryCarrier | MemorySubscriber) -> _Channel:
    with _channels_lock:
        channel = _channels.setdefault(name, _Channel(name))
        with channel.changed:
            if isinstance(side, MemorySubscriber):
                channel.subscribers.append(side)
                if channel.publisher is not None:
                    side.publisher_came()
            elif channel.publisher is not None:
                raise TransportError(f"cannot publish on memory://{name}: it is in use; choose another name")
            else:
                channel.publisher = side
                for subscriber in channel.subscribers:
                    subscriber.publisher_came()
        return channel


def _detach(channel: _Channel, side: MemoryCarrier | MemorySubscriber) -> None:
    with _channels_lock, channel.changed:
        if isinstance(side, MemorySubscriber):
            channel.subscribers.remove(side)
            channel.resent = {peer: place for peer, place in channel.resent.items() if place[0] is not side}
        else:
            channel.publisher = None
        if channel.publisher is None and not channel.subscribers:
            del _channels[channel.name]


class MemoryCarrier:
    """A `Carrier` within this process. Raises `TransportError` where the name has a publisher already."""

    def __init__(self, name: str) -> None:
        self.malformed = 0
        self.slow_reader_drops = 0
        self.payload_bytes_max = BATCH_BYTES_MAX
        self._woken = False
        self._channel = _attach(name, self)

    def send(self, sequence: int, payload: bytes) -> None:
        with self._channel.changed:
            taken = [subscriber.deliver(sequence, payload) for subscriber in self._channel.subscribers]
            self.slow_reader_drops += not all(taken)

    def send_heartbeat(self, sequence: int, payload: bytes) -> None:
        self.send(sequence, payload)

    def resend(self, peer: bytes, sequence: int, payload: bytes) -> Reply:
        with self._channel.changed:
            if peer not in self._channel.resent:
                return Reply.GONE
            subscriber, waiting = self._channel.resent[peer]
            if len(waiting) >= _RESENT_WAITING_MAX:
                return Reply.FULL
            waiting.append((sequence, payload))
            subscriber.signal()
            return Reply.SENT

    def wait(self, timeout_s: float | None) -> list[Request]:
        with self._channel.changed:
            self._channel.changed.wait_for(lambda: self._woken or self._channel.requests, timeout_s)
            self._woken = False
            requests = list(self._channel.requests)
            self._channel.requests.clear()
            return requests

    def wake(self) -> None:
        with self._channel.changed:
            self._woken = True
            self._channel.changed.notify_all()

    def close(self) -> None:
        _detach(self._channel, self)


class MemoryPublisher(BatchPublisher):
    """Publishes one producer's batches to this process. See `BatchPublisher`."""

    def __init__(self, url: str, *, producer: int, **options: Unpack[PublisherOptions]) -> None:
        """Raises `TransportError` where the name has a publisher already."""
        name = parse_url(url).path

        def open_carrier() -> Carrier:
            return MemoryCarrier(name)

        super().__init__(open_carrier, producer=producer, **options)


class MemorySubscriber:
    """Receives what is published under one name. See `Subscriber`. Past `queue_batches` waiting, live ones are lost.

    `when_slow` as `wait` lets acknowledgements hold the publisher back; `drop` gives none.
    """

    def __init__(
        self, source: str, url: str, *, when_slow: WhenSlow = "wait", queue_batches: int = 4096
    ) -> None:
        self.source = source
        self._name = parse_url(url).path
        self._when_slow = when_slow
        self._queue_batches = queue_batches
        self._live: deque[_Delivery] = deque()
        self._asks: dict[int, bytes] = {}
        self._closed = False
        self._dropped = 0
        self._reconnects = 0
        self._reconnects_told = 0
        self._attached = False
        self._ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._channel = _attach(self._name, self)

    def deliver(self, sequence: int, payload: bytes) -> bool:
        """Called by the publishing side, under the channel's lock. False: there was no room."""
        if len(self._live) >= self._queue_batches:
            self._dropped += 1
            return False
        self._live.append((sequence, payload))
        self.signal()
        return True

    def publisher_came(self) -> None:
        """Called under the channel's lock."""
        if self._attached:
            self._reconnects += 1
            self.signal()
        self._attached = True

    def signal(self) -> None:
        """Make the pollable ready. Called under the channel's lock."""
        os.eventfd_write(self._ready, 1)

    def pollables(self) -> list[Any]:
        """See `Subscriber.pollables`."""
        return [] if self._closed else [self._ready]

    def receive(self, count_max: int) -> list[Received]:
        """See `Subscriber.receive`. Neither live nor resent messages can starve the other."""
        with self._channel.changed:
            if self._closed:
                return []
            received: list[Received] = []
            if self._reconnects_told < self._reconnects:
                self._reconnects_told = self._reconnects
                received.append(Reconnected(self.source))
            for token in list(self._asks):
                self._receive_resent(token, received, count_max - count_max // 2)
            while self._live and len(received) < count_max:
                received.append(self._message(*self._live.popleft()))
            self._settle_signal()
            return received

    def connection(self) -> Connection:
        """See `Subscriber.connection`."""
        with self._channel.changed:
            connected = self._channel.publisher is not None
            problem = "" if connected else f"nobody publishes on memory://{self._name}: start its publisher"
            return Connection(connected, problem, self._reconnects, self._dropped)

    def acknowledge(self, producer: int, epoch: int, sequence: int) -> None:
        """See `Subscriber.acknowledge`."""
        if self._when_slow == "wait":
            self._request(Acknowledgement(self._peer, producer, epoch, sequence))

    def ask_resend(self, from_sequence: int, token: int, producer: int | None = None) -> bool:
        """See `Subscriber.ask_resend`."""
        with self._channel.changed:
            if self._closed:
                return False
            if token in self._asks:
                self._end_ask(token)
            self._channel.asks_made += 1
            peer = f"ask-{self._channel.asks_made}".encode()
            self._asks[token] = peer
            self._channel.resent[peer] = (self, deque())
            self._request(Ask(peer, from_sequence))
            return True

    def ask_snapshot(self, producer: int, epoch: int) -> bool:
        """See `Subscriber.ask_snapshot`."""
        self._request(SnapshotAsk(self._peer, producer, epoch))
        return not self._closed

    def close(self) -> None:
        """See `Subscriber.close`."""
        with self._channel.changed:
            if self._closed:
                return
            self._closed = True
        _detach(self._channel, self)
        os.close(self._ready)

    @property
    def _peer(self) -> bytes:
        return f"subscriber-{id(self)}".encode()

    def _request(self, request: Request) -> None:
        with self._channel.changed:
            if not self._closed:
                self._channel.requests.append(request)
                self._channel.changed.notify_all()

    def _receive_resent(self, token: int, received: list[Received], count_max: int) -> None:
        _, waiting = self._channel.resent[self._asks[token]]
        while waiting and len(received) < count_max:
            sequence, payload = waiting.popleft()
            if sequence == RESEND_END and not payload:
                self._end_ask(token)
                received.append(ResendEnd(self.source, token))
            else:
                received.append(self._message(sequence, payload))

    def _end_ask(self, token: int) -> None:
        del self._channel.resent[self._asks.pop(token)]

    def _settle_signal(self) -> None:
        """Leave the pollable ready exactly while something waits."""
        waiting = bool(self._live) or any(self._channel.resent[peer][1] for peer in self._asks.values())
        self.signal()
        os.eventfd_read(self._ready)
        if waiting:
            self.signal()

    def _message(self, sequence: int, payload: bytes) -> Message:
        return Message(self.source, b"", sequence, payload)
