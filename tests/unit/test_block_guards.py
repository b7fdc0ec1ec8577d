"""The life-cycle table, and guards that give a block back exactly once."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest

from event_plane.schema import Namespace
from kvbm_core.block import TRANSITIONS, BlockState, ImmutableBlock, MutableBlock, Trigger, diagram, next_state
from kvbm_core.errors import BlockStateError, PoolExhaustedError
from kvbm_core.identity import BlockIdentity
from kvbm_core.pool import BlockPool, PoolOccupancy
from kvbm_core.reuse import FifoOrder, LruOrder, ReuseOrder
from storage_agent.port import BlockKey

PAGE_TOKENS = 4
NAMESPACE = Namespace(tenant="acme", block_tokens=PAGE_TOKENS)


class Noted:
    """What the pool told its callbacks, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def store(self, identity: BlockIdentity, copied: bool) -> None:
        self.events.append(("copy" if copied else "store", identity.key.sequence_hash))

    def remove(self, identity: BlockIdentity) -> None:
        self.events.append(("remove", identity.key.sequence_hash))


def identity(number: int) -> BlockIdentity:
    return BlockIdentity(
        key=BlockKey(NAMESPACE.namespace_id, 0, number),
        namespace=NAMESPACE,
        parent_hash=0,
        prefix_hash=number,
        depth=0,
        block_tokens=PAGE_TOKENS,
    )


def pool_of(
    blocks: int, noted: Noted | None = None, *, reuse: ReuseOrder | None = None, allow: bool = False
) -> BlockPool:
    noted = noted or Noted()
    return BlockPool(
        name="device:0",
        blocks=blocks,
        page_tokens=PAGE_TOKENS,
        reuse=LruOrder() if reuse is None else reuse,
        duplicates="allow" if allow else "reject",
        on_store=noted.store,
        on_remove=noted.remove,
    )


def registered(pool: BlockPool, number: int) -> ImmutableBlock:
    (block,) = pool.allocate(1).blocks
    return filled(block).commit(identity(number)).register()


def filled(block: MutableBlock) -> MutableBlock:
    block.init_sequence()
    block.fill(PAGE_TOKENS)
    return block


@pytest.mark.parametrize("state", list(BlockState))
@pytest.mark.parametrize("trigger", list(Trigger))
def test_a_step_outside_the_table_names_what_is_allowed(state: BlockState, trigger: Trigger) -> None:
    if trigger in TRANSITIONS[state]:
        assert next_state(state, trigger) is TRANSITIONS[state][trigger]
    else:
        with pytest.raises(BlockStateError, match=f"a {state} block cannot take {trigger}: it allows"):
            next_state(state, trigger)


def test_the_diagram_in_the_docs_is_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "block-states.md"
    assert f"```mermaid\n{diagram()}```" in page.read_text()


def test_a_block_goes_from_reset_to_registered_and_is_announced_once() -> None:
    noted = Noted()
    pool = pool_of(2, noted)
    (block,) = pool.allocate(1).blocks
    assert block.state is BlockState.RESET
    block.init_sequence()
    block.fill(1)
    assert (block.state, block.filled_tokens) == (BlockState.PARTIAL, 1)
    block.fill(3)
    complete = block.commit(identity(7))
    assert noted.events == []
    immutable = complete.register()
    assert noted.events == [("store", 7)]
    assert pool.occupancy() == PoolOccupancy(active=1, inactive=0, reset=1)
    immutable.release()
    assert pool.occupancy() == PoolOccupancy(active=0, inactive=1, reset=1)
    assert noted.events == [("store", 7)]


def test_errors_leave_the_block_with_its_guard() -> None:
    pool = pool_of(1)
    (block,) = pool.allocate(1).blocks
    with pytest.raises(BlockStateError, match="a Reset block cannot take commit"):
        block.commit(identity(1))
    block.init_sequence()
    with pytest.raises(BlockStateError, match="a Partial block cannot take init_sequence"):
        block.init_sequence()
    block.fill(3)
    with pytest.raises(BlockStateError, match="block 0 holds 3 of 4 tokens: commit it when full"):
        block.commit(identity(1))
    with pytest.raises(BlockStateError, match="block 0 has room for 1 tokens, not 2"):
        block.fill(2)
    block.fill(1)
    other = pool_of(1)
    complete = block.commit(identity(1))
    with pytest.raises(BlockStateError, match="block 0 is not of pool device:0"):
        other.register(complete)
    with complete.register() as immutable:
        assert immutable.identity == identity(1)


def test_a_released_guard_refuses_use() -> None:
    pool = pool_of(1)
    (block,) = pool.allocate(1).blocks
    block.release()
    block.release()
    with pytest.raises(BlockStateError, match="MutableBlock of block 0 was released: allocate or match again"):
        block.init_sequence()
    assert pool.occupancy().reset == 1


@pytest.mark.parametrize("steps", ["reset", "partial", "complete"])
def test_a_block_dropped_before_registration_is_reset(steps: str) -> None:
    noted = Noted()
    pool = pool_of(1, noted)
    with pool.allocate(1).blocks[0] as block:
        if steps != "reset":
            block.init_sequence()
        if steps == "complete":
            block.fill(PAGE_TOKENS)
            with block.commit(identity(1)):
                assert pool.occupancy().active == 1
    assert pool.occupancy() == PoolOccupancy(active=0, inactive=0, reset=1)
    assert pool.allocate(1).blocks[0].filled_tokens == 0
    assert noted.events == []


def test_an_exception_gives_the_block_back() -> None:
    pool = pool_of(1)
    with pytest.raises(RuntimeError, match="model failed"), pool.allocate(1).blocks[0]:
        raise RuntimeError("model failed")
    assert pool.occupancy().reset == 1


def test_collected_guards_give_their_blocks_back() -> None:
    pool = pool_of(3)
    held = registered(pool, 1)
    lost = [held.clone(), *pool.allocate(2).blocks]
    assert pool.occupancy() == PoolOccupancy(active=3, inactive=0, reset=0)
    lost.clear()
    gc.collect()
    assert pool.occupancy() == PoolOccupancy(active=1, inactive=0, reset=2)
    del held
    gc.collect()
    assert pool.occupancy() == PoolOccupancy(active=0, inactive=1, reset=2)


def test_threads_that_release_one_guard_give_it_back_once() -> None:
    pool = pool_of(1)
    block = registered(pool, 1)
    keeper = block.clone()
    threads = [threading.Thread(target=block.release) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.occupancy().active == 1
    keeper.release()
    assert pool.occupancy() == PoolOccupancy(active=0, inactive=1, reset=0)


def test_allocate_takes_reset_blocks_first_then_evicts_the_least_recently_used() -> None:
    noted = Noted()
    pool = pool_of(3, noted)
    for number in (1, 2):
        registered(pool, number).release()
    used_again = pool.acquire(identity(1).key)
    assert used_again is not None
    used_again.release()
    first, second = pool.allocate(1), pool.allocate(1)
    assert first.evicted == []
    assert second.evicted == [identity(2)]
    assert noted.events == [("store", 1), ("store", 2), ("remove", 2)]


def test_fifo_evicts_the_block_registered_first_however_often_it_is_used() -> None:
    pool = pool_of(2, reuse=FifoOrder())
    for number in (1, 2):
        registered(pool, number).release()
    for _ in range(100):
        used_again = pool.acquire(identity(1).key)
        assert used_again is not None
        used_again.release()
    assert pool.allocate(1).evicted == [identity(1)]


def test_allocate_is_all_or_nothing() -> None:
    noted = Noted()
    pool = pool_of(3, noted)
    held = registered(pool, 1)
    registered(pool, 2).release()
    with pytest.raises(PoolExhaustedError, match="pool device:0 can give 2 of its 3 blocks, not 3"):
        pool.allocate(3)
    assert pool.occupancy() == PoolOccupancy(active=1, inactive=1, reset=1)
    assert noted.events == [("store", 1), ("store", 2)]
    assert held.index == 0


def test_a_rejected_duplicate_is_reset_and_the_first_returned() -> None:
    noted = Noted()
    pool = pool_of(2, noted)
    first = registered(pool, 5)
    second = registered(pool, 5)
    assert second.index == first.index
    assert pool.occupancy() == PoolOccupancy(active=1, inactive=0, reset=1)
    first.release()
    assert pool.occupancy().active == 1
    second.release()
    assert pool.occupancy() == PoolOccupancy(active=0, inactive=1, reset=1)
    assert noted.events == [("store", 5)]


def test_an_allowed_second_copy_keeps_the_first_alive_and_is_reset_when_let_go() -> None:
    noted = Noted()
    pool = pool_of(3, noted, allow=True)
    first, second = registered(pool, 5), registered(pool, 5)
    assert (first.is_second_copy, second.is_second_copy) == (False, True)
    assert (first.identity, first.index) != (second.identity, second.index)
    first.release()
    assert pool.occupancy() == PoolOccupancy(active=2, inactive=0, reset=1)
    with pytest.raises(PoolExhaustedError):
        pool.allocate(2)
    third = second.clone()
    second.release()
    assert pool.occupancy().active == 2
    third.release()
    assert pool.occupancy() == PoolOccupancy(active=0, inactive=1, reset=2)
    assert noted.events == [("store", 5)]
    assert pool.allocate(3).evicted == [identity(5)]
    assert noted.events == [("store", 5), ("remove", 5)]


def test_match_stops_at_the_first_miss() -> None:
    pool = pool_of(4)
    for number in (1, 2, 4):
        registered(pool, number).release()
    matched = pool.match([identity(number).key for number in (1, 2, 3, 4)])
    assert [block.identity.key.sequence_hash for block in matched] == [1, 2]
    assert pool.occupancy() == PoolOccupancy(active=2, inactive=1, reset=1)


def test_a_weak_block_upgrades_until_its_block_is_evicted() -> None:
    pool = pool_of(1)
    block = registered(pool, 1)
    weak = block.downgrade()
    block.release()
    upgraded = weak.upgrade()
    assert upgraded is not None
    assert upgraded.identity == identity(1)
    upgraded.release()
    pool.allocate(1)
    assert weak.upgrade() is None
