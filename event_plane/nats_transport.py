"""NATS core: one subject a producer, headers with producer, epoch and sequence, requests as in `nats_requests`.

The server keeps nothing: what a subscriber misses is asked of the publisher again. Messages of foreign publishers, as
NVIDIA Dynamo's on `namespace.N.component.C.endpoint.E.kv-events`, are taken as they are.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Unpack

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from event_plane.credentials import NO_CREDENTIALS, Credentials
from event_plane.errors import TransportError
from event_plane.nats_connection import (
    HEADER_BYTES_MAX,
    OUTBOX_BYTES_MAX,
    SUBSCRIPTION_BYTES_MAX,
    SUBSCRIPTION_MESSAGES_MAX,
    NatsConnection,
    PlaceUnusable,
)
from event_plane.nats_mailbox import Lane
from event_plane.nats_requests import (
    REQUEST_HEADER,
    RequestKind,
    ack_body,
    batch_headers,
    batch_subject,
    read_headers,
    read_request,
    read_who_reply,
    request_headers,
    request_subject,
    resend_body,
    snapshot_body,
    who_reply,
)
from event_plane.nats_subscription import MailboxSubscriber, ResendAsk
from event_plane.publishing import RESEND_END, BatchPublisher, Carrier, PublisherOptions, Reply, Request
from event_plane.transport import Connection, Message, PlaneUrl, WhenSlow, parse_url
from event_plane.wire import is_batch

OPEN_WAIT_S: Final = 3.0
"""How long opening a publisher waits for the server; it is then opened all the same and connects when it can."""
FLUSH_WAIT_S: Final = 2.0
DEFAULT_PAYLOAD_BYTES_MAX: Final = 1024 * 1024 - HEADER_BYTES_MAX
"""What a server takes unless it is told otherwise."""
_REQUESTS_MAX = 4096
_WHO_WAIT_S = 0.5
_ASK_AGAIN_S = 0.5
"""After nobody was there to take an ask."""
_HEARD_MAX = 65_536
"""Producers of ours that a subscriber remembers the subject of."""
_RESENT_OUTBOX_BYTES = OUTBOX_BYTES_MAX // 2
"""Resends wait while more is in the outbox: live batches must find room there."""


class NatsCarrier:
    """A `Carrier` of one producer: publishes under `subject`, listens to requests. Lives on a `NatsConnection`."""

    def __init__(self, place: PlaneUrl, subject: str, credentials: Credentials, producer: int, epoch: int) -> None:
        """Raises `TransportError` where the producer is in use, or the server does not let us in."""
        self.malformed = 0
        self.slow_reader_drops = 0
        self._producer = producer
        self._epoch = epoch
        self._subject = subject
        self._batch_subject = batch_subject(subject, producer)
        self._changed = threading.Condition()
        self._requests: deque[Request] = deque(maxlen=_REQUESTS_MAX)
        self._woken = False
        self._in_use = ""
        self._asked_who = False
        self.connection = NatsConnection(place, credentials, self, f"kvadvisor publisher {producer:016x}")
        standing = self.connection.wait_known(OPEN_WAIT_S)
        if self.connection.unusable:
            self.connection.close()
            raise TransportError(f"cannot publish on {place}: {standing.problem}")
        self.payload_bytes_max = self.connection.payload_bytes_max or DEFAULT_PAYLOAD_BYTES_MAX

    def send(self, sequence: int, payload: bytes) -> None:
        headers = batch_headers(self._producer, self._epoch, sequence)
        if not self.connection.post(self._batch_subject, payload, headers=headers):
            self.slow_reader_drops += 1

    def send_heartbeat(self, sequence: int, payload: bytes) -> None:
        self.send(sequence, payload)

    def resend(self, peer: bytes, sequence: int, payload: bytes) -> Reply:
        if self.connection.outbox_bytes > _RESENT_OUTBOX_BYTES:
            return Reply.FULL
        headers = batch_headers(self._producer, self._epoch, sequence)
        return Reply.SENT if self.connection.post(peer.decode(), payload, headers=headers) else Reply.FULL

    def wait(self, timeout_s: float | None) -> list[Request]:
        with self._changed:
            self._changed.wait_for(lambda: self._woken or self._requests, timeout_s)
            self._woken = False
            requests = list(self._requests)
            self._requests.clear()
        if self._in_use:
            raise TransportError(self._in_use)
        return requests

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        self.connection.close()

    async def serve(self, client: Client, up: Callable[[], None]) -> None:
        """See `Resident.serve`."""
        await self._take_place(client)
        up()
        await asyncio.Event().wait()

    def slow(self) -> None:
        """See `Resident.slow`: requests that were dropped are asked again."""

    async def _take_place(self, client: Client) -> None:
        """Listen to requests, unless another publisher does so already for this producer."""
        if not self._asked_who and await self._other_epoch(client) is not None:
            self._in_use = (
                f"producer {self._producer:016x} is in use under {self._subject}; stop the process that publishes it"
                " or choose another producer"
            )
            self.wake()
            raise PlaceUnusable(self._in_use)
        # Asked once: after a lost connection the server may still hold our own former subscription.
        self._asked_who = True
        for producer in (self._producer, None):
            await client.subscribe(
                request_subject(self._subject, producer),
                cb=self._take_request,
                pending_msgs_limit=_REQUESTS_MAX,
                pending_bytes_limit=SUBSCRIPTION_BYTES_MAX,
            )
        await client.flush()

    async def _other_epoch(self, client: Client) -> int | None:
        try:
            reply = await client.request(
                request_subject(self._subject, self._producer),
                timeout=_WHO_WAIT_S,
                headers=request_headers(RequestKind.WHO),
            )
        except (nats.errors.NoRespondersError, nats.errors.TimeoutError):
            return None
        return read_who_reply(reply.data)

    async def _take_request(self, message: Msg) -> None:
        kind = (message.headers or {}).get(REQUEST_HEADER, "")
        if kind == RequestKind.WHO and message.reply:
            await message.respond(who_reply(self._epoch))
            return
        request = read_request(kind, message.data, message.reply)
        if request is None:
            self.malformed += 1
            return
        self._hand_in(request)

    def _hand_in(self, request: Request) -> None:
        with self._changed:
            self._requests.append(request)
            self._changed.notify_all()


class NatsPublisher(BatchPublisher):
    """Publishes one producer's batches on `<subject>.<producer>`. See `BatchPublisher`."""

    def __init__(
        self,
        url: str,
        *,
        producer: int,
        credentials: Credentials = NO_CREDENTIALS,
        **options: Unpack[PublisherOptions],
    ) -> None:
        """Raises `TransportError` where the subject holds wildcards, the producer is in use, or the server does not
        let us in. Where the server is away it is opened all the same."""
        place = parse_url(url)
        if "*" in place.path or ">" in place.path:
            raise TransportError(f"cannot publish on {place}: * and > are for subscribing; name one subject")

        def open_carrier() -> Carrier:
            carrier = NatsCarrier(place, place.path, credentials, producer, self.epoch)
            self._nats = carrier.connection
            return carrier

        super().__init__(open_carrier, producer=producer, **options)

    def flush(self) -> int:
        """See `Publisher.flush`. Waits besides until the server has it, for two seconds at most."""
        last = super().flush()
        self._nats.flush(FLUSH_WAIT_S)
        return last

    def connection(self) -> Connection:
        """How it stands with the server; `dropped` is in `stat()` as `slow_reader_drops`."""
        return self._nats.standing()


class NatsSubscriber(MailboxSubscriber):
    """Receives what is published under one subject, ours or a foreign publisher's. See `Subscriber`.

    Without wildcards both `<subject>` and `<subject>.*` are read, where our publishers are; with them, or with
    `foreign`, the subject alone.

    A server never waits for a slow reader. With `wait` acknowledgements that do not come hold a publisher of ours back
    long before the 12,288 messages that are held here at most; what comes past them is dropped and counted. With `drop`
    a third of that is held and nothing is acknowledged.
    """

    def __init__(
        self,
        source: str,
        url: str,
        *,
        topic: bytes = b"",
        foreign: bool | None = None,
        credentials: Credentials = NO_CREDENTIALS,
        when_slow: WhenSlow = "wait",
    ) -> None:
        """`topic`: prefix of the subjects wanted. Raises `TransportError` for credentials that cannot be read."""
        self.foreign = foreign
        place = parse_url(url)
        self._when_slow = when_slow
        self._is_verbatim = "*" in place.path or ">" in place.path
        self._heard: dict[int, str] = {}
        """By producer of ours: the subject that its batches come by."""
        self._inbox = f"_INBOX.{secrets.token_hex(11)}"
        """The same over every connection: publishers know their acknowledging subscribers by it."""
        self._acks: dict[tuple[int, int], int] = {}
        super().__init__(source, place, credentials, topic)

    def acknowledge(self, producer: int, epoch: int, sequence: int) -> None:
        """See `Subscriber.acknowledge`."""
        with self._lock:
            if self._closed or self.foreign is not False or self._when_slow == "drop":
                return
            first = not self._acks
            self._acks[producer, epoch] = sequence
        if first:
            self._connection.soon(self._send_acks)

    def ask_resend(self, from_sequence: int, token: int, producer: int | None = None) -> bool:
        """See `Subscriber.ask_resend`. It is asked again until a publisher is there."""
        if self.foreign or (self._is_verbatim and producer not in self._heard):
            return False
        return self._ask(from_sequence, token, producer)

    def ask_snapshot(self, producer: int, epoch: int) -> bool:
        """See `Subscriber.ask_snapshot`."""
        if self._closed or self.foreign or (self._is_verbatim and producer not in self._heard):
            return False
        self._request(self._requests_of(producer), RequestKind.SNAPSHOT, snapshot_body(producer, epoch))
        return True

    async def serve(self, client: Client, up: Callable[[], None]) -> None:
        """See `Resident.serve`."""
        path = self._place.path
        # One subscription of each kind: a resend that waits for room keeps no live message from the mailbox.
        subjects = [] if self._is_verbatim or self.foreign else [f"{path}.*"]
        if self._is_verbatim or self.foreign is not False:
            subjects.append(path)
        for subject, callback in [(each, self._take_live) for each in subjects] + [
            (f"{self._inbox}.*", self._take_reply)
        ]:
            await client.subscribe(
                subject,
                cb=callback,
                pending_msgs_limit=SUBSCRIPTION_MESSAGES_MAX,
                pending_bytes_limit=SUBSCRIPTION_BYTES_MAX,
            )
        await client.flush()
        self._stands(up)
        await asyncio.Event().wait()

    def _requests_of(self, producer: int | None) -> str:
        heard = None if producer is None else self._heard.get(producer)
        return f"{heard}.requests" if heard else request_subject(self._place.path, producer)

    def _issue(self, ask: ResendAsk) -> None:
        self._request(
            self._requests_of(ask.producer),
            RequestKind.RESEND,
            resend_body(ask.from_sequence),
            f"{self._inbox}.{ask.number}",
        )

    def _send_acks(self) -> None:
        with self._lock:
            acks, self._acks = self._acks, {}
        for (producer, epoch), sequence in acks.items():
            self._request(
                self._requests_of(producer), RequestKind.ACK, ack_body(producer, epoch, sequence), f"{self._inbox}.0"
            )

    async def _take_live(self, message: Msg) -> None:
        if REQUEST_HEADER in (message.headers or {}) or not message.subject.encode().startswith(self._topic):
            return
        lane = self._mailbox.live
        if lane.is_full and self._when_slow == "drop":
            self._mailbox.dropped += 1
            return
        await self._mailbox.room(lane)
        self._deliver(lane, message, None)

    async def _take_reply(self, message: Msg) -> None:
        ask = self._asked_as(message.subject.rpartition(".")[2])
        if ask is None:
            return
        if (message.headers or {}).get("Status"):
            # Nobody listens: the publisher is not there, or not yet.
            asyncio.get_running_loop().call_later(_ASK_AGAIN_S, self._issue_if_connected, ask)
            return
        identity = read_headers(message.headers)
        if identity is None:
            self.malformed += 1
        elif identity[2] == RESEND_END and not message.data:
            self._end(ask)
        else:
            await self._mailbox.room(self._mailbox.resent)
            self._deliver(self._mailbox.resent, message, ask)

    def _asked_as(self, number: str) -> ResendAsk | None:
        with self._lock:
            return next((ask for ask in self._asks.values() if str(ask.number) == number), None)

    def _deliver(self, lane: Lane[Any], message: Msg, ask: ResendAsk | None) -> None:
        ours = is_batch(message.data)
        identity = read_headers(message.headers) if ours else None
        if self.foreign is None:
            self.foreign = not ours
        subject = message.subject
        if identity is not None:
            if ask is not None:
                subject = self._heard.get(identity[0]) or batch_subject(self._place.path, identity[0])
            elif identity[0] not in self._heard and len(self._heard) < _HEARD_MAX:
                self._heard[identity[0]] = subject
        sequence = identity[2] if identity else 0
        self._mailbox.put(
            lane, Message(self.source, subject.encode(), sequence, message.data), len(message.data), ask
        )
