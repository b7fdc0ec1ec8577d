"""The adaptive rule's two bounds in simulated time: how long an event waits, and how many messages leave."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from event_plane.batching import ADAPTIVE_EVENTS, Batcher, Columns, FlushRule, adaptive_rule
from event_plane.schema import RECORD_COUNT_MAX, RECORD_DTYPE, Batch, EventRecord, EventType, Namespace
from event_plane.wire import encode
from tests.examples import examples

NAMESPACE = Namespace()
LOAD = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 7, 900, 10_000, 400_000]) | st.integers(0, 2_000_000),
        st.sampled_from([1, 3, ADAPTIVE_EVENTS - 1, ADAPTIVE_EVENTS, 5_000, 70_000]) | st.integers(1, 200_000),
    ),
    min_size=1,
    max_size=25,
)
"""Microseconds that pass, then so many events at once."""
RULES = st.tuples(st.integers(1, 2_000), st.sampled_from([0, 500, 20_000, 1_000_000]) | st.integers(0, 3_000_000))
"""Messages a second, interval in µs."""


def columns(count: int) -> Columns:
    records = np.zeros(count, RECORD_DTYPE)
    records["event_type"] = EventType.STORE
    return Columns(records, (NAMESPACE,), ("gpu:0",))


def advance(batcher: Batcher, now_us: int, until_us: int) -> list[Batch]:
    """As the publishing thread does: wake when something is due, not before."""
    batches: list[Batch] = []
    while (due_us := batcher.due_us) is not None and due_us <= until_us:
        now_us = max(now_us, due_us)
        batches += batcher.tick(now_us)
    return batches


@settings(max_examples=examples(60), deadline=None)
@given(LOAD, RULES)
def test_events_wait_no_longer_than_the_interval_and_messages_keep_the_pace(
    load: list[tuple[int, int]], limits: tuple[int, int]
) -> None:
    messages_per_s_max, interval_us = limits
    rule = adaptive_rule(interval_us, messages_per_s_max)
    batcher = Batcher(rule, producer=1, epoch=1)
    now_us = 0
    arrived: list[tuple[int, int]] = []
    batches: list[Batch] = []
    for passed_us, count in load:
        batches += advance(batcher, now_us, now_us + passed_us)
        now_us += passed_us
        arrived.append((now_us, count))
        batches += batcher.add_columns(columns(count), now_us)
    batches += advance(batcher, now_us, now_us + interval_us)
    assert batcher.due_us is None

    closed_us = np.repeat([batch.timestamp_us for batch in batches], [len(batch.records) for batch in batches])
    came_us = np.repeat([at_us for at_us, _ in arrived], [count for _, count in arrived])
    assert len(closed_us) == len(came_us)
    assert (closed_us - came_us).max() <= interval_us

    # Over any stretch that begins with a message: at most one a pace, but for full ones.
    full = sum(len(batch.records) == RECORD_COUNT_MAX for batch in batches)
    span_us = batches[-1].timestamp_us - batches[0].timestamp_us
    pace_us = min(rule.pace_us, interval_us)
    assert not pace_us or len(batches) <= span_us / pace_us + full + 1


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 6), st.integers(1, 200))
def test_steady_load_of_any_rate_keeps_both_bounds(magnitude: int, messages_per_s_max: int) -> None:
    """From 1 to 1 M events/s for two simulated seconds, handed over each millisecond or as they come."""
    events_per_s = 10**magnitude
    step_us = max(1_000_000 // events_per_s, 1_000)
    rule = adaptive_rule(1_000_000, messages_per_s_max)
    batcher = Batcher(rule, producer=1, epoch=1)
    batches: list[Batch] = []
    for now_us in range(0, 2_000_000, step_us):
        batches += batcher.tick(now_us)
        batches += batcher.add_columns(columns(max(events_per_s * step_us // 1_000_000, 1)), now_us)
    full = sum(len(batch.records) == RECORD_COUNT_MAX for batch in batches)
    assert len(batches) <= 2 * messages_per_s_max + full + 1
    waited_us = [batch.timestamp_us - batches[i - 1].timestamp_us for i, batch in enumerate(batches) if i]
    assert max(waited_us, default=0) <= 1_000_000 + step_us


@settings(max_examples=examples(60), deadline=None)
@given(LOAD, st.integers(1, 700), st.booleans())
def test_columns_are_cut_as_events_are(load: list[tuple[int, int]], events: int, paced: bool) -> None:
    """The same rule, whichever way the events are handed over; times and sizes of batches agree."""
    rule = FlushRule(events, 50_000, 10_000 if paced else 0)
    by_event, by_column = Batcher(rule, producer=1, epoch=1), Batcher(rule, producer=1, epoch=1)
    one = EventRecord(EventType.STORE, 1, 0, NAMESPACE, "gpu:0")
    now_us = 0
    cuts: list[list[tuple[int, int]]] = [[], []]
    for passed_us, count in load[:8]:
        count = min(count, 1_500)
        for batcher, cut in zip((by_event, by_column), cuts, strict=True):
            made = advance(batcher, now_us, now_us + passed_us)
            at_us = now_us + passed_us
            made += (
                batcher.add([one] * count, at_us) if batcher is by_event else batcher.add_columns(columns(count), at_us)
            )
            cut += [(batch.timestamp_us, len(batch.records)) for batch in made]
        now_us += passed_us
    assert cuts[0] == cuts[1]
    assert by_event.due_us == by_column.due_us


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.sampled_from(["events", "columns", "other columns", "snapshot", "lost"]), max_size=12),
    st.integers(700, 3_000),
)
def test_whatever_is_handed_over_leaves_once_in_order_within_the_payload(
    calls: list[str], payload_bytes_max: int
) -> None:
    batcher = Batcher(FlushRule(20, 1_000), producer=1, epoch=1, payload_bytes_max=payload_bytes_max)
    batches: list[Batch] = []
    expected: list[int] = []
    for call, kind in enumerate(calls):
        blocks = list(range(call * 10, call * 10 + 10))
        events = [EventRecord(EventType.STORE, 1, block, NAMESPACE, "gpu:0") for block in blocks]
        match kind:
            case "events":
                batches += batcher.add(events, 0)
            case "snapshot":
                batches += batcher.snapshot(events, 0)
            case "lost":
                batches += batcher.lost("queue full", 0)
            case _:
                handed = columns(10)
                handed.records["sequence_hash_lo"] = blocks
                tables = (NAMESPACE,), ("gpu:0" if kind == "columns" else "gpu:1",)
                batches += batcher.add_columns(Columns(handed.records, *tables), 0)
        expected += [] if kind == "lost" else blocks
    batches += batcher.flush(0)
    assert [batch.sequence for batch in batches] == list(range(len(batches)))
    assert [int(block) for batch in batches for block in batch.records["sequence_hash_lo"]] == expected
    assert all(len(encode(batch)) <= payload_bytes_max for batch in batches)
    numbers = [int(number) for batch in batches for number in batch.records["event_sequence"]]
    assert numbers == list(range(len(expected)))
