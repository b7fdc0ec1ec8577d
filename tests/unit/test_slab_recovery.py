"""How a slab is found again: by its saved table and what changed since, or slot by slot; and how it changes size."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from event_plane.schema import Namespace
from storage_agent import slab_recovery, slab_volume
from storage_agent.block_header import PAGE_BYTES, BlockHeader, seal
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import VolumeError
from storage_agent.port import BlockKey, PutBlock, Result
from storage_agent.slab_format import INTENTS_OFFSET, SUPERBLOCK_OFFSETS, Superblock
from storage_agent.slab_volume import SlabInspection, SlabStore
from storage_agent.slot_volume import SlotVolume
from tests.disks import disk_of

REGION = 256
CAPACITY = 8 * REGION
BLOCK_BYTES = 64
NAMESPACE = Namespace(tenant="t")
SLABS = Superblock("v", CAPACITY, BLOCK_BYTES)


def descriptor(path: Path, **fields: Any) -> VolumeDescriptor:
    return VolumeDescriptor(
        **{"id": "v", "path": str(path), "capacity_blocks": CAPACITY, "block_bytes_max": BLOCK_BYTES, **fields}
    )


def key(number: int) -> BlockKey:
    return BlockKey(NAMESPACE.namespace_id, 0, number)


def blocks(*numbers: int) -> list[PutBlock]:
    return [PutBlock(key(n), NAMESPACE, memoryview(b"%032d" % n), depth=n) for n in numbers]


@contextmanager
def opened(path: Path, **fields: Any) -> Iterator[SlotVolume]:
    asked = descriptor(path, **fields)
    store = SlabStore(asked, path, deadline_s=30.0)
    volume = SlotVolume(asked, store, on_stored=lambda headers: None, on_freed=lambda headers: None)
    try:
        yield volume
    finally:
        volume.close()


def live(volume: SlotVolume) -> dict[int, BlockHeader]:
    return {header.slot: header for header in volume.live_headers()}


def crashed(path: Path, name: str = "left") -> Path:
    """The slab and its table as a crash at this moment would leave them."""
    left = path.with_name(name)
    shutil.copy(path, left)
    if (table := path.with_name(f"{path.name}.table")).exists():
        shutil.copy(table, left.with_name(f"{name}.table"))
    return left


def without_table(path: Path) -> Path:
    """A copy that has to be looked at slot by slot."""
    shutil.copy(path, copy := path.with_name(f"{path.name}-whole"))
    return copy


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "v"


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The runs of slots that recoveries look at."""
    runs: list[tuple[int, int]] = []
    look = slab_recovery.look

    def watched(slab: Any, first: int, end: int, *, check_payloads: bool) -> Any:
        runs.append((first, end))
        return look(slab, first, end, check_payloads=check_payloads)

    monkeypatch.setattr(slab_recovery, "look", watched)
    return runs


def test_a_slab_that_is_new_or_was_closed_in_order_is_opened_without_a_look_at_its_slots(
    path: Path, looked: list[tuple[int, int]]
) -> None:
    with opened(path) as volume:
        volume.put(blocks(*range(600)))
        before = live(volume)
    with opened(path) as volume:
        assert live(volume) == before
    assert looked == []


def test_after_a_crash_only_the_regions_that_changed_are_looked_at(path: Path, looked: list[tuple[int, int]]) -> None:
    with opened(path) as volume:
        volume.put(blocks(*range(6 * REGION)))
    with opened(path) as volume:
        volume.delete([key(n) for n in (3 * REGION + 1, 3 * REGION + 9)])
        volume.delete([key(5 * REGION)])
        before = live(volume)
        left = crashed(path)
    with opened(left) as volume:
        assert live(volume) == before
    slots = {slot for first, end in looked for slot in range(first, end)}
    assert set(range(3 * REGION, 4 * REGION)) | set(range(5 * REGION, 6 * REGION)) <= slots
    assert not slots & set(range(3 * REGION)), "nothing changed there"


@pytest.mark.parametrize("damage", ["gone", "flipped", "cut", "of another slab", "older", "intents"])
def test_a_table_that_cannot_be_trusted_is_not(
    path: Path, damage: str, tmp_path: Path, looked: list[tuple[int, int]]
) -> None:
    table = path.with_name("v.table")
    with opened(path) as volume:
        volume.put(blocks(*range(700)))
    older = table.read_bytes()
    with opened(path) as volume:
        volume.delete([key(n) for n in range(0, 700, 3)])
        before = live(volume)
    content = bytearray(table.read_bytes())
    if damage == "gone":
        table.unlink()
    elif damage == "flipped":
        content[5000] ^= 1
        table.write_bytes(content)
    elif damage == "cut":
        table.write_bytes(content[:-8])
    elif damage == "of another slab":
        with opened(tmp_path / "w", id="v") as volume:
            volume.put(blocks(1))
        shutil.copy(tmp_path / "w.table", table)
    elif damage == "older":
        table.write_bytes(older)
    else:
        with path.open("r+b") as file:
            file.seek(INTENTS_OFFSET + 20)
            file.write(b"\xff")
    looked.clear()
    with opened(path) as volume:
        assert live(volume) == before
    assert looked == [(0, CAPACITY)]


def test_a_slab_put_back_from_a_copy_does_not_believe_the_table_of_its_later_life(path: Path) -> None:
    with opened(path) as volume:
        volume.put(blocks(*range(500)))
        before = live(volume)
    kept = path.read_bytes()
    with opened(path) as volume:
        volume.delete([key(n) for n in range(400)])
    path.write_bytes(kept)
    with opened(path) as volume:
        assert live(volume) == before


@pytest.mark.parametrize("seed", range(2))
def test_recovery_by_table_is_what_a_look_at_every_slot_gives(
    path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab_volume, "_SAVE_REGIONS_MIN", 2)  # tables are saved while blocks come and go
    draw = random.Random(seed)
    there: set[int] = set()
    volume_path = path
    for life in range(2):
        with opened(volume_path) as volume:
            for _ in range(8):
                if draw.random() < 0.6:
                    numbers = draw.sample(range(3000), 120)
                    outcomes = volume.put(blocks(*numbers))
                    there |= {n for n, o in zip(numbers, outcomes, strict=True) if o.result is Result.STORED}
                elif there:
                    gone = draw.sample(sorted(there), min(len(there), draw.choice([1, 40, 300])))
                    volume.delete([key(n) for n in gone])
                    there -= set(gone)
            assert {header.depth for header in volume.live_headers()} == there
            left = crashed(volume_path, f"life-{life}")
        for copy in (left, without_table(left)):
            inspection = SlabInspection(descriptor(copy), copy)
            found = {r.key.sequence_hash for r in inspection.reports() if r.state == "live" and r.key is not None}
            inspection.close()
            assert found == there
        whole = without_table(left)
        with opened(left) as by_table, opened(whole) as by_look:
            assert live(by_table) == live(by_look)
            assert by_table.stat().slots_free == by_look.stat().slots_free == CAPACITY - len(there)
        volume_path = left


def test_a_disk_without_room_for_the_table_does_not_degrade_the_slab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab_volume, "_SAVE_REGIONS_MIN", 1)
    saves: list[Path] = []
    save = slab_volume.save_rows

    def counted(table: Path, *arguments: Any, **facts: Any) -> None:
        saves.append(table)
        save(table, *arguments, **facts)

    monkeypatch.setattr(slab_volume, "save_rows", counted)
    with disk_of(tmp_path / "disk", 18) as disk, opened(disk / "v") as volume:
        with (disk / "filler").open("wb") as filler:
            status = os.fstatvfs(filler.fileno())
            os.posix_fallocate(filler.fileno(), 0, status.f_bavail * status.f_frsize)
        for region in range(8):
            outcomes = volume.put(blocks(*range(region * REGION, (region + 1) * REGION)))
            assert {outcome.result for outcome in outcomes} == {Result.STORED}
        assert volume.stat().degraded == ""
        assert 1 <= len(saves) <= 3, "it is tried again when twice as much changed"
        shutil.copy(disk / "v", left := tmp_path / "left")  # as a crash would leave it
        with opened(left) as again:
            assert len(again.live_headers()) == CAPACITY


def test_generations_of_a_life_that_crashed_are_not_used_again(path: Path) -> None:
    with opened(path) as volume:
        volume.put(blocks(1))
        (header,) = volume.live_headers()
        volume.delete([key(1)])
        left = crashed(path)
    with opened(left) as volume:
        volume.put(blocks(1))
        assert volume.live_headers()[0].generation > header.generation


# Superblock and size


@pytest.mark.parametrize("offset", SUPERBLOCK_OFFSETS)
def test_one_torn_superblock_leaves_the_other(path: Path, offset: int) -> None:
    with opened(path) as volume:
        volume.put(blocks(1, 2))
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"torn" * 100)
    with opened(path) as volume:
        assert {header.depth for header in volume.live_headers()} == {1, 2}


def test_a_slab_of_format_1_is_refused_with_what_to_do_and_left_alone(path: Path) -> None:
    content = seal(b"KVASLAB\0" + (1).to_bytes(4, "little")) + bytes(100 * PAGE_BYTES)
    path.write_bytes(content)
    with pytest.raises(VolumeError, match=r"slab format 1, this version reads 2; .*remove the file"), opened(path):
        pass
    assert path.read_bytes() == content


def test_a_slab_grows_over_bytes_that_a_cut_short_growth_left(path: Path) -> None:
    with opened(path, capacity_blocks=4) as volume:
        volume.put(blocks(*range(4)))
    with path.open("ab") as file:
        file.write(b"\xee" * (4 * SLABS.slot_bytes))
    with opened(path, capacity_blocks=8) as volume:
        assert (volume.stat().blocks, volume.stat().slots_free) == (4, 4)
        assert [o.result for o in volume.put(blocks(*range(4, 9)))] == [Result.STORED] * 4 + [Result.FULL]
        left = crashed(path)
    with opened(left, capacity_blocks=8) as volume:
        assert {header.depth for header in volume.live_headers()} == set(range(8))


def test_growth_without_room_is_refused_and_the_volume_goes_on(path: Path) -> None:
    with opened(path, capacity_blocks=4) as volume:
        volume.put(blocks(1))
        with pytest.raises(VolumeError, match=r"needs \d+ bytes more, \d+ are free"):
            volume.resize(1 << 31)
        assert volume.stat().slots_free == 3
        assert volume.put(blocks(2))[0].result is Result.STORED


def test_shrinking_gives_the_bytes_back_and_a_crash_after_it_finds_all(path: Path) -> None:
    with opened(path) as volume:
        volume.put(blocks(*range(1000)))
        volume.delete([key(n) for n in range(900)])
        volume.resize(300)
        assert path.stat().st_size == Superblock("v", 300, BLOCK_BYTES).file_bytes
        assert {header.depth for header in volume.live_headers()} == set(range(900, 1000))
        assert max(live(volume)) < 300
        left = crashed(path)
    with opened(left, capacity_blocks=300) as volume:
        assert {header.depth for header in volume.live_headers()} == set(range(900, 1000))
        assert volume.stat().slots_free == 200
        assert volume.scrub().good == 100
