"""ZeroMQ: PUB/SUB for batches, ROUTER/DEALER for resends and acknowledgements.

Frames of a batch are vLLM's, `[topic, sequence u64 big-endian, payload]`, and so is the resend protocol: a DEALER sends
`["", first sequence u64 big-endian]` and gets `["", topic, sequence, payload]` for each buffered batch, then sequence
2^64-1 with an empty payload. Ours alone takes `["", "ACK1", producer, epoch, sequence (3 × u64 big-endian)]` there too.
"""

from __future__ import annotations

import errno
import ipaddress
import math
import os
import socket
import struct
import threading
from typing import Any, Final, Unpack

import zmq

from event_plane.errors import TransportError
from event_plane.publishing import RESEND_END, Acknowledgement, Ask, BatchPublisher, Carrier, PublisherOptions, Reply
from event_plane.transport import Message, PlaneUrl, ResendEnd, parse_url, resend_url_beside
from event_plane.wire import BATCH_BYTES_MAX, is_batch

TOPIC: Final = b"kv-events"
ACK_TAG: Final = b"ACK1"
_SEQUENCE = struct.Struct(">Q")
_ACK = struct.Struct(">QQQ")
_REQUESTS_PER_TURN = 64
_LINGER_MS = 1_000
_PUB_QUEUE = 1024
"""Batches waiting for one subscriber; past it they are dropped for that one, whose gap heals by resend."""
_ROUTER_QUEUE = 256
_ASKS_MAX = 256
"""Resends awaited at a time by one subscriber; the oldest gives way."""


class _ZmqCarrier:
    """PUB and ROUTER of one publisher. Bound in the opening thread, then used by the publishing thread alone."""

    def __init__(self, url: PlaneUrl, resend_url: PlaneUrl, topic: bytes) -> None:
        self.malformed = 0
        self._topic = topic
        self._wakeups = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        self._pub.setsockopt(zmq.SNDHWM, _PUB_QUEUE)
        self._router.setsockopt(zmq.SNDHWM, _ROUTER_QUEUE)
        # With it a full or vanished reader is reported; without, its messages are dropped in silence.
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.MAXMSGSIZE, 1024)
        for each in (self._pub, self._router):
            each.setsockopt(zmq.LINGER, _LINGER_MS)
        try:
            self.url = _bind(self._pub, url, "publish")
            self.resend_url = _bind(self._router, resend_url, "serve resends")
        except TransportError:
            self.close()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wakeups, zmq.POLLIN)

    def send(self, sequence: int, payload: bytes) -> None:
        self._pub.send_multipart((self._topic, _SEQUENCE.pack(sequence), payload))

    def resend(self, peer: bytes, sequence: int, payload: bytes) -> Reply:
        try:
            self._router.send_multipart((peer, b"", self._topic, _SEQUENCE.pack(sequence), payload), zmq.DONTWAIT)
        except zmq.Again:
            return Reply.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Reply.GONE
        return Reply.SENT

    def wait(self, timeout_s: float | None) -> list[Ask | Acknowledgement]:
        # Rounded up: a wait that ends before its time would only begin again.
        ready = dict(self._poller.poll(None if timeout_s is None else math.ceil(timeout_s * 1000)))
        if self._wakeups in ready:
            os.eventfd_read(self._wakeups)
        requests: list[Ask | Acknowledgement] = []
        for _ in range(_REQUESTS_PER_TURN):
            try:
                frames = self._router.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            request = _parse_request(frames)
            if request is None:
                self.malformed += 1
            else:
                requests.append(request)
        return requests

    def wake(self) -> None:
        os.eventfd_write(self._wakeups, 1)

    def close(self) -> None:
        self._pub.close()
        self._router.close()
        self._context.term()
        os.close(self._wakeups)


class ZmqPublisher(BatchPublisher):
    """Publishes one producer's batches on a loopback port or a socket file. See `BatchPublisher`."""

    url: PlaneUrl
    """Where it publishes; names the port that was chosen where 0 was asked for."""
    resend_url: PlaneUrl

    def __init__(
        self,
        url: str,
        resend_url: str | None = None,
        *,
        producer: int,
        topic: bytes = TOPIC,
        **options: Unpack[PublisherOptions],
    ) -> None:
        """`resend_url`: the next port where not given. Raises `TransportError` for a place that cannot be bound."""
        place = parse_url(url)
        resend_place = parse_url(resend_url) if resend_url else resend_url_beside(place)

        def open_carrier() -> Carrier:
            carrier = _ZmqCarrier(place, resend_place, topic)
            self.url, self.resend_url = carrier.url, carrier.resend_url
            return carrier

        super().__init__(open_carrier, producer=producer, **options)


class ZmqSubscriber:
    """Receives one source, ours or a foreign engine's. See `Subscriber`.

    `foreign` None: told from the first payload. A foreign engine gets no acknowledgements. `close` may come from
    another thread, but not while one waits on the pollables. The pollables change with each resend asked for or ended.
    """

    def __init__(
        self,
        source: str,
        url: str,
        resend_url: str | None = None,
        *,
        topic: bytes = b"",
        foreign: bool | None = None,
        queue_batches: int = 4096,
    ) -> None:
        """`topic`: prefix of the topics wanted. Raises `TransportError` for a URL that cannot be used."""
        self.source = source
        self.foreign = foreign
        self.malformed = 0
        """Messages that were dropped because they are no `[topic, sequence, payload]`."""
        place = parse_url(url)
        self._resend_place = parse_url(resend_url) if resend_url else resend_url_beside(place)
        self._topic = topic
        self._topic_seen: bytes | None = None
        self._nameless: dict[int, int] = {}
        """By token of a resend: the lowest sequence dropped because no live message had told the topic yet."""
        self._lock = threading.Lock()
        self._closed = False
        self._asks: dict[int, zmq.Socket[bytes]] = {}
        self._context = zmq.Context()
        try:
            self._sub = self._connect(zmq.SUB, place, queue_batches)
            self._acks = None if foreign else self._connect(zmq.DEALER, self._resend_place, queue_batches)
        except TransportError:
            self._context.destroy(linger=0)
            raise
        self._sub.setsockopt(zmq.SUBSCRIBE, topic)

    def pollables(self) -> list[Any]:
        """See `Subscriber.pollables`."""
        with self._lock:
            return [] if self._closed else [self._sub, *self._asks.values()]

    def receive(self, count_max: int) -> list[Message | ResendEnd]:
        """See `Subscriber.receive`. Neither live nor resent messages can starve the other."""
        with self._lock:
            if self._closed:
                return []
            received: list[Message | ResendEnd] = []
            for token in list(self._asks):
                self._receive_resent(token, received, count_max - count_max // 2)
            while len(received) < count_max and (frames := _receive_now(self._sub)) is not None:
                if (parsed := self._parse(frames)) is not None:
                    self._topic_seen = frames[-3]
                    self._ask_again_for_nameless()
                    received.append(Message(self.source, self._topic_seen, *parsed))
            return received

    def acknowledge(self, producer: int, epoch: int, sequence: int) -> None:
        """See `Subscriber.acknowledge`."""
        with self._lock:
            if self._closed or self._acks is None or self.foreign is not False:
                return
            try:
                self._acks.send_multipart((b"", ACK_TAG, _ACK.pack(producer, epoch, sequence)), zmq.DONTWAIT)
            except zmq.Again:
                # The publisher is away and the queue is full. The next acknowledgement says all that this one does.
                return

    def ask_resend(self, from_sequence: int, token: int) -> bool:
        """See `Subscriber.ask_resend`. A second ask with one token replaces the first."""
        with self._lock:
            if self._closed:
                return False
            self._ask(from_sequence, token)
            return True

    def close(self) -> None:
        """See `Subscriber.close`."""
        with self._lock:
            if not self._closed:
                self._closed = True
                while self._asks:
                    self._end_ask(next(iter(self._asks)))
                self._context.destroy(linger=0)

    def _ask(self, from_sequence: int, token: int) -> None:
        if token in self._asks:
            self._end_ask(token)
        elif len(self._asks) == _ASKS_MAX:
            self._end_ask(next(iter(self._asks)))
        # A fresh identity for each ask, and no mark: publishers drop in silence for a reader that is full.
        dealer = self._connect(zmq.DEALER, self._resend_place, 0)
        dealer.send_multipart((b"", _SEQUENCE.pack(from_sequence)))
        self._asks[token] = dealer

    def _ask_again_for_nameless(self) -> None:
        """They may hold what no gap shows: the batch that tells an engine's new life from its former one."""
        for token, from_sequence in self._nameless.items():
            self._ask(from_sequence, token)
        self._nameless = {}

    def _connect(self, kind: int, place: PlaneUrl, queue_batches: int) -> zmq.Socket[bytes]:
        connected = self._context.socket(kind)
        connected.setsockopt(zmq.RCVHWM, queue_batches)
        connected.setsockopt(zmq.LINGER, 0)
        connected.setsockopt(zmq.MAXMSGSIZE, BATCH_BYTES_MAX)
        connected.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        connected.setsockopt(zmq.HEARTBEAT_IVL, 5_000)
        connected.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15_000)
        connected.setsockopt(zmq.IPV6, 1)
        try:
            connected.connect(place.endpoint)
        except zmq.ZMQError as error:
            raise TransportError(f"cannot subscribe to {place}: {error.strerror}; check the URL") from error
        return connected

    def _receive_resent(self, token: int, received: list[Message | ResendEnd], count_max: int) -> None:
        while len(received) < count_max and (frames := _receive_now(self._asks[token])) is not None:
            # Before vLLM 0.25 replies carry no topic: theirs is that of the live messages.
            topic = frames[-3] if len(frames) > 3 else self._topic_seen
            parsed = self._parse(frames)
            if parsed is None:
                continue
            sequence, payload = parsed
            if sequence == RESEND_END and not payload:
                self._end_ask(token)
                received.append(ResendEnd(self.source, token))
                return
            if topic is None:
                # Under an assumed topic it would be another producer's.
                self._nameless[token] = min(sequence, self._nameless.get(token, sequence))
            elif topic.startswith(self._topic):
                received.append(Message(self.source, topic, sequence, payload))

    def _end_ask(self, token: int) -> None:
        self._asks.pop(token).close()

    def _parse(self, frames: list[bytes]) -> tuple[int, bytes] | None:
        """Sequence and payload, from the tail: what comes before topic and these differs between releases."""
        if len(frames) < 3 or len(frames[-2]) != _SEQUENCE.size:
            self.malformed += 1
            return None
        payload = frames[-1]
        if self.foreign is None and payload:
            self.foreign = not is_batch(payload)
        return _SEQUENCE.unpack(frames[-2])[0], payload


def _receive_now(receiver: zmq.Socket[bytes]) -> list[bytes] | None:
    try:
        return receiver.recv_multipart(zmq.DONTWAIT)
    except zmq.Again:
        return None


def _parse_request(frames: list[bytes]) -> Ask | Acknowledgement | None:
    match frames:
        case [peer, b"", start] if len(start) == _SEQUENCE.size:
            return Ask(peer, _SEQUENCE.unpack(start)[0])
        case [peer, b"", tag, body] if tag == ACK_TAG and len(body) == _ACK.size:
            return Acknowledgement(peer, *_ACK.unpack(body))
    return None


def _bind(bound: zmq.Socket[bytes], place: PlaneUrl, purpose: str) -> PlaneUrl:
    """Bind, and return where: with the port that was chosen where 0 was asked for."""
    if place.scheme == "zmq+ipc":
        _refuse_live_socket_file(place, purpose)
    elif not _is_loopback(place.host):
        raise TransportError(
            f"cannot {purpose} on {place}: {place.host} is reachable from other machines and connections are not"
            " encrypted yet (CURVE keys come with issue 3); use 127.0.0.1"
        )
    bound.setsockopt(zmq.IPV6, int(":" in place.host))
    try:
        bound.bind(place.endpoint)
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            remedy = f"port {place.port} is in use; stop the process that holds it or choose another port"
        else:
            remedy = f"{error.strerror}; choose another address"
        raise TransportError(f"cannot {purpose} on {place}: {remedy}") from error
    if place.scheme == "zmq+tcp" and place.port == 0:
        return parse_url(f"zmq+{bound.getsockopt_string(zmq.LAST_ENDPOINT)}")
    return place


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _refuse_live_socket_file(place: PlaneUrl, purpose: str) -> None:
    """libzmq takes over a socket file that another process serves; ask whether one does."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(place.path)
        except OSError:
            return
    raise TransportError(
        f"cannot {purpose} on {place}: {place.path} is in use; stop the process that holds it or choose another path"
    )
