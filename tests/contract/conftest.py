"""The places that the transports' contract tests run at. A test file narrows `place` by parametrizing it indirectly."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from event_plane.connect import open_publisher, open_subscriber
from event_plane.publishing import BatchPublisher
from event_plane.transport import Subscriber
from tests.contract.transports import PRODUCER, WITH_A_SERVER, WITHOUT_A_SERVER, Place, PublishAt, Subscribe
from tests.nats_server import NatsServer, nats_server
from tests.ports import free_ports

pytest.register_assert_rewrite("storage_agent.volume_contract")  # as `pytest_plugins` does


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One for all tests, each of which has a subject or stream of its own."""
    with nats_server(tmp_path_factory.mktemp("nats"), jetstream=True) as running:
        yield running


@pytest.fixture(params=[*WITHOUT_A_SERVER, *WITH_A_SERVER])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    name = f"contract-{secrets.token_hex(6)}"
    if request.param in WITH_A_SERVER:
        return request.getfixturevalue("server").url(name, request.param), None
    events, resends = free_ports(2)
    places: dict[str, Place] = {
        "zmq+tcp": (f"zmq+tcp://127.0.0.1:{events}", f"zmq+tcp://127.0.0.1:{resends}"),
        "zmq+ipc": (f"zmq+ipc://{tmp_path}/events", None),
        "memory": (f"memory://{name}", None),
    }
    return places[str(request.param)]


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def publishers() -> list[BatchPublisher]:
    """Those that `publish_at` opened."""
    return []


@pytest.fixture
def publish_at(opened: ExitStack, place: Place, publishers: list[BatchPublisher]) -> PublishAt:
    def publish_at(**options: Any) -> BatchPublisher:
        # No heartbeats unless asked for: on a slow machine one comes between what a test compares.
        options = {"producer": PRODUCER, "epoch": 3, "heartbeat_s": 0, **options}
        publishers.append(opened.enter_context(closing(open_publisher(*place, **options))))
        return publishers[-1]

    return publish_at


@pytest.fixture
def subscribe(opened: ExitStack, place: Place, publishers: list[BatchPublisher]) -> Subscribe:
    """A subscriber whose log holds all that was published before: what a server kept does not come live."""

    def subscribe() -> Subscriber:
        logged = {PRODUCER: (3, publishers[-1].last_sequence)} if publishers else {}
        return opened.enter_context(closing(open_subscriber("engine", *place, resume=logged)))

    return subscribe
