"""What travels beside ordinary batches, on every transport: columns, snapshots, losses and heartbeats."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from event_plane.batching import SNAPSHOT_CHUNK_RECORDS_MAX
from event_plane.errors import TransportError
from event_plane.publishing import BatchPublisher
from event_plane.schema import RECORD_DTYPE, Batch, BatchKind, EventRecord, EventType, Namespace, Records
from event_plane.transport import Message, Received, Subscriber
from tests.contract.transports import (
    PATIENCE_S,
    PRODUCER,
    WITHOUT_A_SERVER,
    PublishAt,
    Subscribe,
    attach_live,
    batches_of,
    blocks_of,
    receive_until,
    resend,
    stores,
    wait_for,
)

TABLES = ([Namespace(model="m")], ["gpu:0"])


def columns(*blocks: int) -> Records:
    records = np.zeros(len(blocks), RECORD_DTYPE)
    records["event_type"] = EventType.STORE
    records["tier"] = 1
    records["sequence_hash_lo"] = blocks
    return records


def kinds(batches: list[Batch]) -> list[BatchKind]:
    return [batch.kind for batch in batches]


def until_kind(subscriber: Subscriber, kind: BatchKind) -> list[Batch]:
    """What comes up to the first batch of `kind`."""

    def done(received: list[Received]) -> bool:
        return any(batch.kind is kind for batch in batches_of(received))

    return batches_of(receive_until(subscriber, done))


# Columns


def test_columns_travel_in_batches_of_their_own_in_the_order_of_the_calls(
    publish_at: PublishAt, subscribe: Subscribe
) -> None:
    publisher = publish_at(flush_events=4)
    publisher.publish(stores(1, 2))
    publisher.publish_records(columns(3, 4, 5, 6, 7, 8), *TABLES)
    publisher.publish(stores(9))
    publisher.publish_records(columns(10), *TABLES, flush=True)
    batches = resend(subscribe(), 0)
    assert [blocks_of([batch]) for batch in batches] == [[1, 2], [3, 4, 5, 6], [7, 8], [9], [10]]
    numbers = [int(number) for batch in batches for number in batch.records["event_sequence"]]
    assert numbers == list(range(10))
    assert {(batch.namespaces, batch.locations) for batch in batches} == {((Namespace(model="m"),), ("gpu:0",))}
    assert publisher.stat().events == 10


def test_columns_are_the_callers_again_after_the_call(publish_at: PublishAt, subscribe: Subscribe) -> None:
    publisher = publish_at(flush_interval_s=60)
    records = columns(1, 2)
    publisher.publish_records(records, *TABLES)
    records["sequence_hash_lo"] = 99
    publisher.flush()
    assert blocks_of(resend(subscribe(), 0)) == [1, 2]
    assert records["event_sequence"].tolist() == [0, 0]


def test_columns_may_be_a_stride_of_a_read_only_array(publish_at: PublishAt, subscribe: Subscribe) -> None:
    publisher = publish_at()
    records = columns(1, 2, 3, 4, 5)
    records.flags.writeable = False
    publisher.publish_records(records[::2], *TABLES, flush=True)
    assert blocks_of(resend(subscribe(), 0)) == [1, 3, 5]


def test_columns_that_no_batch_can_carry_are_refused_whole(publish_at: PublishAt, subscribe: Subscribe) -> None:
    publisher = publish_at()
    wrong = columns(1, 2)
    wrong["storage_location"][1] = 1
    with pytest.raises(ValueError, match="storage_location 1: its table has 1 entries"):
        publisher.publish_records(wrong, *TABLES)
    publisher.publish_records(columns(3), *TABLES, flush=True)
    assert blocks_of(resend(subscribe(), 0)) == [3]


# Snapshots


def test_snapshot_stands_between_the_batches_before_and_after_it(publish_at: PublishAt, subscribe: Subscribe) -> None:
    publisher = publish_at(flush_events=2)
    publisher.publish(stores(1, 2, 3))
    publisher.publish_snapshot(stores(2, 3))
    publisher.publish(stores(4), flush=True)
    batches = resend(subscribe(), 0)
    assert [batch.sequence for batch in batches] == list(range(6))
    events, begin, chunk, end = (
        BatchKind.EVENTS, BatchKind.SNAPSHOT_BEGIN, BatchKind.SNAPSHOT_CHUNK, BatchKind.SNAPSHOT_END,
    )  # fmt: skip
    assert kinds(batches) == [events, events, begin, chunk, end, events]
    assert [blocks_of([batch]) for batch in batches] == [[1, 2], [3], [], [2, 3], [], [4]]
    assert [batch.snapshot.as_of for batch in batches if batch.snapshot] == [1, 1, 1]
    assert publisher.stat().snapshots == 1


def test_long_snapshot_is_cut_into_chunks(publish_at: PublishAt, subscribe: Subscribe) -> None:
    publisher = publish_at()
    count = SNAPSHOT_CHUNK_RECORDS_MAX * 2 + 1
    publisher.publish_snapshot(stores(*range(count)))
    publisher.flush()
    batches = resend(subscribe(), 0)
    assert [len(batch.records) for batch in batches] == [0, 4096, 4096, 1, 0]
    assert blocks_of(batches) == list(range(count))
    assert [batch.snapshot.as_of for batch in batches if batch.snapshot] == [0] * 5


def test_snapshot_is_stores_alone(publish_at: PublishAt) -> None:
    with pytest.raises(ValueError, match="a snapshot is Stores alone"):
        publish_at().publish_snapshot([EventRecord(EventType.REMOVE, 1, 5, Namespace(), "gpu:0")])


def test_snapshot_that_is_asked_for_comes_in_the_stream(publish_at: PublishAt, subscribe: Subscribe) -> None:
    publisher, subscriber = publish_at(flush_events=1), subscribe()
    publisher.serve_snapshots(lambda: publisher.publish_snapshot(stores(8, 9)))
    attach_live(publisher, subscriber)
    assert subscriber.ask_snapshot(PRODUCER, 3)
    batches = until_kind(subscriber, BatchKind.SNAPSHOT_END)
    assert blocks_of(batches[-2:]) == [8, 9]
    assert publisher.stat().snapshot_asks == 1


def test_asks_during_a_snapshot_are_answered_by_one_more(publish_at: PublishAt, subscribe: Subscribe) -> None:
    publisher, subscriber = publish_at(snapshot_interval_s=0.0), subscribe()
    calls, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def announce() -> None:
        calls.release()
        assert go_on.acquire(timeout=PATIENCE_S)
        publisher.publish_snapshot(stores(1))

    publisher.serve_snapshots(announce)
    attach_live(publisher, subscriber)
    subscriber.ask_snapshot(PRODUCER, 3)
    assert calls.acquire(timeout=PATIENCE_S)
    for _ in range(5):
        subscriber.ask_snapshot(PRODUCER, 3)
    wait_for(lambda: publisher.stat().snapshot_asks == 6)
    go_on.release(6)
    assert calls.acquire(timeout=PATIENCE_S)
    wait_for(lambda: publisher.stat().snapshots == 2)
    assert not calls.acquire(blocking=False)


def test_ask_for_a_snapshot_that_nobody_can_give_is_refused(publish_at: PublishAt, subscribe: Subscribe) -> None:
    publisher, subscriber = publish_at(), subscribe()
    attach_live(publisher, subscriber)
    subscriber.ask_snapshot(PRODUCER, 3)
    wait_for(lambda: publisher.stat().requests_refused == 1)
    publisher.serve_snapshots(lambda: publisher.publish_snapshot([]))
    subscriber.ask_snapshot(PRODUCER, 4)
    wait_for(lambda: publisher.stat().requests_refused == 2)
    assert publisher.stat().snapshot_asks == 0


def test_publisher_closed_during_a_snapshot_ends_it(publish_at: PublishAt, subscribe: Subscribe) -> None:
    publisher, subscriber = publish_at(), subscribe()
    began, closed, said = threading.Event(), threading.Event(), []

    def announce() -> None:
        began.set()
        assert closed.wait(PATIENCE_S)
        try:
            publisher.publish_snapshot(stores(1))
        except TransportError as error:
            said.append(str(error))
            raise

    publisher.serve_snapshots(announce)
    attach_live(publisher, subscriber)
    subscriber.ask_snapshot(PRODUCER, 3)
    assert began.wait(PATIENCE_S)
    closing = threading.Thread(target=publisher.close)
    closing.start()
    wait_for(lambda: _is_closed(publisher))
    closed.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert "was closed" in said[0]


def _is_closed(publisher: BatchPublisher) -> bool:
    try:
        publisher.publish([])
    except TransportError:
        return True
    return False


def test_closed_publisher_serves_no_snapshots(publish_at: PublishAt) -> None:
    publisher = publish_at()
    publisher.close()
    with pytest.raises(TransportError, match="was closed"):
        publisher.serve_snapshots(lambda: None)


# Losses


def test_loss_is_told_in_the_stream_under_a_number_of_its_own(publish_at: PublishAt, subscribe: Subscribe) -> None:
    publisher = publish_at()
    publisher.publish(stores(1))
    publisher.publish_lost("the engine's queue overflowed")
    publisher.publish(stores(2), flush=True)
    batches = resend(subscribe(), 0)
    assert kinds(batches) == [BatchKind.EVENTS, BatchKind.LOST, BatchKind.EVENTS]
    assert [batch.sequence for batch in batches] == [0, 1, 2]
    assert batches[1].snapshot is not None
    assert batches[1].snapshot.through == 1
    assert batches[1].extra == ({"reason": "the engine's queue overflowed"},)


# Heartbeats


@pytest.mark.parametrize("place", [*WITHOUT_A_SERVER, "nats"], indirect=True)
def test_silence_brings_heartbeats_that_name_the_last_sequence(publish_at: PublishAt, subscribe: Subscribe) -> None:
    publisher, subscriber = publish_at(heartbeat_s=0.02), subscribe()
    attach_live(publisher, subscriber)
    publisher.publish(stores(1), flush=True)
    last = publisher.last_sequence
    received = receive_until(
        subscriber,
        lambda got: sum(b.kind is BatchKind.HEARTBEAT and b.sequence == last for b in batches_of(got)) >= 2,
    )
    heartbeats = [batch for batch in batches_of(received) if batch.kind is BatchKind.HEARTBEAT]
    assert {(batch.producer, batch.epoch, len(batch.records)) for batch in heartbeats} == {(PRODUCER, 3, 0)}
    assert publisher.last_sequence == last
    # None is kept to be sent again; live ones may come between what is.
    assert publisher.stat().buffered_batches == last + 1
    assert kinds(resend(subscriber, 0)).count(BatchKind.EVENTS) == last + 1
    assert isinstance(received[0], Message)


@pytest.mark.parametrize("place", ["jetstream"], indirect=True)
def test_stream_that_is_kept_loses_no_tail_and_holds_no_heartbeats(publish_at: PublishAt, subscribe: Subscribe) -> None:
    publisher, subscriber = publish_at(heartbeat_s=0.01), subscribe()
    publisher.publish(stores(1), flush=True)
    wait_for(lambda: publisher.stat().heartbeats > 3)
    publisher.publish(stores(2), flush=True)
    live = batches_of(receive_until(subscriber, lambda got: len(batches_of(got)) >= 2))
    assert kinds(live) == kinds(resend(subscriber, 0)) == [BatchKind.EVENTS, BatchKind.EVENTS]


def test_no_heartbeat_before_the_first_batch(publish_at: PublishAt, subscribe: Subscribe) -> None:
    publisher = publish_at(heartbeat_s=0.01)
    resend(subscribe(), 0)  # the publisher has been round several times
    assert publisher.stat().heartbeats == 0
    publisher.publish(stores(1), flush=True)
    wait_for(lambda: publisher.stat().heartbeats > 0)


def test_heartbeats_can_be_left_out(publish_at: PublishAt) -> None:
    publisher = publish_at(heartbeat_s=0)
    publisher.publish(stores(1), flush=True)
    assert publisher.stat().heartbeats == 0
