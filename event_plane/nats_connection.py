"""One connection to a NATS server: an asyncio loop in a thread of its own that connects for ever, and an outbox."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import nats.errors
import nats.js.errors
import stamina
import structlog
from nats.aio.client import Client

from event_plane.credentials import Credentials
from event_plane.errors import TransportError
from event_plane.nats_credentials import connect_options, wants_tls
from event_plane.transport import Connection, PlaneUrl

OUTBOX_BYTES_MAX: Final = 32 * 1024 * 1024
"""Bytes that wait to be sent; what comes past it is dropped by whoever sends."""
HEADER_BYTES_MAX: Final = 512
"""What headers of ours take at most of a message: the server counts them in its `max_payload`."""
SUBSCRIPTION_MESSAGES_MAX: Final = 8192
SUBSCRIPTION_BYTES_MAX: Final = 64 * 1024 * 1024
"""What nats-py holds of one subscription before it drops the newest."""
_PENDING_BYTES = 2 * 1024 * 1024
_CONNECT_S = 2.0
_PING_S = 5.0
_PINGS_MAX = 2
"""Unanswered pings past which the server is taken for dead."""
_LOOK_S = 0.5
_BACK_OFF_FIRST_S = 0.1
_BACK_OFF_MAX_S = 5.0
_SETTLED_S = 5.0
"""A connection that lived shorter counts as a failed attempt: the back-off goes on growing."""
_CLOSE_S = 1.0
_CLOSE_CLIENT_S = 0.5


_log = structlog.get_logger()


class ConnectionAway(Exception):
    """The connection cannot stand or fell; says why, in a sentence. Tried again, with back-off."""


class PlaceUnusable(ConnectionAway):
    """It cannot stand before somebody changes something: no reason to wait for the server."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One message to publish."""

    subject: str
    payload: bytes
    reply: str
    headers: Mapping[str, str] | None


class Resident(Protocol):
    """What lives on a connection. Everything here is called in the loop's thread."""

    async def serve(self, client: Client, up: Callable[[], None]) -> None:
        """Runs for one connection's life and is cancelled at its end. Subscribes, calls `up`, then does its work.

        May raise `ConnectionAway` or nats-py's errors: the connection is then made anew, with back-off.
        """

    def slow(self) -> None:
        """nats-py dropped a message because a subscription of ours was full."""


class _SecretsKeptClient(Client):
    """Refuses to log in unencrypted: nats-py alone goes on in the clear where the server asks for no TLS."""

    def __init__(self, tls_wanted: bool) -> None:
        super().__init__()
        self._tls_wanted = tls_wanted

    def _connect_command(self) -> bytes:
        if self._tls_wanted and not self._server_info.get("tls_required"):
            raise nats.errors.SecureConnWantedError
        return super()._connect_command()

    async def abandon(self) -> None:
        """Close the socket, whatever state `connect` or `close` left it in when it failed or was cut short.

        Under TLS a close that waits for the server's own leaves the socket open beneath: it is closed at once.
        """
        if self._transport is not None:
            self._transport.close()  # type: ignore[no-untyped-call]  # nats-py's annotations end here
            beneath: asyncio.StreamWriter | None = getattr(self._transport, "_bare_io_writer", None)
            if beneath is not None:
                beneath.transport.abort()
            await asyncio.sleep(0)


class NatsConnection:
    """Keeps one connection to `place` until closed. Thread-safe."""

    def __init__(self, place: PlaneUrl, credentials: Credentials, resident: Resident, name: str) -> None:
        """`name` is shown in the server's monitoring. Raises `TransportError` for credentials that cannot be read."""
        connect_options(credentials)
        self._place = place
        self._credentials = credentials
        self._resident = resident
        self._name = name
        self._standing = Connection()
        self._known = threading.Event()
        self._has_stood = False
        self._reported = ""
        self.unusable = False
        """Whether the last attempt failed for what only somebody can mend: see `PlaceUnusable`."""
        self.payload_bytes_max: int | None = None
        """Largest payload that the server takes beside our headers; None before the first connection."""
        self.client: Client | None = None
        """The connection that stands. In the loop's thread."""

        self._lock = threading.Lock()
        self._outbox: deque[Outgoing] = deque()
        self._outbox_bytes = 0
        self._closed = False
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name=f"nats-{name}", daemon=True)
        self._thread.start()
        self._started.wait()

    def standing(self) -> Connection:
        """How it stands now; `dropped` is not counted here."""
        return self._standing

    def wait_known(self, timeout_s: float) -> Connection:
        """How it stands once the first attempt has ended, or after `timeout_s`."""
        self._known.wait(timeout_s)
        return self._standing

    def post(
        self, subject: str, payload: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> bool:
        """Have a message published, after those posted before; while the server is away it waits in the outbox.

        Never waits. False, and nothing posted, where the outbox is full.
        """
        with self._lock:
            if self._closed or self._outbox_bytes + len(payload) > OUTBOX_BYTES_MAX:
                return False
            self._outbox.append(Outgoing(subject, payload, reply, headers))
            self._outbox_bytes += len(payload)
            if len(self._outbox) == 1:
                self._loop.call_soon_threadsafe(self._filled.set)
            return True

    @property
    def outbox_bytes(self) -> int:
        """What waits to be sent."""
        return self._outbox_bytes

    def soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Call it in the loop's thread. Nothing happens once closed."""
        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(callback, *args)

    def flush(self, timeout_s: float) -> None:
        """Wait until the server has what was posted, at most so long; not at all while there is no connection."""
        with self._lock:
            if self._closed or not self._standing.connected:
                return
            sending = asyncio.run_coroutine_threadsafe(self._send_rest(), self._loop)
        with contextlib.suppress(TimeoutError, nats.errors.Error, OSError, CancelledError):
            sending.result(timeout_s)
        sending.cancel()

    def close(self) -> None:
        """Send what waits, within a second, then end the connection and the thread. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._closing = asyncio.Event()
        self._started.set()
        keeping = asyncio.create_task(self._connect_for_ever())
        closing = asyncio.create_task(self._closing.wait())
        await asyncio.wait((keeping, closing), return_when=asyncio.FIRST_COMPLETED)
        if keeping.done():
            with self._lock:
                self._closed = True
            keeping.result()
        with contextlib.suppress(TimeoutError, nats.errors.Error):
            async with asyncio.timeout(_CLOSE_S):
                await self._send_rest()
        await _end([keeping], again_s=0.2)

    async def _send_rest(self) -> None:
        while self._outbox:
            self._emptied.clear()
            await self._emptied.wait()
        if self.client is not None:
            await self.client.flush()

    async def _connect_for_ever(self) -> None:
        while True:
            async for attempt in stamina.retry_context(
                on=ConnectionAway, attempts=None, timeout=None, wait_initial=_BACK_OFF_FIRST_S, wait_max=_BACK_OFF_MAX_S
            ):
                with attempt:
                    await self._live_once()

    async def _live_once(self) -> None:
        """Connect and stay connected. Raises `ConnectionAway` unless the connection lived long before it fell."""
        lost = asyncio.Event()
        self._reported = ""
        client = await self._connect(lost)
        began_s = time.monotonic()
        stands = asyncio.Event()

        def up() -> None:
            self._up()
            stands.set()

        tasks = [
            asyncio.create_task(work)
            for work in (self._resident.serve(client, up), self._send_outbox(client, stands), _until_lost(client, lost))
        ]
        self.client = client
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.client = None
            await _end(tasks, again_s=0.05)
            await _close(client)
        ended = [None if task.cancelled() else task.exception() for task in tasks]
        problem = self._reported or next(
            (_sentence(self._place, each) for each in ended if isinstance(each, Exception)),
            f"the connection to {self._place} was lost: the server was stopped or cannot be reached",
        )
        self.unusable = any(isinstance(each, PlaceUnusable) for each in ended)
        self._down(problem)
        for each in ended:
            if isinstance(each, Exception) and not isinstance(each, (ConnectionAway, nats.errors.Error, OSError)):
                raise each
        if time.monotonic() - began_s < _SETTLED_S:
            raise ConnectionAway(problem)

    async def _connect(self, lost: asyncio.Event) -> _SecretsKeptClient:
        client = _SecretsKeptClient(wants_tls(self._credentials))
        first_error: list[Exception] = []

        async def closed() -> None:
            lost.set()

        async def error(fault: Exception) -> None:
            first_error.append(fault)
            del first_error[1:]
            if isinstance(fault, nats.errors.SlowConsumerError):
                self._resident.slow()
            elif "permissions violation" in str(fault).lower():
                self._reported = f"{self._place} does not let us do what we must ({fault}): extend our permissions"
                lost.set()

        try:
            await client.connect(
                f"nats://{self._place.authority}",
                name=self._name,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=_CONNECT_S,  # type: ignore[arg-type]  # any number of seconds does
                ping_interval=_PING_S,  # type: ignore[arg-type]
                max_outstanding_pings=_PINGS_MAX,
                pending_size=_PENDING_BYTES,
                closed_cb=closed,
                error_cb=error,
                **connect_options(self._credentials),
            )
        except (nats.errors.Error, OSError, TimeoutError, TransportError) as fault:
            await _close(client)
            # Of a server that cannot be reached nats-py says only that there is none; it reported why before.
            why = first_error[0] if isinstance(fault, nats.errors.NoServersError) and first_error else fault
            problem = _sentence(self._place, why)
            self.unusable = _is_refusal(why)
            self._down(problem)
            raise ConnectionAway(problem) from fault
        except asyncio.CancelledError:
            await client.abandon()
            raise
        self.payload_bytes_max = client.max_payload - HEADER_BYTES_MAX
        return client

    def _up(self) -> None:
        if self._standing.connected is False:
            _log.info("connected", to=str(self._place), connection=self._name)
        self._standing = replace(
            self._standing, connected=True, problem="", reconnects=self._standing.reconnects + self._has_stood
        )
        self._has_stood = True
        self._known.set()

    def _down(self, problem: str) -> None:
        if problem != self._standing.problem:
            _log.warning(problem, connection=self._name)
        self._standing = replace(self._standing, connected=False, problem=problem)
        self._known.set()

    async def _send_outbox(self, client: Client, stands: asyncio.Event) -> None:
        await stands.wait()
        self._filled.set()
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._outbox:
                message = self._outbox[0]
                headers = None if message.headers is None else dict(message.headers)
                # A message too large for this server is dropped here: its number is missing, and the gap shows it.
                with contextlib.suppress(nats.errors.MaxPayloadError):
                    await client.publish(message.subject, message.payload, message.reply, headers)
                with self._lock:
                    self._outbox.popleft()
                    self._outbox_bytes -= len(message.payload)
            self._emptied.set()


async def _end(tasks: Sequence[asyncio.Task[Any]], again_s: float) -> None:
    """Cancel until they have ended: nats-py swallows a cancellation that reaches it while it flushes."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=again_s)


async def _until_lost(client: Client, lost: asyncio.Event) -> None:
    """Until `lost`, or a close that nats-py does not tell of: its last bytes found that the server was gone."""
    while not client.is_closed:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await lost.wait()
                return


async def _close(client: _SecretsKeptClient) -> None:
    try:
        # After a failed TLS handshake nats-py waits for ever for the end of a stream that has none.
        with contextlib.suppress(nats.errors.Error, OSError, TimeoutError):
            async with asyncio.timeout(_CLOSE_CLIENT_S):
                await client.close()
    finally:
        await client.abandon()


def _sentence(place: PlaneUrl, fault: BaseException) -> str:
    """Why there is no connection and what to do."""
    said = str(fault) or type(fault).__name__
    match fault:
        case ConnectionAway() | TransportError():
            return said
        case nats.errors.SecureConnWantedError():
            return f"{place} offers no TLS and nothing is sent unencrypted: set the server's tls, or drop tls_ca_file"
        case _ if _is_refusal(fault):
            return f"{place} does not let us in ({said}): check user and password_file, nkey_file or creds_file"
        case nats.js.errors.Error():
            return f"JetStream of {place} does not serve us ({said}): enable it on the server, or wait for its leader"
        case OSError() if "certificate" in said.lower() or "ssl" in said.lower():
            return f"{place} and we do not trust each other's TLS certificates ({said}): check the tls files"
    return f"no connection to {place} ({said}): start the server or check the URL"


def _is_refusal(fault: BaseException) -> bool:
    said = str(fault).lower()
    return isinstance(fault, nats.errors.Error) and ("authorization" in said or "authentication" in said)
