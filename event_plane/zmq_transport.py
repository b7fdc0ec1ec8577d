"""ZeroMQ: PUB/SUB for batches, ROUTER/DEALER for resends, acknowledgements and asks for snapshots.

Frames of a batch are vLLM's, `[topic, sequence u64 big-endian, payload]`, and so is the resend protocol: a DEALER sends
`["", first sequence u64 big-endian]` and gets `["", topic, sequence, payload]` for each buffered batch, then sequence
2^64-1 with an empty payload. Ours alone takes `["", "ACK1", producer, epoch, sequence (3 × u64 big-endian)]` and
`["", "SNP1", producer, epoch (2 × u64 big-endian)]` there too; what is asked for comes in the stream.
"""

from __future__ import annotations

import errno
import ipaddress
import math
import os
import socket
import struct
import threading
import time
from typing import Any, Final, Unpack

import zmq

from event_plane.credentials import NO_CREDENTIALS, Credentials
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
from event_plane.transport import (
    Connection,
    Message,
    PlaneUrl,
    Received,
    Reconnected,
    ResendEnd,
    WhenSlow,
    parse_url,
    resend_url_beside,
)
from event_plane.wire import BATCH_BYTES_MAX, is_batch
from event_plane.zmq_connection import ConnectionState, Monitor
from event_plane.zmq_curve import PublisherKeys, publisher_keys, subscriber_keys
from event_plane.zmq_live import DroppingFeed, LiveFeed, WaitingFeed, receive_now

TOPIC: Final = b"kv-events"
ACK_TAG: Final = b"ACK1"
SNAPSHOT_TAG: Final = b"SNP1"
_SEQUENCE = struct.Struct(">Q")
_ACK = struct.Struct(">QQQ")
_SNAPSHOT = struct.Struct(">QQ")
_REQUESTS_PER_TURN = 64
_LINGER_MS = 1_000
_REQUEST_BYTES_MAX = 1024
_PUB_QUEUE = 1024
"""Batches waiting for one subscriber; past it they are dropped for that one, counted, and its gap heals by resend."""
_ROUTER_QUEUE = 256
_COPIED_BYTES_MAX = 4_096
"""Of a batch that is sent again, below which a copy costs less than to share it."""
_ASKS_MAX = 256
"""Resends awaited at a time by one subscriber; the oldest gives way."""
_REFUSED_RETRY_S = 5.0
"""Between attempts to connect to a publisher that refuses our keys, which libzmq gives up on."""


class ZmqCarrier:
    """XPUB and ROUTER of one publisher. Bound in the opening thread, then used by the publishing thread alone."""

    def __init__(self, url: PlaneUrl, resend_url: PlaneUrl, topic: bytes, keys: PublisherKeys | None) -> None:
        self.malformed = 0
        self.slow_reader_drops = 0
        self.payload_bytes_max = BATCH_BYTES_MAX
        self.topic = topic
        """Of what is sent next, again or for the first time."""
        self.has_subscribers = False
        """Whether some subscription was ever made."""
        self._wakeups = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context = zmq.Context()
        self._authenticator = keys.let_in_only_clients(self._context) if keys else None
        self._pub = self._context.socket(zmq.XPUB)
        self._router = self._context.socket(zmq.ROUTER)
        self._pub.setsockopt(zmq.SNDHWM, _PUB_QUEUE)
        # A reader whose queue is full is reported, where a PUB would drop in silence.
        self._pub.setsockopt(zmq.XPUB_NODROP, 1)
        self._router.setsockopt(zmq.SNDHWM, _ROUTER_QUEUE)
        self._router.copy_threshold = _COPIED_BYTES_MAX
        # With it a full or vanished reader is reported; without, its messages are dropped in silence.
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        for each in (self._pub, self._router):
            each.setsockopt(zmq.MAXMSGSIZE, _REQUEST_BYTES_MAX)
            each.setsockopt(zmq.LINGER, _LINGER_MS)
            if keys:
                keys.secure(each)
        try:
            self.url = _bind(self._pub, url, "publish", encrypted=keys is not None)
            self.resend_url = _bind(self._router, resend_url, "serve resends", encrypted=keys is not None)
        except TransportError:
            self.close()
            raise
        self._poller = zmq.Poller()
        for pollable in (self._pub, self._router, self._wakeups):
            self._poller.register(pollable, zmq.POLLIN)

    def send(self, sequence: int, payload: bytes) -> None:
        frames = (self.topic, _SEQUENCE.pack(sequence), payload)
        try:
            self._pub.send_multipart(frames, zmq.DONTWAIT)
        except zmq.Again:
            self.slow_reader_drops += 1
            # Nobody got it yet. Those with room do; a full one does without, and libzmq leaves it out, and does not
            # report it again, until it has read.
            self._pub.setsockopt(zmq.XPUB_NODROP, 0)
            self._pub.send_multipart(frames, zmq.DONTWAIT)
            self._pub.setsockopt(zmq.XPUB_NODROP, 1)

    def send_heartbeat(self, sequence: int, payload: bytes) -> None:
        self.send(sequence, payload)

    def resend(self, peer: bytes, sequence: int, payload: bytes) -> Reply:
        frames = (peer, b"", self.topic, _SEQUENCE.pack(sequence), payload)
        try:
            # What waits for any number of slow askers is the buffer's own bytes, not a copy for each.
            self._router.send_multipart(frames, zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return Reply.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Reply.GONE
        return Reply.SENT

    def wait(self, timeout_s: float | None) -> list[Request]:
        # Rounded up: a wait that ends before its time would only begin again.
        ready = dict(self._poller.poll(None if timeout_s is None else math.ceil(timeout_s * 1000)))
        if self._wakeups in ready:
            os.eventfd_read(self._wakeups)
        for _ in range(_REQUESTS_PER_TURN):
            if (frames := receive_now(self._pub)) is None:  # subscriptions, which are libzmq's business
                break
            self.has_subscribers |= frames[0][:1] == b"\x01"
        requests: list[Request] = []
        for _ in range(_REQUESTS_PER_TURN):
            if (frames := receive_now(self._router)) is None:
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
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        os.close(self._wakeups)


class ZmqPublisher(BatchPublisher):
    """Publishes one producer's batches on a port or a socket file. See `BatchPublisher`.

    With CURVE keys it lets in the subscribers whose keys it has; without, it binds to nothing but this machine.
    """

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
        credentials: Credentials = NO_CREDENTIALS,
        **options: Unpack[PublisherOptions],
    ) -> None:
        """`resend_url`: the next port where not given. Raises `TransportError` for a place that cannot be bound."""
        place = parse_url(url)
        keys = publisher_keys(credentials)
        resend_place = parse_url(resend_url) if resend_url else resend_url_beside(place)

        def open_carrier() -> Carrier:
            carrier = ZmqCarrier(place, resend_place, topic, keys)
            self.url, self.resend_url = carrier.url, carrier.resend_url
            return carrier

        super().__init__(open_carrier, producer=producer, **options)


class ZmqSubscriber:
    """Receives one source, ours or a foreign engine's. See `Subscriber`.

    `foreign` None: told from the first payload. A foreign engine gets no acknowledgements. `close` may come from
    another thread, but not while one waits on the pollables. The pollables change with each resend asked for or ended
    and with each new attempt to connect.

    `when_slow` as `wait`: what is not received fills the queues, and acknowledgements that do not come hold a publisher
    of ours back. `drop`: messages are always read, the newest of more than `queue_batches` are dropped and counted, and
    nothing is acknowledged.
    """

    def __init__(
        self,
        source: str,
        url: str,
        resend_url: str | None = None,
        *,
        topic: bytes = b"",
        foreign: bool | None = None,
        credentials: Credentials = NO_CREDENTIALS,
        when_slow: WhenSlow = "wait",
        queue_batches: int = 1024,
    ) -> None:
        """`topic`: prefix of the topics wanted. Raises `TransportError` for a URL or keys that cannot be used."""
        self.source = source
        self.foreign = foreign
        self.malformed = 0
        """Messages that were dropped because they are no `[topic, sequence, payload]`."""
        self._place = parse_url(url)
        self._resend_place = parse_url(resend_url) if resend_url else resend_url_beside(self._place)
        self._topic = topic
        self._keys = subscriber_keys(credentials)
        self._when_slow = when_slow
        self._queue_batches = queue_batches
        self._topic_seen: bytes | None = None
        self._nameless: dict[int, int] = {}
        """By token of a resend: the lowest sequence dropped because no live message had told the topic yet."""
        self._lock = threading.Lock()
        self._closed = False
        self._asks: dict[int, zmq.Socket[bytes]] = {}
        self._state = ConnectionState(self._place)
        self._retry_at_s: float | None = None
        self._dropped_before = 0
        """By feeds before this one."""
        self._context = zmq.Context()
        try:
            self._open()
        except TransportError:
            self._context.destroy(linger=0)
            raise

    def pollables(self) -> list[Any]:
        """See `Subscriber.pollables`."""
        with self._lock:
            return [] if self._closed else [self._live.pollable, self._monitor.pollable, *self._asks.values()]

    def receive(self, count_max: int) -> list[Received]:
        """See `Subscriber.receive`. Neither live nor resent messages can starve the other."""
        with self._lock:
            if self._closed:
                return []
            received: list[Received] = []
            self._watch_connection(received)
            for token in list(self._asks):
                self._receive_resent(token, received, count_max - count_max // 2)
            while len(received) < count_max and (frames := self._live.take()) is not None:
                if (parsed := self._parse(frames)) is not None:
                    self._topic_seen = frames[-3]
                    self._ask_again_for_nameless()
                    received.append(Message(self.source, self._topic_seen, *parsed))
            return received

    def acknowledge(self, producer: int, epoch: int, sequence: int) -> None:
        """See `Subscriber.acknowledge`."""
        with self._lock:
            if self._when_slow == "wait":
                self._tell_publisher(ACK_TAG, _ACK.pack(producer, epoch, sequence))

    def ask_resend(self, from_sequence: int, token: int, producer: int | None = None) -> bool:
        """See `Subscriber.ask_resend`."""
        with self._lock:
            if self._closed:
                return False
            self._ask(from_sequence, token)
            return True

    def ask_snapshot(self, producer: int, epoch: int) -> bool:
        """See `Subscriber.ask_snapshot`. False until a batch has told that the source is ours."""
        with self._lock:
            return self._tell_publisher(SNAPSHOT_TAG, _SNAPSHOT.pack(producer, epoch))

    def connection(self) -> Connection:
        """See `Subscriber.connection`; as of the last `receive`."""
        with self._lock:
            return self._state.connection(self._dropped_before + self._live.dropped)

    def close(self) -> None:
        """See `Subscriber.close`."""
        with self._lock:
            if not self._closed:
                self._closed = True
                while self._asks:
                    self._end_ask(next(iter(self._asks)))
                self._live.close()
                self._monitor.close()
                self._context.destroy(linger=0)

    def _open(self) -> None:
        """Connect the sockets that live as long as the connection."""
        sub = self._socket(zmq.SUB, self._queue_batches)
        self._monitor = Monitor(sub)
        self._connect(sub, self._place)
        sub.setsockopt(zmq.SUBSCRIBE, self._topic)
        self._acks: zmq.Socket[bytes] | None = None
        if not self.foreign:
            self._acks = self._socket(zmq.DEALER, self._queue_batches)
            self._connect(self._acks, self._resend_place)
        self._live: LiveFeed = (
            WaitingFeed(sub) if self._when_slow == "wait" else DroppingFeed(sub, self._queue_batches)
        )

    def _watch_connection(self, received: list[Received]) -> None:
        if self._state.given_up:
            now_s = time.monotonic()
            if self._retry_at_s is None:
                self._retry_at_s = now_s + _REFUSED_RETRY_S
            elif now_s >= self._retry_at_s:
                self._retry_at_s = None
                self._reopen()
        received += [Reconnected(self.source) for event in self._monitor.events() if self._state.take(event)]

    def _reopen(self) -> None:
        self._dropped_before += self._live.dropped
        self._live.close()
        self._monitor.close()
        if self._acks is not None:
            self._acks.close()
        self._state.given_up = False
        self._open()

    def _tell_publisher(self, tag: bytes, body: bytes) -> bool:
        """Send a request that only our own publishers know. False where the source is none, or none yet."""
        if self._closed or self._acks is None or self.foreign is not False:
            return False
        try:
            self._acks.send_multipart((b"", tag, body), zmq.DONTWAIT)
        except zmq.Again:
            # The publisher is away and the queue is full. A later acknowledgement says all that this one does, and a
            # snapshot that does not come is asked for again.
            return True
        return True

    def _ask(self, from_sequence: int, token: int) -> None:
        if token in self._asks:
            self._end_ask(token)
        elif len(self._asks) == _ASKS_MAX:
            self._end_ask(next(iter(self._asks)))
        # A fresh identity for each ask, and no mark: publishers drop in silence for a reader that is full.
        dealer = self._socket(zmq.DEALER, 0)
        self._connect(dealer, self._resend_place)
        dealer.send_multipart((b"", _SEQUENCE.pack(from_sequence)))
        self._asks[token] = dealer

    def _ask_again_for_nameless(self) -> None:
        """They may hold what no gap shows: the batch that tells an engine's new life from its former one."""
        for token, from_sequence in self._nameless.items():
            self._ask(from_sequence, token)
        self._nameless = {}

    def _socket(self, kind: int, queue_batches: int) -> zmq.Socket[bytes]:
        opened = self._context.socket(kind)
        opened.setsockopt(zmq.RCVHWM, queue_batches)
        opened.setsockopt(zmq.LINGER, 0)
        opened.setsockopt(zmq.MAXMSGSIZE, BATCH_BYTES_MAX)
        opened.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        opened.setsockopt(zmq.HEARTBEAT_IVL, 5_000)
        opened.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15_000)
        opened.setsockopt(zmq.IPV6, 1)
        if self._keys is not None:
            self._keys.secure(opened)
        return opened

    def _connect(self, opened: zmq.Socket[bytes], place: PlaneUrl) -> None:
        try:
            opened.connect(place.endpoint)
        except zmq.ZMQError as error:
            raise TransportError(f"cannot subscribe to {place}: {error.strerror}; check the URL") from error

    def _receive_resent(self, token: int, received: list[Received], count_max: int) -> None:
        while len(received) < count_max and (frames := receive_now(self._asks[token])) is not None:
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


def _parse_request(frames: list[bytes]) -> Request | None:
    match frames:
        case [peer, b"", start] if len(start) == _SEQUENCE.size:
            return Ask(peer, _SEQUENCE.unpack(start)[0])
        case [peer, b"", tag, body] if tag == ACK_TAG and len(body) == _ACK.size:
            return Acknowledgement(peer, *_ACK.unpack(body))
        case [peer, b"", tag, body] if tag == SNAPSHOT_TAG and len(body) == _SNAPSHOT.size:
            return SnapshotAsk(peer, *_SNAPSHOT.unpack(body))
    return None


def _bind(bound: zmq.Socket[bytes], place: PlaneUrl, purpose: str, *, encrypted: bool) -> PlaneUrl:
    """Bind, and return where: with the port that was chosen where 0 was asked for."""
    if place.scheme == "zmq+ipc":
        _refuse_live_socket_file(place, purpose)
    elif not encrypted and not _is_loopback(place.host):
        raise TransportError(
            f"cannot {purpose} on {place}: {place.host} is reachable from other machines, and without CURVE keys"
            " anybody could read along; make keys with `kvadvisor keys` and name them in curve_key_file and"
            " curve_clients_folder, or use 127.0.0.1"
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
