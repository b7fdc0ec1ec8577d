"""One slab volume on a real file through real NIXL: what is put is served, whatever happens to the file."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from event_plane.schema import Namespace
from storage_agent import slab_volume
from storage_agent.block_header import PAGE_BYTES
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import VolumeError
from storage_agent.inspection import SlotReport
from storage_agent.port import BlockKey, PutBlock, Result
from storage_agent.shards import Axis, BlockLayout, Shard, ShardSpan
from storage_agent.slab_format import SESSION_OFFSET, Superblock
from storage_agent.slab_volume import SlabInspection, SlabStore
from storage_agent.slot_volume import SlotVolume
from storage_agent.volume import ReadResult
from tests.disks import disk_of, file_size_limit

NAMESPACE = Namespace(tenant="acme", model="llama", block_tokens=16)
BLOCK_BYTES = 6000
CAPACITY = 8
SLABS = Superblock("fast", CAPACITY, BLOCK_BYTES)


def key(number: int) -> BlockKey:
    return BlockKey(NAMESPACE.namespace_id, 0, number << 64 | 0xABC)


def payload(number: int, size: int = BLOCK_BYTES) -> bytes:
    return (b"%08d" % number * (size // 8 + 1))[:size]


def block(number: int, size: int = BLOCK_BYTES) -> PutBlock:
    parent_hash = max(0, number - 1)
    return PutBlock(key(number), NAMESPACE, memoryview(payload(number, size)), parent_hash, number, block_tokens=16)


def descriptor(path: Path, **fields: Any) -> VolumeDescriptor:
    return VolumeDescriptor(
        **{
            "id": "fast", "path": str(path), "capacity_blocks": CAPACITY, "block_bytes_max": BLOCK_BYTES, **fields,
        }
    )  # fmt: skip


class Announced:
    def __init__(self) -> None:
        self.stored: list[int] = []
        self.freed: list[int] = []


@contextmanager
def opened(path: Path, announced: Announced | None = None, **fields: Any) -> Iterator[SlotVolume]:
    told = announced or Announced()
    asked = descriptor(path, **fields)
    volume = SlotVolume(
        asked,
        SlabStore(asked, path, deadline_s=30.0),
        on_stored=lambda headers: told.stored.extend(h.key.sequence_hash >> 64 for h in headers),
        on_freed=lambda headers: told.freed.extend(h.key.sequence_hash >> 64 for h in headers),
    )
    try:
        yield volume
    finally:
        volume.close()


def read(volume: SlotVolume, numbers: Sequence[int]) -> tuple[list[ReadResult], dict[int, bytes]]:
    taken: dict[int, bytes] = {}

    def accept(index: int, header: object, view: memoryview) -> str:
        assert numbers[index] not in taken, "each is handed over once"
        taken[numbers[index]] = bytes(view)
        return ""

    return volume.read([key(number) for number in numbers], accept), taken


def results(outcomes: Sequence[Any]) -> list[Result]:
    return [getattr(outcome, "outcome", outcome).result for outcome in outcomes]


def scan(path: Path) -> list[SlotReport]:
    slab = SlabInspection(descriptor(path), path)
    try:
        return list(slab.reports())
    finally:
        slab.close()


def flip_byte(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))
        file.flush()
        os.fsync(file.fileno())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "fast.slab"


def test_blocks_come_back_byte_for_byte_with_their_facts(path: Path) -> None:
    with opened(path) as volume:
        stored = volume.put([block(1), block(2, 1), block(3, PAGE_BYTES)])
        assert results(stored) == [Result.STORED] * 3
        assert [outcome.payload_bytes for outcome in stored] == [BLOCK_BYTES, 1, PAGE_BYTES]
        reads, taken = read(volume, [3, 1, 9, 2])
        assert results(reads) == [Result.HIT, Result.HIT, Result.MISS, Result.HIT]
        assert taken == {1: payload(1), 2: payload(2, 1), 3: payload(3, PAGE_BYTES)}
        facts = reads[0].header
        assert facts is not None
        assert (facts.namespace, facts.parent_hash, facts.depth, facts.block_tokens) == (NAMESPACE, 2, 3, 16)
        stat = volume.stat()
        assert (stat.blocks, stat.slots_free, stat.payload_bytes) == (3, 5, BLOCK_BYTES + 1 + PAGE_BYTES)
        assert (stat.write_bytes_total, stat.read_bytes_total) == (stat.payload_bytes, stat.payload_bytes)


def test_a_batch_larger_than_staging_goes_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "wide.slab"
    with opened(path, capacity_blocks=600, block_bytes_max=100) as volume:
        assert volume.batch_slots == 256
        assert results(volume.put([block(n, 100) for n in range(600)])) == [Result.STORED] * 600
        _, taken = read(volume, range(600))
        assert taken == {n: payload(n, 100) for n in range(600)}


def test_a_batch_larger_than_its_staging_memory_uses_that_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_volume, "STAGING_BYTES_TARGET", 3 * BLOCK_BYTES)
    with opened(path, capacity_blocks=40) as volume:
        assert volume.batch_slots == 256
        assert results(volume.put([block(n, BLOCK_BYTES - n) for n in range(40)])) == [Result.STORED] * 40
        flip_byte(path, Superblock("fast", 40, BLOCK_BYTES).slot_offset(20) + PAGE_BYTES)
        reads, taken = read(volume, range(40))
        assert [number for number, result in enumerate(results(reads)) if result is Result.CORRUPT] == [20]
        assert taken == {n: payload(n, BLOCK_BYTES - n) for n in range(40) if n != 20}


def test_slices_of_more_blocks_than_staging_holds_are_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_volume, "STAGING_BYTES_TARGET", 3 * BLOCK_BYTES)
    layout = BlockLayout((Axis("head", 4), Axis("byte", 1500)), 1, "head")
    whole = [replace(block(n), span=ShardSpan(1500, 0, 4), layout=layout) for n in range(10)]
    with opened(path, capacity_blocks=10) as volume:
        assert results(volume.put(whole)) == [Result.STORED] * 10
        taken: dict[int, bytes] = {}

        def accept(index: int, header: object, view: memoryview) -> str:
            taken[index] = bytes(view)
            return ""

        volume.read([key(n) for n in range(10)], accept, Shard(3, 4))
        assert taken == {n: payload(n)[4500:] for n in range(10)}


def test_a_block_that_is_there_is_present_and_not_written_again(path: Path) -> None:
    announced = Announced()
    with opened(path, announced) as volume:
        volume.put([block(1)])
        written = volume.stat().write_bytes_total
        assert results(volume.put([block(1)])) == [Result.PRESENT]
        assert volume.stat().write_bytes_total == written
        assert announced.stored == [1]


def test_a_full_volume_refuses_and_takes_again_what_was_freed(path: Path) -> None:
    with opened(path) as volume:
        outcomes = volume.put([block(n) for n in range(CAPACITY + 1)])
        assert results(outcomes) == [Result.STORED] * CAPACITY + [Result.FULL]
        assert "free some first" in outcomes[-1].reason
        assert results(volume.delete([key(3)])) == [Result.DELETED]
        assert results(volume.put([block(99)])) == [Result.STORED]
        _, taken = read(volume, [3, 99])
        assert taken == {99: payload(99)}


def test_a_bad_block_fails_alone(path: Path) -> None:
    other = Namespace(tenant="else")
    bad = [
        PutBlock(key(2), NAMESPACE, memoryview(payload(2, BLOCK_BYTES + 1))),
        PutBlock(key(3), NAMESPACE, memoryview(b"")),
        PutBlock(key(4), other, memoryview(b"x")),
        PutBlock(key(5), NAMESPACE, memoryview(b"xyxyxy")[::2]),
        PutBlock(key(6), NAMESPACE, memoryview(b"x"), depth=-1),
        PutBlock(BlockKey(other.namespace_id, 256, 1), other, memoryview(b"x")),
    ]
    with opened(path) as volume:
        outcomes = volume.put([block(1), *bad, block(7)])
        assert results(outcomes) == [Result.STORED, Result.TOO_LARGE] + [Result.FAILED] * 5 + [Result.STORED]
        assert all(outcome.reason for outcome in outcomes[1:-1])
        assert (volume.stat().slots_free, volume.stat().degraded) == (CAPACITY - 2, "")


def test_blocks_are_found_again_after_a_close(path: Path) -> None:
    with opened(path) as volume:
        volume.put([block(n) for n in range(4)])
        volume.delete([key(2)])
    with opened(path) as volume:
        assert sorted(header.depth for header in volume.live_headers()) == [0, 1, 3]
        _, taken = read(volume, [0, 1, 3])
        assert taken == {n: payload(n) for n in (0, 1, 3)}
        generations = {header.generation for header in volume.live_headers()}
        volume.put([block(9)])
        assert max(h.generation for h in volume.live_headers()) > max(generations)


@pytest.mark.parametrize("place", [0, 40, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + BLOCK_BYTES - 1])
def test_a_flipped_byte_is_corrupt_once_then_a_miss_and_its_slot_is_free(path: Path, place: int) -> None:
    announced = Announced()
    with opened(path, announced) as volume:
        volume.put([block(1), block(2)])
        (slot,) = [header.slot for header in volume.live_headers() if header.key == key(1)]
        flip_byte(path, SLABS.slot_offset(slot) + place)
        reads, taken = read(volume, [1, 2])
        assert results(reads) == [Result.CORRUPT, Result.HIT]
        assert reads[0].outcome.reason.startswith("CorruptBlock: ")
        assert taken == {2: payload(2)}
        assert announced.freed == [1]
        assert (volume.stat().corrupt_total, volume.stat().slots_free) == (1, CAPACITY - 1)
        assert results(read(volume, [1])[0]) == [Result.MISS]
        assert results(volume.put([block(1)])) == [Result.STORED]
        assert read(volume, [1])[1] == {1: payload(1)}


def test_corrupt_blocks_are_logged_the_first_with_its_reason_and_many_with_their_number(path: Path) -> None:
    numbers = list(range(1, CAPACITY + 1))
    with capture_logs() as said:
        with opened(path) as volume:
            volume.put([block(number) for number in numbers])
            for slot in range(CAPACITY):
                flip_byte(path, SLABS.slot_offset(slot) + PAGE_BYTES)
            assert results(read(volume, numbers)[0]) == [Result.CORRUPT] * CAPACITY
            assert len(said) == 1
        name = volume.descriptor.id
    first, rest = said
    assert (first["log_level"], first["volume"], first["blocks"]) == ("warning", name, 1)
    assert first["hash"] in [f"{key(number).sequence_hash:032x}" for number in numbers]
    assert first["reason"].startswith("CorruptBlock: ")
    assert (rest["volume"], rest["blocks"]) == (name, CAPACITY - 1)


def test_a_byte_flipped_while_closed_in_order_is_found_by_the_get(path: Path) -> None:
    with opened(path) as volume:
        volume.put([block(1)])
        (slot,) = [header.slot for header in volume.live_headers()]
    flip_byte(path, SLABS.slot_offset(slot) + PAGE_BYTES + 5)
    assert [report.state for report in scan(path)].count("torn") == 1
    with opened(path) as volume:
        assert results(read(volume, [1])[0]) == [Result.CORRUPT]


def test_after_a_close_out_of_order_torn_slots_are_freed_before_anything_is_served(path: Path) -> None:
    with opened(path) as volume:
        volume.put([block(n) for n in range(3)])
        slots = {header.depth: header.slot for header in volume.live_headers()}
        left = path.read_bytes()  # as a crash at this moment would leave it
    torn = bytearray(left)
    torn[SLABS.slot_offset(slots[1]) + PAGE_BYTES + 9] ^= 1
    torn[SLABS.slot_offset(slots[2]) + 9] ^= 1
    path.write_bytes(torn)
    assert sorted(report.state for report in scan(path)) == ["free"] * 5 + ["live"] + ["torn"] * 2
    with opened(path) as volume:
        assert [header.depth for header in volume.live_headers()] == [0]
        assert volume.stat().slots_free == CAPACITY - 1
        assert [report.state for report in scan(path)].count("free") == CAPACITY - 1


def test_of_two_slots_of_one_block_the_newer_wins_and_the_older_is_freed(path: Path) -> None:
    with opened(path) as volume:
        volume.put([block(1)])
        old = path.read_bytes()[SLABS.slot_offset(0) :][: SLABS.slot_bytes]
        volume.delete([key(1)])
        volume.put([block(1, 100)])
        left = bytearray(path.read_bytes())
    left[SLABS.slot_offset(0) : SLABS.slot_offset(0) + SLABS.slot_bytes] = old
    path.write_bytes(left)
    assert [report.state for report in scan(path)].count("live") == 2
    with opened(path) as volume:
        assert read(volume, [1])[1] == {1: payload(1, 100)}
    assert [report.state for report in scan(path)].count("live") == 1


def test_a_damaged_session_page_means_every_payload_is_checked(path: Path) -> None:
    with opened(path) as volume:
        volume.put([block(1), block(2)])
        (slot,) = [header.slot for header in volume.live_headers() if header.key == key(2)]
    flip_byte(path, SESSION_OFFSET + 3)
    flip_byte(path, SLABS.slot_offset(slot) + PAGE_BYTES)
    with opened(path) as volume:
        assert [header.key for header in volume.live_headers()] == [key(1)]


def test_a_second_opener_is_told_who_has_it_and_a_read_only_look_still_works(path: Path) -> None:
    with opened(path) as volume:
        volume.put([block(1)])
        holder = rf"is open in process {os.getpid()} on {socket.gethostname()}; close it .* be a client of that agent"
        with pytest.raises(VolumeError, match=holder), opened(path):
            pass
        reports = scan(path)
        assert [(r.key, r.payload_bytes) for r in reports if r.state == "live"] == [(key(1), BLOCK_BYTES)]
    with opened(path) as volume:
        assert volume.stat().blocks == 1


def test_a_read_only_look_changes_no_byte(path: Path) -> None:
    with opened(path) as volume:
        volume.put([block(1)])
        left = path.read_bytes()
    path.write_bytes(left)
    scan(path)
    assert path.read_bytes() == left


def test_a_file_that_is_no_slab_is_left_alone(path: Path) -> None:
    path.write_bytes(b"somebody's notes" * 1000)
    with pytest.raises(VolumeError, match=r"is not a slab .* left alone"), opened(path):
        pass
    assert path.read_bytes() == b"somebody's notes" * 1000


@pytest.mark.parametrize("fields", [{"id": "slow"}, {"block_bytes_max": BLOCK_BYTES + 1}])
def test_a_slab_of_another_volume_or_block_size_is_refused(path: Path, fields: dict[str, Any]) -> None:
    with opened(path):
        pass
    with pytest.raises(VolumeError, match=r"was made as 'fast' for blocks of 6000 bytes, asked for are"), opened(
        path, **fields
    ):
        pass


def test_a_folder_that_is_not_there_and_a_path_that_is_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(VolumeError, match=r"there is no folder .*absent; make it first"), opened(
        tmp_path / "absent" / "fast.slab"
    ):
        pass
    with pytest.raises(VolumeError, match="Is a directory"), opened(tmp_path):
        pass


def test_too_little_room_says_how_much_and_leaves_no_file(path: Path) -> None:
    with pytest.raises(VolumeError, match=r"needs \d+ bytes, .* has \d+ free: lower capacity_blocks"), opened(
        path, capacity_blocks=1 << 31, block_bytes_max=1 << 28
    ):
        pass
    assert list(path.parent.iterdir()) == []


def test_a_draft_that_a_crash_left_behind_is_made_anew(path: Path) -> None:
    (path.parent / ".fast.slab.creating").write_bytes(b"half")
    with opened(path) as volume:
        volume.put([block(1)])
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["fast.slab", "fast.slab.table"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disk_of(tmp_path / "disk", 1) as disk:
        yield disk


def test_a_full_disk_is_refused_at_once_and_a_volume_on_it_keeps_its_room(small_disk: Path) -> None:
    path = small_disk / "fast.slab"
    with opened(path) as volume:
        free_bytes = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
        (small_disk / "filler").write_bytes(bytes(free_bytes))
        assert results(volume.put([block(n) for n in range(CAPACITY)])) == [Result.STORED] * CAPACITY
        with pytest.raises(VolumeError, match="has 0 free"), opened(small_disk / "second.slab"):
            pass
        assert sorted(entry.name for entry in small_disk.iterdir()) == ["fast.slab", "filler"]


@pytest.mark.parametrize("staged_slots", [1, 256])
def test_a_write_that_fails_fails_its_block_alone_and_degrades_the_volume(
    path: Path, staged_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab_volume, "STAGING_BYTES_TARGET", staged_slots * BLOCK_BYTES)
    announced = Announced()
    with opened(path, announced) as volume:
        with file_size_limit(SLABS.slot_offset(2)):
            outcomes = volume.put([block(n) for n in range(4)])
        assert results(outcomes) == [Result.STORED, Result.STORED, Result.FAILED, Result.FAILED]
        assert "EFBIG" in outcomes[2].reason
        assert "EFBIG" in volume.stat().degraded
        assert announced.stored == [0, 1]
        # Not even the header could be erased, so the slots are held back.
        assert volume.stat().slots_free == CAPACITY - 4
        assert results(volume.put([block(2), block(9)])) == [Result.BUSY, Result.STORED]
        assert read(volume, [0, 1, 2, 9])[1] == {n: payload(n) for n in (0, 1, 9)}
    with opened(path) as volume:
        assert (volume.stat().blocks, volume.stat().slots_free, volume.stat().degraded) == (3, CAPACITY - 3, "")


def test_a_delete_that_fails_leaves_the_block_in_service(path: Path) -> None:
    announced = Announced()
    with opened(path, announced) as volume:
        volume.put([block(n) for n in range(4)])
        with file_size_limit(SLABS.slot_offset(2)):
            assert results(volume.delete([key(0), key(3)])) == [Result.DELETED, Result.FAILED]
        assert announced.freed == [0]
        assert announced.stored == [0, 1, 2, 3, 3], "a snapshot made meanwhile lacks it"
        assert read(volume, [0, 3])[1] == {3: payload(3)}
        assert results(volume.delete([key(3)])) == [Result.DELETED]


@pytest.mark.parametrize("staged_slots", [1, 256])
def test_a_read_that_fails_fails_its_block_alone(
    path: Path, staged_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab_volume, "STAGING_BYTES_TARGET", staged_slots * BLOCK_BYTES)
    with opened(path) as volume:
        volume.put([block(n) for n in range(4)])
        whole = path.read_bytes()
        os.truncate(path, SLABS.slot_offset(3))
        reads, taken = read(volume, [0, 3])
        assert results(reads) == [Result.HIT, Result.FAILED]
        assert (taken, volume.stat().degraded) == ({0: payload(0)}, reads[1].outcome.reason)
        with path.open("r+b") as file:
            file.write(whole)
        assert read(volume, [3])[1] == {3: payload(3)}


def test_delete_waits_for_the_reader_of_its_slot(path: Path) -> None:
    with opened(path) as volume:
        volume.put([block(1)])
        deleting: list[Result] = []
        deleter = threading.Thread(target=lambda: deleting.extend(results(volume.delete([key(1)]))))
        seen: list[tuple[bytes, list[Result], bool]] = []

        def accept(index: int, header: object, view: memoryview) -> str:
            deleter.start()
            while volume.live_header(key(1)) is not None:  # until the delete has begun
                threading.Event().wait(0.001)
            # It cannot end before this read does, and its block cannot be put again meanwhile.
            seen.append((bytes(view), results(volume.put([block(1)])), bool(deleting)))
            return ""

        volume.read([key(1)], accept)
        deleter.join()
        assert seen == [(payload(1), [Result.BUSY], False)]
        assert deleting == [Result.DELETED]
        assert volume.stat().slots_free == CAPACITY


def test_an_observer_that_raises_leaves_the_table_true(path: Path) -> None:
    def refuse(headers: object) -> None:
        raise RuntimeError("the event plane is gone")

    store = SlabStore(descriptor(path), path, deadline_s=30.0)
    volume = SlotVolume(descriptor(path), store, on_stored=refuse, on_freed=refuse)
    with pytest.raises(RuntimeError, match="gone"):
        volume.put([block(1)])
    assert read(volume, [1])[1] == {1: payload(1)}
    with pytest.raises(RuntimeError, match="gone"):
        volume.delete([key(1)])
    assert (volume.stat().blocks, volume.stat().slots_free) == (0, CAPACITY)
    volume.close()
    volume.close()
