"""The slot table against a model of plain dicts: every slot is in one state, every block in one slot."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from event_plane.schema import Namespace
from storage_agent.block_header import PAGE_BYTES, BlockHeader
from storage_agent.errors import SlotStateError
from storage_agent.port import BlockKey, ClassStat
from storage_agent.slot_classes import SlotClass
from storage_agent.slot_rows import SlotRows
from storage_agent.slot_table import TRANSITIONS, Refusal, Reservation, SlotState, SlotTable, SlotTrigger
from tests.examples import examples

CAPACITY = 4
keys = st.integers(0, 6).map(lambda number: BlockKey(1, 0, number))


def header(key: BlockKey, slot: int, generation: int) -> BlockHeader:
    return BlockHeader(slot, key, Namespace(), 0, 0, 16, 1, 0, generation)


class SlotTableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(SlotRows.empty(CAPACITY), 1)
        self.writing: dict[BlockKey, Reservation] = {}
        self.live: dict[BlockKey, BlockHeader] = {}
        self.freeing: dict[BlockKey, BlockHeader] = {}
        self.pins: list[int] = []
        self.generations: set[int] = set()

    @rule(key=keys)
    def reserve(self, key: BlockKey) -> None:
        result = self.table.reserve(key, 1)
        if key in self.live:
            assert result is Refusal.PRESENT
        elif key in self.writing or key in self.freeing:
            assert result is Refusal.BUSY
        elif len(self.writing) + len(self.live) + len(self.freeing) == CAPACITY:
            assert result is Refusal.FULL
        else:
            assert isinstance(result, Reservation)
            assert result.generation not in self.generations
            assert self.table.state(result.slot) is SlotState.WRITING
            self.generations.add(result.generation)
            self.writing[key] = result

    @rule(key=keys)
    def publish(self, key: BlockKey) -> None:
        if key not in self.writing:
            with pytest.raises(SlotStateError):
                self.table.publish(header(key, 0, 0))
            return
        reserved = self.writing.pop(key)
        self.live[key] = header(key, reserved.slot, reserved.generation)
        self.table.publish(self.live[key])

    @rule(key=keys)
    def abandon(self, key: BlockKey) -> None:
        if key in self.writing:
            self.table.abandon(self.writing.pop(key).slot)

    @rule(wanted=st.lists(keys, max_size=4))
    def pin(self, wanted: list[BlockKey]) -> None:
        pinned = self.table.pin(wanted)
        assert pinned == [(number, self.live[key]) for number, key in enumerate(wanted) if key in self.live]
        self.pins += [header.slot for _, header in pinned]

    @rule(which=st.integers(0, 100))
    def unpin(self, which: int) -> None:
        if self.pins:
            self.table.unpin([self.pins.pop(which % len(self.pins))])

    @rule(key=keys)
    def retire(self, key: BlockKey) -> None:
        result = self.table.retire(key)
        if key in self.live:
            assert result == self.live[key]
            self.freeing[key] = self.live.pop(key)
        else:
            assert result is (Refusal.BUSY if key in self.writing or key in self.freeing else None)

    @rule(key=keys)
    def release(self, key: BlockKey) -> None:
        if key in self.freeing:
            slot = self.freeing[key].slot
            if slot in self.pins:
                with pytest.raises(SlotStateError, match="still being read"):
                    self.table.release(slot)
            else:
                self.table.release(slot)
                del self.freeing[key]

    @rule(key=keys)
    def restore(self, key: BlockKey) -> None:
        if key in self.freeing:
            self.live[key] = self.freeing.pop(key)
            self.table.restore(self.live[key].slot)

    @invariant()
    def every_slot_is_where_the_model_has_it(self) -> None:
        expected = dict.fromkeys(range(CAPACITY), SlotState.FREE)
        expected |= {reserved.slot: SlotState.WRITING for reserved in self.writing.values()}
        expected |= {held.slot: SlotState.LIVE for held in self.live.values()}
        expected |= {held.slot: SlotState.FREEING for held in self.freeing.values()}
        assert {slot: self.table.state(slot) for slot in range(CAPACITY)} == expected
        assert self.table.free_count == list(expected.values()).count(SlotState.FREE)
        assert self.table.live_count == len(self.live)
        assert {held.key: held for held in self.table.live_headers()} == self.live
        assert self.table.is_settled == (not self.writing and not self.freeing and not self.pins)

    @invariant()
    def no_more_bytes_are_live_than_are_held(self) -> None:
        live_bytes = sum(PAGE_BYTES + held.payload_bytes for held in self.live.values())
        assert self.table.live_bytes() == live_bytes <= self.table.held_bytes(2 * PAGE_BYTES)

    @invariant()
    def a_table_built_from_the_live_slots_serves_the_same(self) -> None:
        rebuilt = SlotTable(SlotRows.of(CAPACITY, self.live.values()), 1)
        assert {held.key: held for held in rebuilt.live_headers()} == self.live
        assert rebuilt.free_count == CAPACITY - len(self.live)
        assert rebuilt.generation_next > max((held.generation for held in self.live.values()), default=0)


TestSlotTable = SlotTableMachine.TestCase
TestSlotTable.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("state", SlotState)
@pytest.mark.parametrize("trigger", SlotTrigger)
def test_a_step_outside_the_transition_table_raises_and_changes_nothing(state: SlotState, trigger: SlotTrigger) -> None:
    if trigger is SlotTrigger.RESERVE or trigger in TRANSITIONS[state]:
        return
    key = BlockKey(1, 0, 1)
    table = SlotTable(SlotRows.of(1, [header(key, 0, 1)] if state in (SlotState.LIVE, SlotState.FREEING) else []), 1)
    if state is SlotState.WRITING:
        table.reserve(key, 1)
    if state is SlotState.FREEING:
        table.retire(key)
    if trigger is SlotTrigger.RETIRE:
        assert not isinstance(table.retire(key), BlockHeader)
    else:
        steps: dict[SlotTrigger, Callable[[], None]] = {
            SlotTrigger.PUBLISH: lambda: table.publish(header(key, 0, 1)),
            SlotTrigger.ABANDON: lambda: table.abandon(0),
            SlotTrigger.RESTORE: lambda: table.restore(0),
            SlotTrigger.RELEASE: lambda: table.release(0),
        }
        with pytest.raises(SlotStateError):
            steps[trigger]()
    assert table.state(0) is state


def test_a_block_recovered_twice_is_an_error() -> None:
    twice = [header(BlockKey(1, 0, 1), 0, 1), header(BlockKey(1, 0, 1), 1, 2)]
    with pytest.raises(SlotStateError, match="recovered twice"):
        SlotTable(SlotRows.of(2, twice), 1)


def test_the_slot_freed_longest_ago_is_reused_first() -> None:
    table = SlotTable(SlotRows.empty(3), 1)
    for number in range(3):
        table.reserve(BlockKey(1, 0, number), 1)
    for slot in (1, 0, 2):
        table.abandon(slot)
    reserved = [table.reserve(BlockKey(1, 0, number), 1) for number in range(3, 6)]
    assert [r.slot for r in reserved if isinstance(r, Reservation)] == [1, 0, 2]


def test_a_block_takes_the_smallest_slot_that_holds_it_and_a_larger_one_when_those_are_taken() -> None:
    classes = (SlotClass(10, 2), SlotClass(100, 2))
    table = SlotTable(SlotRows.empty(4), 1, classes)

    def put(number: int, payload_bytes: int) -> int | Refusal:
        reserved = table.reserve(BlockKey(1, 0, number), payload_bytes)
        if isinstance(reserved, Refusal):
            return reserved
        written = header(BlockKey(1, 0, number), reserved.slot, reserved.generation)
        table.publish(written._replace(payload_bytes=payload_bytes))
        return reserved.slot

    assert [put(1, 11), put(2, 10), put(3, 1), put(4, 5)] == [2, 0, 1, 3]
    assert put(5, 1) is Refusal.FULL
    assert table.class_stats() == [ClassStat(10, 2, 2, 11, 0), ClassStat(100, 2, 2, 16, 0)]
    table.retire(BlockKey(1, 0, 3))
    table.release(1)
    assert put(6, 11) is Refusal.FULL, "a slot that is too small is none"
    assert table.class_stats() == [ClassStat(10, 2, 1, 10, 1), ClassStat(100, 2, 2, 16, 0)]
    assert table.free_count == 1
    assert put(7, 10) == 1


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 4)), min_size=1, max_size=4, unique_by=lambda each: each[0]),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20)), max_size=40),
)
def test_a_slot_is_refused_only_where_no_free_one_is_large_enough(
    sizes: list[tuple[int, int]], calls: list[tuple[int, int]]
) -> None:
    classes = tuple(SlotClass(*each) for each in sorted(sizes))
    room = [each.block_bytes for each in classes for _ in range(each.blocks)]
    table = SlotTable(SlotRows.empty(len(room)), 1, classes)
    held: dict[int, BlockHeader] = {}
    for number, payload_bytes in calls:
        key = BlockKey(1, 0, number)
        if number in held:
            table.retire(key)
            table.release(held.pop(number).slot)
            continue
        free = set(range(len(room))) - {each.slot for each in held.values()}
        fitting = [room[slot] for slot in free if room[slot] >= payload_bytes]
        reserved = table.reserve(key, payload_bytes)
        if isinstance(reserved, Refusal):
            assert (reserved, fitting) == (Refusal.FULL, [])
            continue
        assert reserved.slot in free
        assert room[reserved.slot] == min(fitting)
        held[number] = header(key, reserved.slot, reserved.generation)._replace(payload_bytes=payload_bytes)
        table.publish(held[number])
        assert table.free_count == len(room) - len(held)
    stats = table.class_stats()
    assert [each.slots - each.slots_free for each in stats] == [each.blocks for each in stats]
    assert sum(each.blocks for each in stats) == len(held)
    assert sum(each.payload_bytes for each in stats) == sum(each.payload_bytes for each in held.values())
