"""Transport URLs: what they mean, and one clear sentence for each that cannot be used."""

from __future__ import annotations

import re

import pytest

from event_plane.errors import TransportError
from event_plane.transport import PlaneUrl, parse_url, resend_url_beside


@pytest.mark.parametrize(
    ("url", "parsed", "endpoint"),
    [
        ("zmq+tcp://127.0.0.1:5557", PlaneUrl("zmq+tcp", host="127.0.0.1", port=5557), "tcp://127.0.0.1:5557"),
        ("zmq+tcp://[::1]:5557", PlaneUrl("zmq+tcp", host="::1", port=5557), "tcp://[::1]:5557"),
        ("zmq+ipc:///run/kv/events", PlaneUrl("zmq+ipc", path="/run/kv/events"), "ipc:///run/kv/events"),
        ("zmq+ipc://events", PlaneUrl("zmq+ipc", path="events"), "ipc://events"),
    ],
)
def test_zeromq_urls_name_an_endpoint(url: str, parsed: PlaneUrl, endpoint: str) -> None:
    assert parse_url(url) == parsed
    assert parsed.endpoint == endpoint
    assert str(parsed) == url


def test_memory_url_names_a_channel() -> None:
    assert parse_url("memory://engine") == PlaneUrl("memory", path="engine")
    assert str(PlaneUrl("memory", path="engine")) == "memory://engine"


@pytest.mark.parametrize(
    ("url", "beside"),
    [
        ("zmq+tcp://127.0.0.1:5557", "zmq+tcp://127.0.0.1:5558"),
        ("zmq+tcp://127.0.0.1:0", "zmq+tcp://127.0.0.1:0"),
        ("zmq+ipc:///run/events", "zmq+ipc:///run/events.resend"),
        ("memory://engine", "memory://engine"),
    ],
)
def test_resends_are_beside_the_events_by_default(url: str, beside: str) -> None:
    assert str(resend_url_beside(parse_url(url))) == beside


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("zmq+tcp://127.0.0.1", "needs a host and a port"),
        ("zmq+tcp://:5557", "needs a host and a port"),
        ("zmq+tcp://127.0.0.1:5557/topic", "needs a host and a port"),
        ("zmq+tcp://127.0.0.1:65536", "Port out of range"),
        ("zmq+tcp://127.0.0.1:port", "cannot be read"),
        ("zmq+ipc://", "names nothing: use zmq\\+ipc:///path"),
        ("memory://", "names nothing: use memory://name"),
        ("tcp://127.0.0.1:5557", "write zmq\\+tcp://127.0.0.1:5557"),
        ("nats://127.0.0.1:4222", "needs a host and a subject: use nats://host:port/subject"),
        ("nats:///kv", "needs a host and a subject"),
        ("nats://127.0.0.1/kv..events", "needs a host and a subject"),
        ("jetstream://127.0.0.1:4222/kv.events", "needs a host and a stream"),
        ("nats://me:secret@127.0.0.1/kv", "holds a user or password: name the user and a password file"),
        ("nats://127.0.0.1/kv?replicas=3", "has options after \\?, which only jetstream:// takes"),
        ("kafka://broker:9092", "unknown scheme 'kafka'"),
        ("127.0.0.1:5557", "unknown scheme"),
        ("", "unknown scheme ''"),
    ],
)
def test_url_that_cannot_be_used_says_why_and_what_to_write(url: str, said: str) -> None:
    with pytest.raises(TransportError, match=said) as refused:
        parse_url(url)
    assert re.search(r"(use|write) (zmq\+tcp|zmq\+ipc|memory|nats|jetstream)|in the settings", str(refused.value))


def test_streams_options_are_kept_as_written() -> None:
    place = parse_url("jetstream://127.0.0.1/kv?replicas=3&max_bytes=5")
    assert (place.path, place.port, place.query) == ("kv", 4222, "replicas=3&max_bytes=5")
    assert str(place) == "jetstream://127.0.0.1:4222/kv?replicas=3&max_bytes=5"
