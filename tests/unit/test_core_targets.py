"""Targets that a caller gives: what is none is refused before any byte moves, and is the caller's still."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvbm_core.block import ImmutableBlock, MutableBlock
from kvbm_core.errors import BlockStateError
from kvbm_core.identity import BlockIdentity
from tests.core_room import CoreRoom, release

Give = Callable[[CoreRoom], list[MutableBlock]]
Load = Callable[[CoreRoom, Sequence[BlockIdentity], Sequence[MutableBlock]], object]


@pytest.fixture
def room() -> Iterator[CoreRoom]:
    made = CoreRoom()
    yield made
    made.close()


def of_the_host(room: CoreRoom) -> list[MutableBlock]:
    return room.host_pool.allocate(3).blocks


def one_released(room: CoreRoom) -> list[MutableBlock]:
    given = room.manager.allocate(3).blocks
    given[1].release()
    return given


def one_twice(room: CoreRoom) -> list[MutableBlock]:
    first, second = room.manager.allocate(2).blocks
    return [first, second, first]


def one_begun(room: CoreRoom) -> list[MutableBlock]:
    given = room.manager.allocate(3).blocks
    given[1].init_sequence()
    given[1].fill(1)
    return given


def onboard(room: CoreRoom, wanted: Sequence[BlockIdentity], targets: Sequence[MutableBlock]) -> object:
    return room.manager.onboard(wanted, targets)


def onboard_by_layer(room: CoreRoom, wanted: Sequence[BlockIdentity], targets: Sequence[MutableBlock]) -> object:
    return room.manager.onboard_by_layer(wanted, targets)


def offload_by_layer(room: CoreRoom, wanted: Sequence[BlockIdentity], blocks: Sequence[MutableBlock]) -> object:
    room.manager.scheduler.begin_iteration()
    try:
        return room.manager.offload_by_layer(blocks, wanted)
    finally:
        room.manager.scheduler.end_iteration()


@pytest.mark.parametrize("load", [onboard, onboard_by_layer, offload_by_layer])
@pytest.mark.parametrize("give", [of_the_host, one_released, one_twice, one_begun])
def test_what_is_no_empty_block_of_the_device_is_refused_and_no_byte_is_written(
    room: CoreRoom, give: Give, load: Load
) -> None:
    wanted = room.sequence(3)
    room.compute_and_release(wanted)
    room.manager.reset("device")
    others = room.compute(room.sequence(3, 5_000))  # a host block's number is also one of theirs
    given = give(room)
    held_before = [block.holds for block in given]
    host_before = room.manager.occupancy().host
    with pytest.raises(BlockStateError):
        load(room, wanted, given)
    assert [block.holds for block in given] == held_before
    assert all(map(room.is_right, others))
    for block in given:
        block.release()
    occupancy = room.manager.occupancy()
    assert occupancy.device == (3, 0, 5)
    assert occupancy.host.reset == host_before.reset + (3 if give is of_the_host else 0)
    assert occupancy.host.active == 0
    release(others)


@pytest.mark.parametrize("load", [onboard, onboard_by_layer, offload_by_layer])
def test_another_number_of_them_is_refused(room: CoreRoom, load: Load) -> None:
    wanted = room.sequence(3)
    room.compute_and_release(wanted)
    room.manager.reset("device")
    given = room.manager.allocate(2).blocks
    with pytest.raises(ValueError, match="give one for each"):
        load(room, wanted, given)
    assert [block.holds for block in given] == [True, True]
    assert room.manager.occupancy().host.active == 0
    room.device_pool.release_many(given)


def test_a_layered_load_leaves_the_targets_that_it_does_not_need(room: CoreRoom) -> None:
    wanted = room.sequence(3)
    room.compute_and_release(wanted[:2])
    room.manager.reset("device")
    given = room.manager.allocate(3).blocks
    loaded = room.manager.onboard_by_layer(wanted, given).finish()
    assert [block.holds for block in given] == [False, False, True]
    assert all(map(room.is_right, loaded))
    given[2].release()
    release(loaded)


@pytest.mark.parametrize("budget_ms", [-1.0, math.nan])
def test_a_budget_that_is_no_time_is_refused(room: CoreRoom, budget_ms: float) -> None:
    with pytest.raises(ValueError, match="budget_ms"):
        room.manager.onboard(room.sequence(1), budget_ms=budget_ms)


def test_a_block_registered_on_the_device_is_no_target(room: CoreRoom) -> None:
    held: list[ImmutableBlock] = room.compute(room.sequence(1))
    with pytest.raises(BlockStateError, match="is Registered"):
        room.manager.onboard(room.sequence(1, 100), held)  # type: ignore[arg-type]
    assert room.is_right(held[0])
    release(held)
