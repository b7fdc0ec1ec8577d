"""When a batch is closed, and in which order its events travel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from event_plane.batching import Batcher, FlushRule, check_event, in_travel_order
from event_plane.schema import (
    DEPTH_UNKNOWN,
    EXTENSION_BYTES_MAX,
    LOCATION_ALL,
    RECORD_COUNT_MAX,
    EventRecord,
    EventType,
    Namespace,
)
from event_plane.wire import decode, encode

NAMESPACE = Namespace(model="llama")


def store(block: int, depth: int = 0, **fields: Any) -> EventRecord:
    return EventRecord(EventType.STORE, 1, block, NAMESPACE, "gpu:0", depth=depth, **fields)


def remove(block: int, depth: int = 0) -> EventRecord:
    return EventRecord(EventType.REMOVE, 1, block, NAMESPACE, "gpu:0", depth=depth)


def access(block: int, hits: int = 1, location: str = "gpu:0") -> EventRecord:
    return EventRecord(EventType.ACCESS, 1, block, NAMESPACE, location, hits=hits)


def batcher(events: int = 512, interval_us: int = 1_000_000) -> Batcher:
    return Batcher(FlushRule(events, interval_us), producer=7, epoch=8)


def blocks(events: list[EventRecord]) -> list[int]:
    return [event.sequence_hash for event in in_travel_order(events)]


def test_batch_closes_at_the_count() -> None:
    batches = batcher(events=3).add([store(i) for i in range(8)], now_us=0)
    assert [batch.records["sequence_hash_lo"].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5]]


def test_batch_closes_at_the_age_of_its_oldest_event() -> None:
    waiting = batcher(interval_us=100)
    assert waiting.add([store(1)], now_us=1000) == []
    assert waiting.add([store(2)], now_us=1060) == []
    assert waiting.due_us == 1100
    assert waiting.tick(1099) == []
    (batch,) = waiting.tick(1100)
    assert batch.records["sequence_hash_lo"].tolist() == [1, 2]
    assert batch.timestamp_us == 1100
    assert waiting.due_us is None


def test_zero_interval_closes_at_once() -> None:
    assert len(batcher(interval_us=0).add([store(1)], now_us=5)) == 1


def test_flush_closes_what_waits_and_nothing_else() -> None:
    waiting = batcher()
    assert waiting.flush(0) == []
    waiting.add([store(1)], now_us=0)
    assert len(waiting.flush(1)) == 1
    assert waiting.flush(2) == []


def test_batches_and_events_are_numbered_without_holes() -> None:
    waiting = batcher(events=2)
    batches = waiting.add([store(i) for i in range(5)], now_us=0) + waiting.flush(0)
    assert [(batch.producer, batch.epoch, batch.sequence) for batch in batches] == [(7, 8, 0), (7, 8, 1), (7, 8, 2)]
    assert [batch.first_event_sequence for batch in batches] == [0, 2, 4]
    assert [batch.records["event_sequence"].tolist() for batch in batches] == [[0, 1], [2, 3], [4]]
    assert waiting.next_sequence == 3


def test_creates_travel_in_ascending_depth_and_removes_in_descending() -> None:
    assert blocks([store(12, 2), store(10, 0), store(11, 1)]) == [10, 11, 12]
    assert blocks([remove(10, 0), remove(12, 2), remove(11, 1)]) == [12, 11, 10]


def test_store_never_passes_a_remove_of_its_block() -> None:
    assert blocks([store(5, 9), remove(5, 9), store(5, 9), store(4, 8)]) == [5, 5, 4, 5]


def test_equal_depths_keep_their_order() -> None:
    assert blocks([store(3, 1), store(1, 1), store(2, 1)]) == [3, 1, 2]
    assert blocks([remove(3, 1), remove(1, 1), remove(2, 1)]) == [3, 1, 2]


def test_run_with_an_unknown_depth_keeps_its_order() -> None:
    assert blocks([store(3, 5), store(1, DEPTH_UNKNOWN), store(2, 0)]) == [3, 1, 2]


def test_accesses_of_a_run_are_folded_at_the_last_one() -> None:
    run = [access(1), access(2, hits=0), access(1, hits=4), access(1, location="host")]
    folded = [(event.sequence_hash, event.location, event.hits) for event in in_travel_order(run)]
    assert folded == [(2, "gpu:0", 1), (1, "gpu:0", 5), (1, "host", 1)]


def test_accesses_are_not_folded_across_a_remove() -> None:
    assert blocks([access(1), remove(1), access(1)]) == [1, 1, 1]


def test_folded_hits_stay_within_their_field() -> None:
    (folded,) = in_travel_order([access(1, hits=2**32 - 1), access(1)])
    assert folded.hits == 2**32 - 1


def test_extensions_never_pass_their_limit() -> None:
    large = {"note": "x" * (EXTENSION_BYTES_MAX // 3)}
    waiting = batcher()
    batches = waiting.add([store(i, extra=large) for i in range(5)], now_us=0) + waiting.flush(0)
    assert [len(batch.records) for batch in batches] == [2, 2, 1]
    assert [decode(encode(batch)).sequence for batch in batches] == [0, 1, 2]


def test_location_tables_never_reach_the_index_that_means_all() -> None:
    waiting = batcher(events=RECORD_COUNT_MAX)
    many = [replace(store(i), location=str(i)) for i in range(RECORD_COUNT_MAX)]
    batches = waiting.add(many, now_us=0) + waiting.flush(0)
    assert [len(batch.locations) for batch in batches] == [LOCATION_ALL, RECORD_COUNT_MAX - LOCATION_ALL]


def test_largest_batch_is_encodable() -> None:
    (batch,) = batcher(events=RECORD_COUNT_MAX).add([store(i) for i in range(RECORD_COUNT_MAX)], now_us=0)
    assert len(decode(encode(batch)).records) == RECORD_COUNT_MAX


@pytest.mark.parametrize(
    ("events", "interval_us", "said"),
    [
        (0, 1, "0 events"),
        (RECORD_COUNT_MAX + 1, 1, f"{RECORD_COUNT_MAX + 1} events"),
        (1, -1, "-1 µs"),
        (1, 60_000_001, "60000001 µs"),
    ],
)
def test_rule_out_of_range_is_named(events: int, interval_us: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        FlushRule(events, interval_us)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sequence_hash", 2**128), ("parent_hash", -1), ("depth", 2**32), ("tier", 256), ("group", 256),
        ("block_size", 2**32), ("block_tokens", 65_536), ("hits", 2**32), ("timestamp_us", 2**64),
        ("extra", {"x": object()}), ("extra", {"x": b"-" * EXTENSION_BYTES_MAX}),
    ],
)  # fmt: skip
def test_event_that_no_record_can_carry_is_named(field: str, value: object) -> None:
    event = store(1)
    setattr(event, field, value)
    with pytest.raises(ValueError, match=f"event field {field}"):
        check_event(event)
