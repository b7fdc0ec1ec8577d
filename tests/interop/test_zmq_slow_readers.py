"""What becomes of a reader that cannot keep up over ZeroMQ: it is noticed, nobody waits for it, and its gap heals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
import zmq

from event_plane.schema import EventRecord
from event_plane.transport import Message, Received
from event_plane.zmq_transport import ZmqPublisher, ZmqSubscriber
from tests.contract.transports import (
    PATIENCE_S,
    attach_live,
    batches_of,
    blocks_of,
    receive_until,
    resend,
    stores,
    wait_for,
)

ANY_PORT = "zmq+tcp://127.0.0.1:0"


def large(block: int) -> list[EventRecord]:
    """A Store that takes 200 kB in its batch."""
    (event,) = stores(block)
    event.extra = {"note": "x" * 200_000}
    return [event]


def sequences(received: list[Received]) -> list[int]:
    return [each.transport_sequence for each in received if isinstance(each, Message)]


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def publish(opened: ExitStack) -> ZmqPublisher:
    """A publisher that sends no heartbeats, which would fill queues, too."""
    made = ZmqPublisher(ANY_PORT, ANY_PORT, producer=7, epoch=3, flush_events=1, heartbeat_s=0)
    return opened.enter_context(closing(made))


@pytest.fixture
def publisher(opened: ExitStack) -> ZmqPublisher:
    return publish(opened)


def subscribe(opened: ExitStack, publisher: ZmqPublisher, **options: object) -> ZmqSubscriber:
    place = str(publisher.url), str(publisher.resend_url)
    return opened.enter_context(closing(ZmqSubscriber("engine", *place, **options)))  # type: ignore[arg-type]


def test_batches_that_a_slow_reader_misses_are_counted_and_nobody_else_misses_them(
    opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("event_plane.zmq_transport._PUB_QUEUE", 32)
    publisher = publish(opened)
    context = opened.enter_context(zmq.Context())
    slow = opened.enter_context(context.socket(zmq.SUB))
    slow.setsockopt(zmq.LINGER, 0)
    slow.setsockopt(zmq.RCVHWM, 1)
    slow.setsockopt(zmq.RCVBUF, 4096)
    slow.connect(publisher.url.endpoint)
    slow.setsockopt(zmq.SUBSCRIBE, b"")
    slow.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
    quick = subscribe(opened, publisher)
    attach_live(publisher, quick)
    wait_for(lambda: bool(publisher.publish(stores(1), flush=True) or slow.poll(5)))

    # Each goes out when the quick one has the one before, so that only the slow one's queue fills.
    while publisher.stat().slow_reader_drops == 0:
        publisher.publish(large(1), flush=True)
        last = publisher.last_sequence
        receive_until(quick, lambda got, last=last: last in sequences(got))  # type: ignore[misc]

    seen = [int.from_bytes(slow.recv_multipart()[1], "big")]
    while slow.poll(200):
        seen.append(int.from_bytes(slow.recv_multipart()[1], "big"))
    assert len(seen) <= last - seen[0]
    # The gap heals.
    assert [batch.sequence for batch in resend(quick, seen[0])] == list(range(seen[0], last + 1))


def test_dropping_subscriber_counts_what_it_forgets_and_heals_by_resend(
    publisher: ZmqPublisher, opened: ExitStack
) -> None:
    subscriber = subscribe(opened, publisher, when_slow="drop", queue_batches=5)

    def has_all() -> bool:
        subscriber.receive(64)
        return attach_live(publisher, subscriber) == publisher.last_sequence

    wait_for(has_all)
    before = subscriber.connection().dropped
    first = publisher.last_sequence + 1
    for block in range(100, 140):
        publisher.publish(stores(block), flush=True)
    # All have arrived: one that came later would find a place and be among what is resent.
    wait_for(lambda: subscriber.connection().dropped == before + 35)
    held = batches_of(subscriber.receive(64))
    assert [batch.sequence for batch in held] == list(range(first, first + 5)), "the newest are dropped"
    assert publisher.stat().acknowledging_subscribers == 0
    assert blocks_of(resend(subscriber, first))[-40:] == list(range(100, 140))


def test_dropping_subscriber_holds_no_publisher_back(publisher: ZmqPublisher, opened: ExitStack) -> None:
    subscriber = subscribe(opened, publisher, when_slow="drop")
    attach_live(publisher, subscriber)
    subscriber.acknowledge(7, 3, 0)
    resend(subscriber, 0)  # what was sent before has arrived
    assert publisher.stat().acknowledging_subscribers == 0


def test_more_resends_than_are_served_at_a_time_are_refused(opened: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("event_plane.zmq_transport._ROUTER_QUEUE", 2)
    monkeypatch.setattr("event_plane.publishing._RESENDS_MAX", 3)
    publisher = publish(opened)
    for block in range(60):
        publisher.publish(large(block), flush=True)
    context = opened.enter_context(zmq.Context())
    for _ in range(5):
        asker = opened.enter_context(context.socket(zmq.DEALER))
        asker.setsockopt(zmq.LINGER, 0)
        asker.setsockopt(zmq.RCVHWM, 1)
        asker.setsockopt(zmq.RCVBUF, 4096)
        asker.connect(publisher.resend_url.endpoint)
        asker.send_multipart([b"", bytes(8)])
    wait_for(lambda: publisher.stat().resends + publisher.stat().requests_refused == 5)
    assert publisher.stat().resends == 3
    publisher.publish(stores(1), flush=True)
    assert publisher.last_sequence == 60
