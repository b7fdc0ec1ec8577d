"""Opens publishers and subscribers by URL: `zmq+tcp://host:port`, `zmq+ipc:///path`, `memory://name`."""

from __future__ import annotations

from typing import Unpack

from event_plane.memory_transport import MemoryPublisher, MemorySubscriber
from event_plane.publishing import BatchPublisher, PublisherOptions
from event_plane.transport import Subscriber, parse_url
from event_plane.zmq_transport import TOPIC, ZmqPublisher, ZmqSubscriber


def open_publisher(
    url: str,
    resend_url: str | None = None,
    *,
    producer: int,
    topic: bytes = TOPIC,
    **options: Unpack[PublisherOptions],
) -> BatchPublisher:
    """A publisher of `producer`'s events. `resend_url` and `topic` mean something over ZeroMQ alone.

    Raises `TransportError` for a URL that cannot be used, `ValueError` for an option out of range.
    """
    if parse_url(url).scheme == "memory":
        return MemoryPublisher(url, producer=producer, **options)
    return ZmqPublisher(url, resend_url, producer=producer, topic=topic, **options)


def open_subscriber(
    source: str, url: str, resend_url: str | None = None, *, topic: bytes = b"", foreign: bool | None = None
) -> Subscriber:
    """A subscription named `source`. `foreign` None: told from what arrives; `topic` is a prefix.

    Raises `TransportError` for a URL that cannot be used.
    """
    if parse_url(url).scheme == "memory":
        return MemorySubscriber(source, url)
    return ZmqSubscriber(source, url, resend_url, topic=topic, foreign=foreign)
