"""What subscribers on NATS and JetStream share: a mailbox, resends asked for by token, requests to publishers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from nats.aio.client import Client

from event_plane.credentials import Credentials
from event_plane.errors import TransportError
from event_plane.nats_connection import NatsConnection
from event_plane.nats_mailbox import Letter, Mailbox
from event_plane.nats_requests import RequestKind, request_headers
from event_plane.transport import Connection, PlaneUrl, Received, Reconnected, ResendEnd

_ASKS_MAX: Final = 256
"""Resends awaited at a time by one subscriber; the oldest gives way."""


@dataclass(frozen=True, slots=True)
class ResendAsk:
    """A resend that is awaited. `number` tells its messages from those of the asks before it."""

    token: int
    number: int
    from_sequence: int
    producer: int | None


class MailboxSubscriber:
    """What subscribers on NATS and JetStream share: the mailbox, asks by token, requests to publishers."""

    def __init__(self, source: str, place: PlaneUrl, credentials: Credentials, topic: bytes) -> None:
        self.source = source
        self.malformed = 0
        """Messages that were dropped because they are neither a batch nor a reply to an ask."""
        self._place = place
        self._topic = topic
        self._mailbox: Mailbox[Any] = Mailbox()
        self._lock = threading.Lock()
        self._asks: dict[int, ResendAsk] = {}
        self._ask_number = 0
        self._closed = False
        self._stood = False
        try:
            self._connection = NatsConnection(place, credentials, self, f"kvadvisor subscriber {source}")
        except TransportError:
            self._mailbox.close()
            raise

    def pollables(self) -> list[Any]:
        """See `Subscriber.pollables`."""
        return self._mailbox.pollables()

    def receive(self, count_max: int) -> list[Received]:
        """See `Subscriber.receive`. Neither live nor resent messages can starve the other."""
        return self._mailbox.take(count_max, self._hand_out)

    def connection(self) -> Connection:
        """See `Subscriber.connection`."""
        standing = self._connection.standing()
        return Connection(standing.connected, standing.problem, standing.reconnects, self._mailbox.dropped)

    def close(self) -> None:
        """See `Subscriber.close`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._mailbox.close()
        self._connection.close()

    async def serve(self, client: Client, up: Callable[[], None]) -> None:
        """See `Resident.serve`."""
        raise NotImplementedError

    def slow(self) -> None:
        """See `Resident.slow`."""
        self._mailbox.dropped += 1

    def _issue(self, ask: ResendAsk) -> None:
        """Have a resend made. In the loop's thread."""
        raise NotImplementedError

    def _hand_out(self, letter: Letter[Any]) -> bool:
        """Whether a message that waited may go out: not when its resend was asked for anew meanwhile."""
        if not isinstance(ask := letter.mark, ResendAsk):
            return True
        with self._lock:
            if not self._is_current(ask):
                return False
            if isinstance(letter.received, ResendEnd):
                del self._asks[ask.token]
            return True

    def _stands(self, up: Callable[[], None]) -> None:
        """Every subscription is made: say so, and ask for what was to be asked."""
        up()
        if self._stood:
            self._mailbox.put(self._mailbox.live, Reconnected(self.source), 0, None)
        self._stood = True
        with self._lock:
            asks = list(self._asks.values())
        for ask in asks:
            self._issue(ask)

    def _ask(self, from_sequence: int, token: int, producer: int | None) -> bool:
        with self._lock:
            if self._closed:
                return False
            self._asks.pop(token, None)
            if len(self._asks) == _ASKS_MAX:
                del self._asks[next(iter(self._asks))]
            self._ask_number += 1
            ask = ResendAsk(token, self._ask_number, from_sequence, producer)
            self._asks[token] = ask
        self._connection.soon(self._issue_if_connected, ask)
        return True

    def _issue_if_connected(self, ask: ResendAsk) -> None:
        # Else `_stands` does it.
        if self._stood and self._connection.client is not None and self._is_current(ask):
            self._issue(ask)

    def _is_current(self, ask: ResendAsk) -> bool:
        return self._asks.get(ask.token) is ask

    def _end(self, ask: ResendAsk) -> None:
        """Its last message is in the mailbox."""
        self._mailbox.put(self._mailbox.resent, ResendEnd(self.source, ask.token), 0, ask)

    def _request(self, subject: str, kind: RequestKind, body: bytes, reply: str = "") -> None:
        self._connection.post(subject, body, reply=reply, headers=request_headers(kind))
