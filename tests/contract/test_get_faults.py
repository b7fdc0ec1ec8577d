"""What a get must never believe: damage of every sort, done behind the back of a volume that is open."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from event_plane.schema import Namespace
from storage_agent.agent import StorageAgent
from storage_agent.block_header import PAGE_BYTES, BlockHeader, fold_checksums, pack_header, part_checksums
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.port import BlockKey, PutBlock, Result
from storage_agent.slab_format import Superblock, unpack_superblock

NAMESPACE = Namespace(tenant="faults")
BLOCK_BYTES = 6000
CAPACITY = 4
GEOMETRY = Superblock("v", CAPACITY, BLOCK_BYTES)
SLOT_BYTES = GEOMETRY.slot_bytes


def key(number: int) -> BlockKey:
    return BlockKey(NAMESPACE.namespace_id, 0, number + 1)


def payload(number: int) -> bytes:
    return b"%06d" % number * (BLOCK_BYTES // 6)


class Slab:
    """A slab's file, changed as a device or another program would."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, slot: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(GEOMETRY.slot_offset(slot))
            return file.read(SLOT_BYTES)

    def write(self, slot: int, content: bytes, at: int = 0) -> None:
        with self.path.open("r+b") as file:
            file.seek(GEOMETRY.slot_offset(slot) + at)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


@pytest.fixture
def slab(tmp_path: Path) -> Slab:
    return Slab(tmp_path / "v.slab")


@pytest.fixture
def agent(slab: Slab) -> Iterator[StorageAgent]:
    with StorageAgent("a", publisher=None, allowed_roots=[slab.path.parent]) as made:
        made.register_volume(
            VolumeDescriptor(id="v", path=str(slab.path), capacity_blocks=CAPACITY, block_bytes_max=BLOCK_BYTES)
        )
        put(made, 0, 1)
        yield made


def put(agent: StorageAgent, *numbers: int) -> None:
    outcomes = agent.put("v", [PutBlock(key(n), NAMESPACE, memoryview(payload(n))) for n in numbers])
    assert {outcome.result for outcome in outcomes} == {Result.STORED}


def get(agent: StorageAgent, *numbers: int) -> tuple[list[Result], list[bytes]]:
    buffers = [bytearray(b"\xee" * BLOCK_BYTES) for _ in numbers]
    outcomes = agent.get([key(n) for n in numbers], [memoryview(buffer) for buffer in buffers])
    assert all(outcome.reason for outcome in outcomes if not outcome.result.ok)
    return [outcome.result for outcome in outcomes], [bytes(buffer) for buffer in buffers]


def flip(slab: Slab) -> None:
    byte = slab.read(0)[PAGE_BYTES + 77]
    slab.write(0, bytes([byte ^ 1]), PAGE_BYTES + 77)


def flip_in_header(slab: Slab) -> None:
    byte = slab.read(0)[20]
    slab.write(0, bytes([byte ^ 0x80]), 20)


def zero(slab: Slab) -> None:
    slab.write(0, bytes(SLOT_BYTES))


def tear(slab: Slab) -> None:
    """The second half is of another block."""
    slab.write(0, slab.read(1)[SLOT_BYTES // 2 :], SLOT_BYTES // 2)


def replace_by_neighbour(slab: Slab) -> None:
    """Header and payload, whole and sealed: a write that went astray."""
    slab.write(0, slab.read(1))


def replace_payload_alone(slab: Slab) -> None:
    slab.write(0, slab.read(1)[PAGE_BYTES:], PAGE_BYTES)


def name_another_key(slab: Slab) -> None:
    """A header that is sound in itself, of this slot and slab, and of a block that was not put here."""
    with slab.path.open("rb") as file:
        mark = unpack_superblock(file.read(PAGE_BYTES)).mark
    content = memoryview(payload(0))
    checksums = part_checksums(content, len(content))
    folded = fold_checksums(checksums.each)
    header = BlockHeader(0, key(9), NAMESPACE, 0, 0, 0, len(content), folded, 1 << 40, None, None)
    slab.write(0, pack_header(header, checksums, place=0, mark=mark))


DAMAGE = [flip, flip_in_header, zero, tear, replace_by_neighbour, replace_payload_alone, name_another_key]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_block_is_corrupt_then_a_miss_and_the_others_are_served(
    agent: StorageAgent, slab: Slab, damage: Callable[[Slab], None]
) -> None:
    damage(slab)
    results, buffers = get(agent, 0, 1)
    assert results == [Result.CORRUPT, Result.HIT]
    assert buffers == [b"\xee" * BLOCK_BYTES, payload(1)], "not a byte of it is handed over"
    assert get(agent, 0)[0] == [Result.MISS]
    put(agent, 0)
    assert get(agent, 0) == ([Result.HIT], [payload(0)])
    volume = agent.stat().volumes[0]
    assert (volume.corrupt_total, volume.blocks, volume.slots_free) == (1, 2, CAPACITY - 2)


def test_two_slots_that_changed_places_are_both_found_out(agent: StorageAgent, slab: Slab) -> None:
    first, second = slab.read(0), slab.read(1)
    slab.write(0, second)
    slab.write(1, first)
    assert get(agent, 0, 1)[0] == [Result.CORRUPT, Result.CORRUPT]


def test_a_slot_that_went_back_to_an_earlier_generation_is_found_out(agent: StorageAgent, slab: Slab) -> None:
    """The same block, whole, of an earlier put: the write of the later one was lost."""
    before = slab.read(0)
    agent.delete("", "v", [key(0)])
    put(agent, 2, 3)  # they take other slots, or this one
    agent.delete("", "v", [key(2), key(3)])
    put(agent, 0)
    is_free = [slab.read(slot)[:PAGE_BYTES] == bytes(PAGE_BYTES) for slot in range(CAPACITY)]
    slab.write(next(slot for slot in range(CAPACITY) if slot != 1 and not is_free[slot]), before)
    assert get(agent, 0)[0] == [Result.CORRUPT]
    assert get(agent, 1) == ([Result.HIT], [payload(1)])


def test_a_file_that_was_cut_fails_what_is_gone_and_serves_the_rest(agent: StorageAgent, slab: Slab) -> None:
    put(agent, 2, 3)
    os.truncate(slab.path, GEOMETRY.slot_offset(CAPACITY - 1) + PAGE_BYTES)
    results, buffers = get(agent, 0, 1, 2, 3)
    assert sorted(results) == [Result.FAILED, Result.HIT, Result.HIT, Result.HIT]
    lost = results.index(Result.FAILED)
    assert buffers == [b"\xee" * BLOCK_BYTES if n == lost else payload(n) for n in range(4)]
    assert agent.stat().volumes[0].degraded
