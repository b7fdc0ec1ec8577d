"""A producer's snapshot in the fold: replaced at its end in one step, or not at all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.entries import EntryKind, LogEntry, VolumeEntry, control_entry
from advisor.fold import Fold
from advisor.index import INDEX_FULL, ArrayIndex, BlockRow, IndexSize, Key
from advisor.snapshots import absent
from event_plane import wire
from event_plane.schema import (
    Batch,
    BatchKind,
    BatchTables,
    EventRecord,
    EventType,
    Namespace,
    SnapshotRange,
    to_records,
)
from tests.examples import examples

NAMESPACE = Namespace(tenant="acme")
PRODUCER = 77


def store(block: int, location: str = "gpu", tier: int = 1) -> EventRecord:
    return EventRecord(
        EventType.STORE, tier, block, NAMESPACE, location, block - 1, depth=block - 1, block_size=64, block_tokens=16
    )


class Folded:
    """A fold and the log it was given, entry by entry."""

    def __init__(self, size: IndexSize | None = None) -> None:
        self.fold = Fold(ArrayIndex(size or IndexSize.for_blocks(256, 1024)))
        self.log: list[LogEntry] = []

    def send(
        self, sequence: int, kind: BatchKind = BatchKind.EVENTS, events: list[EventRecord] | None = None, epoch: int = 1
    ) -> None:
        tables = BatchTables()
        records = to_records(events or [], tables, 0)
        lost = SnapshotRange(through=sequence) if kind is BatchKind.LOST else None
        batch = Batch(
            PRODUCER, epoch, sequence, records, kind, namespaces=tuple(tables.namespaces),
            locations=tuple(tables.locations), snapshot=lost,
        )  # fmt: skip
        self.apply(LogEntry(len(self.log) + 1, EntryKind.BATCH, wire.encode(batch), source="core"))

    def apply(self, entry: LogEntry) -> None:
        self.log.append(entry)
        self.fold.apply(entry)

    def snapshot(self, first: int, events: list[EventRecord], epoch: int = 1) -> None:
        self.send(first, BatchKind.SNAPSHOT_BEGIN, epoch=epoch)
        for i, event in enumerate(events):
            self.send(first + 1 + i, BatchKind.SNAPSHOT_CHUNK, [event], epoch)
        self.send(first + 1 + len(events), BatchKind.SNAPSHOT_END, epoch=epoch)

    def placed(self) -> set[tuple[int, str]]:
        index = self.fold.index
        index.check()
        return {
            (block.key.sequence_hash, index.places[each.place].location)
            for block in index.page(limit=1_000)[0]
            for each in block.placements
        }

    def block(self, sequence_hash: int) -> BlockRow:
        block = self.fold.index.get(Key(NAMESPACE.namespace_id, 0, sequence_hash))
        assert block is not None
        return block


def test_placements_are_replaced_at_the_end_and_not_before() -> None:
    folded = Folded()
    folded.send(0, events=[store(1), store(2), store(3)])
    before = folded.placed()
    folded.send(1, BatchKind.SNAPSHOT_BEGIN)
    folded.send(2, BatchKind.SNAPSHOT_CHUNK, [store(2), store(9)])
    assert folded.placed() == before
    folded.send(3, BatchKind.SNAPSHOT_END)
    assert folded.placed() == {(2, "gpu"), (9, "gpu")}
    state = folded.fold.producers[PRODUCER]
    assert (state.snapshots, state.sequence, state.events, state.partial) == (1, 3, 5, False)


def test_block_that_stays_or_moves_keeps_its_history_and_no_store_is_a_use() -> None:
    folded = Folded()
    folded.send(0, events=[store(1), store(1), store(2), store(2), store(2)])
    assert folded.block(2).touches == 3
    folded.snapshot(1, [store(1), store(2, "host", 2), store(3)])
    assert folded.placed() == {(1, "gpu"), (2, "host"), (3, "gpu")}
    assert [folded.block(n).touches for n in (1, 2, 3)] == [2, 3, 0]
    assert folded.fold.recomputed == 5


def test_empty_snapshot_clears_the_producer() -> None:
    folded = Folded()
    folded.send(0, events=[store(1)])
    folded.snapshot(1, [])
    assert folded.placed() == set()


def test_other_producers_keep_what_they_placed() -> None:
    folded = Folded()
    tables = BatchTables()
    records = to_records([store(1), store(5)], tables, 0)
    other = Batch(
        8, 1, 0, records, namespaces=tuple(tables.namespaces), locations=tuple(tables.locations)
    )
    folded.apply(LogEntry(1, EntryKind.BATCH, wire.encode(other), source="other"))
    folded.send(0, events=[store(1), store(2)])
    folded.snapshot(1, [store(2)])
    assert folded.placed() == {(1, "gpu"), (2, "gpu"), (5, "gpu")}
    assert len(folded.block(1).placements) == 1


def test_new_epoch_that_begins_with_its_snapshot_changes_placements_in_one_step() -> None:
    folded = Folded()
    folded.send(0, events=[store(1), store(2)])
    folded.send(0, BatchKind.SNAPSHOT_BEGIN, epoch=2)
    folded.send(1, BatchKind.SNAPSHOT_CHUNK, [store(2), store(3)], epoch=2)
    assert folded.placed() == {(1, "gpu"), (2, "gpu")}
    folded.send(2, BatchKind.SNAPSHOT_END, epoch=2)
    assert folded.placed() == {(2, "gpu"), (3, "gpu")}
    assert folded.fold.producers[PRODUCER].epochs_closed == 1


def test_snapshot_begun_again_counts_from_its_second_beginning() -> None:
    folded = Folded()
    folded.send(0, BatchKind.SNAPSHOT_BEGIN)
    folded.send(1, BatchKind.SNAPSHOT_CHUNK, [store(1)])
    folded.snapshot(2, [store(2)])
    assert folded.placed() == {(2, "gpu")}


@pytest.mark.parametrize("instead", ["events", "lost", "epoch"])
def test_snapshot_without_an_end_is_discarded(instead: str) -> None:
    folded = Folded()
    folded.send(0, events=[store(1)])
    folded.send(1, BatchKind.SNAPSHOT_BEGIN)
    folded.send(2, BatchKind.SNAPSHOT_CHUNK, [store(2)])
    match instead:
        case "events":
            folded.send(3, events=[store(4)])
        case "lost":
            folded.send(3, BatchKind.LOST)
        case "epoch":
            folded.send(3, events=[store(4)], epoch=2)
    folded.send(4, BatchKind.SNAPSHOT_CHUNK, [store(5)], epoch=1 if instead != "epoch" else 2)
    folded.send(5, BatchKind.SNAPSHOT_END, epoch=1 if instead != "epoch" else 2)
    assert folded.placed() == (set() if instead == "lost" else {(4, "gpu")})
    assert folded.fold.producers[PRODUCER].partial == (instead != "epoch")
    assert folded.fold.skipped == {"snapshot chunk without a beginning": 1, "snapshot end without a beginning": 1}


def test_snapshot_ends_what_was_partial_and_one_after_a_hole_is_partial_until_then() -> None:
    folded = Folded()
    folded.send(0, events=[store(1)])
    folded.send(5, BatchKind.SNAPSHOT_BEGIN)
    state = folded.fold.producers[PRODUCER]
    assert (state.partial, state.note[:30]) == (True, "4 batches before its snapshot ")
    folded.send(6, BatchKind.SNAPSHOT_END)
    assert (state.partial, state.note) == (False, "")
    folded.send(7, BatchKind.LOST)
    assert state.partial
    folded.snapshot(8, [store(1)])
    assert not state.partial


def test_records_that_make_no_sense_are_counted_and_the_rest_is_taken() -> None:
    folded = Folded()
    folded.send(0, BatchKind.SNAPSHOT_BEGIN)
    remove = EventRecord(EventType.REMOVE, 1, 3, NAMESPACE, "gpu")
    folded.send(1, BatchKind.SNAPSHOT_CHUNK, [store(1), remove, store(2, tier=9), store(4)])
    folded.send(2, BatchKind.SNAPSHOT_END)
    assert folded.placed() == {(1, "gpu"), (4, "gpu")}
    assert folded.fold.skipped == {"no Store in a snapshot": 1, "no tier": 1}


def test_full_index_makes_room_before_it_skips_what_a_snapshot_names() -> None:
    folded = Folded(IndexSize.for_blocks(16, 16))
    folded.send(0, events=[store(n, tier=3) for n in range(1, 12)])
    folded.snapshot(1, [store(n, tier=3) for n in range(101, 107)])
    assert len(folded.placed()) == 6
    assert folded.fold.skipped[INDEX_FULL] == 0


def test_snapshot_larger_than_the_index_is_given_up_and_says_so() -> None:
    folded = Folded(IndexSize.for_blocks(16, 16))
    folded.send(0, BatchKind.SNAPSHOT_BEGIN)
    folded.send(1, BatchKind.SNAPSHOT_CHUNK, [store(n) for n in range(1, 60)])
    folded.send(2, BatchKind.SNAPSHOT_END)
    assert folded.placed() == set()
    assert folded.fold.skipped["snapshot larger than the index"] == 1
    assert "raise its memory limit" in folded.fold.producers[PRODUCER].note


def test_volume_keeps_its_order_of_eviction_through_its_owners_snapshot() -> None:
    folded = Folded()
    descriptor = {
        "id": "nvme", "tier": 3, "speed_rank": 1, "capacity_blocks": 100, "high_watermark": 0.9, "low_watermark": 0.8,
    }  # fmt: skip
    new = control_entry(VolumeEntry(descriptor, "agent", PRODUCER))
    folded.apply(LogEntry(1, new.kind, new.payload))
    folded.send(0, events=[store(n, "nvme", 3) for n in (4, 2, 9, 7)])
    folded.snapshot(1, [store(n, "nvme", 3) for n in (7, 9, 4)])
    index = folded.fold.index
    place = folded.fold.volumes["nvme"].place
    assert [index.block(row).key.sequence_hash for row in index.coldest(place, 10)] == [4, 9, 7]
    assert index.is_volume(place)


def test_folding_again_gives_the_same_digest_in_the_middle_and_at_the_end() -> None:
    folded = Folded()
    folded.send(0, events=[store(1), store(2)])
    folded.send(1, BatchKind.SNAPSHOT_BEGIN)
    without_chunk = folded.fold.digest()
    folded.send(2, BatchKind.SNAPSHOT_CHUNK, [store(2)])
    assert folded.fold.digest() != without_chunk
    for _ in range(2):
        again = Folded()
        for entry in folded.log:
            again.apply(entry)
        assert again.fold.digest() == folded.fold.digest()
        folded.send(3, BatchKind.SNAPSHOT_END)


_KEYS = st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(1, 4), st.integers(0, 1))


@given(st.lists(_KEYS, unique=True), st.lists(_KEYS))
@settings(max_examples=examples(200), deadline=None)
def test_absent_keys_are_those_of_a_set_difference(
    keys: list[tuple[int, int, int, int]], among: list[tuple[int, int, int, int]]
) -> None:
    def columns(rows: list[tuple[int, int, int, int]]) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        made = np.zeros(len(rows), ArrayIndex.KEY_DTYPE)
        names = ("namespace_id", "group", "sequence_hash_lo", "sequence_hash_hi")
        for i, row in enumerate(rows):
            for name, value in zip(names, row, strict=True):
                made[name][i] = value
        return made

    found = absent(columns(keys), columns(among))
    assert found.tolist() == [key not in set(among) for key in keys]
