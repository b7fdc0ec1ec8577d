"""Which inactive block goes first, for each reuse order, and the counts that the multi-level LRU goes by."""

from __future__ import annotations

import random

import pytest

from event_plane.schema import Namespace
from kvbm_core.block import Slot
from kvbm_core.config import ReuseName
from kvbm_core.frequency import AGE_AFTER, COUNT_MAX, FrequencySketch
from kvbm_core.identity import BlockIdentity
from kvbm_core.reuse import LineageOrder, LruOrder, MultiLruOrder, ReuseOrder, reuse_order
from storage_agent.port import BlockKey

NAMESPACE = Namespace(tenant="acme", block_tokens=4)
NAMES: list[ReuseName] = ["fifo", "lru", "multi_lru", "lineage"]


def key_of(number: int) -> BlockKey:
    # Spread over all bits, as a hash is.
    return BlockKey(NAMESPACE.namespace_id, 0, random.Random(number).getrandbits(128))


def slot_of(number: int, *, parent: int = 0, priority: int = 35) -> Slot:
    """A registered block, the `number`th of its pool; `parent` 0 is the root."""
    parent_hash = key_of(parent).sequence_hash if parent else 0
    identity = BlockIdentity(key_of(number), NAMESPACE, parent_hash, 0, 0, 4)
    return Slot(number, identity=identity, priority=priority, registered_order=number)


def emptied(order: ReuseOrder) -> list[int]:
    return [order.pop().index for _ in range(len(order))]


@pytest.mark.parametrize("name", NAMES)
def test_an_order_without_a_block_says_so(name: ReuseName) -> None:
    order = reuse_order(name, 8)
    assert len(order) == 0
    with pytest.raises(KeyError, match="no inactive block"):
        order.pop()
    with pytest.raises(KeyError):
        order.remove(slot_of(1))
    slot = slot_of(2)
    order.insert(slot)
    order.remove(slot)
    with pytest.raises(KeyError, match="no inactive block"):
        order.pop()


@pytest.mark.parametrize("name", NAMES)
def test_lower_priority_goes_first_and_within_one_the_older(name: ReuseName) -> None:
    order = reuse_order(name, 8)
    for number, priority in ((1, 50), (2, 0), (3, 50), (4, 100), (5, 0)):
        order.insert(slot_of(number, priority=priority))
    assert emptied(order) == [2, 5, 1, 3, 4]


def test_fifo_goes_by_registration_lru_by_release() -> None:
    released = [slot_of(number) for number in (3, 1, 2)]
    fifo, lru = reuse_order("fifo", 8), reuse_order("lru", 8)
    for slot in released:
        fifo.insert(slot)
        lru.insert(slot)
    assert emptied(fifo) == [1, 2, 3]
    assert emptied(lru) == [3, 1, 2]


@pytest.mark.parametrize("name", NAMES)
def test_a_block_that_comes_back_with_another_priority_is_ordered_by_it(name: ReuseName) -> None:
    order = reuse_order(name, 8)
    moved, others = slot_of(1, priority=40), [slot_of(number, priority=40) for number in (2, 3)]
    for slot in (moved, *others):
        order.insert(slot)
    for priority, expected in ((90, [2, 3, 1]), (10, [1, 2, 3])):
        order.remove(moved)
        moved.priority = priority
        order.insert(moved)
        popped = [order.pop() for _ in range(3)]
        assert [slot.index for slot in popped] == expected
        for slot in (moved, *others):
            order.insert(slot)


def test_multi_lru_keeps_what_is_used_often_until_the_colder_lists_are_empty() -> None:
    order = MultiLruOrder(64)
    uses = {1: 15, 2: 8, 3: 3, 4: 2, 5: 14, 6: 7, 7: 1}
    for number, count in uses.items():
        slot = slot_of(number)
        for _ in range(count):
            order.used(slot)
        order.insert(slot)
    assert emptied(order) == [4, 7, 3, 6, 2, 5, 1]


def test_multi_lru_is_an_lru_where_all_are_used_alike() -> None:
    orders: list[ReuseOrder] = [LruOrder(), MultiLruOrder(64)]
    for order in orders:
        for number in (5, 2, 9, 4):
            slot = slot_of(number)
            order.used(slot)
            order.insert(slot)
    assert emptied(orders[0]) == emptied(orders[1]) == [5, 2, 9, 4]


def chains(*numbers: tuple[int, ...]) -> dict[int, Slot]:
    """Slots of some chains, each given root first."""
    return {
        number: slot_of(number, parent=parent)
        for chain in numbers
        for parent, number in zip((0, *chain), chain, strict=False)
    }


def test_lineage_evicts_tails_before_what_they_share() -> None:
    slots = chains((1, 2, 3), (1, 2, 4))
    order = LineageOrder()
    # Roots were let go first, so recency alone would evict them first.
    for number in (1, 2, 3, 4):
        order.insert(slots[number])
    assert emptied(order) == [3, 4, 2, 1]


def test_lineage_evicts_a_whole_cold_chain_before_a_warm_ones_tail() -> None:
    slots = chains((1, 2, 3), (4, 5, 6))
    for released in ([3, 2, 1, 6, 5, 4], [1, 2, 3, 4, 5, 6]):
        order = LineageOrder()
        for number in released:
            order.insert(slots[number])
        assert emptied(order) == [3, 2, 1, 6, 5, 4]


def test_lineage_does_not_hold_a_block_back_for_children_in_use() -> None:
    slots = chains((1, 2), (3, 4))
    order = LineageOrder()
    for number in (1, 2, 3, 4):
        order.insert(slots[number])
    order.remove(slots[2])
    assert order.pop() is slots[1]
    order.insert(slots[2])
    assert emptied(order) == [4, 3, 2]


def test_lineage_lets_a_block_that_was_passed_over_wait_for_a_child_that_comes_back() -> None:
    slots = chains((1, 2), (3,))
    order = LineageOrder()
    for number in (1, 2, 3):
        order.insert(slots[number])
    order.remove(slots[2])  # 1 is a leaf
    assert order.pop() is slots[1]
    order.insert(slots[1])
    order.insert(slots[2])  # and now none
    assert emptied(order) == [3, 2, 1]


def test_lineage_never_evicts_a_parent_of_low_priority_before_its_child() -> None:
    order = LineageOrder()
    order.insert(slot_of(1, priority=0))
    order.insert(slot_of(2, parent=1, priority=90))
    order.insert(slot_of(3, priority=50))
    assert emptied(order) == [3, 2, 1]


def test_lineage_survives_parents_in_a_ring() -> None:
    order = LineageOrder()
    for number, parent in ((1, 2), (2, 1), (3, 3)):
        order.insert(slot_of(number, parent=parent))
    assert sorted(emptied(order)) == [1, 2, 3]


@pytest.mark.parametrize("name", NAMES)
def test_an_order_kept_busy_evicts_each_block_once(name: ReuseName) -> None:
    chance = random.Random(7)
    order = reuse_order(name, 32)
    slots = [slot_of(number, parent=number // 2) for number in range(1, 33)]
    inactive: set[int] = set()
    for _ in range(3_000):
        slot = chance.choice(slots)
        if slot.index in inactive:
            order.remove(slot)
            inactive.remove(slot.index)
        else:
            slot.priority = chance.choice((0, 35, 100))
            order.used(slot)
            order.insert(slot)
            inactive.add(slot.index)
        if chance.random() < 0.2 and inactive:
            inactive.remove(order.pop().index)
        assert len(order) == len(inactive)
    assert sorted(emptied(order)) == sorted(inactive)


def test_a_sketch_counts_to_fifteen_and_halves_with_age() -> None:
    sketch = FrequencySketch(100)
    keys = [key_of(number) for number in range(1, 5)]
    for key, uses in zip(keys, (1, 6, 15, 40), strict=True):
        for _ in range(uses):
            sketch.use(key)
    assert [sketch.count(key) for key in keys] == [1, 6, 15, COUNT_MAX]
    assert sketch.count(key_of(99)) == 0
    # 62 of the uses after which all are halved were spent.
    for _ in range(100 * AGE_AFTER - 62):
        sketch.use(keys[3])
    assert [sketch.count(key) for key in keys] == [0, 3, 7, 7]


def test_a_full_sketch_rarely_counts_too_much_and_never_too_little() -> None:
    chance = random.Random(3)
    sketch = FrequencySketch(2_000)
    uses = {key_of(number): chance.choice((1, 1, 1, 2, 4, 9)) for number in range(2_000)}
    for key, count in uses.items():
        for _ in range(count):
            sketch.use(key)
    counted = {key: sketch.count(key) for key in uses}
    assert all(counted[key] >= count for key, count in uses.items())
    assert sum(counted[key] > count for key, count in uses.items()) < 0.01 * len(uses)


def test_blocks_that_pass_once_are_rarely_taken_for_used_before() -> None:
    # A row has 16,384 counters, as few as it ever has for so many blocks.
    sketch = FrequencySketch(1_000)
    seen_before = 0
    for number in range(1, 3 * 1_000 * AGE_AFTER):
        key = key_of(number)
        seen_before += sketch.count(key) > 0
        sketch.use(key)
    assert seen_before / number < 0.02
