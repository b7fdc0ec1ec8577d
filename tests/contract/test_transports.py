"""What every transport must do, on the real thing: ZeroMQ over TCP and a socket file, memory, NATS and JetStream.

Where a server keeps the batches (`server_keeps`) it does what elsewhere the publisher and its subscribers do between
them: it serves resends, from further back than the publisher's buffer, and acknowledges.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from event_plane.connect import open_publisher
from event_plane.errors import TransportError
from event_plane.transport import Message, Publisher, Received, ResendEnd, Subscriber
from event_plane.wire import decode
from tests.contract.transports import (
    PATIENCE_S,
    PRODUCER,
    WITHOUT_A_SERVER,
    Place,
    PublishAt,
    Subscribe,
    attach_live,
    blocks_of,
    receive_until,
    resend,
    server_keeps,
    stores,
    wait_for,
)

subscribers_acknowledge = pytest.mark.parametrize("place", [*WITHOUT_A_SERVER, "nats"], indirect=True)
servers_acknowledge = pytest.mark.parametrize("place", ["jetstream"], indirect=True)

def test_live_batches_come_in_order_and_undamaged(publish_at: PublishAt, subscribe: Subscribe) -> None:
    publisher, subscriber = publish_at(), subscribe()
    first = attach_live(publisher, subscriber)
    for block in range(100, 120):
        publisher.publish(stores(block, block + 1000), flush=True)
    last = publisher.flush()
    received = receive_until(
        subscriber, lambda got: any(isinstance(each, Message) and each.transport_sequence == last for each in got)
    )
    messages = [each for each in received if isinstance(each, Message)]
    assert [each.transport_sequence for each in messages] == list(range(first + 1, last + 1))
    batches = [decode(each.payload) for each in messages]
    assert [(batch.producer, batch.epoch, batch.sequence) for batch in batches] == [
        (PRODUCER, 3, sequence) for sequence in range(first + 1, last + 1)
    ]
    expected = [each for block in range(100, 120) for each in (block, block + 1000)]
    assert blocks_of(batches)[-40:] == expected
    assert {each.source for each in messages} == {"engine"}


def test_late_subscriber_gets_everything_buffered_and_then_the_end(publish_at: PublishAt, subscribe: Subscribe) -> None:
    publisher = publish_at(flush_events=10)
    publisher.publish(stores(*range(1, 2001)))
    publisher.flush()
    batches = resend(subscribe(), 0)
    assert [batch.sequence for batch in batches] == list(range(200))
    assert blocks_of(batches) == list(range(1, 2001))


def test_resend_begins_where_it_is_asked_to(publish_at: PublishAt, subscribe: Subscribe, place: Place) -> None:
    publisher = publish_at(flush_events=1)
    publisher.publish(stores(1, 2, 3, 4))
    publisher.flush()
    subscriber = subscribe()
    assert [batch.sequence for batch in resend(subscriber, 2)] == [2, 3]
    assert resend(subscriber, 99) == []
    assert publisher.stat().resends == (0 if server_keeps(place) else 2)


def test_resend_older_than_the_buffer_begins_with_the_oldest_kept(
    publish_at: PublishAt, subscribe: Subscribe, place: Place
) -> None:
    publisher = publish_at(flush_events=1, buffer_batches=3)
    publisher.publish(stores(*range(1, 11)))
    publisher.flush()
    kept = list(range(10)) if server_keeps(place) else [7, 8, 9]
    assert [batch.sequence for batch in resend(subscribe(), 0)] == kept
    assert publisher.stat().buffered_batches == 3


def test_buffer_is_bounded_by_bytes(publish_at: PublishAt) -> None:
    publisher = publish_at(flush_events=1, buffer_bytes=1000)
    publisher.publish(stores(*range(1, 11)))
    publisher.flush()
    stat = publisher.stat()
    assert 0 < stat.buffered_bytes <= 1000
    assert stat.batches == 10


def test_second_ask_with_one_token_replaces_the_first(publish_at: PublishAt, subscribe: Subscribe) -> None:
    publisher = publish_at(flush_events=1)
    publisher.publish(stores(1, 2, 3), flush=True)
    subscriber = subscribe()
    subscriber.ask_resend(0, 5)
    assert [batch.sequence for batch in resend(subscriber, 2, token=5)] == [2]


def test_asks_with_different_tokens_end_each_for_itself(publish_at: PublishAt, subscribe: Subscribe) -> None:
    publisher = publish_at(flush_events=1)
    publisher.publish(stores(1, 2, 3), flush=True)
    subscriber = subscribe()
    assert subscriber.ask_resend(1, 5)
    assert subscriber.ask_resend(2, 6)
    received = receive_until(subscriber, lambda got: sum(isinstance(each, ResendEnd) for each in got) == 2)
    assert sorted(each.transport_sequence for each in received if isinstance(each, Message)) == [1, 2, 2]
    assert {each.token for each in received if isinstance(each, ResendEnd)} == {5, 6}


def test_flush_names_the_batch_that_holds_what_was_published(publish_at: PublishAt, subscribe: Subscribe) -> None:
    publisher = publish_at(flush_events=2, flush_interval_s=60)
    assert publisher.flush() == -1
    assert publisher.last_sequence == -1
    publisher.publish(stores(1, 2, 3))
    last = publisher.flush()
    assert last == publisher.last_sequence == 1
    assert publisher.flush() == 1
    assert blocks_of(resend(subscribe(), last)) == [3]


def test_age_flushes_without_anyone_asking(publish_at: PublishAt, subscribe: Subscribe) -> None:
    publisher = publish_at(flush_interval_s=0.02)
    publisher.publish(stores(1))
    wait_for(lambda: publisher.last_sequence == 0)
    assert blocks_of(resend(subscribe(), 0)) == [1]


@subscribers_acknowledge
def test_acknowledgement_reaches_the_publisher(publish_at: PublishAt, subscribe: Subscribe) -> None:
    publisher, subscriber = publish_at(flush_events=1), subscribe()
    publisher.publish(stores(1, 2, 3), flush=True)
    assert publisher.stat().acknowledged_sequence == -1
    resend(subscriber, 0)
    subscriber.acknowledge(PRODUCER, 3, 1)
    wait_for(lambda: publisher.stat().acknowledged_sequence == 1)
    subscriber.acknowledge(PRODUCER, 3, 2)
    wait_for(lambda: publisher.stat().acknowledged_sequence == 2)
    assert publisher.stat().acknowledging_subscribers == 1


@servers_acknowledge
def test_publisher_learns_what_the_server_has(publish_at: PublishAt, subscribe: Subscribe) -> None:
    publisher, subscriber = publish_at(flush_events=1), subscribe()
    publisher.publish(stores(1, 2, 3), flush=True)
    wait_for(lambda: publisher.stat().acknowledged_sequence == 2)
    subscriber.acknowledge(PRODUCER, 3, 1)
    assert publisher.stat().acknowledging_subscribers == 1


@subscribers_acknowledge
def test_acknowledgement_of_another_life_or_of_the_future_is_refused(
    publish_at: PublishAt, subscribe: Subscribe
) -> None:
    publisher, subscriber = publish_at(flush_events=1), subscribe()
    publisher.publish(stores(1))
    publisher.flush()
    resend(subscriber, 0)
    # Of another producer: refused, or heard by nobody where each has a subject of its own.
    for producer, epoch, sequence in ((PRODUCER + 1, 3, 0), (PRODUCER, 4, 0), (PRODUCER, 3, 1)):
        subscriber.acknowledge(producer, epoch, sequence)
    wait_for(lambda: publisher.stat().requests_refused >= 2)
    assert publisher.stat().acknowledged_sequence == -1


@subscribers_acknowledge
def test_full_window_waits_and_then_goes_on_without_the_straggler(publish_at: PublishAt, subscribe: Subscribe) -> None:
    publisher, subscriber = publish_at(flush_events=1, window_batches=2, window_wait_s=0.05), subscribe()
    publisher.publish(stores(1), flush=True)
    resend(subscriber, 0)
    subscriber.acknowledge(PRODUCER, 3, 0)
    wait_for(lambda: publisher.stat().acknowledging_subscribers == 1)
    for block in (2, 3, 4):
        publisher.publish(stores(block), flush=True)
    assert publisher.stat().window_timeouts == 0
    publisher.publish(stores(5), flush=True)
    publisher.publish(stores(6), flush=True)
    stat = publisher.stat()
    assert (stat.window_timeouts, stat.acknowledging_subscribers, stat.batches) == (1, 0, 6)


@subscribers_acknowledge
def test_what_waits_to_be_sent_counts_in_the_window(publish_at: PublishAt, subscribe: Subscribe) -> None:
    publisher, subscriber = publish_at(flush_events=1, window_batches=64, window_wait_s=PATIENCE_S), subscribe()
    publisher.publish(stores(1), flush=True)
    resend(subscriber, 0)
    subscriber.acknowledge(PRODUCER, 3, 0)
    wait_for(lambda: publisher.stat().acknowledging_subscribers == 1)
    calls = 0

    def publish() -> None:
        nonlocal calls
        for first in range(2, 2_002, 10):
            publisher.publish(stores(*range(first, first + 10)))
            calls += 1

    publishing = threading.Thread(target=publish)
    publishing.start()
    wait_for(lambda: publisher.last_sequence >= 64)
    publisher.flush()
    # The window, the call that filled it, and the one that was let in before it was full.
    assert publisher.last_sequence <= 64 + 2 * 10
    while publishing.is_alive():
        subscriber.acknowledge(PRODUCER, 3, publisher.last_sequence)
        publishing.join(0.01)
    publisher.flush()
    assert (calls, publisher.last_sequence, publisher.stat().window_timeouts) == (200, 2_000, 0)


def test_acknowledgement_opens_the_window_for_a_waiting_publisher(publish_at: PublishAt, subscribe: Subscribe) -> None:
    publisher, subscriber = publish_at(flush_events=1, window_batches=1, window_wait_s=PATIENCE_S), subscribe()
    publisher.publish(stores(1), flush=True)
    resend(subscriber, 0)
    subscriber.acknowledge(PRODUCER, 3, 0)
    wait_for(lambda: publisher.stat().acknowledging_subscribers == 1)
    publisher.publish(stores(2, 3), flush=True)
    waiting = threading.Thread(target=publisher.publish, args=(stores(4), True))
    waiting.start()
    subscriber.acknowledge(PRODUCER, 3, 2)
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    assert publisher.last_sequence == 3
    assert publisher.stat().window_timeouts == 0


def test_many_threads_publish_each_event_once_and_in_its_threads_order(
    publish_at: PublishAt, subscribe: Subscribe
) -> None:
    publisher = publish_at(flush_events=7)

    def publish(thread: int) -> None:
        for i in range(50):
            publisher.publish(stores(thread * 1000 + i), flush=i % 10 == 0)

    threads = [threading.Thread(target=publish, args=(thread,)) for thread in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    publisher.flush()
    blocks = blocks_of(resend(subscribe(), 0))
    assert sorted(blocks) == [thread * 1000 + i for thread in range(1, 5) for i in range(50)]
    for number in range(1, 5):
        own = [block for block in blocks if block // 1000 == number]
        assert own == sorted(own)
    assert publisher.stat().events == 200


def test_event_that_no_batch_can_carry_is_refused_whole_and_the_publisher_lives_on(
    publish_at: PublishAt, subscribe: Subscribe
) -> None:
    publisher = publish_at()
    bad = stores(1, 2)
    bad[1].depth = -1
    with pytest.raises(ValueError, match="depth is -1"):
        publisher.publish(bad)
    publisher.publish(stores(3), flush=True)
    assert blocks_of(resend(subscribe(), 0)) == [3]


def test_second_publisher_of_one_producer_is_one_clear_error(
    publish_at: PublishAt, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_at()
    for wait in ("_WHO_WAIT_S", "OPEN_WAIT_S"):  # for the first one's answer, over NATS
        monkeypatch.setattr(f"event_plane.nats_transport.{wait}", PATIENCE_S)
    with pytest.raises(TransportError, match=r"cannot publish on .* in use.*; .*choose another") as refused:
        open_publisher(*place, producer=PRODUCER)
    assert "\n" not in str(refused.value)


def test_place_is_free_again_after_close(publish_at: PublishAt, place: Place) -> None:
    publish_at().close()
    open_publisher(*place, producer=PRODUCER).close()


def test_close_sends_what_waits_and_ends_publishing(publish_at: PublishAt) -> None:
    publisher = publish_at()
    publisher.publish(stores(1))
    publisher.close()
    publisher.close()
    assert publisher.last_sequence == 0
    assert publisher.flush() == 0
    with pytest.raises(TransportError, match="was closed"):
        publisher.publish(stores(2))


def test_closed_subscriber_is_silent(publish_at: PublishAt, subscribe: Subscribe) -> None:
    publish_at().publish(stores(1), flush=True)
    subscriber = subscribe()
    subscriber.close()
    subscriber.close()
    subscriber.acknowledge(PRODUCER, 3, 0)
    assert subscriber.pollables() == []
    assert subscriber.receive(1) == []
    assert not subscriber.ask_resend(0, 1)


def test_receive_brings_no_more_than_asked_for(publish_at: PublishAt, subscribe: Subscribe) -> None:
    publish_at(flush_events=1).publish(stores(*range(1, 30)), flush=True)
    subscriber = subscribe()
    subscriber.ask_resend(0, 1)
    got: list[Received] = []

    def receive_some() -> bool:
        some = subscriber.receive(3)
        assert len(some) <= 3
        got.extend(some)
        return ResendEnd("engine", 1) in got

    wait_for(receive_some)
    assert len(got) == 30


def test_subscriber_waits_for_a_publisher_that_starts_later(publish_at: PublishAt, subscribe: Subscribe) -> None:
    subscriber = subscribe()
    subscriber.ask_resend(0, 1)
    publisher = publish_at(flush_events=1)
    received = receive_until(subscriber, lambda got: ResendEnd("engine", 1) in got)
    assert received == [ResendEnd("engine", 1)]
    attach_live(publisher, subscriber)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"flush_events": 0}, "0 events"),
        ({"flush_interval_s": 61}, "61000000 µs"),
        ({"buffer_batches": 0}, "0 batches"),
        ({"window_batches": 0}, "window of 0"),
        ({"epoch": 2**64}, "epoch"),
        ({"heartbeat_s": -1}, "heartbeat_s of -1"),
        ({"messages_per_s_max": 0}, "0 messages a second"),
    ],
)
def test_option_out_of_range_is_named_and_opens_nothing(place: Place, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        open_publisher(*place, producer=PRODUCER, **options)
    open_publisher(*place, producer=PRODUCER).close()


def test_implementations_keep_the_protocols(publish_at: PublishAt, subscribe: Subscribe) -> None:
    publisher: Publisher = publish_at()
    assert (publisher.producer, publisher.epoch) == (PRODUCER, 3)
    assert isinstance(subscribe(), Subscriber)
