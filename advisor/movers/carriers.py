"""What carries published plans: ZeroMQ on this host, NATS to others. Lost messages are the caller's to send again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import zmq
from nats.aio.client import Client
from nats.aio.msg import Msg

from advisor.errors import AdvisorError
from advisor.movers.messages import MESSAGE_BYTES_MAX
from event_plane.credentials import Credentials
from event_plane.errors import TransportError
from event_plane.nats_connection import NatsConnection
from event_plane.transport import PlaneUrl, parse_url
from storage_agent.command_nats import SCHEME as NATS_SCHEME
from storage_agent.command_zmq import LOOPBACK

UNSENT_MAX = 1_024
"""Commands that wait for the carrier's thread; the oldest give way, and are sent again."""

Take = Callable[[bytes], bool]
"""Takes a message; True where commands go to its sender from now on."""


class MoverUnusable(AdvisorError):
    """Where plans should be published cannot be used as it is set."""


class PlanCarrier(Protocol):
    url: str

    def send(self, payload: bytes) -> None:
        """To the array, if it is there. Never waits. From any thread."""

    def close(self) -> None:
        """Idempotent."""


def open_carrier(agent: str, url: str, take: Take, credentials: Credentials) -> PlanCarrier:
    """Raises `MoverUnusable`."""
    if url.startswith(NATS_SCHEME):
        try:
            place = parse_url(url)
            if not {"*", ">"}.isdisjoint(place.path):
                raise TransportError("its subject has wildcards; name one subject")
            return NatsPlanCarrier(agent, place, take, credentials)
        except TransportError as error:
            raise MoverUnusable(f"command_url {url!r} of agent {agent} cannot be used: {error}") from error
    return ZmqPlanCarrier(agent, url, take)


class ZmqPlanCarrier:
    """A ROUTER that the array's DEALER connects to. Commands go to whoever said its volumes last."""

    def __init__(self, agent: str, url: str, take: Take) -> None:
        """Raises `MoverUnusable`."""
        if not url.startswith(LOOPBACK):
            raise MoverUnusable(
                f"command_url {url!r} of agent {agent} is not on this host: use tcp://127.0.0.1:PORT or ipc://PATH, or "
                "over the network nats://HOST:PORT/SUBJECT"
            )
        self._take = take
        self._unsent: deque[bytes] = deque(maxlen=UNSENT_MAX)
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        try:
            self._router.bind(url)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise MoverUnusable(
                f"command_url {url!r} of agent {agent} cannot be bound: {zmq.strerror(error.errno or 0)}; stop what "
                "uses it or choose another"
            ) from error
        self.url = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._carry, name=f"kvadvisor-plans-{agent}", daemon=True)
        self._thread.start()

    def send(self, payload: bytes) -> None:
        """See `PlanCarrier.send`."""
        self._unsent.append(payload)
        self._wake()

    def close(self) -> None:
        """See `PlanCarrier.close`."""
        if not self._closed.is_set():
            self._closed.set()
            self._wake()
            self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: it is awake; closed: it is gone
            self._wake_in.send(b"x")

    def _carry(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_out, zmq.POLLIN)
        array = b""
        while not self._closed.is_set():
            ready = dict(poller.poll())
            with contextlib.suppress(BlockingIOError):
                while self._wake_out.recv(4096):
                    pass
            if self._router in ready:
                sender, *frames = self._router.recv_multipart()
                if self._take(frames[-1] if frames else b""):
                    array = sender
            while array and self._unsent:
                with contextlib.suppress(zmq.Again):  # its queue is full: it is asked again
                    self._router.send_multipart([array, self._unsent.popleft()], zmq.DONTWAIT)
        self._context.destroy(linger=0)
        self._wake_in.close()
        self._wake_out.close()


class NatsPlanCarrier:
    """Publishes to `SUBJECT.commands` and reads `SUBJECT.answers`. Lives on a `NatsConnection`."""

    def __init__(self, agent: str, place: PlaneUrl, take: Take, credentials: Credentials) -> None:
        """Raises `TransportError`. Connects when the server is there."""
        self.url = str(place)
        self._take = take
        self._commands, self._answers = f"{place.path}.commands", f"{place.path}.answers"
        self._connection = NatsConnection(place, credentials, self, f"kvadvisor plans for {agent}")

    def send(self, payload: bytes) -> None:
        """See `PlanCarrier.send`."""
        self._connection.post(self._commands, payload)

    def close(self) -> None:
        """See `PlanCarrier.close`."""
        self._connection.close()

    async def serve(self, client: Client, up: Callable[[], None]) -> None:
        """See `Resident.serve`."""
        await client.subscribe(self._answers, cb=self._receive)
        await client.flush()
        up()
        await asyncio.Event().wait()

    def slow(self) -> None:
        """See `Resident.slow`: what was dropped is asked again."""

    async def _receive(self, message: Msg) -> None:
        self._take(message.data)
