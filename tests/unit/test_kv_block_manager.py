"""The block manager over a real storage agent (NIXL on files) and a real ZeroMQ publisher."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from event_plane.schema import LOCATION_ALL, Batch, BatchKind, EventType, RecordFlag, Tier, producer_id
from event_plane.transport import Message, ResendEnd
from event_plane.wire import decode
from event_plane.zmq_transport import ZmqPublisher, ZmqSubscriber
from kvbm_core.block import ImmutableBlock
from kvbm_core.config import KvbmConfig, TierVolumes
from kvbm_core.identity import BlockIdentity
from kvbm_core.manager import KvBlockManager
from kvbm_core.paths import TransferPath
from kvbm_core.pool import BlockPool, PoolOccupancy
from kvbm_core.sequence import TokenBlockSequence
from storage_agent.agent import StorageAgent
from storage_agent.descriptor import VolumeDescriptor

COPY = RecordFlag.COPY
CONFIG: dict[str, Any] = {
    "layers": 2,
    "page_tokens": 4,
    "heads": 2,
    "head_dim": 16,
    "device_blocks": 4,
    "host_blocks": 8,
    "disk": TierVolumes(volumes=("slow",), tenant_volumes={"forge": ("fast", "slow")}, retention_s=60.0),
    "hash_secret": "a secret of the tests",
    "model": "tiny",
}


class Room:
    """A core, its agent with two volumes, and what the core has published."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.config = KvbmConfig(**CONFIG | changes)
        self.publisher = ZmqPublisher("zmq+tcp://127.0.0.1:0", producer=producer_id("core"))
        self.agent = StorageAgent("agent", publisher=None, allowed_roots=[folder])
        self.files = {name: folder / f"{name}.slab" for name in ("fast", "slow")}
        for name, capacity_blocks in (("fast", 2), ("slow", 16)):
            self.agent.register_volume(
                VolumeDescriptor(
                    id=name,
                    path=str(self.files[name]),
                    capacity_blocks=capacity_blocks,
                    block_bytes_max=self.config.block_bytes,
                    speed_rank=int(name == "slow"),
                )
            )
        self.manager = KvBlockManager(self.config, self.publisher, self.agent)

    @property
    def device_pool(self) -> BlockPool:
        return self.manager._tiers.device.pool

    @property
    def host_pool(self) -> BlockPool:
        assert self.manager._tiers.host is not None
        return self.manager._tiers.host.pool

    def sequence(self, blocks: int, tenant: str = "acme", first_token: int = 0) -> list[BlockIdentity]:
        tokens = np.arange(first_token, first_token + blocks * self.config.page_tokens, dtype=np.uint32)
        return TokenBlockSequence(self.config, tenant, tokens).blocks

    def compute(self, wanted: list[BlockIdentity]) -> list[ImmutableBlock]:
        """Write each block with a number of its own, as a model would, and register it."""
        places = self.manager.allocate(len(wanted)).blocks
        for place, identity in zip(places, wanted, strict=True):
            self.manager.device_tensor[place.index] = number_of(identity)
        return self.manager.register_many(self.manager.complete(places, wanted))

    def compute_and_release(self, wanted: list[BlockIdentity], *, offload: bool = True) -> None:
        held = self.compute(wanted)
        if offload:
            self.manager.offload(100)
        for block in reversed(held):
            block.release()

    def push_out_of_device(self, first_token: int = 9_000) -> None:
        """Fill the device with blocks that nobody asks for again, and do not offload them."""
        self.compute_and_release(self.sequence(self.config.device_blocks, "other", first_token), offload=False)
        self.manager._offloads._queue.clear()

    def batches(self) -> list[Batch]:
        """Everything the core has published, from its publisher's resend buffer."""
        self.manager.flush_events()
        self.publisher.flush()
        subscriber = ZmqSubscriber("core", str(self.publisher.url), str(self.publisher.resend_url), foreign=False)
        try:
            subscriber.ask_resend(0, 1)
            received: list[Message | ResendEnd] = []
            while not any(isinstance(message, ResendEnd) for message in received):
                assert zmq.select(subscriber.pollables(), [], [], 10)[0], "the publisher does not answer"
                received += subscriber.receive(100)
            return [decode(message.payload) for message in received if isinstance(message, Message)]
        finally:
            subscriber.close()

    def events(self, tier: int | None = None) -> list[tuple[str, int, str, int, int]]:
        """(type, tier, location, flags, low half of the hash) of every event, or of a tier's, in order.

        Neighbouring Stores travel in ascending depth, so the tiers of one step are mixed.
        """
        return [
            (
                EventType(record["event_type"]).name,
                int(record["tier"]),
                "" if record["storage_location"] == LOCATION_ALL else batch.locations[record["storage_location"]],
                int(record["flags"]),
                int(record["sequence_hash_lo"]),
            )
            for batch in self.batches()
            for record in batch.records
            if tier in (None, record["tier"])
        ]

    def close(self) -> None:
        self.manager.close()
        self.publisher.close()
        self.agent.close()


def number_of(identity: BlockIdentity) -> int:
    return identity.key.sequence_hash % 1_000


def low(identity: BlockIdentity) -> int:
    return identity.key.sequence_hash & (2**64 - 1)


def holds_its_own_bytes(room: Room, block: ImmutableBlock) -> bool:
    bytes_there = room.manager.device_tensor[block.index]
    return torch.equal(bytes_there, torch.full_like(bytes_there, number_of(block.identity)))


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    opened = Room(tmp_path)
    yield opened
    opened.close()


def test_a_computed_block_is_announced_with_its_place_in_the_tree(room: Room) -> None:
    first, second = room.sequence(2)
    held = room.compute([first, second])
    *begun, batch = room.batches()
    assert [each.kind for each in begun] == [BatchKind.SNAPSHOT_BEGIN, BatchKind.SNAPSHOT_END]
    assert batch.producer == producer_id("core")
    assert batch.namespaces == (room.config.namespace_of("acme"),)
    assert batch.locations == ("device:0",)
    record = batch.records[1]
    assert (record["event_type"], record["flags"], record["tier"], record["depth"]) == (EventType.STORE, 0, 1, 1)
    assert int(record["sequence_hash_hi"]) << 64 | int(record["sequence_hash_lo"]) == second.key.sequence_hash
    assert int(record["parent_hash_hi"]) << 64 | int(record["parent_hash_lo"]) == first.key.sequence_hash
    assert int(record["prefix_hash_hi"]) << 64 | int(record["prefix_hash_lo"]) == first.key.sequence_hash
    assert (record["block_size"], record["block_tokens"]) == (room.config.block_bytes, 4)
    assert len(held) == 2


def test_a_snapshot_names_what_both_tiers_hold_as_copies_after_what_was_noted(room: Room) -> None:
    wanted = room.sequence(2)
    room.compute_and_release(wanted)
    room.manager.announce_snapshot()
    *before, begin, chunk, end = room.batches()
    assert [each.kind for each in (begin, chunk, end)] == [
        BatchKind.SNAPSHOT_BEGIN, BatchKind.SNAPSHOT_CHUNK, BatchKind.SNAPSHOT_END,
    ]  # fmt: skip
    assert sum(len(each.records) for each in before) == 4
    placed = [
        (chunk.locations[record["storage_location"]], int(record["sequence_hash_lo"])) for record in chunk.records
    ]
    assert sorted(placed) == sorted((place, low(each)) for place in ("device:0", "host") for each in wanted)
    assert {int(record["flags"]) for record in chunk.records} == {COPY}


def test_a_snapshot_that_a_subscriber_asks_for_is_published(room: Room) -> None:
    room.compute(room.sequence(1))
    subscriber = ZmqSubscriber("core", str(room.publisher.url), str(room.publisher.resend_url), foreign=False)
    with closing(subscriber):
        assert subscriber.ask_snapshot(producer_id("core"), room.publisher.epoch)
        deadline_s = time.monotonic() + 60
        while room.publisher.stat().snapshots < 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
    assert room.batches()[-1].kind is BatchKind.SNAPSHOT_END


def test_a_closed_core_holds_nothing(room: Room) -> None:
    room.compute(room.sequence(1))
    room.manager.close()
    room.manager.announce_snapshot()
    assert [each.kind for each in room.batches()][-2:] == [BatchKind.SNAPSHOT_BEGIN, BatchKind.SNAPSHOT_END]


def test_offload_copies_to_host_as_a_copy_and_puts_to_the_tenants_volume(room: Room) -> None:
    wanted = room.sequence(2)
    room.compute_and_release(wanted)
    assert room.events(tier=1) == [("STORE", 1, "device:0", 0, low(identity)) for identity in wanted]
    assert room.events(tier=2) == [("STORE", 2, "host", COPY, low(identity)) for identity in wanted]
    assert room.manager.totals().put == {"slow": 2}
    assert room.manager.occupancy().host == PoolOccupancy(active=0, inactive=2, reset=6)
    buffers = [bytearray(room.config.block_bytes) for _ in wanted]
    outcomes = room.agent.get([identity.key for identity in wanted], [memoryview(buffer) for buffer in buffers])
    assert [outcome.volume for outcome in outcomes] == ["slow", "slow"]
    for buffer, identity in zip(buffers, wanted, strict=True):
        assert set(np.frombuffer(buffer, dtype=np.float16).tolist()) == {float(np.float16(number_of(identity)))}


def test_a_match_is_one_access_a_block(room: Room) -> None:
    wanted = room.sequence(3)
    room.compute_and_release(wanted[:2], offload=False)
    matched = room.manager.match(wanted)
    assert [block.identity for block in matched] == wanted[:2]
    assert room.events()[2:] == [("ACCESS", 1, "device:0", 0, low(identity)) for identity in wanted[:2]]
    assert room.batches()[-1].records["hits"].tolist()[-2:] == [1, 1]


def test_a_block_evicted_from_the_device_comes_back_from_the_host(room: Room) -> None:
    wanted = room.sequence(2)
    room.compute_and_release(wanted)
    room.push_out_of_device()
    before = len(room.events(tier=1))
    found = room.manager.onboard(wanted)
    assert found.sources == ["G2", "G2"]
    assert all(holds_its_own_bytes(room, block) for block in found.blocks)
    assert room.events(tier=2)[2:] == [("ACCESS", 2, "host", 0, low(identity)) for identity in wanted]
    events = room.events(tier=1)[before:]
    assert [event[0] for event in events[:2]] == ["REMOVE", "REMOVE"]
    assert events[2:] == [("STORE", 1, "device:0", COPY, low(identity)) for identity in wanted]
    assert room.manager.totals().requests.loaded == {"G2": 2}


def test_a_block_evicted_from_the_host_comes_back_from_its_volume(room: Room) -> None:
    wanted = room.sequence(3)
    room.compute_and_release(wanted)
    for first_token in (1_000, 2_000):
        room.compute_and_release(room.sequence(4, first_token=first_token))
    assert not any(room.host_pool.has(identity.key) for identity in wanted)
    found = room.manager.onboard(wanted)
    assert found.sources == ["slow"] * 3
    assert all(holds_its_own_bytes(room, block) for block in found.blocks)
    assert room.manager.totals().requests.loaded == {"slow": 3}
    assert room.events(tier=2)[-3:] == [("STORE", 2, "host", COPY, low(identity)) for identity in wanted]
    assert room.events(tier=1)[-3:] == [("STORE", 1, "device:0", COPY, low(identity)) for identity in wanted]
    assert room.manager.occupancy().offload_waiting == 0


def test_onboarding_stops_at_the_first_block_that_is_nowhere(room: Room) -> None:
    wanted = room.sequence(4)
    room.compute_and_release([wanted[0], wanted[1], wanted[3]])
    room.push_out_of_device()
    found = room.manager.onboard(wanted)
    assert [block.identity for block in found.blocks] == wanted[:2]
    assert found.ended == "miss"
    assert found.account.found == {Tier.G2: 3}
    assert found.account.absent == 1
    assert found.account.not_loaded == {"behind_a_miss": 1}


def test_a_flipped_byte_on_the_volume_is_a_counted_miss_and_never_registered(room: Room) -> None:
    wanted = room.sequence(3)
    room.compute_and_release(wanted)
    for first_token in (1_000, 2_000):
        room.compute_and_release(room.sequence(4, first_token=first_token))
    payload = np.full(room.config.block_bytes // 2, number_of(wanted[1]), dtype=np.float16).tobytes()
    place = room.files["slow"].read_bytes().index(payload)
    with room.files["slow"].open("r+b") as slab:
        slab.seek(place + 100)
        slab.write(bytes([payload[100] ^ 1]))
        os.fsync(slab.fileno())
    before = len(room.events())
    found = room.manager.onboard(wanted)
    assert [block.identity for block in found.blocks] == wanted[:1]
    assert found.account.not_loaded == {"corrupt": 1, "behind_a_miss": 1}
    stored = {event[1:5:3] for event in room.events()[before:] if event[0] == "STORE"}
    assert stored == {(2, low(wanted[0])), (1, low(wanted[0])), (2, low(wanted[2]))}


def test_a_full_volume_passes_blocks_on_and_the_last_one_refuses(tmp_path: Path) -> None:
    room = Room(tmp_path, device_blocks=24, host_blocks=24)
    room.compute_and_release(room.sequence(20, "forge"))
    totals = room.manager.totals()
    assert totals.put == {"fast": 2, "slow": 16}
    assert totals.put_fell_back == {"fast": 18}
    assert totals.put_refused == {"full": 2}
    room.close()


def test_a_volume_that_is_not_there_any_more_refuses_and_is_counted(tmp_path: Path) -> None:
    room = Room(tmp_path, disk=TierVolumes(volumes=("fast",), retention_s=60.0))
    room.agent.unregister_volume("fast")
    room.compute_and_release(room.sequence(2))
    assert room.manager.totals().put_refused == {"failed": 2}
    assert room.manager.totals().paths[TransferPath.DEVICE_TO_HOST].blocks == 2
    room.close()


def test_blocks_that_cannot_wait_are_counted_by_reason(tmp_path: Path) -> None:
    room = Room(tmp_path, offload_queue_blocks=3)
    room.compute_and_release(room.sequence(4), offload=False)
    assert room.manager.totals().offload_skipped == {("", "queue_full"): 1}
    assert room.manager.occupancy().offload_waiting == 3
    room.compute_and_release(room.sequence(4, first_token=500), offload=False)
    assert room.manager.offload(100) == 3
    assert room.manager.totals().offload_skipped == {("", "queue_full"): 5, ("", "evicted_before_copy"): 3}
    room.close()


def test_a_duplicate_is_neither_announced_nor_offloaded_again(room: Room) -> None:
    (identity,) = room.sequence(1)
    held = room.compute([identity]) + room.compute([identity])
    assert held[0].index == held[1].index
    assert room.events() == [("STORE", 1, "device:0", 0, low(identity))]
    assert room.manager.occupancy().offload_waiting == 1


def test_a_device_in_full_use_ends_onboarding_with_a_reason(room: Room) -> None:
    wanted = room.sequence(2)
    room.compute_and_release(wanted)
    held = room.compute(room.sequence(4, first_token=500))
    found = room.manager.onboard(wanted)
    assert found.blocks == []
    assert found.account.not_loaded == {"device_exhausted": 2}
    assert room.manager.occupancy().host.active == 0
    assert len(held) == 4


def test_a_core_without_storage_keeps_to_its_own_tiers(tmp_path: Path) -> None:
    room = Room(tmp_path)
    alone = KvBlockManager(room.config, room.publisher)
    found = alone.onboard(room.sequence(3))
    assert found.blocks == []
    assert found.account.absent == 3
    alone.close()
    room.close()


def test_closing_clears_what_the_core_had_placed(room: Room) -> None:
    room.compute_and_release(room.sequence(2))
    room.manager.close()
    assert room.events()[-1][:2] == ("CLEAR", 0)


def test_what_was_published_is_what_the_pools_hold(tmp_path: Path) -> None:
    room = Room(tmp_path)
    rng = np.random.default_rng(3)
    for _ in range(60):
        wanted = room.sequence(int(rng.integers(1, 5)), first_token=int(rng.integers(0, 6)) * 100)
        held = room.manager.match(wanted)
        held += room.manager.onboard(wanted[len(held) :]).blocks
        assert all(holds_its_own_bytes(room, block) for block in held)
        held += room.compute(wanted[len(held) :])
        for block in reversed(held):
            block.release()
        room.manager.offload(int(rng.integers(0, 4)))
    placed: dict[int, set[int]] = {1: set(), 2: set()}
    for kind, tier, _, _, number in room.events():
        if kind == "STORE":
            assert number not in placed[tier]
            placed[tier].add(number)
        elif kind == "REMOVE":
            placed[tier].remove(number)
        else:
            assert number in placed[tier]
    for tier, pool in ((1, room.device_pool), (2, room.host_pool)):
        assert placed[tier] == {key.sequence_hash & (2**64 - 1) for key in pool.registered_keys()}
    assert room.manager.totals().requests.loaded["slow"] > 0
    room.close()
