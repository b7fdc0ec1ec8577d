"""JetStream on a real server: how the stream is made, what is stored, where reading goes on, what is acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js import JetStreamContext
from nats.js.api import ConsumerInfo, RetentionPolicy, StorageType, StreamConfig
from structlog.testing import capture_logs

from event_plane.connect import open_publisher, open_subscriber
from event_plane.errors import TransportError
from event_plane.jetstream_stream import sync_warning
from event_plane.jetstream_subscriber import HELD_MAX, JetStreamSubscriber
from event_plane.publishing import BatchPublisher
from event_plane.transport import Message, Reconnected, Subscriber
from tests.contract.transports import batches_of, blocks_of, receive_until, resend, stores, wait_for
from tests.nats_server import NatsServer, nats_server

Open = Callable[..., Any]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with nats_server(tmp_path / "server", jetstream=True) as running:
        yield running


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def publish(opened: ExitStack, server: NatsServer) -> Callable[..., BatchPublisher]:
    return lambda stream="kv", **options: opened.enter_context(
        closing(open_publisher(server.url(stream, "jetstream"), **{"producer": 7, "flush_events": 1, **options}))
    )


@pytest.fixture
def subscribe(opened: ExitStack, server: NatsServer) -> Callable[..., Subscriber]:
    def subscribe(stream: str = "kv", resume: Mapping[int, tuple[int, int]] | None = None) -> Subscriber:
        return opened.enter_context(
            closing(open_subscriber("engine", server.url(stream, "jetstream"), resume=resume or {}))
        )

    return subscribe


def on_server(server: NatsServer, work: Callable[[JetStreamContext], Coroutine[Any, Any, Any]]) -> Any:
    async def run() -> Any:
        client = await nats.connect(f"nats://127.0.0.1:{server.port}")
        try:
            return await work(client.jetstream())
        finally:
            await client.close()

    return asyncio.run(run())


def consumers(server: NatsServer) -> list[ConsumerInfo]:
    return on_server(server, lambda js: js.consumers_info("kv"))


def live(subscriber: Subscriber, count: int) -> list[tuple[int, int, int]]:
    """(producer, epoch, sequence) of the first `count` messages."""
    received = receive_until(subscriber, lambda got: sum(isinstance(each, Message) for each in got) >= count)
    return [(batch.producer, batch.epoch, batch.sequence) for batch in batches_of(received)]


def stands(subscriber: Subscriber) -> None:
    wait_for(lambda: subscriber.connection().connected is True)


# The stream and its consumer


def test_stream_is_made_with_every_setting_spelled_out(server: NatsServer, publish: Open) -> None:
    publish("kv?max_bytes=5000000&max_age_s=3600")
    config = on_server(server, lambda js: js.stream_info("kv")).config
    assert (config.subjects, config.storage, config.retention) == (
        ["kvadvisor.kv.*"], StorageType.FILE, RetentionPolicy.LIMITS,
    )  # fmt: skip
    assert (config.max_bytes, config.max_age, config.duplicate_window) == (5_000_000, 3600, 120)
    assert (config.num_replicas, config.max_msgs, config.max_msgs_per_subject) == (1, -1, -1)
    assert (config.discard, config.allow_direct) == ("old", True)


def test_consumer_pulls_acknowledges_explicitly_and_is_gone_after_close(
    server: NatsServer, publish: Open, subscribe: Open
) -> None:
    publish()
    subscriber = subscribe()
    stands(subscriber)
    (consumer,) = consumers(server)
    config = consumer.config
    assert (config.ack_policy, config.ack_wait, config.max_ack_pending) == ("explicit", 60, HELD_MAX)
    assert (config.deliver_subject, config.filter_subject) == (None, "kvadvisor.kv.*")
    assert consumer.name.startswith("kvadvisor-engine-")
    subscriber.close()
    assert consumers(server) == []


def test_stream_with_other_limits_is_used_and_the_difference_is_said(server: NatsServer, publish: Open) -> None:
    publish("kv?max_bytes=5000000").close()
    with capture_logs() as said:
        publish("kv?max_bytes=6000000")
    assert [entry["differs"] for entry in said if "differs" in entry] == ["max_bytes is 5000000, not 6000000"]


def test_stream_that_would_lose_batches_is_refused_naming_what_differs(
    server: NatsServer, publish: Open, subscribe: Open
) -> None:
    made = StreamConfig(name="kv", subjects=["kvadvisor.kv.*"], storage=StorageType.MEMORY, retention="workqueue")
    on_server(server, lambda js: js.add_stream(made))
    words = r"storage is memory, not file; retention is workqueue, not limits; allow_direct is False, not True"
    with pytest.raises(TransportError, match=rf"cannot publish on .*stream kv was made with other settings \({words}"):
        publish()
    subscriber = subscribe()
    wait_for(lambda: subscriber.connection().connected is False)
    assert "name another stream" in subscriber.connection().problem


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("max_byte=1", "unknown option 'max_byte': use max_bytes, max_age_s, replicas, monitor"),
        ("max_bytes=many", "an option that cannot be read"),
        ("replicas=9", "replicas 1 to 5"),
        ("monitor=ftp://x", "is no http:// or https:// address"),
    ],
)
def test_option_that_cannot_be_used_is_named(query: str, words: str) -> None:
    url = f"jetstream://127.0.0.1:1/kv?{query}"
    with pytest.raises(TransportError, match=words):
        open_publisher(url, producer=7)
    with pytest.raises(TransportError, match=words):
        open_subscriber("engine", url)


def test_server_without_jetstream_is_a_clear_problem(tmp_path: Path, opened: ExitStack) -> None:
    plain = opened.enter_context(nats_server(tmp_path / "plain"))
    subscriber = opened.enter_context(closing(open_subscriber("engine", plain.url("kv", "jetstream"))))
    wait_for(lambda: subscriber.connection().connected is False)
    assert "enable it on the server" in subscriber.connection().problem


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("sync_interval: always", ""),
        ("sync_interval: 10s", "acknowledges before its fsync, which comes every 10 s"),
        ("", "acknowledges before its fsync, which comes every 120 s"),
    ],
)
def test_acknowledging_before_the_fsync_is_warned_of(tmp_path: Path, setting: str, words: str) -> None:
    configuration = f'jetstream {{ store_dir: "{tmp_path}/store", {setting} }}'
    with nats_server(tmp_path / "server", configuration, monitor=True) as server:
        warning = sync_warning(server.monitor_url)
        with capture_logs() as said:
            open_publisher(f"{server.url('kv', 'jetstream')}?monitor={server.monitor_url}", producer=7).close()
    assert words in warning
    assert bool(warning) == bool(words)
    assert [entry["event"] for entry in said] == ([warning] if words else [])


def test_sync_that_cannot_be_told_is_said_with_the_remedy(server: NatsServer) -> None:
    assert "cannot be told from here: set `jetstream { sync_interval: always }`" in sync_warning("")
    assert "does not say whether it syncs" in sync_warning(server.monitor_url)


# What is stored


def test_what_is_stored_is_acknowledged_and_once_in_the_stream_through_a_killed_server(
    server: NatsServer, publish: Open, subscribe: Open
) -> None:
    publisher = publish(epoch=3, window_wait_s=0.01)
    for block in range(200):
        publisher.publish(stores(block))
        if block in (50, 120):
            server.kill()
            server.start()
    publisher.flush()
    wait_for(lambda: publisher.stat().acknowledged_sequence == 199)
    info = on_server(server, lambda js: js.stream_info("kv"))
    assert info.state.messages == 200
    assert live(subscribe(), 200) == [(7, 3, sequence) for sequence in range(200)]
    assert publisher.stat().slow_reader_drops == 0


def test_batch_sent_twice_is_stored_once(server: NatsServer, publish: Open) -> None:
    publish(epoch=3).publish(stores(1), flush=True)

    async def again(js: JetStreamContext) -> Any:
        stored = await js.get_msg("kv", seq=1)
        assert stored.headers is not None
        assert stored.headers["Nats-Msg-Id"] == "0000000000000007/3/0"
        return await js.publish("kvadvisor.kv.0000000000000007", stored.data or b"", headers=stored.headers)

    assert on_server(server, again).duplicate


def test_publisher_that_outlives_the_servers_absence_stores_what_it_held(server: NatsServer, publish: Open) -> None:
    server.stop()
    publisher = publish(window_wait_s=0.01)
    publisher.publish(stores(1), flush=True)
    assert publisher.connection().connected is False
    assert publisher.stat().acknowledged_sequence == -1
    server.start()
    wait_for(lambda: publisher.stat().acknowledged_sequence == 0)


def test_stream_deleted_under_a_publisher_is_made_again(server: NatsServer, publish: Open) -> None:
    publisher = publish(epoch=3)
    publisher.publish(stores(1), flush=True)
    on_server(server, lambda js: js.delete_stream("kv"))
    publisher.publish(stores(2), flush=True)
    wait_for(lambda: publisher.stat().acknowledged_sequence == 1)
    assert on_server(server, lambda js: js.stream_info("kv")).state.messages == 1


# Where reading goes on


def test_reading_goes_on_behind_what_the_log_holds(server: NatsServer, publish: Open, subscribe: Open) -> None:
    for epoch in (3, 1, 2):
        publisher = publish(epoch=epoch)
        publisher.publish(stores(*range(10)), flush=True)
        publisher.close()
    other = publish(producer=8, epoch=5)
    other.publish(stores(1, 2), flush=True)
    every = [(7, epoch, sequence) for epoch in (3, 1, 2) for sequence in range(10)] + [(8, 5, 0), (8, 5, 1)]
    assert live(subscribe(), 32) == every
    assert live(subscribe(resume={7: (1, 4)}), 17) == every[15:]
    assert live(subscribe(resume={7: (3, 9), 8: (5, 0)}), 22) == every[10:]
    # All is logged, but for what comes.
    ahead = subscribe(resume={7: (2, 9), 8: (5, 1)})
    stands(ahead)
    other.publish(stores(3), flush=True)
    assert live(ahead, 1) == [(8, 5, 2)]
    # A log that knows another life than any in the stream is older, or the stream is another: everything comes.
    assert live(subscribe(resume={7: (9, 4), 8: (5, 1)}), 33)[:30] == every[:30]


def test_resend_brings_the_latest_life_alone(server: NatsServer, publish: Open, subscribe: Open) -> None:
    for epoch in (3, 1):
        publisher = publish(epoch=epoch)
        publisher.publish(stores(*range(5)), flush=True)
        publisher.close()
    subscriber = subscribe(resume={7: (1, 4)})
    assert [(batch.epoch, batch.sequence) for batch in resend(subscriber, 2)] == [(1, 2), (1, 3), (1, 4)]
    assert subscriber.ask_resend(0, 9, producer=12)
    assert receive_until(subscriber, lambda got: len(got) > 0)


def test_server_killed_under_a_subscriber_goes_on_where_it_was(
    server: NatsServer, publish: Open, subscribe: Open
) -> None:
    publisher, subscriber = publish(epoch=3), subscribe()
    publisher.publish(stores(*range(20)), flush=True)
    assert len(live(subscriber, 20)) == 20
    server.kill()
    wait_for(lambda: subscriber.connection().connected is False)
    publisher.publish(stores(*range(20, 30)))
    server.start()
    received = receive_until(subscriber, lambda got: len(batches_of(got)) >= 10)
    assert Reconnected("engine") in received
    assert blocks_of(batches_of(received)) == list(range(20, 30))
    assert subscriber.connection().reconnects == 1


def test_many_pulls_follow_each_other_on_one_consumer(server: NatsServer, publish: Open, subscribe: Open) -> None:
    publisher, subscriber = publish(epoch=3), subscribe()
    stands(subscriber)
    (consumer,) = consumers(server)
    for first in range(0, 3_000, 100):
        publisher.publish(stores(*range(first, first + 100)))
        assert live(subscriber, 100) == [(7, 3, sequence) for sequence in range(first, first + 100)]
        subscriber.acknowledge(7, 3, first + 99)
    assert [each.name for each in consumers(server)] == [consumer.name]
    assert subscriber.connection().reconnects == 0


def test_stream_that_was_deleted_is_made_again(server: NatsServer, publish: Open, subscribe: Open) -> None:
    publisher, subscriber = publish(epoch=3), subscribe()
    publisher.publish(stores(*range(5)), flush=True)
    live(subscriber, 5)
    on_server(server, lambda js: js.delete_stream("kv"))
    wait_for(lambda: subscriber.connection().reconnects == 1)
    publisher.publish(stores(5), flush=True)
    assert live(subscriber, 1) == [(7, 3, 5)]


# Acknowledgements of subscribers


def test_stream_waits_for_the_acknowledgement_after_the_commit(
    server: NatsServer, publish: Open, subscribe: Open
) -> None:
    publisher, other, subscriber = publish(epoch=3), publish(producer=8, epoch=5), subscribe()
    publisher.publish(stores(*range(10)), flush=True)
    other.publish(stores(*range(4)), flush=True)
    live(subscriber, 14)
    wait_for(lambda: consumers(server)[0].num_ack_pending == 14)
    subscriber.acknowledge(7, 3, 6)
    wait_for(lambda: consumers(server)[0].num_ack_pending == 7)
    subscriber.acknowledge(8, 5, 3)
    subscriber.acknowledge(8, 4, 3)
    subscriber.acknowledge(7, 3, 9)
    wait_for(lambda: consumers(server)[0].num_ack_pending == 0)


def test_batches_of_a_closed_life_are_let_go_with_the_next(server: NatsServer, publish: Open, subscribe: Open) -> None:
    for epoch in (3, 4):
        publisher = publish(epoch=epoch)
        publisher.publish(stores(1, 2, 3), flush=True)
        publisher.close()
    subscriber = subscribe()
    live(subscriber, 6)
    wait_for(lambda: consumers(server)[0].num_ack_pending == 6)
    subscriber.acknowledge(7, 4, 1)
    wait_for(lambda: consumers(server)[0].num_ack_pending == 1)


def test_what_is_not_acknowledged_in_time_comes_to_this_process_once(
    server: NatsServer, publish: Open, opened: ExitStack
) -> None:
    publisher = publish(epoch=3)
    url = server.url("kv", "jetstream")
    subscriber = opened.enter_context(closing(JetStreamSubscriber("engine", url, resume={}, ack_wait_s=0.3)))
    publisher.publish(stores(1, 2), flush=True)
    live(subscriber, 2)
    # Delivered again, recognised, and acknowledged for the gate that has it.
    wait_for(lambda: consumers(server)[0].num_ack_pending == 0)
    publisher.publish(stores(3), flush=True)
    assert live(subscriber, 1) == [(7, 3, 2)]


def test_message_that_is_no_batch_is_counted_and_stepped_over(
    server: NatsServer, publish: Open, subscribe: Open
) -> None:
    publisher, subscriber = publish(epoch=3), subscribe()
    stands(subscriber)
    on_server(server, lambda js: js.publish("kvadvisor.kv.0000000000000007", b"garbage"))
    publisher.publish(stores(1), flush=True)
    assert live(subscriber, 1) == [(7, 3, 0)]
    assert subscriber.malformed == 1
    assert blocks_of(resend(subscriber, 0)) == [1]
