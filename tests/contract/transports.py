"""What the contract tests of transports share: events to publish, and ways to wait for what comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import zmq

from event_plane.publishing import BatchPublisher
from event_plane.schema import Batch, EventRecord, EventType, Namespace
from event_plane.transport import Message, Received, ResendEnd, Subscriber
from event_plane.wire import decode

PRODUCER = 7
PATIENCE_S = 60.0
Place = tuple[str, str | None]
"""URL and resend URL."""
WITH_A_SERVER = ["nats", "jetstream"]
WITHOUT_A_SERVER = ["zmq+tcp", "zmq+ipc", "memory"]
PublishAt = Callable[..., BatchPublisher]
Subscribe = Callable[[], Subscriber]


def server_keeps(place: Place) -> bool:
    """Whether a server keeps every batch: it acknowledges them to the publisher, and serves the resends."""
    return place[0].startswith("jetstream")


def stores(*blocks: int) -> list[EventRecord]:
    return [EventRecord(EventType.STORE, 1, block, Namespace(model="m"), "gpu:0") for block in blocks]


def blocks_of(batches: Sequence[Batch]) -> list[int]:
    return [int(block) for batch in batches for block in batch.records["sequence_hash_lo"]]


def batches_of(received: Sequence[Received]) -> list[Batch]:
    """The messages among `received`, decoded."""
    return [decode(each.payload) for each in received if isinstance(each, Message)]


def receive_until(subscriber: Subscriber, done: Callable[[list[Received]], bool]) -> list[Received]:
    """Everything that comes until `done`; fails the test after a long time."""
    received: list[Received] = []
    deadline = time.monotonic() + PATIENCE_S
    while not done(received):
        assert time.monotonic() < deadline, f"only {len(received)} messages came"
        poller = zmq.Poller()
        for pollable in subscriber.pollables():
            poller.register(pollable, zmq.POLLIN)
        poller.poll(100)
        received += subscriber.receive(16)
    return received


def resend(subscriber: Subscriber, from_sequence: int, token: int = 1) -> list[Batch]:
    """What one resend brings, up to its end."""
    assert subscriber.ask_resend(from_sequence, token)
    return batches_of(receive_until(subscriber, lambda got: ResendEnd("engine", token) in got))


def wait_for(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def attach_live(publisher: BatchPublisher, subscriber: Subscriber) -> int:
    """Publish until the subscription stands. Returns the sequence of the first batch that came live."""
    received: list[Received] = []
    deadline = time.monotonic() + PATIENCE_S
    while not received:
        assert time.monotonic() < deadline
        publisher.publish(stores(1), flush=True)
        time.sleep(0.01)
        received = [each for each in subscriber.receive(1) if isinstance(each, Message)]
    assert isinstance(received[0], Message)
    return received[0].transport_sequence
