"""Publishing into a JetStream stream: what is acknowledged to the publisher is in the stream. See `jetstream_stream`.

Requests travel as on NATS core, but for resends: subscribers read those from the stream themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Final, Unpack

import msgspec
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg

from event_plane.credentials import NO_CREDENTIALS, Credentials
from event_plane.jetstream_stream import (
    API_WAIT_S,
    IN_FLIGHT_MAX,
    StreamCare,
    stream_options,
    subject_of,
)
from event_plane.nats_connection import SUBSCRIPTION_BYTES_MAX, SUBSCRIPTION_MESSAGES_MAX
from event_plane.nats_requests import (
    batch_headers,
)
from event_plane.nats_transport import (
    FLUSH_WAIT_S,
    NatsCarrier,
)
from event_plane.publishing import Acknowledgement, BatchPublisher, Carrier, PublisherOptions
from event_plane.transport import Connection, PlaneUrl, parse_url

UNSTORED_BATCHES_MAX: Final = 4096
UNSTORED_BYTES_MAX: Final = 64 * 1024 * 1024
"""What a publisher holds for the stream; past it the oldest go, counted, and a snapshot mends the gap."""
_STORE_WAIT_S = 5.0
"""After which a batch is sent again: the stream knows it by its id."""
_STORE_AGAIN_S = 0.5
_CLOSE_WAIT_S = 1.0
_STREAM_PEER: Final = b"stream"

_log = structlog.get_logger()


class _PubAck(msgspec.Struct):
    """What the server says of a batch sent to the stream."""

    error: dict[str, Any] | None = None


class JetStreamCarrier(NatsCarrier):
    """A `Carrier` that holds each batch until the stream has it, whatever becomes of the connection meanwhile."""

    def __init__(self, place: PlaneUrl, credentials: Credentials, producer: int, epoch: int) -> None:
        self._care = StreamCare(place)
        self._stream = place.path
        self._unstored: OrderedDict[int, bytes] = OrderedDict()
        """By sequence; guarded, as the two below, by the condition that guards the requests."""
        self._unstored_bytes = 0
        self._to_send: deque[int] = deque()
        self._last_sequence = -1
        self._in_flight: dict[int, float] = {}
        """By sequence: when it was sent. In the loop's thread."""
        self._more = asyncio.Event()
        self._inbox = f"_INBOX.{secrets.token_hex(11)}"
        self._refusal = ""
        super().__init__(place, subject_of(place.path), credentials, producer, epoch)

    def send(self, sequence: int, payload: bytes) -> None:
        with self._changed:
            self._unstored[sequence] = payload
            self._unstored_bytes += len(payload)
            self._to_send.append(sequence)
            self._last_sequence = sequence
            while len(self._unstored) > UNSTORED_BATCHES_MAX or self._unstored_bytes > UNSTORED_BYTES_MAX:
                self._forget(next(iter(self._unstored)))
                self.slow_reader_drops += 1
        self.connection.soon(self._more.set)

    def send_heartbeat(self, sequence: int, payload: bytes) -> None:
        """Nothing: the stream loses no tail."""

    def wait_stored(self, sequence: int, timeout_s: float) -> bool:
        """Wait until the stream has everything up to `sequence`; False where it takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._stored_up_to() >= sequence, timeout_s)

    def close(self) -> None:
        if self.connection.standing().connected:
            self.wait_stored(self._last_sequence, _CLOSE_WAIT_S)
        super().close()

    async def serve(self, client: Client, up: Callable[[], None]) -> None:
        """See `Resident.serve`."""
        await self._take_place(client)
        js = client.jetstream(timeout=API_WAIT_S)
        await self._care.see_to(js)
        await client.subscribe(
            f"{self._inbox}.*",
            cb=self._take_stored,
            pending_msgs_limit=SUBSCRIPTION_MESSAGES_MAX,
            pending_bytes_limit=SUBSCRIPTION_BYTES_MAX,
        )
        await client.flush()
        with self._changed:
            # Whether what was in flight arrived is not known: the stream drops what it has.
            self._to_send = deque(self._unstored)
        self._in_flight = {}
        up()
        while True:
            self._more.clear()
            await self._send_some(client)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._more.wait(), _STORE_WAIT_S / 2)
            self._send_overdue_again()
            if self._refusal:
                # It may have been deleted under us.
                await self._care.see_to(js)

    async def _send_some(self, client: Client) -> None:
        while len(self._in_flight) < IN_FLIGHT_MAX:
            with self._changed:
                if not self._to_send:
                    return
                sequence = self._to_send.popleft()
                payload = self._unstored.get(sequence)
            if payload is None:
                continue
            self._in_flight[sequence] = time.monotonic()
            headers = batch_headers(self._producer, self._epoch, sequence)
            headers["Nats-Msg-Id"] = f"{self._producer:016x}/{self._epoch}/{sequence}"
            headers["Nats-Expected-Stream"] = self._stream
            await client.publish(self._batch_subject, payload, f"{self._inbox}.{sequence}", headers)

    def _send_overdue_again(self) -> None:
        overdue_s = time.monotonic() - _STORE_WAIT_S
        for sequence in [sequence for sequence, sent_s in self._in_flight.items() if sent_s < overdue_s]:
            self._send_again(sequence)

    def _send_again(self, sequence: int) -> None:
        if self._in_flight.pop(sequence, None) is not None:
            with self._changed:
                self._to_send.appendleft(sequence)
        self._more.set()

    async def _take_stored(self, message: Msg) -> None:
        sequence = int(message.subject.rpartition(".")[2])
        if (message.headers or {}).get("Status"):
            refusal = "nothing listens for the stream: JetStream is off, or has no leader"
        else:
            answer = msgspec.json.decode(message.data, type=_PubAck)
            refusal = "" if answer.error is None else str(answer.error.get("description", answer.error))
        if refusal:
            if refusal != self._refusal:
                _log.warning("the stream refused a batch, which is sent again", stream=self._stream, detail=refusal)
            self._refusal = refusal
            asyncio.get_running_loop().call_later(_STORE_AGAIN_S, self._send_again, sequence)
            return
        self._refusal = ""
        self._in_flight.pop(sequence, None)
        with self._changed:
            self._forget(sequence)
            stored = self._stored_up_to()
            self._requests.append(Acknowledgement(_STREAM_PEER, self._producer, self._epoch, stored))
            self._changed.notify_all()
        self._more.set()

    def _forget(self, sequence: int) -> None:
        self._unstored_bytes -= len(self._unstored.pop(sequence, b""))

    def _stored_up_to(self) -> int:
        return next(iter(self._unstored)) - 1 if self._unstored else self._last_sequence


class JetStreamPublisher(BatchPublisher):
    """Publishes one producer's batches into a stream. See `BatchPublisher`; the stream is the one that acknowledges."""

    def __init__(
        self,
        url: str,
        *,
        producer: int,
        credentials: Credentials = NO_CREDENTIALS,
        **options: Unpack[PublisherOptions],
    ) -> None:
        """Raises `TransportError` where the URL's options cannot be used, the producer is in use, or the server does
        not let us in. Where the server is away it is opened all the same."""
        place = parse_url(url)
        stream_options(place)

        def open_carrier() -> Carrier:
            self._stream = JetStreamCarrier(place, credentials, producer, self.epoch)
            return self._stream

        super().__init__(open_carrier, producer=producer, **options)

    def connection(self) -> Connection:
        """How it stands with the server; batches given up while it was away are in `stat()` as `slow_reader_drops`."""
        return self._stream.connection.standing()

    def flush(self) -> int:
        """See `Publisher.flush`. Waits besides until the stream has it, for two seconds at most."""
        last = super().flush()
        if self.connection().connected:
            self._stream.wait_stored(last, FLUSH_WAIT_S)
        return last
