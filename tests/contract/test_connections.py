"""How a subscription says that it stands, where it is connected to its publisher itself and to no server between."""

from __future__ import annotations

import pytest

from event_plane.transport import Reconnected, Subscriber
from tests.contract.transports import (
    PublishAt,
    Subscribe,
    attach_live,
    receive_until,
    resend,
    stores,
    wait_for,
)

pytestmark = pytest.mark.parametrize("place", ["zmq+tcp", "zmq+ipc", "memory"], indirect=True)


def stands(subscriber: Subscriber) -> bool | None:
    """Whether it is connected, after looking."""
    subscriber.receive(64)
    return subscriber.connection().connected


def test_subscription_without_a_publisher_says_so(subscribe: Subscribe) -> None:
    subscriber = subscribe()
    wait_for(lambda: stands(subscriber) is False)
    assert subscriber.connection().problem


def test_subscription_stands_once_its_publisher_is_there(publish_at: PublishAt, subscribe: Subscribe) -> None:
    publish_at()
    subscriber = subscribe()
    wait_for(lambda: stands(subscriber) is True)
    connection = subscriber.connection()
    assert (connection.problem, connection.reconnects, connection.dropped) == ("", 0, 0)


def test_publisher_that_goes_and_comes_back_shows_as_reconnected(publish_at: PublishAt, subscribe: Subscribe) -> None:
    publisher, subscriber = publish_at(), subscribe()
    attach_live(publisher, subscriber)
    publisher.close()
    wait_for(lambda: stands(subscriber) is False)
    assert subscriber.connection().problem
    again = publish_at()
    receive_until(subscriber, lambda got: Reconnected("engine") in got)
    assert subscriber.connection().connected is True
    assert subscriber.connection().reconnects == 1
    again.publish(stores(1), flush=True)
    assert {batch.sequence for batch in resend(subscriber, 0)} == {0}


def test_first_connection_is_no_reconnection(publish_at: PublishAt, subscribe: Subscribe) -> None:
    subscriber = subscribe()
    wait_for(lambda: stands(subscriber) is False)
    publish_at()
    wait_for(lambda: stands(subscriber) is True)
    assert subscriber.connection().reconnects == 0
