"""What the array index answers, keeps apart, refuses and survives; the state machine covers the rest."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from advisor.index.array_index import INDEX_FULL, PLACES_SPENT, ArrayIndex
from advisor.index.errors import IndexFault, IndexFull
from advisor.index.jit import INTERPRETED
from advisor.index.keys import Key, PlaceKey
from advisor.index.layout import BITS, FRONTIER, PLACES_MAX, REALMS_MAX, IndexSize
from advisor.index.views import Figures
from event_plane.schema import DEPTH_UNKNOWN, RECORD_DTYPE, EventType, RecordFlag, Records

NAMESPACE = 7
PLACE = PlaceKey(1, 3, "disk")
SMALL = IndexSize.for_blocks(1000)


def chain(first: int, count: int, kind: EventType = EventType.STORE, tier: int = 3, flags: int = 0) -> Records:
    """Records of blocks `first` … `first + count - 1`, each the parent of the next."""
    records = np.zeros(count, RECORD_DTYPE)
    hashes = np.arange(first, first + count, dtype=np.uint64)
    records["event_type"], records["tier"], records["flags"] = kind, tier, flags
    records["sequence_hash_lo"] = hashes
    records["parent_hash_lo"][1:] = hashes[:-1]
    records["depth"] = np.arange(count)
    records["block_size"] = 100
    return records


def put(index: ArrayIndex, *records: Records, producer: int = 1, now_us: int = 1_000_000) -> None:
    for each in records:
        applied = index.apply(
            each, producer=producer, namespace_ids=(NAMESPACE,), locations=("disk",), now_us=now_us
        )
        assert not applied.skipped


def key(number: int) -> Key:
    return Key(NAMESPACE, 0, number)


def numbers(index: ArrayIndex, rows: list[int]) -> list[int]:
    return [index.block(row).key.sequence_hash for row in rows]


def test_a_namespace_that_was_named_before_it_had_a_block_is_known_once_it_has() -> None:
    index = ArrayIndex(SMALL)
    for namespaces, records in (((NAMESPACE,), chain(1, 3, EventType.REMOVE)), ((NAMESPACE, 8), chain(1, 3))):
        index.apply(records, producer=1, namespace_ids=namespaces, locations=("disk",), now_us=1_000_000)
    assert len(index) == 3
    put(index, chain(2, 2, EventType.REMOVE))
    assert len(index) == 1


def test_sequences_match_as_far_as_they_are_present_in_a_row() -> None:
    index = ArrayIndex(SMALL)
    put(index, chain(1, 70), chain(1, 3, tier=1), chain(201, 5))
    disk, gpu = index.place(PLACE), index.place(PlaceKey(1, 1, "disk"))
    path = list(range(1, 100))
    assert index.match(NAMESPACE, 0, path) == 70
    assert index.match(NAMESPACE, 0, path, gpu) == 3
    assert index.match(NAMESPACE, 1, path) == index.match(8, 0, path) == index.match(NAMESPACE, 0, []) == 0
    assert index.match_by_place(NAMESPACE, 0, path).by_place == {disk: 70, gpu: 3}
    assert index.match_by_place(NAMESPACE, 0, path).longest == 70
    assert index.match_by_place(NAMESPACE, 0, [99, *path]).by_place == {}
    several = [(NAMESPACE, 0, path), (NAMESPACE, 0, [201, 202, 1, 999]), (8, 0, path), (NAMESPACE, 0, [])]
    assert index.match_many(several) == [70, 3, 0, 0]
    assert index.match_many(several, gpu) == [3, 0, 0, 0]
    assert index.match_many([]) == []


def test_runs_by_place_start_afresh_with_each_question() -> None:
    index = ArrayIndex(SMALL)
    put(index, chain(1, 5))
    assert [index.match_by_place(NAMESPACE, 0, [1, 2]).longest for _ in range(3)] == [2, 2, 2]


def test_blocks_whose_hashes_differ_in_one_half_only_are_told_apart() -> None:
    index = ArrayIndex(SMALL)
    records = np.zeros(3, RECORD_DTYPE)
    records["event_type"], records["tier"] = EventType.STORE, 3
    records["sequence_hash_lo"], records["sequence_hash_hi"] = [5, 5, 6], [1, 2, 1]
    put(index, records)
    assert len(index) == 3
    assert index.get(key(2 << 64 | 5)) is not None
    assert index.get(key(2 << 64 | 6)) is None


def test_interior_block_removed_and_stored_again_keeps_its_children_and_loses_its_history() -> None:
    index = ArrayIndex(SMALL)
    put(index, chain(1, 3), chain(2, 1, EventType.ACCESS), now_us=5_000_000)
    put(index, chain(2, 1, EventType.REMOVE))
    assert index.get(key(2)) is None
    assert index.match(NAMESPACE, 0, [1, 2, 3]) == 1
    assert index.totals().ghosts == 1
    put(index, chain(2, 1), now_us=9_000_000)
    block = index.get(key(2))
    assert block is not None
    assert (block.touches, block.first_touch_us, block.last_touch_us) == (1, 9_000_000, 9_000_000)
    assert index.match(NAMESPACE, 0, [1, 2, 3]) == 3
    index.check()


def test_prefix_groups_become_one_when_an_orphan_finds_its_parent() -> None:
    index = ArrayIndex(SMALL)
    put(index, chain(10, 5)[1:], chain(1, 3))
    assert [(group.key, group.blocks) for group in index.largest_groups(9)] == [(key(10), 4), (key(1), 3)]
    link = chain(10, 1)
    link["parent_hash_lo"] = 3
    put(index, link)
    assert [(group.key, group.blocks, group.block_bytes) for group in index.largest_groups(9)] == [(key(1), 8, 800)]
    row = index.row_of(key(14))
    assert row is not None
    assert index.group_of(row).key == key(1)
    index.check()


def test_full_index_refuses_new_blocks_and_goes_on_serving() -> None:
    index = ArrayIndex(IndexSize.for_blocks(100))
    put(index, chain(1, 90))
    applied = index.apply(chain(201, 50), producer=1, namespace_ids=(NAMESPACE,), locations=("disk",), now_us=0)
    assert applied.skipped[INDEX_FULL] >= 39
    held = len(index)
    assert 90 <= held <= 100
    put(index, chain(1, 90, EventType.ACCESS), chain(1, 90))
    assert index.match(NAMESPACE, 0, list(range(1, 91))) == 90
    put(index, chain(1, 90, EventType.REMOVE)[::-1])
    put(index, chain(301, 80))
    assert index.match(NAMESPACE, 0, list(range(301, 400))) == 80
    index.check()


def test_full_index_forgets_touches_of_freed_blocks_before_it_refuses() -> None:
    index = ArrayIndex(IndexSize.for_blocks(100))
    index.set_volume(index.place(PLACE), True)
    for first in range(1, 2000, 50):
        put(index, chain(first, 50), chain(first, 50, EventType.REMOVE)[::-1])
    assert index.room()[0] == 100
    assert not len(index.touched_since_drain())
    index.check()


def test_hash_table_doubles_in_steps_while_blocks_come_and_go() -> None:
    count = 3_000 if INTERPRETED else 60_000
    index = ArrayIndex(IndexSize(count, count, 17, hash_bits=6, step_homes=512, finish_homes=1024))
    random = np.random.default_rng(1)
    live: set[int] = set()
    mid_way = 0
    for first in range(1, count, 1000):
        put(index, chain(first, min(1000, count - first)))
        live.update(range(first, min(first + 1000, count)))
        gone = random.choice(np.array(sorted(live)), len(live) // 10, replace=False)
        records = np.zeros(len(gone), RECORD_DTYPE)
        records["event_type"], records["tier"], records["sequence_hash_lo"] = EventType.REMOVE, 3, gone
        put(index, records)
        live.difference_update(gone.tolist())
        mid_way += int(index.tables.state[FRONTIER] > 0)
    assert {block.key.sequence_hash for block in index.page(limit=count)[0]} == live
    assert index.tables.state[BITS] > 10
    assert mid_way or INTERPRETED
    index.check()


def test_pages_repeat_nothing_and_miss_nothing_that_stays() -> None:
    index = ArrayIndex(SMALL)
    put(index, chain(1, 100))
    seen: list[int] = []
    after: int | None = -1
    while after is not None:
        blocks, after = index.page(after, 7)
        seen += [block.key.sequence_hash for block in blocks]
        if len(seen) < 50:
            put(index, chain(100 - len(seen), 1, EventType.REMOVE))
    assert len(seen) == len(set(seen))
    assert set(range(1, 51)) <= set(seen)


def test_page_keeps_what_fits_all_filters() -> None:
    index = ArrayIndex(SMALL)
    put(index, chain(0x10, 16), chain(0x10, 2, tier=1))
    other = chain(0x100, 1)
    index.apply(other, producer=2, namespace_ids=(9,), locations=("disk",), now_us=0)
    assert len(index.page()[0]) == 17
    assert len(index.page(tier=1)[0]) == 2
    assert len(index.page(place=index.place(PLACE), tier=1)[0]) == 2
    assert [b.key.namespace_id for b in index.page(namespace_ids=[9])[0]] == [9]
    assert [b.key.sequence_hash for b in index.page(hash_prefix="0" * 29 + "01")[0]] == list(range(0x10, 0x20))
    assert [b.key.sequence_hash for b in index.page(hash_prefix="0" * 30 + "1f")[0]] == [0x1F]
    with pytest.raises(ValueError, match="33 digits"):
        index.page(hash_prefix="0" * 33)


def test_page_keeps_what_was_touched_so_often_and_so_lately() -> None:
    index = ArrayIndex(SMALL)
    put(index, chain(1, 90), now_us=1_000_000)
    put(index, *[chain(40, 20, EventType.ACCESS)] * 2, now_us=4_000_000_000_000_000)
    often = index.page(touches=(2, 1 << 40))[0]
    assert [block.key.sequence_hash for block in often] == list(range(40, 60))
    assert {block.touches for block in often} == {3}
    assert len(index.page(touches=(0, 1))[0]) == 70
    old = index.page(last_touch_us=(0, 1_000_000))[0]
    assert len(old) == 70
    assert len(index.page(last_touch_us=(1_000_001, 1 << 62))[0]) == 20
    assert index.page(touches=(3, 3), last_touch_us=(0, 1_000_000)) == ([], None)
    seen: list[int] = []
    after: int | None = -1
    while after is not None:
        blocks, after = index.page(after, 7, touches=(0, 1))
        seen += [block.key.sequence_hash for block in blocks]
    assert seen == [block.key.sequence_hash for block in old]


def test_page_ends_where_enough_rows_were_looked_at_and_goes_on_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("advisor.index.array_index._PAGE_ROWS", 16)
    index = ArrayIndex(SMALL)
    put(index, chain(1, 100))
    wanted = f"{90:032x}"
    blocks, after = index.page(hash_prefix=wanted, rows_max=17)
    assert (blocks, after) == ([], 31)
    blocks, after = index.page(after or 0, hash_prefix=wanted, rows_max=60)
    assert ([block.key.sequence_hash for block in blocks], after) == ([90], 95)
    assert index.page(95, hash_prefix=wanted, rows_max=60) == ([], None)


def test_blocks_of_a_hash_are_found_in_every_namespace_or_in_those_that_are_asked_for() -> None:
    index = ArrayIndex(SMALL)
    put(index, chain(5, 2))
    grouped = chain(5, 1)
    grouped["group"] = 3
    for namespace, records in ((9, chain(5, 1)), (9, grouped), (11, chain(5, 1, EventType.REMOVE))):
        index.apply(records, producer=2, namespace_ids=(namespace,), locations=("disk",), now_us=0)
    assert {(b.key.namespace_id, b.key.group) for b in index.named(5)} == {(7, 0), (9, 0), (9, 3)}
    assert [(b.key.namespace_id, b.key.group) for b in index.named(5, [7, 11])] == [(7, 0)]
    assert len(index.named(5, at_most=2)) == 2
    assert index.named(99) == index.named(5, []) == []
    put(index, chain(5, 1, EventType.REMOVE))
    assert index.named(5, [7]) == []


def test_block_is_seen_again_as_it_is_now_or_not_at_all() -> None:
    index = ArrayIndex(SMALL)
    put(index, chain(1, 2))
    first, last = (index.block(row) for row in index.coldest(index.place(PLACE), 2))
    put(index, chain(1, 2, EventType.ACCESS))
    seen = index.again(first)
    assert seen is not None
    assert (seen.key, seen.touches) == (first.key, first.touches + 1)
    put(index, chain(1, 2, EventType.REMOVE)[::-1])
    put(index, chain(50, 2))  # takes their rows
    assert index.again(first) is index.again(last) is None
    assert index.key_of(-1) is index.key_of(10**6) is None


def test_touches_are_drained_once_in_order_and_only_of_volumes() -> None:
    index = ArrayIndex(SMALL)
    put(index, chain(1, 3))
    assert not len(index.touched_since_drain())
    index.set_volume(index.place(PLACE), True)
    put(index, chain(3, 1, EventType.ACCESS), chain(1, 2, EventType.ACCESS), chain(50, 1, flags=RecordFlag.COPY))
    assert numbers(index, index.touched().tolist()) == [3, 1, 2]
    put(index, chain(1, 1, EventType.REMOVE))
    assert numbers(index, index.touched_since_drain().tolist()) == [3, 2]
    assert not len(index.touched_since_drain())


def test_use_in_host_memory_keeps_a_block_warm_in_its_volume() -> None:
    index = ArrayIndex(SMALL)
    disk = index.place(PLACE)
    index.set_volume(disk, True)
    put(index, chain(1, 3, tier=2), chain(1, 3))
    put(index, chain(1, 1, EventType.ACCESS, tier=2))
    assert numbers(index, index.coldest(disk, 3)) == [2, 3, 1]


def test_frequency_order_counts_from_when_it_is_asked_for() -> None:
    index = ArrayIndex(SMALL)
    disk = index.place(PLACE)
    put(index, chain(1, 3), chain(1, 1, EventType.ACCESS))
    index.set_order(disk, "lfu")
    assert numbers(index, index.coldest(disk, 3)) == [2, 3, 1]
    put(index, chain(2, 1, EventType.ACCESS), chain(3, 1, EventType.ACCESS), chain(2, 1, EventType.ACCESS))
    assert numbers(index, index.coldest(disk, 3)) == [1, 3, 2]
    index.set_order(disk, "lru")
    assert numbers(index, index.coldest(disk, 3)) == [1, 3, 2]
    assert index.order(disk) == "lru"
    with pytest.raises(ValueError, match="choose one of lru, lfu"):
        index.set_order(disk, "fifo")


def test_leaves_come_first_however_many_are_asked_for() -> None:
    index = ArrayIndex(IndexSize.for_blocks(20_000))
    disk = index.place(PLACE)
    # The oldest blocks are roots of one long chain: the first leaf is the newest of all.
    put(index, chain(1, 2_000))
    assert numbers(index, index.leaves_first(disk, 3)) == [2000, 1999, 1998]
    assert numbers(index, list(index.every_leaf_first(disk))) == list(range(2000, 0, -1))


def test_hottest_blocks_outside_a_place_are_found_behind_those_inside() -> None:
    index = ArrayIndex(SMALL)
    put(index, chain(1, 300), chain(1, 50, tier=4))
    fast = index.place(PlaceKey(1, 4, "disk"))
    for number in range(1, 61):
        hit = chain(number, 1, EventType.ACCESS)
        hit["hits"] = 1000 - number
        put(index, hit)
    assert numbers(index, index.hottest(3)) == [1, 2, 3]
    assert numbers(index, index.hottest(3, outside=fast)) == [51, 52, 53]
    assert len(index.hottest(1000, outside=fast)) == 250
    assert index.hottest(0) == []


def test_figures_are_kept_by_place_tier_and_namespace() -> None:
    index = ArrayIndex(SMALL)
    put(index, chain(1, 3), chain(1, 2, tier=1))
    put(index, chain(1, 3, EventType.ACCESS))
    index.apply(chain(9, 1), producer=2, namespace_ids=(8,), locations=("disk",), now_us=0)
    totals = index.totals()
    assert (totals.blocks, totals.placements) == (4, 6)
    assert totals.by_place[index.place(PLACE)] == (3, 300, 3)
    assert totals.by_tier == {1: Figures(2, 200), 2: Figures(0, 0), 3: Figures(4, 400), 4: Figures(0, 0)}
    assert totals.by_namespace == {NAMESPACE: Figures(3, 500), 8: Figures(1, 100)}
    assert index.places_of(2) == [index.place(PlaceKey(2, 3, "disk"))]
    assert index.clear([index.place(PLACE)], namespace_id=8) == 0
    assert index.clear_producer(2) == 1


def test_freed_rows_are_no_blocks() -> None:
    index = ArrayIndex(SMALL)
    put(index, chain(1, 1))
    row = index.row_of(key(1))
    assert row is not None
    assert index.remove(row, index.place(PLACE))
    with pytest.raises(IndexFault, match="is free"):
        index.block(row)
    with pytest.raises(IndexFault, match="no block row 99"):
        index.block(99)


def test_children_are_counted_past_what_is_listed() -> None:
    index = ArrayIndex(SMALL)
    put(index, chain(1, 1))
    for number in range(10, 15):
        child = chain(number, 1)
        child["parent_hash_lo"] = 1
        child["depth"] = DEPTH_UNKNOWN
        put(index, child)
    root = index.row_of(key(1))
    assert root is not None
    rows, count = index.children(root, at_most=2)
    assert (numbers(index, rows), count) == ([14, 13], 5)
    assert index.child_counts([rows[0], root]) == [0, 5]
    block = index.get(key(12))
    assert block is not None
    assert (block.depth, block.parent) == (1, root)


def test_namespaces_without_blocks_make_way_for_others() -> None:
    index = ArrayIndex(SMALL)
    row = chain(1, 1)
    index._realms_made = REALMS_MAX - 2
    for namespace_id in range(10, 16):
        index.apply(row, producer=1, namespace_ids=(namespace_id,), locations=("disk",), now_us=0)
        index.clear_producer(1)
    kept = index.apply(row, producer=1, namespace_ids=(99,), locations=("disk",), now_us=0)
    more = index.apply(row, producer=1, namespace_ids=(98,), locations=("disk",), now_us=0)
    none = index.apply(row, producer=1, namespace_ids=(97,), locations=("disk",), now_us=0)
    assert (kept.skipped, more.skipped, none.skipped) == ({}, {}, {INDEX_FULL: 1})
    index.clear_producer(1)
    again = index.apply(row, producer=1, namespace_ids=(97,), locations=("disk",), now_us=0)
    assert again.skipped == {}
    assert index.match(97, 0, [1]) == 1
    assert index.match(99, 0, [1]) == 0


def test_place_run_as_a_cache_makes_way_and_tells_its_events() -> None:
    index = ArrayIndex(SMALL)
    disk = index.place(PLACE)

    def serve(first: int, count: int) -> tuple[int, list[tuple[int, int]]]:
        hits, sent = index.serve_from(
            chain(first, count), place=disk, namespace_id=NAMESPACE, capacity_blocks=3, now_us=0
        )
        return hits, [(row["event_type"], row["sequence_hash_lo"]) for row in sent]

    store, remove, access = EventType.STORE, EventType.REMOVE, EventType.ACCESS
    assert serve(1, 3) == (0, [(store, 1), (store, 2), (store, 3)])
    assert serve(2, 3) == (2, [(access, 2), (access, 3), (remove, 1), (store, 4)])
    assert numbers(index, index.coldest(disk, 9)) == [2, 3, 4]


def test_memory_limit_is_kept_and_holds_what_it_should() -> None:
    size = IndexSize.for_bytes(12_000_000_000)
    assert size.blocks_max >= 100_000_000
    assert size.placements_max >= 100_000_000
    index = ArrayIndex(IndexSize.for_blocks(4000))
    put(index, chain(1, 3000))
    assert index.memory_bytes() / len(index) <= 120
    with pytest.raises(ValueError, match="1 MiB or more"):
        IndexSize.for_bytes(1000)
    with pytest.raises(ValueError, match="allow it more bits"):
        ArrayIndex(IndexSize(1000, 1000, hash_bits_max=10))


def test_touching_memory_changes_nothing() -> None:
    index = ArrayIndex(SMALL)
    put(index, chain(1, 100))
    before = index.page()[0]
    index.touch_ahead(1000)
    assert index.page()[0] == before
    index.check()


def test_address_space_that_is_refused_is_said_so() -> None:
    with pytest.raises(IndexFull, match="lower its memory limit"):
        ArrayIndex(IndexSize(1000, 1 << 50, hash_bits_max=12))


def test_readers_see_whole_batches_and_get_their_turn() -> None:
    index = ArrayIndex(SMALL)
    batch = np.concatenate([chain(1, 60), chain(1, 60, EventType.REMOVE)[::-1], chain(101, 60)])
    undo = chain(101, 60, EventType.REMOVE)[::-1]
    stop = threading.Event()
    done = 0

    def ingest() -> None:
        nonlocal done
        while not stop.is_set():
            put(index, batch, undo)
            done += 1

    writer = threading.Thread(target=ingest)
    writer.start()
    try:
        answers = {
            answer
            for _ in range(300)
            for answer in [tuple(index.match_many([(NAMESPACE, 0, range(1, 61)), (NAMESPACE, 0, range(101, 161))]))]
        }
    finally:
        stop.set()
        writer.join()
    assert answers <= {(0, 0), (0, 60)}
    assert done > 0
    index.check()


def test_lock_is_reentrant_and_let_go_once() -> None:
    index = ArrayIndex(SMALL)
    with index.lock, index.lock:
        put(index, chain(1, 1))
    seen: list[int] = []
    reader = threading.Thread(target=lambda: seen.append(len(index.page()[0])))
    reader.start()
    reader.join()
    assert seen == [1]


def test_events_at_more_places_than_there_are_is_skipped_and_volumes_still_find_room() -> None:
    index = ArrayIndex(SMALL)
    put(index, chain(1, 3))
    while len(index.places) < PLACES_MAX - 1_025:
        index.place(PlaceKey(2, 3, str(len(index.places))))
    records = np.concatenate([chain(11, 3), chain(21, 2), chain(1, 1, EventType.REMOVE)])
    records["storage_location"][:5] = [0, 1, 2, 2, 0]
    applied = index.apply(
        records, producer=1, namespace_ids=(NAMESPACE,), locations=("disk", "last", "one more"), now_us=2_000_000
    )
    assert applied.skipped == {PLACES_SPENT: 2}
    disk, last = index.place(PLACE), index.place(PlaceKey(1, 3, "last"))
    assert numbers(index, index.coldest(disk, 9)) == [2, 3, 11, 22]
    assert numbers(index, index.coldest(last, 9)) == [12]
    assert index.known_place(PlaceKey(1, 3, "one more")) is None
    volume = index.place(PlaceKey(3, 3, "nvme"))
    index.set_volume(volume, True)
    assert index.is_volume(volume)
