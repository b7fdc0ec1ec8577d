"""Commands over NATS: requests to an agent's subject, answers to the caller's inbox.

A server keeps nothing: what is lost on the way is asked again by the caller, under the same command id.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from event_plane.credentials import Credentials
from event_plane.errors import TransportError
from event_plane.nats_connection import NatsConnection, PlaceUnusable
from event_plane.transport import PlaneUrl, parse_url
from storage_agent.command_desk import Answer
from storage_agent.command_wire import REQUEST_BYTES_MAX, RefusedReply, StatRequest, encode
from storage_agent.errors import AgentUnreachable, ServiceError

SCHEME = "nats://"
_OPEN_WAIT_S = 3.0
"""How long a listener waits for the server when it starts; it listens later where it comes later."""
_OTHER_WAIT_S = 0.5
_DEFAULT_PAYLOAD_BYTES_MAX = 1024 * 1024 - 512
"""What a server takes unless it is told otherwise."""
_LOOK_S = 0.1
"""How often a waiting question looks whether the connection stands."""


class NatsCommandListener:
    """Hands what comes in to `take` until `close`. Lives on a `NatsConnection`."""

    def __init__(
        self, url: str, take: Callable[[bytes, Answer], None], name: str, credentials: Credentials
    ) -> None:
        """Raises `ServiceError`: no NATS URL, the server does not let us in, or another agent listens there."""
        self.url = url
        self._take = take
        self._asked_for_other = False
        place = _place(url)
        self._subject = place.path
        try:
            self._connection = NatsConnection(place, credentials, self, f"kvadvisor agent {name} commands")
        except TransportError as error:
            raise ServiceError(f"command_url {url!r} cannot be used: {error}") from error
        standing = self._connection.wait_known(_OPEN_WAIT_S)
        if self._connection.unusable:
            self._connection.close()
            raise ServiceError(f"command_url {url!r} cannot be used: {standing.problem}")

    def close(self) -> None:
        """Send what was answered, within a second, then stop. Idempotent."""
        self._connection.close()

    async def serve(self, client: Client, up: Callable[[], None]) -> None:
        """See `Resident.serve`."""
        if not self._asked_for_other and await self._is_taken(client):
            raise PlaceUnusable(
                f"another agent takes commands on subject {self._subject}; stop it or choose another subject"
            )
        # Asked once: after a lost connection the server may still hold our own former subscription.
        self._asked_for_other = True
        await client.subscribe(self._subject, cb=self._receive)
        await client.flush()
        up()
        await asyncio.Event().wait()

    def slow(self) -> None:
        """See `Resident.slow`: commands that were dropped are asked again."""

    async def _is_taken(self, client: Client) -> bool:
        try:
            await client.request(self._subject, encode(StatRequest()), timeout=_OTHER_WAIT_S)
        except (nats.errors.NoRespondersError, nats.errors.TimeoutError):
            return False
        return True

    async def _receive(self, message: Msg) -> None:
        reply = message.reply
        if reply and len(message.data) <= REQUEST_BYTES_MAX:
            self._take(message.data, lambda payload: self._answer(reply, payload))

    def _answer(self, reply: str, payload: bytes) -> None:
        longest = self._connection.payload_bytes_max or _DEFAULT_PAYLOAD_BYTES_MAX
        if len(payload) > longest:  # the server would end our connection, and the caller would wait in vain
            payload = encode(
                RefusedReply(
                    f"it was carried out, but the answer has {len(payload)} bytes and the NATS server takes {longest}; "
                    "ask about fewer blocks at a time"
                )
            )
        self._connection.post(reply, payload)


class NatsCommandCaller:
    """Asks one question at a time; its caller sees to that. Connects when made, and keeps connected."""

    def __init__(self, url: str, credentials: Credentials) -> None:
        """Raises `AgentUnreachable` for a URL or credentials that cannot be used."""
        self._url = url
        self._inbox = f"_INBOX.{secrets.token_hex(11)}"
        self._changed = threading.Condition()
        self._number = 0
        self._answers: list[bytes] = []
        self._problem = ""
        self._closed = False
        try:
            place = _place(url)
            self._subject = place.path
            self._connection = NatsConnection(place, credentials, self, "kvadvisor agent client")
        except (TransportError, ServiceError) as error:
            raise AgentUnreachable(f"agent at {url} cannot be asked: {error}") from error

    @property
    def request_bytes_max(self) -> int:
        return min(REQUEST_BYTES_MAX, self._connection.payload_bytes_max or _DEFAULT_PAYLOAD_BYTES_MAX)

    def ask(self, payload: bytes, timeout_s: float) -> bytes:
        """The answer. Raises `AgentUnreachable`, after which it may still be under way."""
        deadline = time.monotonic() + timeout_s
        self._wait_for_server(deadline, timeout_s)
        with self._changed:
            self._number += 1
            self._answers.clear()
            self._problem = ""
            # Posted only while the server is there: a command must not run long after it was given up.
            self._connection.post(self._subject, payload, reply=f"{self._inbox}.{self._number}")
            self._changed.wait_for(
                lambda: self._answers or self._problem or self._closed, deadline - time.monotonic()
            )
            if self._answers:
                return self._answers[0]
            if self._closed:
                raise AgentUnreachable(f"the client of {self._url} was closed while it waited")
            why = self._problem or f"did not answer in {timeout_s} s"
            raise AgentUnreachable(f"agent at {self._url} {why}; check that it runs, then ask again")

    def stop(self) -> None:
        """Ends the question under way with `AgentUnreachable`, from any thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        self._connection.close()

    async def serve(self, client: Client, up: Callable[[], None]) -> None:
        """See `Resident.serve`."""
        await client.subscribe(f"{self._inbox}.*", cb=self._receive)
        await client.flush()
        up()
        await asyncio.Event().wait()

    def slow(self) -> None:
        """See `Resident.slow`: there is at most one answer under way."""

    async def _receive(self, message: Msg) -> None:
        with self._changed:
            if message.subject != f"{self._inbox}.{self._number}":
                return  # to a question given up before
            if (message.headers or {}).get("Status"):
                self._problem = "does not listen"
            else:
                self._answers.append(message.data)
            self._changed.notify_all()

    def _wait_for_server(self, deadline: float, timeout_s: float) -> None:
        while not self._connection.standing().connected:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                problem = self._connection.standing().problem or f"no connection in {timeout_s} s"
                raise AgentUnreachable(f"agent at {self._url} cannot be asked: {problem}")
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, min(left_s, _LOOK_S)):
                    raise AgentUnreachable(f"the client of {self._url} was closed while it waited")


def _place(url: str) -> PlaneUrl:
    """Raises `ServiceError`."""
    try:
        place = parse_url(url)
    except TransportError as error:
        raise ServiceError(f"command_url {url!r} cannot be used: {error}") from error
    if "*" in place.path or ">" in place.path:
        raise ServiceError(f"command_url {url!r} has wildcards; name one subject")
    return place
