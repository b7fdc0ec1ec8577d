"""`kvadvisor relay` between a real publisher of ours and subscribers that know engines alone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import zmq

from advisor.cli import main
from advisor.relay import outlet, relay
from event_plane.connect import open_publisher, open_subscriber
from event_plane.dialects.known import open_dialect
from event_plane.dialects.outgoing import Style
from event_plane.dialects.words import Words
from event_plane.errors import TransportError
from event_plane.playing import Player
from event_plane.schema import Batch, EventRecord, EventType, Namespace
from event_plane.transport import Message, Subscriber
from tests.foreign_streams import CONFIGURED, Key, live
from tests.nats_server import nats_server

PATIENCE_S = 60.0
NAMESPACE = Namespace(model="m")


def record(kind: EventType, block: int, tier: int = 1) -> EventRecord:
    return EventRecord(kind, tier, block, NAMESPACE, "gpu:0", block_tokens=16)


@contextmanager
def relayed(source: str, to: str, style: Style) -> Iterator[None]:
    """A relay at work, in a thread."""
    stopping = threading.Event()
    opening, topic = outlet(to, None, style)
    subscriber = open_subscriber("source", source, foreign=False)
    with Player(opening, shared=True) as player:
        words = Words(style, topic, 9)
        thread = threading.Thread(target=relay, args=(subscriber, player, words, stopping))
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join(PATIENCE_S)


def read_until(subscriber: Subscriber, dialect: str, done: Callable[[set[Key]], bool]) -> set[Key]:
    """Decode what comes, once each by its number, until what is placed is as wanted."""
    opened = open_dialect(dialect, namespace=CONFIGURED)
    batches: dict[int, Batch] = {}
    ask_s = time.monotonic()
    deadline = time.monotonic() + PATIENCE_S
    while True:
        placed = live([batches[number] for number in sorted(batches)])
        if done(placed) and sorted(batches) == list(range(len(batches))):
            return placed
        assert time.monotonic() < deadline, f"{len(batches)} messages, {len(placed)} blocks placed"
        if time.monotonic() >= ask_s:
            # What was said before the subscription stood.
            subscriber.ask_resend(0, 1)
            ask_s += 1.0
        poller = zmq.Poller()
        for pollable in subscriber.pollables():
            poller.register(pollable, zmq.POLLIN)
        poller.poll(100)
        for received in subscriber.receive(64):
            if isinstance(received, Message):
                number = opened.origin(received).sequence
                batches[number], skipped = opened.decode(received.payload, producer=1, epoch=1, sequence=number)
                assert skipped == {}


def test_subscriber_of_vllm_hears_our_producer_live_or_by_replay(tmp_path: Path) -> None:
    source, to = (f"zmq+ipc://{tmp_path}/{name}" for name in ("source", "relay"))
    with (
        closing(open_publisher(source, producer=7)) as publisher,
        relayed(source, to, "vllm"),
        closing(open_subscriber("router", to, foreign=True)) as router,
    ):
        blocks = [1 << 64 | number for number in (1, 2)]
        publisher.publish([record(EventType.STORE, block, tier) for block in blocks for tier in (1, 3)], True)
        publisher.publish([record(EventType.REMOVE, blocks[0])], True)
        wanted = {(3, "STORAGE", 0, blocks[0]), (1, "GPU", 0, blocks[1]), (3, "STORAGE", 0, blocks[1])}
        assert read_until(router, "vllm", lambda placed: placed == wanted) == wanted


def test_subscriber_of_dynamo_hears_our_producer_on_nats(tmp_path: Path) -> None:
    source = f"zmq+ipc://{tmp_path}/events"
    with nats_server(tmp_path / "nats") as server, closing(open_publisher(source, producer=7)) as publisher:
        to = server.url("namespace.n.kv-events")
        with closing(open_subscriber("router", to, foreign=True)) as router:
            wait_until(lambda: router.connection().connected is True)
            with relayed(source, to, "dynamo"):
                publisher.publish([record(EventType.STORE, block, tier) for block in (1, 2) for tier in (1, 2)], True)
                publisher.publish([record(EventType.REMOVE, 1)], True)
                wanted = {(2, "worker-7/dp0", 0, 1), (1, "worker-7/dp0", 0, 2), (2, "worker-7/dp0", 0, 2)}
                assert read_until(router, "dynamo", lambda placed: placed == wanted) == wanted


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_command_relays_what_was_published_before_it_until_ctrl_c(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, to = (f"zmq+ipc://{tmp_path}/{name}" for name in ("source", "relay"))
    wanted = {(1, "GPU", 0, block) for block in (1, 2, 3)}
    read: list[set[Key]] = []

    def listen_then_interrupt() -> None:
        try:
            with closing(open_subscriber("router", to, foreign=True)) as router:
                read.append(read_until(router, "vllm", lambda placed: placed == wanted))
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    with closing(open_publisher(source, producer=7)) as publisher:
        for block in (1, 2, 3):
            publisher.publish([record(EventType.STORE, block)], True)
        listener = threading.Thread(target=listen_then_interrupt)
        listener.start()
        with pytest.raises(SystemExit) as ended:
            main(["relay", "--source", source, "--to", to, "--as", "vllm"])
        listener.join(PATIENCE_S)
    assert not ended.value.code
    assert (read, capsys.readouterr().out) == ([wanted], f"3 messages relayed to {to}\n")


@pytest.mark.parametrize(
    ("to", "style", "said"),
    [
        ("nats://127.0.0.1:4222/kv", "vllm", "listen to zmq\\+tcp:// or zmq\\+ipc://"),
        ("zmq+tcp://127.0.0.1:5557", "dynamo", "listen to nats://"),
    ],
)
def test_transport_that_no_such_router_listens_to_is_an_error(to: str, style: Style, said: str) -> None:
    with pytest.raises(TransportError, match=said):
        outlet(to, None, style)
