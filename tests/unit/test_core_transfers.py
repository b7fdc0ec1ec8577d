"""What becomes of transfers: deadlines, doubt, cancelling, waiting for the model, order, and who waits for whom."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from event_plane.schema import RecordFlag
from kvbm_core.async_manager import AsyncKvBlockManager
from kvbm_core.config import PathLimits
from kvbm_core.errors import BlockStateError, ManagerClosedError, ProgressError
from kvbm_core.identity import BlockIdentity
from kvbm_core.paths import TransferPath
from kvbm_core.pool import PoolOccupancy
from kvbm_core.transfer_queue import IDLE
from tests.core_room import DISK, PATIENCE_S, CoreRoom, low, release

COPY = RecordFlag.COPY
TO_BEGIN_MS = 700.0
"""For a transfer that then hangs: less, and on a busy machine it may not have begun before its time is over."""


@pytest.fixture
def room() -> Iterator[CoreRoom]:
    with closing(CoreRoom(disk=DISK)) as opened:
        yield opened


def until(said: str, condition: Callable[[], bool]) -> None:
    """Wait for a condition; fails after a long time."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, said
        time.sleep(0.002)


def until_left(room: CoreRoom, blocks: int) -> None:
    until("a layer is not stored", lambda: room.manager.queues()[TransferPath.DEVICE_TO_HOST].queued == blocks)


def forget_calls(room: CoreRoom) -> None:
    """Of the agent: from now on `came` tells of later ones."""
    while room.agent.came.acquire(blocking=False):
        pass


async def until_called(room: CoreRoom) -> None:
    """Until the agent is asked; the event loop goes on meanwhile."""
    assert await asyncio.to_thread(room.agent.came.acquire, timeout=PATIENCE_S)


def on_disk(room: CoreRoom, blocks: int, first_token: int = 0) -> list[BlockIdentity]:
    """Blocks that the disk has, and the core has not."""
    wanted = room.sequence(blocks, first_token)
    room.compute_and_release(wanted)
    room.push_out_of_host()
    room.push_out_of_device()
    return wanted


def test_a_load_that_hangs_is_a_miss_within_its_budget_and_its_blocks_are_kept_apart(room: CoreRoom) -> None:
    wanted = on_disk(room, 3)
    forget_calls(room)
    with room.agent.held():
        found = room.manager.onboard(wanted, budget_ms=TO_BEGIN_MS)
        assert room.agent.came.acquire(timeout=PATIENCE_S)
        assert found.blocks == []
        assert found.ended == "deadline"
        assert room.manager.queues()[TransferPath.DISK_TO_DEVICE].in_doubt == 3
        assert room.manager.totals().paths[TransferPath.DISK_TO_DEVICE].failures == {"deadline": 3}
        # The host blocks that the hung call may still write are nobody else's: 13 of 16 can be had.
        assert room.manager.occupancy().host == PoolOccupancy(active=3, inactive=13, reset=0)
        computed = room.compute(wanted)
        assert all(room.is_right(block) for block in computed)
        release(computed)
    until(
        "the call does not end",
        lambda: room.manager.queues()[TransferPath.DISK_TO_DEVICE] == IDLE
        and room.manager.occupancy().host.active == 0,
    )
    # It ended well, if late: the blocks are verified and registered, for whoever asks next.
    assert all(room.host_pool.has(identity.key) for identity in wanted)
    assert all(room.is_right(block) for block in room.manager.match(wanted))


def test_targets_in_doubt_do_not_come_back_and_are_not_given_to_others(room: CoreRoom) -> None:
    wanted = on_disk(room, 2)
    targets = room.manager.allocate(2).blocks
    with room.agent.held():
        found = room.manager.onboard(wanted, targets, budget_ms=TO_BEGIN_MS)
        assert (found.blocks, found.unused) == ([], [])
        with pytest.raises(BlockStateError, match="was released"):
            targets[0].reset()
        assert room.manager.occupancy().device.active == 2
    until("the call does not end", lambda: room.manager.occupancy().device.active == 0)
    assert all(room.device_pool.has(identity.key) for identity in wanted)


def test_what_waits_behind_a_hung_load_expires_unbegun_and_gives_its_targets_back() -> None:
    limits = {TransferPath.DISK_TO_DEVICE: PathLimits(concurrency=1, deadline_s=TO_BEGIN_MS / 1e3)}
    with closing(CoreRoom(disk=DISK, transfers=limits)) as room:
        wanted = on_disk(room, 4)
        with room.agent.held():
            first = room.manager.onboard_soon(wanted[:1])
            assert room.agent.came.acquire(timeout=PATIENCE_S)
            until("the first is not in doubt", lambda: first.done())
            targets = room.manager.allocate(2).blocks
            places = [target.index for target in targets]
            found = room.manager.onboard(wanted[2:], targets)
            assert found.ended == "deadline"
            assert [target.index for target in found.unused] == places
            for target in found.unused:
                target.release()
        assert first.result().ended == "deadline"


def test_a_cancelled_load_gives_its_blocks_up_and_keeps_none(room: CoreRoom) -> None:
    wanted = on_disk(room, 3)
    forget_calls(room)
    with room.agent.held():
        future = room.manager.onboard_soon(wanted)
        assert room.agent.came.acquire(timeout=PATIENCE_S)
        assert future.cancel()
        until("it is not given up", lambda: room.manager.queues()[TransferPath.DISK_TO_DEVICE].in_doubt == 3)
    until("the call does not end", lambda: room.manager.occupancy().host.active == 0)
    until("guards are left", lambda: room.manager.occupancy().device.active == 0)
    assert room.manager.totals().paths[TransferPath.DISK_TO_DEVICE].failures == {}


def test_two_requests_for_one_block_load_it_once(room: CoreRoom) -> None:
    wanted = on_disk(room, 2)
    forget_calls(room)
    with room.agent.held():
        first = room.manager.onboard_soon(wanted)
        assert room.agent.came.acquire(timeout=PATIENCE_S)
        assert room.manager.explain(wanted[0].key).waits == ["on its way to the device"]
        second = room.manager.onboard_soon(wanted)
        third = room.manager.onboard(wanted, budget_ms=20.0)
        assert third.ended == "waited_in_vain"
    got = [first.result(), second.result()]
    assert got[0].sources == ["disk", "disk"]
    assert got[1].account.waiting == 2
    assert [block.identity for block in got[1].blocks] == wanted
    assert room.manager.totals().paths[TransferPath.DISK_TO_DEVICE].blocks == 2
    for each in got:
        release(each.blocks)


def test_offload_takes_lower_priorities_first_then_older_blocks(room: CoreRoom) -> None:
    late = room.compute(room.sequence(2), priority=50)
    early = room.compute(room.sequence(2, 1_000), priority=10)
    assert room.manager.offload(2) == 2
    assert [room.host_pool.has(block.identity.key) for block in (*early, *late)] == [True, True, False, False]
    assert room.manager.offload(1) == 1
    assert [room.host_pool.has(block.identity.key) for block in late] == [True, False]
    host = room.host_pool.find(early[0].identity.key)
    assert host is not None
    assert host.priority == 10
    release([*late, *early])


def test_during_an_iteration_blocks_are_not_read_until_it_ends(room: CoreRoom) -> None:
    room.manager.scheduler.begin_iteration()
    held = room.compute(room.sequence(3))
    with pytest.raises(ProgressError, match="use offload_soon"):
        room.manager.offload(3)
    offload = room.manager.offload_soon(3)
    until("it is not queued", lambda: room.manager.queues()[TransferPath.DEVICE_TO_HOST].queued == 3)
    room.manager.scheduler.layer_done(0)
    assert room.manager.occupancy().host.inactive == 0
    assert room.manager.explain(held[0].identity.key).waits == ["on its way to host"]
    room.manager.scheduler.end_iteration()
    assert offload.result(PATIENCE_S) == 3
    assert room.manager.occupancy().host.inactive == 3
    release(held)


def test_at_the_end_of_an_iteration_blocks_leave_by_themselves_where_told_so() -> None:
    with closing(CoreRoom(disk=DISK, offload_blocks_per_iteration=2)) as room:
        room.manager.scheduler.begin_iteration()
        release(room.compute(room.sequence(3)))
        assert room.manager.occupancy().offload_waiting == 3
        room.manager.scheduler.end_iteration()
        until("nothing leaves", lambda: room.manager.totals().put == {"disk": 2})
        assert room.manager.occupancy().offload_waiting == 1


def test_the_model_tells_its_layers_in_order_or_is_told_off(room: CoreRoom) -> None:
    scheduler = room.manager.scheduler
    with pytest.raises(ProgressError, match="call begin_iteration first"):
        scheduler.end_iteration()
    scheduler.begin_iteration()
    with pytest.raises(ProgressError, match="iteration 1 is under way"):
        scheduler.begin_iteration()
    with pytest.raises(ProgressError, match="layer 1 is done, but 0 of 2 layers were"):
        scheduler.layer_done(1)
    scheduler.layer_done(0)
    scheduler.end_iteration()
    assert scheduler.progress.iteration == 1


def test_layers_come_from_the_host_one_after_another_and_make_whole_blocks(room: CoreRoom) -> None:
    wanted = room.sequence(4)
    room.compute_and_release(wanted)
    room.push_out_of_device()
    load = room.manager.onboard_by_layer(wanted)
    for layer in range(room.config.layers):
        assert load.wait_layer(layer)
        for place, identity in zip(load.places(), wanted, strict=True):
            expected = identity.key.sequence_hash % 400 + layer
            assert bool((room.manager.device.layer_view(place, layer) == expected).all())
    assert not room.device_pool.has(wanted[0].key)
    blocks = load.finish()
    assert [block.identity for block in blocks] == wanted
    assert all(room.is_right(block) for block in blocks)
    assert room.events(tier=1)[-4:] == [("STORE", 1, COPY, low(identity)) for identity in wanted]
    assert room.manager.totals().requests.loaded == {"G2": 4}
    assert room.manager.occupancy().host.active == 0
    release(blocks)


def test_layers_are_stored_as_the_model_finishes_them(room: CoreRoom) -> None:
    wanted = room.sequence(3)
    places = room.manager.allocate(3).blocks
    with pytest.raises(ProgressError, match="begin_iteration first"):
        room.manager.offload_by_layer(places, wanted)
    room.manager.scheduler.begin_iteration()
    store = room.manager.offload_by_layer(places, wanted)
    host = room.manager._tiers.host
    assert host is not None
    for layer in range(room.config.layers):
        for place, identity in zip(store.places(), wanted, strict=True):
            room.write_layer(place, identity, layer)
        until_left(room, 3 * (room.config.layers - layer))
        room.manager.scheduler.layer_done(layer)
        until_left(room, 3 * (room.config.layers - layer - 1))
    room.manager.scheduler.end_iteration()
    blocks = store.finish()
    assert all(room.is_right(block) for block in blocks)
    until("they do not go on to the disk", lambda: room.manager.totals().put == {"disk": 3})
    assert room.manager.occupancy().offload_waiting == 0
    assert room.events(tier=1) == [("STORE", 1, 0, low(identity)) for identity in wanted]
    assert room.events(tier=2) == [("STORE", 2, COPY, low(identity)) for identity in wanted]
    release(blocks)
    room.push_out_of_device()
    found = room.manager.onboard(wanted)
    assert all(room.is_right(block) for block in found.blocks)
    release(found.blocks)


def test_blocks_whose_layers_did_not_get_through_wait_for_offload_as_others_do() -> None:
    limits = {TransferPath.DEVICE_TO_HOST: PathLimits(deadline_s=2.0)}
    with closing(CoreRoom(disk=DISK, transfers=limits)) as room:
        wanted = room.sequence(2)
        places = room.manager.allocate(2).blocks
        room.manager.scheduler.begin_iteration()
        store = room.manager.offload_by_layer(places, wanted)
        for place, identity in zip(store.places(), wanted, strict=True):
            room.write_layer(place, identity, 0)
            room.write_layer(place, identity, 1)
        path = TransferPath.DEVICE_TO_HOST
        until("nothing expires", lambda: room.manager.totals().paths[path].failures.get("deadline") == 4)
        room.manager.scheduler.end_iteration()
        blocks = store.finish()
        assert room.manager.occupancy().host == PoolOccupancy(0, 0, 16)
        assert room.manager.occupancy().offload_waiting == 2
        assert room.manager.offload(2) == 2
        assert room.manager.occupancy().host.inactive == 2
        release(blocks)


def test_every_call_can_be_awaited_while_the_loop_goes_on(room: CoreRoom) -> None:
    wanted = on_disk(room, 4)
    forget_calls(room)

    async def serve() -> None:
        manager = AsyncKvBlockManager(room.manager)
        assert await manager.match(wanted) == []
        with room.agent.held():
            load = asyncio.create_task(manager.onboard(wanted))
            await until_called(room)
            assert not load.done()
        found = await load
        assert found.sources == ["disk"] * 4
        release(found.blocks)
        places = (await manager.allocate(2)).blocks
        fresh = room.sequence(2, 5_000)
        room.write(places, fresh)
        release(await manager.register_many(await manager.complete(places, fresh)))
        assert await manager.offload(2) == 2
        await manager.flush_events()
        assert await manager.reset("device") == 8

    asyncio.run(serve())


def test_a_cancelled_await_leaves_nothing_held(room: CoreRoom) -> None:
    wanted = on_disk(room, 2)
    forget_calls(room)

    async def serve() -> None:
        with room.agent.held():
            load = asyncio.create_task(AsyncKvBlockManager(room.manager).onboard(wanted))
            await until_called(room)
            load.cancel()
            with pytest.raises(asyncio.CancelledError):
                await load

    asyncio.run(serve())
    until("guards are left", lambda: room.manager.occupancy().host.active == 0)


def test_a_load_that_closing_cuts_off_says_so(room: CoreRoom) -> None:
    wanted = on_disk(room, 2)
    forget_calls(room)
    with room.agent.held():
        load = room.manager.onboard_soon(wanted)
        assert room.agent.came.acquire(timeout=PATIENCE_S)
        closing = threading.Thread(target=room.manager.close)
        closing.start()
        with pytest.raises(ManagerClosedError, match="open another one"):
            load.result(PATIENCE_S)
    closing.join()


def test_an_await_that_closing_cuts_off_is_not_cancelled(room: CoreRoom) -> None:
    wanted = on_disk(room, 2)
    forget_calls(room)

    async def serve() -> None:
        manager = AsyncKvBlockManager(room.manager)
        with room.agent.held():
            load = asyncio.create_task(manager.onboard(wanted))
            await until_called(room)
            closing = asyncio.create_task(manager.close())
            with pytest.raises(ManagerClosedError):
                await load
        await closing

    asyncio.run(serve())


def test_a_budget_loads_what_it_allows_and_says_why_no_more(room: CoreRoom) -> None:
    wanted = room.sequence(6)
    room.compute_and_release(wanted)
    room.push_out_of_device()
    release(room.manager.onboard(wanted[:1]).blocks)  # so that the path has been measured
    plan = room.manager.estimate(wanted, budget_ms=1e-6)
    assert (plan.blocks, plan.verdict) == (1, "over_budget")  # the first is on the device
    found = room.manager.onboard(wanted, budget_ms=1e-6)
    assert found.sources == ["G1"]
    assert found.ended == "over_budget"
    assert found.account.found == {2: 5}
    assert found.account.not_loaded == {"over_budget": 5}
    release(found.blocks)


def test_where_the_engine_computes_faster_than_the_path_loads_nothing_is_loaded() -> None:
    with closing(CoreRoom(prefill_tokens_per_s=1e9)) as room:
        wanted = room.sequence(4)
        room.compute_and_release(wanted)
        room.push_out_of_device()
        first = room.manager.onboard(wanted)
        assert first.plan.unmeasured == (TransferPath.HOST_TO_DEVICE,)
        assert len(first.blocks) == 4
        release(first.blocks)
        room.push_out_of_device()
        found = room.manager.onboard(wanted)
        assert found.blocks == []
        assert found.ended == "recompute_is_sooner"
        assert found.account.not_loaded == {"recompute_is_sooner": 4}


@pytest.mark.parametrize(
    ("policy", "skipped"),
    [("presence", {("host", "present"): 2}), ("all", {})],
)
def test_a_block_that_the_host_has_is_skipped_with_the_reason(policy: str, skipped: dict[tuple[str, str], int]) -> None:
    with closing(CoreRoom(offload_policy=policy)) as room:
        wanted = room.sequence(2)
        room.compute_and_release(wanted)
        room.push_out_of_device()
        release(room.compute(wanted))
        room.manager.offload(2)
        assert room.manager.totals().offload_skipped == skipped
        assert room.manager.occupancy().host.inactive == 2


def test_a_frequency_policy_lets_a_block_pass_when_it_is_used_again() -> None:
    with closing(CoreRoom(disk=DISK, offload_policy="presence_frequency")) as room:
        wanted = room.sequence(2)
        room.compute_and_release(wanted)
        assert room.manager.totals().offload_skipped == {("host", "too_rarely_used"): 2}
        (device, host, disk) = room.manager.explain(wanted[0].key).copies
        assert (device.state, host.state, disk.state) == ("inactive", "absent", "absent")
        assert host.next == disk.next == "used 1 times, and 2 are wanted"
        release(room.manager.onboard(wanted[:1]).blocks)
        assert room.manager.explain(wanted[0].key).waits == ["queued for offload"]
        assert room.manager.offload(5) == 1
        (_, host, disk) = room.manager.explain(wanted[0].key).copies
        assert (host.state, host.owner) == ("inactive", "core")
        assert (disk.state, disk.location, disk.owner) == ("seen", "disk", "storage agent")


def test_many_threads_may_use_one_manager(room: CoreRoom) -> None:
    wrong: list[int] = []

    def serve(number: int) -> None:
        for turn in range(6):
            wanted = room.sequence(2, 1_000 * ((number + turn) % 5))
            found = room.manager.onboard(wanted)
            blocks = [*found.blocks, *room.compute(wanted[len(found.blocks) :])]
            wrong.extend(block.index for block in blocks if not room.is_right(block))
            release(blocks)
            room.manager.offload(4)

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert room.manager.occupancy().device.active == 0


def test_targets_of_a_cancelled_load_go_back_to_the_pool_once_nothing_can_write_them() -> None:
    limits = {TransferPath.DISK_TO_DEVICE: PathLimits(concurrency=1)}
    with closing(CoreRoom(disk=DISK, transfers=limits, transfer_blocks=2)) as room:
        wanted = on_disk(room, 6)
        forget_calls(room)
        targets = room.manager.allocate(6).blocks
        with room.agent.held():
            future = room.manager.onboard_soon(wanted, targets)
            assert room.agent.came.acquire(timeout=PATIENCE_S)
            future.cancel()
            # Two may still be written; four were not begun.
            until("targets are lost", lambda: room.manager.occupancy().device.active == 2)
        until("targets are lost", lambda: room.manager.occupancy().device.active == 0)


def test_among_waiting_requests_the_one_of_lower_priority_goes_first() -> None:
    limits = {TransferPath.DISK_TO_DEVICE: PathLimits(concurrency=1)}
    with closing(CoreRoom(disk=DISK, transfers=limits, transfer_blocks=1)) as room:
        wanted = on_disk(room, 3)
        gets: list[int] = []
        with room.agent.held():
            forget_calls(room)
            first = room.manager.onboard_soon(wanted[:1])
            assert room.agent.came.acquire(timeout=PATIENCE_S)
            others = [room.manager.onboard_soon([wanted[n]], priority=priority) for n, priority in ((1, 5), (2, -5))]
            until("they do not wait", lambda: room.manager.queues()[TransferPath.DISK_TO_DEVICE].queued == 2)
            others[0].add_done_callback(lambda _: gets.append(1))
            others[1].add_done_callback(lambda _: gets.append(2))
        for each in (first, *others):
            release(each.result().blocks)
        until("not both have ended", lambda: len(gets) == 2)
        assert gets == [2, 1]
