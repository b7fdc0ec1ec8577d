"""Opens publishers and subscribers by URL: `zmq+tcp://`, `zmq+ipc://`, `nats://`, `jetstream://`, `memory://`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Unpack

from event_plane.credentials import NO_CREDENTIALS, Credentials
from event_plane.jetstream_subscriber import JetStreamSubscriber
from event_plane.jetstream_transport import JetStreamCarrier, JetStreamPublisher
from event_plane.memory_transport import MemoryCarrier, MemoryPublisher, MemorySubscriber
from event_plane.nats_transport import NatsCarrier, NatsPublisher, NatsSubscriber
from event_plane.publishing import BatchPublisher, Carrier, PublisherOptions
from event_plane.transport import Subscriber, WhenSlow, parse_url, resend_url_beside
from event_plane.zmq_curve import publisher_keys
from event_plane.zmq_transport import TOPIC, ZmqCarrier, ZmqPublisher, ZmqSubscriber

NOTHING_LOGGED: Final[Mapping[int, tuple[int, int]]] = {}


def open_publisher(
    url: str,
    resend_url: str | None = None,
    *,
    producer: int,
    topic: bytes = TOPIC,
    credentials: Credentials = NO_CREDENTIALS,
    **options: Unpack[PublisherOptions],
) -> BatchPublisher:
    """A publisher of `producer`'s events. `resend_url` and `topic` mean something over ZeroMQ alone.

    Raises `TransportError` for a URL or credentials that cannot be used, `ValueError` for an option out of range.
    """
    match parse_url(url).scheme:
        case "memory":
            return MemoryPublisher(url, producer=producer, **options)
        case "nats":
            return NatsPublisher(url, producer=producer, credentials=credentials, **options)
        case "jetstream":
            return JetStreamPublisher(url, producer=producer, credentials=credentials, **options)
    return ZmqPublisher(url, resend_url, producer=producer, topic=topic, credentials=credentials, **options)


def open_carrier(
    url: str,
    resend_url: str | None = None,
    *,
    producer: int,
    epoch: int,
    credentials: Credentials = NO_CREDENTIALS,
) -> Carrier:
    """What carries encoded batches as they are. ZeroMQ and memory carry every producer's, the others only the one's.

    Raises `TransportError` as `open_publisher` does.
    """
    place = parse_url(url)
    match place.scheme:
        case "memory":
            return MemoryCarrier(place.path)
        case "nats":
            return NatsCarrier(place, place.path, credentials, producer, epoch)
        case "jetstream":
            return JetStreamCarrier(place, credentials, producer, epoch)
    resend_place = parse_url(resend_url) if resend_url else resend_url_beside(place)
    return ZmqCarrier(place, resend_place, TOPIC, publisher_keys(credentials))


def open_subscriber(
    source: str,
    url: str,
    resend_url: str | None = None,
    *,
    topic: bytes = b"",
    foreign: bool | None = None,
    credentials: Credentials = NO_CREDENTIALS,
    resume: Mapping[int, tuple[int, int]] = NOTHING_LOGGED,
    when_slow: WhenSlow = "wait",
) -> Subscriber:
    """A subscription named `source`. `foreign` None: told from what arrives; `topic` is a prefix.

    `resume`: of each producer (epoch, last sequence) that the log holds; JetStream goes on from there.
    Raises `TransportError` for a URL or credentials that cannot be used.
    """
    match parse_url(url).scheme:
        case "memory":
            return MemorySubscriber(source, url, when_slow=when_slow)
        case "nats":
            return NatsSubscriber(
                source, url, topic=topic, foreign=foreign, credentials=credentials, when_slow=when_slow
            )
        case "jetstream":
            return JetStreamSubscriber(source, url, credentials=credentials, resume=resume)
    return ZmqSubscriber(
        source, url, resend_url, topic=topic, foreign=foreign, credentials=credentials, when_slow=when_slow
    )
