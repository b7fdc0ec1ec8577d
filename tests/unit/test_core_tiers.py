"""The manager over every set of tiers: what is where, what is brought, and in which column each block is counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from event_plane.schema import RecordFlag, Tier
from kvbm_core.config import TierVolumes
from kvbm_core.errors import BlockStateError, BudgetError, ConfigError, ManagerClosedError
from kvbm_core.hooks import BlockStep, LifeStep
from kvbm_core.paths import TransferPath
from storage_agent.port import Result
from storage_agent.shards import Shard
from tests.core_room import DISK, REMOTE, CoreRoom, low, number_of, release

COPY = RecordFlag.COPY


@pytest.fixture
def room() -> Iterator[CoreRoom]:
    with closing(CoreRoom(disk=DISK)) as opened:
        yield opened


def test_one_document_in_three_tiers_is_counted_in_three_columns(room: CoreRoom) -> None:
    document = room.sequence(6)
    room.compute_and_release(document)
    room.push_out_of_host()
    release(room.manager.onboard(document[:4]).blocks)  # from the disk, to host and device
    room.push_out_of_device()
    release(room.manager.onboard(document[:2]).blocks)
    assert [room.device_pool.has(each.key) for each in document] == [True] * 2 + [False] * 4
    assert [room.host_pool.has(each.key) for each in document] == [True] * 4 + [False] * 2

    found = room.manager.onboard([*document, *room.sequence(1, 7_000)])
    block_bytes = room.config.block_bytes
    assert found.sources == ["G1", "G1", "G2", "G2", "disk", "disk"]
    assert all(room.is_right(block) for block in found.blocks)
    assert found.ended == "miss"
    account = found.account
    assert (account.asked, account.ready, account.waiting, account.absent, account.untried) == (7, 2, 0, 1, 0)
    assert account.found == {Tier.G2: 2, Tier.G3: 2}
    assert account.loaded == {"G2": 2, "disk": 2}
    assert account.not_loaded == {}
    assert (account.tokens_asked, account.tokens_matched) == (28, 24)
    assert account.bytes_asked == 7 * block_bytes
    assert account.bytes_moved == {
        TransferPath.HOST_TO_DEVICE: 2 * block_bytes,
        TransferPath.DISK_TO_DEVICE: 2 * block_bytes,
    }
    assert account.load_seconds.keys() == account.bytes_moved.keys()
    assert all(seconds > 0 for seconds in account.load_seconds.values())
    release(found.blocks)


def test_totals_are_the_sum_of_what_requests_were_told(room: CoreRoom) -> None:
    wanted = room.sequence(4)
    room.compute_and_release(wanted)
    told = [room.manager.onboard(wanted), room.manager.onboard(room.sequence(3, 4_000))]
    requests = room.manager.totals().requests
    assert requests.asked == sum(each.account.asked for each in told) == 7
    assert requests.ready == 4
    assert requests.absent + requests.untried == 3
    assert room.manager.totals().paths[TransferPath.DEVICE_TO_HOST].blocks == 4
    for each in told:
        release(each.blocks)


def test_eviction_pressure_is_a_column_of_each_pool(room: CoreRoom) -> None:
    room.push_out_of_host()
    occupancy, counters = room.manager.pools()["host"]
    assert (occupancy.active, occupancy.inactive, occupancy.reset) == (0, 16, 0)
    assert (counters.allocated, counters.evicted) == (16, 0)
    room.compute_and_release(room.sequence(4))
    assert room.manager.pools()["host"][1].evicted == 4


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"device_layout": "layer_separate"}, id="a buffer a layer"),
        pytest.param({"device_layout": "layer_separate_outer_first"}, id="outer first"),
        pytest.param({"device_order": "NHD", "host_order": "HND"}, id="heads first in the host"),
        pytest.param({"host_order": "universal"}, id="universal in the host"),
        pytest.param({"dtype": "float8_e4m3fn", "alignment_bytes": 4_096}, id="fp8 at pages"),
    ],
)
def test_blocks_come_back_right_whatever_the_layouts(settings: dict[str, Any]) -> None:
    with closing(CoreRoom(disk=DISK, **settings)) as room:
        wanted = room.sequence(5)
        room.compute_and_release(wanted)
        room.push_out_of_device()
        from_host = room.manager.onboard(wanted)
        assert from_host.sources == ["G2"] * 5
        assert all(room.is_right(block) for block in from_host.blocks)
        release(from_host.blocks)
        room.push_out_of_host()
        room.push_out_of_device()
        from_disk = room.manager.onboard(wanted)
        assert from_disk.sources == ["disk"] * 5
        assert all(room.is_right(block) for block in from_disk.blocks)
        release(from_disk.blocks)


@pytest.mark.parametrize(("tier", "volume"), [({"disk": DISK}, "disk"), ({"remote": REMOTE}, "far")])
def test_without_a_host_blocks_go_through_a_staging_buffer(tier: dict[str, TierVolumes], volume: str) -> None:
    with closing(CoreRoom(host_blocks=0, staging_blocks=4, **tier)) as room:
        wanted = room.sequence(8)
        room.compute_and_release(wanted)
        room.push_out_of_device()
        found = room.manager.onboard(wanted)
        assert found.sources == [volume] * 8
        assert all(room.is_right(block) for block in found.blocks)
        assert {event[1] for event in room.events()} == {1}  # nothing is told of the buffer
        assert room.manager.occupancy().host == (0, 0, 0)
        staging = room.manager._tiers.staging
        assert staging is not None
        assert staging.pool.occupancy() == (0, 0, 4)
        release(found.blocks)


def test_with_a_host_remote_blocks_come_to_it_first(room: CoreRoom) -> None:
    with closing(CoreRoom(remote=REMOTE)) as room:
        wanted = room.sequence(5)
        room.compute_and_release(wanted)
        room.push_out_of_host()
        found = room.manager.onboard(wanted)
        assert found.sources == ["far"] * 5
        assert found.account.found == {Tier.G4: 5}
        moved = found.account.bytes_moved
        assert moved == dict.fromkeys(
            (TransferPath.REMOTE_TO_HOST, TransferPath.HOST_TO_DEVICE), 5 * room.config.block_bytes
        )
        assert all(room.is_right(block) for block in found.blocks)
        assert all(room.host_pool.has(each.key) for each in wanted)
        release(found.blocks)


def test_disk_and_remote_both_get_a_block_and_the_faster_gives_it() -> None:
    with closing(CoreRoom(disk=DISK, remote=REMOTE)) as room:
        wanted = room.sequence(3)
        room.compute_and_release(wanted)
        assert room.manager.totals().put == {"disk": 3, "far": 3}
        room.push_out_of_host()
        found = room.manager.onboard(wanted)
        assert found.sources == ["disk"] * 3
        release(found.blocks)


def test_volumes_that_are_not_named_are_never_written() -> None:
    with closing(CoreRoom()) as room:
        room.compute_and_release(room.sequence(4))
        room.push_out_of_host()
        assert room.manager.onboard(room.sequence(4)).account.absent == 4
        assert [volume.blocks for volume in room.agent.stat().volumes] == [0, 0]


def test_a_device_alone_offloads_nothing_and_says_so() -> None:
    with closing(CoreRoom(host_blocks=0)) as room:
        room.compute_and_release(room.sequence(2))
        assert room.manager.queues() == {}
        assert room.manager.totals().offload_skipped == {("", "no_target"): 2}
        with pytest.raises(ConfigError, match="host_blocks = 0"):
            room.manager.onboard_by_layer(room.sequence(1))


def test_a_block_behind_a_gap_of_the_device_is_used_where_it_is(room: CoreRoom) -> None:
    wanted = room.sequence(4)
    room.compute_and_release(wanted)
    room.push_out_of_device()
    release(room.manager.onboard(wanted).blocks)
    release(room.compute(room.sequence(6, 3_000)))  # pushes out two of them
    found = room.manager.onboard(wanted)
    assert sorted(found.sources) == ["G1", "G1", "G2", "G2"]
    assert [block.identity for block in found.blocks] == wanted
    release(found.blocks)


def test_targets_of_the_caller_are_written_in_order_and_the_rest_comes_back(room: CoreRoom) -> None:
    wanted = room.sequence(3)
    room.compute_and_release(wanted)
    room.push_out_of_device()
    targets = room.manager.allocate(5).blocks
    places = [target.index for target in targets]
    found = room.manager.onboard([*wanted, *room.sequence(2, 8_000)], targets)
    assert [block.index for block in found.blocks] == places[:3]
    assert [target.index for target in found.unused] == places[3:]
    room.write(found.unused, room.sequence(2, 8_000))
    computed = room.manager.register_many(room.manager.complete(found.unused, room.sequence(2, 8_000)))
    assert room.manager.occupancy().device.active == 5
    release([*found.blocks, *computed])
    with pytest.raises(BlockStateError):
        targets[0].reset()


def test_too_few_targets_are_refused_and_stay_the_callers(room: CoreRoom) -> None:
    targets = room.manager.allocate(1).blocks
    with pytest.raises(ValueError, match="1 targets for 2 blocks"):
        room.manager.onboard(room.sequence(2), targets)
    targets[0].release()
    assert room.manager.occupancy().device.reset == 8


def test_a_host_block_whose_bytes_changed_is_never_served_and_is_forgotten(room: CoreRoom) -> None:
    wanted = room.sequence(3)
    room.compute_and_release(wanted)
    room.push_out_of_device()
    place = room.host_pool.find(wanted[1].key)
    assert place is not None
    host = room.manager._tiers.host
    assert host is not None
    host.storage.payload(place.slot)[7] ^= 1
    found = room.manager.onboard(wanted)
    assert [block.identity for block in found.blocks] == wanted[:1]
    assert found.ended == "wrong_bytes"
    assert found.account.not_loaded == {"wrong_bytes": 1, "behind_a_miss": 1}
    assert room.manager.totals().paths[TransferPath.HOST_TO_DEVICE].failures == {"wrong_bytes": 1}
    assert not room.host_pool.has(wanted[1].key)
    assert not room.device_pool.has(wanted[1].key)
    assert ("REMOVE", 2, 0, low(wanted[1])) in room.events(tier=2)
    release(found.blocks)
    again = room.manager.onboard(wanted)
    assert again.sources == ["G1", "disk", again.sources[2]]
    assert all(room.is_right(block) for block in again.blocks)
    release(again.blocks)


def test_a_host_block_whose_bytes_changed_before_it_is_put_is_not_put(room: CoreRoom) -> None:
    wanted = room.sequence(3)
    room.compute_and_release(wanted)
    room.push_out_of_device()
    room.agent.delete("d-1", "disk", [each.key for each in wanted])
    place, host = room.host_pool.find(wanted[1].key), room.manager._tiers.host
    assert place is not None
    assert host is not None
    host.storage.payload(place.slot)[7] ^= 1

    room.compute_and_release(wanted)  # on the device anew, so that what the host has of them is put again

    assert room.agent.holding([each.key for each in wanted]) == ["disk", "", "disk"]
    assert not room.host_pool.has(wanted[1].key)
    assert room.manager.totals().paths[TransferPath.HOST_TO_DISK].failures == {"wrong_bytes": 1}


def test_verification_can_be_left_out() -> None:
    with closing(CoreRoom(verify_copies=False)) as room:
        wanted = room.sequence(2)
        room.compute_and_release(wanted)
        room.push_out_of_device()
        found = room.manager.onboard(wanted)
        assert all(room.is_right(block) for block in found.blocks)
        release(found.blocks)


def test_a_workers_shard_is_put_and_read_as_its_part_of_the_block() -> None:
    with closing(CoreRoom(disk=DISK, heads=4, tensor_parallel_size=2, tensor_parallel_rank=1)) as room:
        wanted = room.sequence(2)
        room.compute_and_release(wanted)
        buffer = bytearray(room.config.block_bytes)
        (ours,) = room.agent.get([wanted[0].key], [memoryview(buffer)], Shard(1, 2))
        assert ours.result is Result.HIT
        assert set(np.frombuffer(buffer, np.float16)) == {number_of(wanted[0]) + layer for layer in (0, 1)}
        (theirs,) = room.agent.get([wanted[0].key], [memoryview(buffer)], Shard(0, 2))
        assert theirs.result is not Result.HIT
        room.push_out_of_host()
        found = room.manager.onboard(wanted)
        assert found.sources == ["disk"] * 2
        assert all(room.is_right(block) for block in found.blocks)
        release(found.blocks)


def test_a_worker_that_holds_what_another_does_leaves_the_volumes_to_it() -> None:
    with closing(CoreRoom(disk=DISK, heads=2, tensor_parallel_size=4, tensor_parallel_rank=1)) as room:
        room.compute_and_release(room.sequence(2))
        assert room.manager.totals().offload_skipped == {("disk", "other_rank"): 2}
        assert room.manager.totals().put == {}


def test_an_operator_empties_a_tier(room: CoreRoom) -> None:
    wanted = room.sequence(4)
    room.compute_and_release(wanted)
    held = room.manager.match(wanted[:1])
    with pytest.raises(BlockStateError, match="1 blocks in use"):
        room.manager.reset("device")
    release(held)
    assert [room.manager.reset(tier) for tier in ("device", "host", "disk")] == [4, 4, 4]
    assert room.manager.onboard(wanted).account.absent + room.manager.onboard(wanted).account.untried == 4
    with pytest.raises(ConfigError, match=r"no tier 'remote'.*device, host, disk"):
        room.manager.reset("remote")


def test_hooks_hear_of_copies_in_every_pool(room: CoreRoom) -> None:
    steps: list[BlockStep] = []
    room.manager.hooks.add(steps.append)
    room.compute_and_release(room.sequence(1))
    registered = [step.pool for step in steps if step.step is LifeStep.REGISTERED]
    assert registered == ["device:0", "host"]


def test_what_a_machine_cannot_hold_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(BudgetError, match="change headroom_bytes"):
        CoreRoom(headroom_bytes=1 << 49)


def test_a_closed_manager_moves_nothing_and_says_so(room: CoreRoom) -> None:
    wanted = room.sequence(1)
    room.manager.close()
    room.manager.close()
    for ask in (
        lambda: room.manager.onboard(wanted),
        lambda: room.manager.offload(1),
        lambda: room.manager.match(wanted),
        lambda: room.manager.allocate(1),
    ):
        with pytest.raises(ManagerClosedError, match="open another one"):
            ask()
