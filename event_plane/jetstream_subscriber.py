"""Reading a JetStream stream: what is acknowledged, after the log's commit, is only flow control.

After a restart reading goes on from the log's own position; see `jetstream_stream` for how it is found.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, ReplayPolicy, StreamInfo
from nats.js.errors import NotFoundError

from event_plane.credentials import NO_CREDENTIALS, Credentials
from event_plane.jetstream_stream import (
    API_WAIT_S,
    IN_FLIGHT_MAX,
    StreamCare,
    first_of_life,
    first_unlogged,
    next_stored,
    subject_of,
)
from event_plane.nats_connection import SUBSCRIPTION_BYTES_MAX, SUBSCRIPTION_MESSAGES_MAX, ConnectionAway
from event_plane.nats_mailbox import Letter
from event_plane.nats_requests import (
    RequestKind,
    batch_subject,
    read_headers,
    request_subject,
    snapshot_body,
)
from event_plane.nats_subscription import MailboxSubscriber, ResendAsk
from event_plane.transport import Message, parse_url
from event_plane.wire import is_batch

HELD_MAX: Final = 8192
"""Batches that a subscriber has not acknowledged; the stream sends no more before it does."""
ACK_WAIT_S: Final = 60.0
CONSUMER_KEPT_S: Final = 300.0
"""How long the server keeps the consumer of a subscriber that is gone."""
_READ_AGAIN_S = 0.5
_CLOSE_WAIT_S = 1.0
_PULL_BATCHES = 256
_PULL_BYTES = 8 * 1024 * 1024
_PULL_EXPIRES_S = 30.0
_PULL_HEARTBEAT_S = 5.0
_PULL_ENDS = ("batch completed", "message size exceeds maxbytes")
"""Descriptions of a pull that has simply ended. A pull's messages come before its status."""
_STATUS_HEARTBEAT = "100"
_STATUSES_EXPIRED = ("404", "408")
_HELD_RELEASED = 256


@dataclass(slots=True)
class _Held:
    """A batch that the stream waits for the acknowledgement of, by its position there."""

    position: int
    producer: int
    epoch: int
    sequence: int
    reply: str
    handed_out: bool = False


class JetStreamSubscriber(MailboxSubscriber):
    """Receives what all producers of a stream published, from the log's own position on. See `Subscriber`.

    A slow log holds nobody up and loses nothing: the stream keeps what is not pulled, within its own bounds.
    """

    def __init__(
        self,
        source: str,
        url: str,
        *,
        credentials: Credentials = NO_CREDENTIALS,
        resume: Mapping[int, tuple[int, int]],
        ack_wait_s: float = ACK_WAIT_S,
    ) -> None:
        """`resume`: of each producer (epoch, last sequence) that the log holds. `ack_wait_s`: after which the stream
        sends again what is not acknowledged.

        Raises `TransportError` for the URL's options or credentials that cannot be read.
        """
        place = parse_url(url)
        self._care = StreamCare(place)
        self._stream = place.path
        self._subject = subject_of(place.path)
        self._resume = dict(resume)
        self._ack_wait_s = ack_wait_s
        self._next_position = 0
        """Past the last batch received; 0 before the first."""
        self._stream_made: object = None
        self._held: OrderedDict[int, _Held] = OrderedDict()
        self._held_of: dict[int, deque[_Held]] = {}
        self._reads: dict[int, asyncio.Task[None]] = {}
        self._pull_left = 0
        self._pull_over = asyncio.Event()
        self._pull_problem = ""
        self._pull_inbox = ""
        self._heard_s = 0.0
        self._js: JetStreamContext | None = None
        super().__init__(source, place, credentials, b"")

    def acknowledge(self, producer: int, epoch: int, sequence: int) -> None:
        """See `Subscriber.acknowledge`."""
        with self._lock:
            held = self._held_of.get(producer, deque())
            settled = 0
            for number, one in enumerate(held, start=1):
                if one.epoch == epoch:
                    if one.sequence > sequence:
                        break
                    settled = number
            replies = [self._let_go(held[0]).reply for _ in range(settled)]
        for reply in replies:
            self._connection.post(reply, b"+ACK")

    def ask_resend(self, from_sequence: int, token: int, producer: int | None = None) -> bool:
        """See `Subscriber.ask_resend`. Read from the stream: no publisher need be there."""
        return self._ask(from_sequence, token, producer)

    def ask_snapshot(self, producer: int, epoch: int) -> bool:
        """See `Subscriber.ask_snapshot`."""
        if self._closed:
            return False
        self._request(request_subject(self._subject, producer), RequestKind.SNAPSHOT, snapshot_body(producer, epoch))
        return True

    async def serve(self, client: Client, up: Callable[[], None]) -> None:
        """See `Resident.serve`."""
        js = self._js = client.jetstream(timeout=API_WAIT_S)
        await self._care.see_to(js)
        inbox = client.new_inbox()
        await client.subscribe(
            f"{inbox}.*",
            cb=self._take_pulled,
            pending_msgs_limit=SUBSCRIPTION_MESSAGES_MAX,
            pending_bytes_limit=SUBSCRIPTION_BYTES_MAX,
        )
        config = self._consumer_config(await self._start_position(js))
        await js.add_consumer(self._stream, config)
        with self._lock:
            # Of the consumer before, which nothing can be acknowledged to any more.
            self._held.clear()
            self._held_of.clear()
        try:
            self._stands(up)
            await self._pull_for_ever(client, f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{config.name}", inbox)
        finally:
            for read in self._reads.values():
                read.cancel()
            with contextlib.suppress(nats.errors.Error, OSError, TimeoutError):
                await asyncio.wait_for(js.delete_consumer(self._stream, str(config.name)), _CLOSE_WAIT_S / 2)

    def _consumer_config(self, start: int) -> ConsumerConfig:
        return ConsumerConfig(
            name=f"kvadvisor-{self.source.replace('.', '_')}-{secrets.token_hex(4)}",
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=start,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=self._ack_wait_s,
            max_deliver=-1,
            max_ack_pending=HELD_MAX,
            filter_subject=f"{self._subject}.*",
            replay_policy=ReplayPolicy.INSTANT,
            inactive_threshold=CONSUMER_KEPT_S,
            # Its position is of no use after a restart: the log's own is the truth.
            mem_storage=True,
            num_replicas=1,
        )

    async def _start_position(self, js: JetStreamContext) -> int:
        """Where to go on: past what this process received, else past what the log holds."""
        info: StreamInfo = await js.stream_info(self._stream, subjects_filter=f"{self._subject}.*")
        end = info.state.last_seq + 1
        same_stream = info.created == self._stream_made
        self._stream_made = info.created
        if same_stream and self._next_position:
            return min(self._next_position, end)
        starts = [end]
        for subject in info.state.subjects or {}:
            read = next_stored(js, self._stream, subject)
            producer = int(subject.rpartition(".")[2], 16)
            if producer in self._resume:
                starts.append(await first_unlogged(read, *self._resume[producer], end))
            elif (first := await read(1)) is not None:
                starts.append(first.position)
        return min(starts)

    async def _pull_for_ever(self, client: Client, next_subject: str, inbox: str) -> None:
        request = json.dumps(
            {
                "batch": _PULL_BATCHES,
                "max_bytes": max(_PULL_BYTES, 2 * client.max_payload),
                "expires": round(_PULL_EXPIRES_S * 1e9),
                "idle_heartbeat": round(_PULL_HEARTBEAT_S * 1e9),
            }
        ).encode()
        pulls = itertools.count()
        while True:
            await self._mailbox.room(self._mailbox.live)
            self._release_oldest()
            self._pull_left = _PULL_BATCHES
            self._pull_problem = ""
            self._pull_over.clear()
            self._heard_s = time.monotonic()
            self._pull_inbox = f"{inbox}.{next(pulls)}"
            await client.publish(next_subject, request, self._pull_inbox)
            while not self._pull_over.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._pull_over.wait(), _PULL_HEARTBEAT_S)
                if time.monotonic() - self._heard_s > 3 * _PULL_HEARTBEAT_S:
                    raise ConnectionAway(f"stream {self._stream} answers no more: it was deleted or has no leader")
            if self._pull_problem:
                raise ConnectionAway(f"stream {self._stream} ended our consumer: {self._pull_problem}")

    async def _take_pulled(self, message: Msg) -> None:
        self._heard_s = time.monotonic()
        headers = message.headers or {}
        status = headers.get("Status")
        if status is None:
            self._take_batch(message)
            self._pull_left -= 1
            if self._pull_left == 0:
                self._pull_over.set()
        elif status != _STATUS_HEARTBEAT and message.subject == self._pull_inbox:
            if status not in _STATUSES_EXPIRED and headers.get("Description", "").lower() not in _PULL_ENDS:
                self._pull_problem = headers.get("Description") or f"status {status}"
            self._pull_over.set()

    def _take_batch(self, message: Msg) -> None:
        position = message.metadata.sequence.stream
        identity = read_headers(message.headers) if is_batch(message.data) else None
        if identity is None:
            self.malformed += 1
            self._connection.post(message.reply, b"+TERM")
            return
        with self._lock:
            known = self._held.get(position)
            if known is None:
                held = _Held(position, *identity, message.reply)
                self._held[position] = held
                self._held_of.setdefault(held.producer, deque()).append(held)
            elif known.handed_out:
                self._let_go(known)
        if known is None:
            self._next_position = max(self._next_position, position + 1)
            received = Message(self.source, message.subject.encode(), identity[2], message.data)
            self._mailbox.put(self._mailbox.live, received, len(message.data), held)
        elif known.handed_out:
            # Delivered again because it was not acknowledged in time: the log's gate has it, or has refused it.
            self._connection.post(message.reply, b"+ACK")

    def _release_oldest(self) -> None:
        """Acknowledge what the gate has had for long, lest what it refused keep the stream from sending more."""
        with self._lock:
            if len(self._held) < HELD_MAX - _PULL_BATCHES:
                return
            oldest = [held for held in self._held.values() if held.handed_out][:_HELD_RELEASED]
            for held in oldest:
                self._let_go(held)
        for held in oldest:
            self._connection.post(held.reply, b"+ACK")

    def _let_go(self, held: _Held) -> _Held:
        del self._held[held.position]
        of_producer = self._held_of[held.producer]
        of_producer.remove(held)
        if not of_producer:
            del self._held_of[held.producer]
        return held

    def _hand_out(self, letter: Letter[Any]) -> bool:
        if isinstance(held := letter.mark, _Held):
            held.handed_out = True
            return True
        return super()._hand_out(letter)

    def _issue(self, ask: ResendAsk) -> None:
        if (former := self._reads.pop(ask.token, None)) is not None:
            former.cancel()
        self._reads[ask.token] = asyncio.get_running_loop().create_task(self._read_again(ask))

    async def _read_again(self, ask: ResendAsk) -> None:
        assert self._js is not None
        try:
            info = await self._js.stream_info(self._stream, subjects_filter=f"{self._subject}.*")
            subjects = (
                list(info.state.subjects or {})
                if ask.producer is None
                else [batch_subject(self._subject, ask.producer)]
            )
            for subject in subjects:
                await self._read_producer_again(self._js, ask, subject, info.state.last_seq + 1)
        except (nats.errors.Error, TimeoutError):
            asyncio.get_running_loop().call_later(_READ_AGAIN_S, self._issue_if_connected, ask)
            return
        self._end(ask)
        self._reads.pop(ask.token, None)

    async def _read_producer_again(self, js: JetStreamContext, ask: ResendAsk, subject: str, end: int) -> None:
        try:
            last = read_headers((await js.get_last_msg(self._stream, subject, direct=True)).headers)
        except NotFoundError:
            return
        if last is None:
            return
        epoch = last[1]
        read = next_stored(js, self._stream, subject)
        # A batch that was sent again may lie behind as many as were in flight with it.
        position = await first_of_life(read, epoch, max(ask.from_sequence - 2 * IN_FLIGHT_MAX, 0), end)
        while position < end and (one := await read(position)) is not None and one.position < end:
            position = one.position + 1
            if one.epoch == epoch and one.sequence >= ask.from_sequence:
                await self._mailbox.room(self._mailbox.resent)
                message = Message(self.source, subject.encode(), one.sequence, one.payload)
                self._mailbox.put(self._mailbox.resent, message, len(one.payload), ask)
