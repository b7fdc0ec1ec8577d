"""Carries foreign messages on NATS: each on a subject of its own, without headers, as the engines publish them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from nats.aio.client import Client

from event_plane.credentials import Credentials
from event_plane.errors import TransportError
from event_plane.nats_connection import NatsConnection
from event_plane.publishing import Reply, Request
from event_plane.transport import PlaneUrl
from event_plane.wire import BATCH_BYTES_MAX

_OPEN_WAIT_S = 5.0
_ROOM_WAIT_S = 30.0


class SubjectCarrier:
    """A `Carrier` whose messages go to `topic`, which is set before each. Nobody can ask it for a resend."""

    def __init__(self, place: PlaneUrl, credentials: Credentials) -> None:
        """Raises `TransportError` where the server is away or does not let us in."""
        self.malformed = 0
        self.slow_reader_drops = 0
        self.payload_bytes_max = BATCH_BYTES_MAX
        self.topic = b""
        self._place = place
        self._connection = NatsConnection(place, credentials, self, "kvadvisor play")
        standing = self._connection.wait_known(_OPEN_WAIT_S)
        if not standing.connected:
            self._connection.close()
            raise TransportError(f"cannot publish on {place}: {standing.problem}")

    def send(self, sequence: int, payload: bytes) -> None:
        """Waits while the server takes nothing; raises `TransportError` where that lasts."""
        deadline = time.monotonic() + _ROOM_WAIT_S
        while not self._connection.post(self.topic.decode("utf-8", "replace"), payload):
            if time.monotonic() > deadline:
                raise TransportError(f"{self._place} has taken nothing for {_ROOM_WAIT_S:.0f} s: see to the server")
            time.sleep(0.01)

    def send_heartbeat(self, sequence: int, payload: bytes) -> None:
        """Foreign engines have none."""

    def resend(self, peer: bytes, sequence: int, payload: bytes) -> Reply:
        return Reply.GONE

    def wait(self, timeout_s: float | None) -> list[Request]:
        time.sleep(timeout_s or 0)
        return []

    def wake(self) -> None:
        """Nobody waits for long."""

    def close(self) -> None:
        self._connection.close()

    async def serve(self, client: Client, up: Callable[[], None]) -> None:
        """See `Resident.serve`."""
        up()
        await asyncio.Event().wait()

    def slow(self) -> None:
        """See `Resident.slow`: nothing is subscribed."""
