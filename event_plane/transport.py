"""What a transport offers, whatever carries it, and the URLs that name one.

Implementations: `zmq_transport`, `memory_transport`; NATS comes with issue 3. `event_plane.connect` chooses by URL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable
from urllib.parse import SplitResult, urlsplit

from event_plane.errors import TransportError
from event_plane.schema import EventRecord

Scheme = Literal["zmq+tcp", "zmq+ipc", "memory"]
_URL_FORMS = "use zmq+tcp://host:port, zmq+ipc:///path or memory://name"


@dataclass(frozen=True, slots=True)
class PlaneUrl:
    """A parsed transport URL.

    `host` and `port` are set for `zmq+tcp` alone (port 0: any free one), `path` is the socket's file for `zmq+ipc`
    and the channel's name for `memory`.
    """

    scheme: Scheme
    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def endpoint(self) -> str:
        """What ZeroMQ calls it: `tcp://host:port` or `ipc://path`."""
        if self.scheme == "zmq+ipc":
            return f"ipc://{self.path}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}" if self.scheme == "memory" else f"zmq+{self.endpoint}"


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
        case "nats" | "jetstream":
            raise TransportError(f"event URL {url!r}: NATS comes with issue 3; until then {_URL_FORMS}")
        case "tcp" | "ipc":
            raise TransportError(f"event URL {url!r} lacks its protocol: write zmq+{url}")
        case scheme:
            raise TransportError(f"event URL {url!r} has unknown scheme {scheme!r}: {_URL_FORMS}")


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
        case "memory":
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


class Publisher(Protocol):
    """Publishes one producer's events in order. Thread-safe."""

    producer: int
    epoch: int

    def publish(self, events: list[EventRecord], flush: bool = False) -> None:
        """Hand over events; the publisher's own thread batches and sends them. Blocks while the window is full.

        With `flush` it returns when they are sent. Raises `ValueError` for an event that no batch can carry (nothing
        of the call is published then) and `TransportError` once closed.
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

    def receive(self, count_max: int) -> list[Message | ResendEnd]:
        """At most `count_max` messages that are there now; never waits."""

    def acknowledge(self, producer: int, epoch: int, sequence: int) -> None:
        """Tell the publisher that everything up to `sequence` is durable. No-op for a foreign engine."""

    def ask_resend(self, from_sequence: int, token: int) -> bool:
        """Ask for everything from `from_sequence` on, inclusive. False: this source cannot resend."""

    def close(self) -> None:
        """Close the sockets. Idempotent."""
