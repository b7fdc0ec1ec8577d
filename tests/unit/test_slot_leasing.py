"""Leases on the slots of a slab, without sockets: what is given up, held back, announced and refused."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from event_plane.schema import Namespace
from storage_agent import leases
from storage_agent.block_header import PAGE_BYTES, BlockHeader, checksum
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import VolumeError
from storage_agent.kinds import prepare
from storage_agent.leases import BlockFacts
from storage_agent.port import BlockKey, Outcome, PutBlock, Result
from storage_agent.shards import ShardSpan
from storage_agent.slab_format import Superblock
from storage_agent.slot_leasing import Grant, SlotLeasing
from storage_agent.slot_locks import lock_shard, locked_shards, locks_work, shard_is_locked, unlock_shard
from storage_agent.slot_volume import SlotVolume

NAMESPACE = Namespace(tenant="leasing")
CAPACITY, SHARD_BYTES, SHARDS = 4, 4096, 2
SLAB = Superblock("v", CAPACITY, SHARD_BYTES * SHARDS)


def facts(number: int) -> BlockFacts:
    span = ShardSpan(SHARD_BYTES, 0, SHARDS)
    return BlockFacts(
        BlockKey(NAMESPACE.namespace_id, 0, number), NAMESPACE, 0, 0, 16, SHARD_BYTES * SHARDS, span, None
    )


class Slab:
    """An opened slab with what it announced, and one client's own descriptor of the file."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "v.slab"
        self.stored: list[BlockHeader] = []
        descriptor = VolumeDescriptor(
            id="v", path=str(self.path), capacity_blocks=CAPACITY, block_bytes_max=SHARD_BYTES * SHARDS
        )
        kind, opening = prepare(descriptor, [folder])
        volume = kind.open(replace(opening, on_stored=self.stored.extend))
        assert isinstance(volume, SlotVolume)
        assert volume.leasing is not None
        self.volume = volume
        self.leasing: SlotLeasing = volume.leasing
        self.fd = os.open(self.path, os.O_RDWR)

    def grant(self, number: int, shard: int) -> Grant:
        (granted,) = self.leasing.lease([(facts(number), shard)])
        assert isinstance(granted, Grant)
        return granted

    def write(self, grant: Grant, payload: bytes) -> None:
        assert lock_shard(self.fd, grant.slot, grant.shard)
        assert self.leasing.confirm([grant.lease]) == [True]
        os.pwrite(self.fd, payload, SLAB.slot_offset(grant.slot) + PAGE_BYTES + grant.shard * SHARD_BYTES)
        os.fdatasync(self.fd)

    def commit(self, grant: Grant, payload: bytes) -> Outcome:
        (outcome,) = self.leasing.commit([(grant.lease, checksum(payload))])
        unlock_shard(self.fd, grant.slot, grant.shard)
        return outcome

    def close(self) -> None:
        os.close(self.fd)
        self.volume.close()


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[Slab]:
    made = Slab(tmp_path)
    yield made
    made.close()


A, B = b"a" * SHARD_BYTES, b"b" * SHARD_BYTES


def test_a_block_is_announced_once_when_its_last_shard_is_durable(slab: Slab) -> None:
    first, second = slab.grant(1, 0), slab.grant(1, 1)
    assert first.slot == second.slot
    slab.write(second, B)
    slab.write(first, A)
    outcome = slab.commit(second, B)
    assert (outcome.result, outcome.reason[:6]) == (Result.PARTIAL, "1 of 2")
    assert slab.stored == []
    assert slab.volume.live_header(facts(1).key) is None
    assert slab.commit(first, A).result is Result.STORED
    (header,) = slab.stored
    assert (header.key, header.payload_bytes, header.span) == (facts(1).key, 2 * SHARD_BYTES, ShardSpan(4096, 0, 2))
    taken: list[bytes] = []

    def take(number: int, header: BlockHeader, payload: memoryview) -> str:
        taken.append(bytes(payload))
        return ""

    slab.volume.read([facts(1).key], take)
    assert taken == [A + B]
    assert [g.result for g in slab.leasing.lease([(facts(1), 0)]) if isinstance(g, Outcome)] == [Result.PRESENT]


def test_bytes_that_are_not_what_the_client_says_are_never_served_and_their_slot_is_free(slab: Slab) -> None:
    first, second = slab.grant(1, 0), slab.grant(1, 1)
    slab.write(first, A)
    slab.write(second, B)
    assert slab.commit(first, A).result is Result.PARTIAL
    outcome = slab.commit(second, A)
    assert outcome.result is Result.FAILED
    assert "part 1 of the payload" in outcome.reason
    assert slab.stored == []
    assert (slab.volume.stat().blocks, slab.volume.stat().slots_free) == (0, CAPACITY)


def test_a_block_whose_writers_died_is_given_up_after_its_time(slab: Slab, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = slab.grant(1, 0), slab.grant(1, 1)
    slab.write(first, A)
    slab.write(second, B)
    assert slab.commit(first, A).result is Result.PARTIAL
    monkeypatch.setattr(leases, "ASSEMBLY_S", 0.0)
    assert slab.leasing.reclaim() == 0, "shard 1 may still be written"
    unlock_shard(slab.fd, second.slot, 1)  # as the kernel does when its writer dies
    assert slab.leasing.reclaim() == 1
    assert (slab.leasing.open_count, slab.volume.stat().slots_free) == (0, CAPACITY)
    assert slab.commit(second, B).result is Result.FAILED
    assert slab.stored == []


def test_a_grant_that_is_never_confirmed_goes_to_another(slab: Slab, monkeypatch: pytest.MonkeyPatch) -> None:
    late = slab.grant(1, 0)
    (busy,) = slab.leasing.lease([(facts(1), 0)])
    assert isinstance(busy, Outcome)
    assert busy.result is Result.BUSY
    monkeypatch.setattr(leases, "GRANT_S", 0.0)
    slab.leasing.reclaim()
    again = slab.grant(1, 0)
    assert slab.leasing.confirm([late.lease, again.lease]) == [False, True]


def test_all_slots_may_be_leased_and_not_one_more(slab: Slab) -> None:
    for number in range(CAPACITY):
        slab.grant(number, 0)
    (full,) = slab.leasing.lease([(facts(9), 0)])
    assert isinstance(full, Outcome)
    assert full.result is Result.FULL
    put = PutBlock(facts(8).key, NAMESPACE, memoryview(A))
    assert slab.volume.put([put])[0].result is Result.FULL
    with pytest.raises(VolumeError, match="holds 4 blocks, more than 2"):
        slab.volume.resize(2)


def test_a_volume_closed_with_leases_holds_back_what_is_still_written_until_it_is_not(tmp_path: Path) -> None:
    first = Slab(tmp_path)
    writing, done = first.grant(1, 0), first.grant(2, 0)
    first.write(writing, A)
    first.write(done, A)
    assert first.commit(done, A).result is Result.PARTIAL
    first.volume.close()
    second = Slab(tmp_path)
    assert second.volume.stat().slots_free == CAPACITY - 1
    assert second.leasing.reclaim() == 0
    assert first.leasing.confirm([writing.lease]) == [True]  # only the old owner knows it
    assert second.leasing.confirm([writing.lease]) == [False]
    os.close(first.fd)
    assert second.leasing.reclaim() == 1
    assert second.volume.stat().slots_free == CAPACITY
    second.close()


def test_facts_no_block_can_have_are_refused(slab: Slab) -> None:
    asked = [
        (facts(1)._replace(payload_bytes=SHARD_BYTES * SHARDS + 1), 0),
        (facts(2)._replace(payload_bytes=SHARD_BYTES + 1), 0),
        (facts(4), 2),
        (facts(5)._replace(key=BlockKey(1, 0, 5)), 0),
    ]
    answers = slab.leasing.lease(asked)
    results = [answer.result for answer in answers if isinstance(answer, Outcome)]
    assert results[0] is Result.TOO_LARGE
    assert results.count(Result.FAILED) == len(results) - 1


# Locks


def test_a_lock_is_one_open_files_and_is_gone_with_it(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.touch()
    owner, one, two = (os.open(path, os.O_RDWR) for _ in range(3))
    assert lock_shard(one, 7, 3)
    assert lock_shard(one, 7, 4)
    assert lock_shard(one, 1 << 31, 255)
    assert not lock_shard(two, 7, 3)
    assert lock_shard(two, 9, 0)
    assert locked_shards(owner) == [(7, 3), (7, 4), (9, 0), (1 << 31, 255)]
    assert shard_is_locked(owner, 7, 4)
    assert not shard_is_locked(one, 7, 4), "its own"
    unlock_shard(one, 7, 4)
    assert not shard_is_locked(owner, 7, 4)
    os.close(one)
    assert locked_shards(owner) == [(9, 0)]
    assert lock_shard(two, 7, 3)
    os.close(two)
    os.close(owner)
    assert path.stat().st_size == 0


def test_where_the_whole_file_is_locked_in_the_same_way_clients_cannot_lock(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.touch()
    owner, client = (os.open(path, os.O_RDWR) for _ in range(2))
    assert locks_work(client)
    whole = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)  # what flock becomes over NFS
    fcntl.fcntl(owner, fcntl.F_OFD_SETLK, whole)
    assert not locks_work(client)
    os.close(owner)
    assert locks_work(client)
    os.close(client)
