"""NATS as it is in the field: a server that dies and comes back, foreign publishers, slow readers, small messages."""

from __future__ import annotations

import asyncio
import gc
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import nats
import pytest

from event_plane.connect import open_publisher, open_subscriber
from event_plane.errors import TransportError
from event_plane.nats_mailbox import MESSAGES_MAX
from event_plane.publishing import BatchPublisher
from event_plane.schema import EventRecord, EventType, Namespace
from event_plane.transport import Message, Reconnected, Subscriber
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
from tests.nats_server import NatsServer, nats_server

DYNAMO = "namespace.prod.component.backend.endpoint.generate.kv-events"
Open = Callable[..., Any]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with nats_server(tmp_path / "server") as running:
        yield running


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def publish(opened: ExitStack, server: NatsServer) -> Callable[..., BatchPublisher]:
    return lambda subject="kv", **options: opened.enter_context(
        closing(open_publisher(server.url(subject), **{"producer": 7, "epoch": 3, "heartbeat_s": 0, **options}))
    )


@pytest.fixture
def subscribe(opened: ExitStack, server: NatsServer) -> Callable[..., Subscriber]:
    return lambda subject="kv", **options: opened.enter_context(
        closing(open_subscriber("engine", server.url(subject), **options))
    )


def say(server: NatsServer, *messages: tuple[str, bytes]) -> None:
    """Publish as a foreign process would."""

    async def say() -> None:
        client = await nats.connect(f"nats://127.0.0.1:{server.port}")
        for subject, payload in messages:
            await client.publish(subject, payload)
        # A socket that is closed with a word of the server's unread takes what the server has not read along.
        await client.flush(timeout=round(PATIENCE_S))
        await client.close()

    asyncio.run(say())


def messages_of(subscriber: Subscriber, count: int) -> list[Message]:
    received = receive_until(subscriber, lambda got: sum(isinstance(each, Message) for each in got) >= count)
    return [each for each in received if isinstance(each, Message)]


# A server that goes and comes


def test_server_away_at_start_is_said_and_found_when_it_comes(
    server: NatsServer, publish: Open, subscribe: Open
) -> None:
    server.stop()
    subscriber = subscribe()
    wait_for(lambda: subscriber.connection().connected is False)
    assert f"no connection to {server.url('kv')}" in subscriber.connection().problem
    assert "start the server or check the URL" in subscriber.connection().problem
    publisher = publish()
    publisher.publish(stores(1), flush=True)
    server.start()
    attach_live(publisher, subscriber)
    connection = subscriber.connection()
    assert (connection.connected, connection.problem, connection.reconnects) == (True, "", 0)


def test_server_that_dies_and_returns_shows_as_reconnected_and_the_gap_is_had_again(
    server: NatsServer, publish: Open, subscribe: Open
) -> None:
    publisher, subscriber = publish(flush_events=1), subscribe()
    attach_live(publisher, subscriber)
    server.kill()
    wait_for(lambda: subscriber.connection().connected is False)
    assert subscriber.connection().problem
    for block in range(100, 110):
        publisher.publish(stores(block), flush=True)
    server.start()
    receive_until(subscriber, lambda got: Reconnected("engine") in got)
    assert subscriber.connection().reconnects == 1
    assert blocks_of(resend(subscriber, 0))[-10:] == list(range(100, 110))
    attach_live(publisher, subscriber)


def test_server_that_dies_with_bytes_of_ours_unread_is_missed_and_found_again(
    server: NatsServer, publish: Open, subscribe: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, subscriber = publish(), subscribe()
    attach_live(publisher, subscriber)
    client = subscriber._connection.client  # type: ignore[attr-defined]

    async def drain() -> None:
        raise ConnectionResetError("Connection lost")

    # What nats-py finds as it closes after such an end: it gives up then and tells nobody.
    monkeypatch.setattr(client._transport, "drain", drain)
    client._pending.append(b"PING\r\n")
    client._pending_data_size = 6
    server.kill()
    wait_for(lambda: subscriber.connection().connected is False)
    server.start()
    attach_live(publisher, subscriber)


def test_ask_made_while_the_server_is_away_is_answered_when_it_is_back(
    server: NatsServer, publish: Open, subscribe: Open
) -> None:
    publisher, subscriber = publish(), subscribe()
    attach_live(publisher, subscriber)
    server.kill()
    wait_for(lambda: subscriber.connection().connected is False)
    assert subscriber.ask_resend(0, 1)
    server.start()
    assert [batch.sequence for batch in resend(subscriber, 0)][:1] == [0]


def test_acknowledging_subscriber_is_one_and_the_same_after_a_reconnection(
    server: NatsServer, publish: Open, subscribe: Open
) -> None:
    publisher, subscriber = publish(flush_events=1), subscribe()
    attach_live(publisher, subscriber)
    subscriber.acknowledge(7, 3, 0)
    wait_for(lambda: publisher.stat().acknowledged_sequence == 0)
    server.kill()
    wait_for(lambda: subscriber.connection().connected is False)
    server.start()
    receive_until(subscriber, lambda got: Reconnected("engine") in got)
    last = attach_live(publisher, subscriber)
    wait_for(lambda: _acknowledged(publisher, subscriber, last))
    assert publisher.stat().acknowledging_subscribers == 1


def _acknowledged(publisher: BatchPublisher, subscriber: Subscriber, sequence: int) -> bool:
    subscriber.acknowledge(7, 3, sequence)
    return publisher.stat().acknowledged_sequence == sequence


# Subjects


def test_producers_of_one_subject_are_told_apart_and_asked_each(
    server: NatsServer, publish: Open, subscribe: Open
) -> None:
    first, second, subscriber = publish(flush_events=1), publish(producer=8, flush_events=1), subscribe()
    attach_live(first, subscriber)
    second.publish(stores(50, 51), flush=True)
    assert subscriber.ask_resend(1, 1, producer=8)
    again = messages_of(subscriber, 3)
    assert [(each.topic, each.transport_sequence) for each in again if each.topic.endswith(b"8")][-1] == (
        b"kv.0000000000000008", 1,
    )  # fmt: skip
    subscriber.ask_snapshot(8, 3)
    wait_for(lambda: second.stat().requests_refused == 1)
    assert first.stat().requests_refused == 0


def test_wildcard_subscriber_sees_batches_and_no_requests(server: NatsServer, publish: Open, subscribe: Open) -> None:
    publisher, other, everything = publish("kv"), subscribe("kv"), subscribe(">")
    attach_live(publisher, other)
    attach_live(publisher, everything)
    resend(other, 0)
    other.ask_snapshot(7, 3)
    wait_for(lambda: publisher.stat().requests_refused == 1)
    publisher.publish(stores(99), flush=True)
    received = receive_until(everything, lambda got: 99 in blocks_of(batches_of(_ours(got))))
    subjects = {each.topic for each in received if isinstance(each, Message)}
    assert not any(subject.endswith(b".requests") for subject in subjects)
    assert b"kv.0000000000000007" in subjects
    assert blocks_of(batches_of(_ours(_resent(everything)))).count(99) == 1


def _ours(received: list[Any]) -> list[Any]:
    return [each for each in received if isinstance(each, Message) and each.topic.startswith(b"kv.")]


def _resent(subscriber: Subscriber) -> list[Any]:
    assert subscriber.ask_resend(0, 4, producer=7)
    return receive_until(subscriber, lambda got: any(not isinstance(each, Message) for each in got))


@pytest.mark.parametrize("subject", [DYNAMO, "namespace.*.component.*.endpoint.*.kv-events", "namespace.prod.>"])
def test_messages_of_a_foreign_publisher_are_taken_as_they_are(
    server: NatsServer, subscribe: Open, subject: str
) -> None:
    subscriber = subscribe(subject)
    wait_for(lambda: subscriber.connection().connected is True)
    say(server, (DYNAMO, b"\x81\xa1a\x01"), ("namespace.prod.other", b""), (DYNAMO, b"\x81\xa1a\x02"))
    messages = [each for each in messages_of(subscriber, 2) if each.topic == DYNAMO.encode()]
    assert messages[0] == Message("engine", DYNAMO.encode(), 0, b"\x81\xa1a\x01")
    assert not subscriber.ask_resend(0, 1, producer=99)
    assert not subscriber.ask_snapshot(99, 1)
    subscriber.acknowledge(99, 1, 0)


def test_publishing_on_a_wildcard_is_refused(server: NatsServer) -> None:
    with pytest.raises(TransportError, match=r"cannot publish on .*kv\.\*: .*name one subject"):
        open_publisher(server.url("kv.*"), producer=7)


# Bounds


@pytest.mark.parametrize("when_slow", ["wait", "drop"])
def test_reader_that_does_not_read_loses_the_newest_counted(
    server: NatsServer, subscribe: Open, when_slow: str
) -> None:
    subscriber = subscribe("foreign", when_slow=when_slow)
    wait_for(lambda: subscriber.connection().connected is True)
    sent = 0
    while subscriber.connection().dropped == 0:
        assert sent < 20 * MESSAGES_MAX
        say(server, *(("foreign", b"%d" % number) for number in range(sent, sent + MESSAGES_MAX)))
        sent += MESSAGES_MAX
    kept = messages_of(subscriber, MESSAGES_MAX)
    assert [int(each.payload) for each in kept[:MESSAGES_MAX]] == list(range(MESSAGES_MAX))


def test_batches_are_cut_to_what_the_server_takes(tmp_path: Path, opened: ExitStack) -> None:
    small = opened.enter_context(nats_server(tmp_path / "small", "max_payload: 8KB"))
    publisher = opened.enter_context(closing(open_publisher(small.url("kv"), producer=7, flush_events=5_000)))
    publisher.publish(stores(*range(1, 1001)), flush=True)
    subscriber = opened.enter_context(closing(open_subscriber("engine", small.url("kv"))))
    batches = resend(subscriber, 0)
    assert blocks_of(batches) == list(range(1, 1001))
    assert len(batches) > 10
    large = EventRecord(EventType.STORE, 1, 5, Namespace(), "gpu", extra={"note": "x" * 9_000})
    with pytest.raises(ValueError, match=r"event field extra brings 9\d{3} bytes: a batch's extension has"):
        publisher.publish([large])
    publisher.publish(stores(2000), flush=True)
    assert blocks_of(resend(subscriber, len(batches)))[-1] == 2000


def test_publisher_without_a_server_bounds_what_it_holds(tmp_path: Path, opened: ExitStack) -> None:
    away = NatsServer(tmp_path / "away", "", jetstream=False, monitor=False)
    publisher = opened.enter_context(closing(open_publisher(away.url("kv"), producer=7, flush_events=4_096)))
    note = {"note": "x" * 900_000}
    for block in range(60):
        publisher.publish([EventRecord(EventType.STORE, 1, block, Namespace(), "gpu", extra=note)], flush=True)
    assert publisher.stat().slow_reader_drops > 10


def test_connection_that_is_closed_while_it_is_made_leaves_no_socket_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        subscriber = open_subscriber("engine", f"nats://127.0.0.1:{listener.getsockname()[1]}/kv")
        accepted, _ = listener.accept()
        with accepted:
            accepted.settimeout(30)
            # A server speaks first; this one keeps silent.
            subscriber.close()
            assert accepted.recv(1) == b""
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                gc.collect()
            assert [str(each.message) for each in warned if "unclosed" in str(each.message)] == []
