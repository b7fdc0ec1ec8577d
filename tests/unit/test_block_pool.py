"""A pool's batches, scans, resets and counters, block priority, and the hooks that follow every block."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence

import pytest

from event_plane.schema import Namespace
from kvbm_core.block import PRIORITY_DEFAULT, ImmutableBlock
from kvbm_core.errors import BlockStateError, PoolExhaustedError, WrongIdentityError
from kvbm_core.hooks import BlockStep, Hooks, LifeStep
from kvbm_core.identity import BlockIdentity
from kvbm_core.pool import BlockPool, PoolCounters, PoolOccupancy
from kvbm_core.reuse import LruOrder, MultiLruOrder, ReuseOrder
from storage_agent.port import BlockKey

PAGE_TOKENS = 4
NAMESPACE = Namespace(tenant="acme", block_tokens=PAGE_TOKENS)


def identity(number: int, *, block_tokens: int = PAGE_TOKENS) -> BlockIdentity:
    return BlockIdentity(BlockKey(NAMESPACE.namespace_id, 0, number), NAMESPACE, 0, number, 0, block_tokens)


def keys(*numbers: int) -> list[BlockKey]:
    return [identity(number).key for number in numbers]


def pool_of(
    blocks: int, *, reuse: ReuseOrder | None = None, hooks: Hooks | None = None, allow: bool = False
) -> BlockPool:
    return BlockPool(
        name="device:0",
        blocks=blocks,
        page_tokens=PAGE_TOKENS,
        reuse=LruOrder() if reuse is None else reuse,
        duplicates="allow" if allow else "reject",
        on_store=lambda identity, copied: None,
        on_remove=lambda identity: None,
        hooks=hooks,
    )


def registered(pool: BlockPool, *numbers: int, priority: int = PRIORITY_DEFAULT) -> list[ImmutableBlock]:
    places = pool.allocate(len(numbers)).blocks
    return pool.register_many(
        pool.complete_many(places, [identity(number) for number in numbers]), priority=priority
    )


def numbers_of(blocks: Sequence[ImmutableBlock | None]) -> list[int | None]:
    return [None if block is None else block.identity.key.sequence_hash for block in blocks]


def test_a_batch_is_registered_and_released_in_order() -> None:
    pool = pool_of(3)
    held = registered(pool, 1, 2, 3)
    assert numbers_of(held) == [1, 2, 3]
    pool.release_many([held[1], held[2], held[0], held[1]])
    assert pool.occupancy() == PoolOccupancy(active=0, inactive=3, reset=0)
    assert pool.allocate(3).evicted == [identity(2), identity(3), identity(1)]


def test_a_batch_with_a_bad_block_changes_nothing() -> None:
    pool, other = pool_of(3), pool_of(1)
    places, (foreign,) = pool.allocate(2).blocks, other.allocate(1).blocks
    with pytest.raises(BlockStateError, match="block 0 is not of pool device:0: give it to its own"):
        pool.complete_many([places[0], foreign], [identity(1), identity(2)])
    with pytest.raises(BlockStateError, match=r"a block is given twice among \[0, 0\]"):
        pool.complete_many([places[0], places[0]], [identity(1), identity(2)])
    with pytest.raises(WrongIdentityError, match="is of 8 tokens, the pool's blocks of 4"):
        pool.complete_many(places, [identity(1), identity(2, block_tokens=8)])
    with pytest.raises(ValueError, match="shorter"):
        pool.complete_many(places, [identity(1)])
    places[1].init_sequence()
    with pytest.raises(BlockStateError, match="a Partial block cannot take init_sequence"):
        pool.complete_many(places, [identity(1), identity(2)])
    assert [place.state for place in places] == ["Reset", "Partial"]
    places[1].reset()
    complete = pool.complete_many(places, [identity(1), identity(2)])
    released = complete.pop()
    released.release()
    with pytest.raises(BlockStateError, match="CompleteBlock of block 1 was released"):
        pool.register_many([*complete, released])
    with pytest.raises(ValueError, match="priority 101 is out of range: give one from 0, evicted first, to 100"):
        pool.register_many(complete, priority=101)
    with pytest.raises(BlockStateError, match="not of pool"):
        pool.release_many([*complete, foreign])
    assert numbers_of(pool.register_many(complete)) == [1]


def test_fewer_than_no_blocks_cannot_be_allocated() -> None:
    with pytest.raises(ValueError, match="-1 blocks cannot be allocated"):
        pool_of(1).allocate(-1)


def test_scan_does_not_stop_at_a_miss() -> None:
    pool = pool_of(4)
    pool.release_many(registered(pool, 1, 3))
    found = pool.scan(keys(1, 2, 3, 4, 1))
    assert numbers_of(found) == [1, None, 3, None, 1]
    assert pool.occupancy() == PoolOccupancy(active=2, inactive=0, reset=2)
    assert numbers_of(pool.match(keys(1, 2, 3))) == [1]


def test_a_block_of_low_priority_is_evicted_first() -> None:
    pool = pool_of(3)
    pool.release_many(registered(pool, 1))
    pool.release_many(registered(pool, 2, priority=0))
    (third,) = registered(pool, 3)
    assert (third.priority, PRIORITY_DEFAULT) == (35, 35)
    third.priority = 10
    assert third.clone().priority == 10
    with pytest.raises(ValueError, match="priority -1 is out of range"):
        third.priority = -1
    third.release()
    assert pool.allocate(3).evicted == [identity(2), identity(3), identity(1)]
    assert registered(pool_of(1), 4)[0].priority == PRIORITY_DEFAULT


@pytest.mark.parametrize("allow", [True, False])
def test_a_duplicate_raises_the_priority_and_never_lowers_it(allow: bool) -> None:
    pool = pool_of(3, allow=allow)
    (first,) = registered(pool, 1, priority=10)
    assert registered(pool, 1, priority=60)[0].priority == 60
    assert registered(pool, 1, priority=0)[0].priority == 60
    assert first.priority == 60
    for other in registered(pool, 1):
        other.priority = 5
    assert first.priority == 5


def test_a_forgotten_block_is_found_no_more_and_reset_by_its_last_guard() -> None:
    pool = pool_of(3, allow=True)
    (first,) = registered(pool, 1)
    (second,) = registered(pool, 1)
    pool.forget(second)
    assert numbers_of(pool.match(keys(1))) == [1]
    pool.forget(first)
    pool.forget(first)
    assert pool.match(keys(1)) == []
    assert first.identity == identity(1)
    (again,) = registered(pool, 1)
    assert again.index not in (first.index, second.index)
    first.release()
    assert pool.occupancy() == PoolOccupancy(active=3, inactive=0, reset=0)
    second.release()
    assert pool.occupancy() == PoolOccupancy(active=1, inactive=0, reset=2)
    again.release()
    with pytest.raises(BlockStateError, match="was released"):
        pool.forget(again)
    assert pool.reset() == [identity(1)]


def test_a_whole_pool_is_reset_once_nobody_uses_it() -> None:
    pool = pool_of(3)
    held = registered(pool, 1, 2)
    held[0].release()
    with pytest.raises(BlockStateError, match="pool device:0 has 1 blocks in use: release them, then reset it"):
        pool.reset()
    assert len(pool.registered_keys()) == 2
    held[1].release()
    assert pool.reset() == [identity(1), identity(2)]
    assert pool.occupancy() == PoolOccupancy(active=0, inactive=0, reset=3)
    assert pool.match(keys(1)) == []
    assert pool.counters().evicted == 0


def test_counters_tell_pressure_apart_from_use() -> None:
    pool = pool_of(3)
    pool.release_many(registered(pool, 1, 2))
    pool.release_many(registered(pool, 1))
    pool.release_many(pool.match(keys(1, 2, 9)))
    registered(pool, 3).clear()
    with pytest.raises(PoolExhaustedError):
        pool.allocate(4)
    taken = pool.allocate(3)
    assert taken.evicted == [identity(1), identity(2), identity(3)]
    assert pool.counters() == PoolCounters(
        allocated=7,
        refused=4,
        evicted=3,
        evicted_unmatched=1,
        registered=3,
        duplicates=1,
        requested=3,
        matched=2,
        released_by_collector=1,
    )


def test_a_pool_counts_registrations_and_matches_as_uses_and_nothing_else() -> None:
    reuse = MultiLruOrder(4)
    pool = pool_of(4, reuse=reuse)
    used, held_only = registered(pool, 1, 2)
    for _ in range(3):
        pool.release_many(pool.match(keys(1)))
        for block in (pool.acquire(keys(2)[0]), held_only.clone()):
            assert block is not None
            block.release()
    used.release()
    held_only.release()
    empty = pool.allocate(2).blocks
    assert pool.allocate(1).evicted == [identity(2)]
    assert [block.index for block in empty] == [2, 3]


def test_a_guard_may_be_released_in_the_middle_of_a_step_of_its_pool() -> None:
    """As a finaliser does that the garbage collector runs while this thread has the pool's lock."""
    let_go: list[ImmutableBlock] = []

    def release_another(identity: BlockIdentity, copied: bool) -> None:
        for block in let_go:
            block.release()
            assert not block.holds

    pool = BlockPool(
        name="device:0",
        blocks=2,
        page_tokens=PAGE_TOKENS,
        reuse=LruOrder(),
        duplicates="reject",
        on_store=release_another,
        on_remove=lambda identity: None,
    )
    let_go += registered(pool, 1)
    held = registered(pool, 2)
    with pytest.raises(BlockStateError, match="ImmutableBlock of block 0 was released"):
        let_go[0].clone()
    assert pool.occupancy() == PoolOccupancy(active=1, inactive=1, reset=0)
    assert held[0].identity == identity(2)


def followed(pool: BlockPool) -> list[tuple[LifeStep, int]]:
    steps: list[tuple[LifeStep, int]] = []
    pool.hooks.add(lambda step: steps.append((step.step, step.block)))
    return steps


def test_hooks_follow_a_block_from_allocation_to_eviction() -> None:
    pool = pool_of(1)
    steps = followed(pool)
    (block,) = pool.allocate(1).blocks
    block.init_sequence()
    block.fill(PAGE_TOKENS)
    immutable = block.commit(identity(1)).register()
    immutable.release()
    pool.release_many(pool.match(keys(1)))
    pool.allocate(1).blocks[0].release()
    assert [step for step, _ in steps] == [
        LifeStep.ALLOCATED,
        LifeStep.INITIALISED,
        LifeStep.COMMITTED,
        LifeStep.REGISTERED,
        LifeStep.RELEASED,
        LifeStep.INACTIVE,
        LifeStep.MATCHED,
        LifeStep.RELEASED,
        LifeStep.INACTIVE,
        LifeStep.EVICTED,
        LifeStep.ALLOCATED,
        LifeStep.RELEASED,
        LifeStep.RESET,
    ]


def interrupt(step: BlockStep) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "act",
    [
        lambda pool: pool.allocate(1),
        lambda pool: registered(pool, 9),
        lambda pool: pool.match(keys(1)),
        lambda pool: pool.scan(keys(1)),
        lambda pool: pool.acquire(keys(1)[0]),
    ],
)
def test_an_interrupt_in_a_hook_reaches_the_caller_and_loses_no_block(act: Callable[[BlockPool], object]) -> None:
    pool = pool_of(2)
    registered(pool, 1)[0].release()
    remove = pool.hooks.add(interrupt)
    with pytest.raises(KeyboardInterrupt):
        act(pool)
    remove()
    gc.collect()
    assert pool.occupancy() == PoolOccupancy(active=0, inactive=1, reset=1)
    assert pool.hooks.failures == 0


def test_whatever_a_hook_raises_in_another_thread_is_counted() -> None:
    pool = pool_of(1)
    pool.hooks.add(interrupt)
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(pool.allocate(1)))
    thread.start()
    thread.join()
    assert len(got) == 1
    assert pool.hooks.failures == 1


@pytest.mark.parametrize("allow", [True, False])
def test_hooks_tell_a_duplicate_and_what_becomes_of_it(allow: bool) -> None:
    pool = pool_of(2, allow=allow)
    registered(pool, 1)[0].release()
    steps = followed(pool)
    registered(pool, 1)[0].release()
    at_registration = [(LifeStep.DUPLICATE, 1), (LifeStep.MATCHED, 0)]
    at_release = [(LifeStep.RELEASED, int(allow))]
    (at_release if allow else at_registration).append((LifeStep.RESET, 1))
    assert steps[3:] == [*at_registration, *at_release, (LifeStep.INACTIVE, 0)]


def test_hooks_of_two_pools_hear_which_block_of_which() -> None:
    heard: list[BlockStep] = []
    hooks = Hooks()
    remove = hooks.add(heard.append)
    first, second = pool_of(1, hooks=hooks), pool_of(1, hooks=hooks)
    second.name = "host"
    held = [*registered(first, 1), *registered(second, 1)]
    assert [(step.pool, step.identity) for step in heard if step.step is LifeStep.REGISTERED] == [
        ("device:0", identity(1)),
        ("host", identity(1)),
    ]
    remove()
    before = len(heard)
    for block in held:
        block.release()
    assert len(heard) == before


def test_a_hook_that_fails_is_counted_and_the_pool_goes_on() -> None:
    pool = pool_of(1)

    def fail(step: BlockStep) -> None:
        raise RuntimeError("hook of a test")

    pool.hooks.add(fail)
    steps = followed(pool)
    registered(pool, 1)[0].release()
    assert pool.hooks.failures == len(steps) == 6
    assert pool.occupancy() == PoolOccupancy(active=0, inactive=1, reset=0)


def test_a_hook_may_use_the_pool_and_hears_its_own_steps_after_those_before() -> None:
    pool = pool_of(2)
    steps = followed(pool)
    found: list[ImmutableBlock] = []

    def match_again(step: BlockStep) -> None:
        if step.step is LifeStep.INACTIVE and not found:
            found.extend(pool.match(keys(1)))

    pool.hooks.add(match_again)
    pool.release_many(registered(pool, 1, 2))
    assert steps[-5:] == [
        (LifeStep.RELEASED, 0),
        (LifeStep.INACTIVE, 0),
        (LifeStep.RELEASED, 1),
        (LifeStep.INACTIVE, 1),
        (LifeStep.MATCHED, 0),
    ]
    assert pool.occupancy().active == 1


def test_steps_of_many_threads_are_each_told_once_and_in_order() -> None:
    pool = pool_of(8)
    steps = followed(pool)

    def work(number: int) -> None:
        for _ in range(50):
            pool.release_many(registered(pool, number))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = [step for step, _ in steps]
    assert told.count(LifeStep.ALLOCATED) == told.count(LifeStep.COMMITTED) == 200
    assert told.count(LifeStep.REGISTERED) == 4
    assert told.count(LifeStep.DUPLICATE) == 196
    for block in range(8):
        own = [step for step, index in steps if index == block]
        begun = [n for n, step in enumerate(own) if step is LifeStep.ALLOCATED]
        assert all(own[n + 1 : n + 3] == [LifeStep.INITIALISED, LifeStep.COMMITTED] for n in begun)
