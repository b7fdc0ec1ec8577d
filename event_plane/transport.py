"""What a transport offers, whatever carries it, and the URLs that name one.

Implementations: `zmq_transport`, `nats_transport`, `jetstream_transport` and `jetstream_subscriber`,
`memory_transport`; `event_plane.connect` chooses by URL.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, runtime_checkable
from urllib.parse import SplitResult, urlsplit

from event_plane.errors import TransportError
from event_plane.schema import EventRecord, Namespace, Records

Scheme = Literal["zmq+tcp", "zmq+ipc", "nats", "jetstream", "memory"]
WhenSlow = Literal["wait", "drop"]
"""What a subscription does when the log cannot keep up: `wait` lets back-pressure reach the publisher, `drop` forgets
the newest messages, which are counted and leave a gap that heals."""

NATS_PORT: Final = 4222
_URL_FORMS = (
    "use zmq+tcp://host:port, zmq+ipc:///path, nats://host:port/subject, jetstream://host:port/stream or memory://name"
)
_SUBJECT = re.compile(r"[A-Za-z0-9_-]+(\.([A-Za-z0-9_-]+|\*))*(\.>)?|>")
_STREAM = re.compile(r"[A-Za-z0-9_-]{1,255}")


@dataclass(frozen=True, slots=True)
class PlaneUrl:
    """A parsed transport URL.

    `host` and `port` are set for `zmq+tcp` (port 0: any free one), `nats` and `jetstream`. `path` is the socket's file
    for `zmq+ipc`, the subject for `nats`, the stream for `jetstream` and the channel's name for `memory`. `query`: what
    stands after `?`, which `jetstream` alone takes (`jetstream_stream.StreamOptions`).
    """

    scheme: Scheme
    host: str = ""
    port: int = 0
    path: str = ""
    query: str = ""

    @property
    def endpoint(self) -> str:
        """What ZeroMQ calls it: `tcp://host:port` or `ipc://path`."""
        if self.scheme == "zmq+ipc":
            return f"ipc://{self.path}"
        return f"tcp://{self.authority}"

    def __str__(self) -> str:
        match self.scheme:
            case "memory":
                return f"memory://{self.path}"
            case "nats" | "jetstream":
                return f"{self.scheme}://{self.authority}/{self.path}" + (f"?{self.query}" if self.query else "")
        return f"zmq+{self.endpoint}"

    @property
    def authority(self) -> str:
        """`host:port`, an IPv6 host in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_url(url: str) -> PlaneUrl:
    """Parse a transport URL. Raises `TransportError` that says what is wrong with it and which forms there are."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise TransportError(f"event URL {url!r} cannot be read ({error}): {_URL_FORMS}") from error
    match parts.scheme:
        case "zmq+tcp":
            if not parts.hostname or port is None or parts.path.strip("/"):
                raise TransportError(f"event URL {url!r} needs a host and a port: use zmq+tcp://host:port")
            return PlaneUrl("zmq+tcp", host=parts.hostname, port=port)
        case "zmq+ipc":
            return PlaneUrl("zmq+ipc", path=_path(url, parts, "zmq+ipc:///path"))
        case "memory":
            return PlaneUrl("memory", path=_path(url, parts, "memory://name"))
        case "nats":
            if parts.query:
                raise TransportError(f"event URL {url!r} has options after ?, which only jetstream:// takes: use nats://host:port/subject")
            subject = _nats_name(url, parts, _SUBJECT, "subject")
            return PlaneUrl("nats", parts.hostname or "", port or NATS_PORT, subject)
        case "jetstream":
            stream = _nats_name(url, parts, _STREAM, "stream")
            return PlaneUrl("jetstream", parts.hostname or "", port or NATS_PORT, stream, parts.query)
        case "tcp" | "ipc":
            raise TransportError(f"event URL {url!r} lacks its protocol: write zmq+{url}")
        case scheme:
            raise TransportError(f"event URL {url!r} has unknown scheme {scheme!r}: {_URL_FORMS}")


def _nats_name(url: str, parts: SplitResult, form: re.Pattern[str], kind: str) -> str:
    if parts.username is not None or parts.password is not None:
        raise TransportError(
            f"event URL of {parts.scheme}://{parts.hostname} holds a user or password: name the user and a password"
            " file in the settings instead, so that no log shows them"
        )
    name = parts.path.strip("/")
    if not parts.hostname or not form.fullmatch(name):
        raise TransportError(
            f"event URL {url!r} needs a host and a {kind}: use {parts.scheme}://host:port/{kind}, the {kind} of"
            " letters, digits, - and _" + (", its parts divided by dots" if kind == "subject" else "")
        )
    return name


def _path(url: str, parts: SplitResult, form: str) -> str:
    path = parts.netloc + parts.path
    if not path.strip("/"):
        raise TransportError(f"event URL {url!r} names nothing: use {form}")
    return path


def resend_url_beside(url: PlaneUrl) -> PlaneUrl:
    """Where resends are asked for when nothing is configured: the next port, or the path with `.resend` added."""
    match url.scheme:
        case "zmq+tcp":
            return PlaneUrl(url.scheme, host=url.host, port=url.port + 1 if url.port else 0)
        case "zmq+ipc":
            return PlaneUrl(url.scheme, path=f"{url.path}.resend")
        case "memory" | "nats" | "jetstream":
            return url


@dataclass(frozen=True, slots=True)
class Message:
    """One message as received, undecoded.

    `source` is the configured name of the subscription it came by, `topic` the transport's own subject and
    `transport_sequence` what the transport numbered it with (a foreign engine's only number; our batches carry
    theirs inside `payload`).
    """

    source: str
    topic: bytes
    transport_sequence: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class ResendEnd:
    """The publisher has sent all it still holds of a resend that was asked for with `token`."""

    source: str
    token: int


@dataclass(frozen=True, slots=True)
class Reconnected:
    """The connection was lost and stands again: what was published meanwhile may be missing."""

    source: str


Received = Message | ResendEnd | Reconnected


@dataclass(frozen=True, slots=True)
class Connection:
    """How a subscription stands. `connected` None: the transport cannot tell yet. `problem`: why not, in a sentence.

    `reconnects` counts losses that were mended, `dropped` messages forgotten because the log was slow.
    """

    connected: bool | None = None
    problem: str = ""
    reconnects: int = 0
    dropped: int = 0


class Publisher(Protocol):
    """Publishes one producer's events in order. Thread-safe."""

    producer: int
    epoch: int

    def publish(self, events: list[EventRecord], flush: bool = False) -> None:
        """Hand over events; the publisher's own thread batches and sends them. Blocks while the window is full.

        With `flush` it returns when they are sent. Raises `ValueError` for an event that no batch can carry (nothing
        of the call is published then) and `TransportError` once closed.
        """

    def publish_records(
        self, records: Records, namespaces: Sequence[Namespace], locations: Sequence[str], flush: bool = False
    ) -> None:
        """Hand over events in columns, as one batch or more of their own: what `publish` does, without an object each.

        `records`' namespace and storage_location index the tables given; its event_sequence is set here, its extra must
        be 0. Order with `publish` is that of the calls. Raises as `publish` does.
        """

    def publish_snapshot(self, events: Sequence[EventRecord]) -> None:
        """Hand over the producer's whole state, as Stores: what it placed and is not among them is gone.

        Call it under the lock that guards that state, so that it stands where it belongs between the events.
        """

    def publish_lost(self, reason: str) -> None:
        """Say in the stream that events were given up before they were handed over, as when a queue overflowed.

        Subscribers forget what the producer placed, and call it partial until its next snapshot.
        """

    def serve_snapshots(self, announce: Callable[[], None]) -> None:
        """Call `announce`, which publishes a snapshot, whenever a subscriber asks for one; asks are refused before.

        It is called on a thread of its own, never twice at once and at a bounded rate. It replaces the one before.
        Raises `TransportError` once closed.
        """

    def flush(self) -> int:
        """Send what is waiting now. Returns the last sent batch's sequence, which holds the last event published
        before the call; -1 when nothing was ever published."""

    def close(self) -> None:
        """Flush, then close the sockets. Idempotent."""


@runtime_checkable
class Subscriber(Protocol):
    """Receives messages of one source. Used by one thread only, except `close`."""

    source: str

    def pollables(self) -> list[Any]:
        """Sockets or file descriptors that a `zmq.Poller` can wait on."""

    def receive(self, count_max: int) -> list[Received]:
        """At most `count_max` messages that are there now; never waits."""

    def acknowledge(self, producer: int, epoch: int, sequence: int) -> None:
        """Tell the publisher that everything up to `sequence` is durable. No-op for a foreign engine."""

    def ask_resend(self, from_sequence: int, token: int, producer: int | None = None) -> bool:
        """Ask for everything from `from_sequence` on, inclusive. False: this source cannot resend.

        A second ask with one `token` replaces the first. `producer` None: of whoever the source carries; transports
        with one publisher a URL need not look at it.
        """

    def ask_snapshot(self, producer: int, epoch: int) -> bool:
        """Ask one of our producers to publish its whole state. False: this source cannot ask."""

    def connection(self) -> Connection:
        """How it stands now. From any thread."""

    def close(self) -> None:
        """Close the sockets. Idempotent."""
