"""Whatever is published, batches carry all of it, within limits, and never turn a block's history around."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from event_plane.batching import Batcher, FlushRule
from event_plane.schema import EventRecord, EventType, Namespace
from event_plane.wire import decode, encode
from tests.examples import examples

NAMESPACE = Namespace()
EVENTS = st.builds(
    lambda event_type, block, depth: EventRecord(event_type, 1, block, NAMESPACE, "gpu:0", depth=depth, hits=1),
    st.sampled_from([EventType.STORE, EventType.REMOVE, EventType.ACCESS]),
    st.integers(1, 6),
    st.integers(0, 4) | st.just(0xFFFF_FFFF),
)
STEPS = st.lists(st.tuples(st.lists(EVENTS, max_size=12), st.integers(0, 50)), max_size=12)


@settings(max_examples=examples(150), deadline=None)
@given(STEPS, st.integers(1, 10), st.integers(0, 100))
def test_batches_carry_each_blocks_history_in_order(
    steps: list[tuple[list[EventRecord], int]], events: int, interval_us: int
) -> None:
    batcher = Batcher(FlushRule(events, interval_us), producer=1, epoch=2)
    now_us, batches = 0, []
    for published, passed_us in steps:
        now_us += passed_us
        batches += batcher.tick(now_us) + batcher.add(published, now_us)
        assert batcher.due_us is None or batcher.due_us > now_us
    batches += batcher.flush(now_us)

    decoded = [decode(encode(batch)) for batch in batches]
    assert [batch.sequence for batch in decoded] == list(range(len(decoded)))
    assert all(1 <= len(batch.records) <= events for batch in decoded)
    numbers = [int(number) for batch in decoded for number in batch.records["event_sequence"]]
    assert numbers == list(range(len(numbers)))

    sent = [record for batch in decoded for record in batch.records]
    received = [event for published, _ in steps for event in published]
    for block in range(1, 7):
        changes = [int(record["event_type"]) for record in sent
                   if record["sequence_hash_lo"] == block and record["event_type"] != EventType.ACCESS]  # fmt: skip
        assert changes == [event.event_type for event in received
                           if event.sequence_hash == block and event.event_type != EventType.ACCESS]  # fmt: skip
        hits = sum(int(record["hits"]) for record in sent
                   if record["sequence_hash_lo"] == block and record["event_type"] == EventType.ACCESS)  # fmt: skip
        assert hits == sum(event.sequence_hash == block and event.event_type == EventType.ACCESS for event in received)
