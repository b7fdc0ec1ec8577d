"""The places that the transports' contract tests run at. A test file narrows `place` by parametrizing it indirectly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from event_plane.connect import open_publisher, open_subscriber
from event_plane.publishing import BatchPublisher
from tests.contract.transports import PRODUCER, Place, PublishAt, Subscribe
from tests.ports import free_ports

pytest.register_assert_rewrite("storage_agent.volume_contract")  # as `pytest_plugins` does


@pytest.fixture(params=["zmq+tcp", "zmq+ipc", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    events, resends = free_ports(2)
    places: dict[str, Place] = {
        "zmq+tcp": (f"zmq+tcp://127.0.0.1:{events}", f"zmq+tcp://127.0.0.1:{resends}"),
        "zmq+ipc": (f"zmq+ipc://{tmp_path}/events", None),
        "memory": (f"memory://contract-{events}", None),
    }
    return places[str(request.param)]


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def publish_at(opened: ExitStack, place: Place) -> PublishAt:
    def publish_at(**options: Any) -> BatchPublisher:
        return opened.enter_context(closing(open_publisher(*place, producer=PRODUCER, epoch=3, **options)))

    return publish_at


@pytest.fixture
def subscribe(opened: ExitStack, place: Place) -> Subscribe:
    return lambda: opened.enter_context(closing(open_subscriber("engine", *place)))
