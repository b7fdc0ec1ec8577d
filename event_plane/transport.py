"""What a transport offers, whatever carries it. Implementations: `zmq_transport`; NATS comes with issue 3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from event_plane.schema import EventRecord


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

    def publish(self, events: list[EventRecord]) -> None:
        """Hand over events; the publisher's own thread batches and sends them. Blocks while the window is full."""

    def flush(self) -> None:
        """Send what is waiting now."""

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
