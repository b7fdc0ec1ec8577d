"""Slabs whose slots are of several sizes: where blocks go, what is counted, and which settings are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from event_plane.schema import Namespace
from storage_agent.block_header import PAGE_BYTES
from storage_agent.descriptor import OptionValue, VolumeDescriptor
from storage_agent.errors import VolumeError
from storage_agent.kinds import inspect_volume, prepare
from storage_agent.port import BlockKey, ClassStat, PutBlock, Result
from storage_agent.slab_format import SLOTS_OFFSET, Superblock
from storage_agent.slot_classes import SlotClass
from storage_agent.volume import Volume

NAMESPACE = Namespace(tenant="t")
SMALL, LARGE = 1000, 20_000
CLASSES: list[OptionValue] = [{"block_bytes": SMALL, "blocks": 3}, {"block_bytes": LARGE, "blocks": 2}]
SLAB = Superblock("v", 5, LARGE, classes=(SlotClass(SMALL, 3), SlotClass(LARGE, 2)))


def descriptor(folder: Path, classes: list[OptionValue] = CLASSES, **fields: Any) -> VolumeDescriptor:
    facts = {"id": "v", "path": str(folder / "v.slab"), "capacity_blocks": 5, "block_bytes_max": LARGE, **fields}
    return VolumeDescriptor(**facts, options={"classes": classes} if classes else {})


@contextmanager
def opened(asked: VolumeDescriptor, folder: Path) -> Iterator[Volume]:
    kind, opening = prepare(asked, [folder])
    volume = kind.open(opening)
    try:
        yield volume
    finally:
        volume.close()


def block(number: int, size: int) -> PutBlock:
    return PutBlock(key(number), NAMESPACE, memoryview(bytes([number]) * size))


def key(number: int) -> BlockKey:
    return BlockKey(NAMESPACE.namespace_id, 0, number)


def test_blocks_lie_in_the_class_of_their_size_and_each_class_is_counted(tmp_path: Path) -> None:
    asked = descriptor(tmp_path)
    blocks = [block(1, SMALL), block(2, SMALL + 1), block(3, LARGE), block(4, LARGE), block(5, LARGE + 1), block(6, 1)]
    with opened(asked, tmp_path) as volume:
        outcomes = volume.put(blocks)
        assert [outcome.result for outcome in outcomes] == [
            Result.STORED, Result.STORED, Result.STORED, Result.FULL, Result.TOO_LARGE, Result.STORED
        ]  # fmt: skip
        assert outcomes[3].reason == f"all slots for {LARGE} bytes are taken; free some first"
        found = [ClassStat(SMALL, 3, 2, SMALL + 1, 1), ClassStat(LARGE, 2, 2, SMALL + 1 + LARGE, 0)]
        assert volume.stat().classes == found
        assert volume.stat().slots_free == 1
    assert (tmp_path / "v.slab").stat().st_size == SLAB.file_bytes == SLOTS_OFFSET + 3 * 8192 + 2 * (4096 + 20_480)
    with opened(asked, tmp_path) as volume:
        assert volume.stat().classes == found, "recovery knows the classes"
        assert volume.scrub().good == 4
        assert {h.slot for h in volume.live_headers() if h.payload_bytes > SMALL} == {3, 4}


@pytest.mark.parametrize("slot", [2, 3])
def test_damage_on_either_side_of_a_border_is_found_from_outside_and_by_a_scrub(tmp_path: Path, slot: int) -> None:
    asked = descriptor(tmp_path)
    with opened(asked, tmp_path) as volume:
        volume.put([block(n, SMALL) for n in range(1, 4)] + [block(4, LARGE), block(5, LARGE)])
    with (tmp_path / "v.slab").open("r+b") as file:
        file.seek(SLAB.slot_offset(slot) + PAGE_BYTES + 9)
        file.write(b"\xff")
    with closing(inspect_volume(asked, [tmp_path])) as inspection:
        states = [report.state for report in inspection.reports()]
    assert [number for number, state in enumerate(states) if state == "torn"] == [slot]
    assert Counter(states) == {"live": 4, "torn": 1}
    with opened(asked, tmp_path) as volume:
        report = volume.scrub()
        assert (report.good, report.corrupt) == (4, 1)
        assert volume.stat().slots_free == 1


def test_a_slab_of_classes_keeps_its_slots(tmp_path: Path) -> None:
    with opened(descriptor(tmp_path), tmp_path) as volume:
        for capacity in (4, 6):
            with pytest.raises(VolumeError, match="keeps its 5 slots"):
                volume.resize(capacity)
        assert volume.resize(5).slots_free == 5


def test_settings_with_other_classes_than_the_slab_has_are_refused(tmp_path: Path) -> None:
    with opened(descriptor(tmp_path), tmp_path):
        pass
    other: list[OptionValue] = [{"block_bytes": SMALL, "blocks": 2}, {"block_bytes": LARGE, "blocks": 3}]
    for classes in (other, []):
        with (
            pytest.raises(VolumeError, match="made with classes 3 of 1000 bytes, 2 of 20000 bytes"),
            opened(descriptor(tmp_path, classes), tmp_path),
        ):
            pass
    equal = {"id": "w", "path": str(tmp_path / "w.slab")}
    with opened(descriptor(tmp_path, [], **equal), tmp_path):
        pass
    with (
        pytest.raises(VolumeError, match="none: all slots are equal"),
        opened(descriptor(tmp_path, **equal), tmp_path),
    ):
        pass


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        ([{"block_bytes": LARGE, "blocks": 3}, {"block_bytes": SMALL, "blocks": 2}], "each larger than the last"),
        ([{"block_bytes": LARGE, "blocks": 3}, {"block_bytes": LARGE, "blocks": 2}], "each larger than the last"),
        ([{"block_bytes": n + 1, "blocks": 1} for n in range(17)], "at most 16"),
        ([{"block_bytes": LARGE, "blocks": 4}], "set them to 4 and 20000"),
        ([{"block_bytes": LARGE - 1, "blocks": 5}], "set them to 5 and 19999"),
        ([{"block_bytes": LARGE, "blocks": 0}], "classes"),
        ([{"block_bytes": 0, "blocks": 5}], "classes"),
        ([{"block_bytes": LARGE, "blocks": 5, "depth": 1}], "depth"),
        ("large", "classes"),
    ],
)
def test_classes_that_make_no_sense_are_refused_and_nothing_is_made(tmp_path: Path, classes: Any, words: str) -> None:
    with pytest.raises(VolumeError, match=words), opened(descriptor(tmp_path, classes), tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_compaction_carries_small_blocks_out_of_large_slots_and_keeps_chains_in_order(tmp_path: Path) -> None:
    classes: list[OptionValue] = [{"block_bytes": SMALL, "blocks": 3}, {"block_bytes": LARGE, "blocks": 4}]
    asked = descriptor(tmp_path, classes, capacity_blocks=7)
    with opened(asked, tmp_path) as volume:
        volume.put([block(n, SMALL) for n in range(1, 4)])
        child = PutBlock(key(4), NAMESPACE, memoryview(bytes([4]) * SMALL), parent_hash=5)
        volume.put([child, block(5, SMALL), block(6, LARGE), block(7, LARGE)])
        assert volume.put([block(8, LARGE)])[0].result is Result.FULL
        volume.delete([key(1), key(2)])
        assert volume.compact() == 2 * (LARGE - SMALL)
        slots = {header.key.sequence_hash: header.slot for header in volume.live_headers()}
        assert [slots[n] for n in (5, 4, 3)] == [0, 1, 2], "the parent comes first"
        assert volume.put([block(8, LARGE)])[0].result is Result.STORED
        assert volume.compact() == 0
        assert volume.stat().slots_free == 1
    with opened(asked, tmp_path) as volume:
        assert volume.scrub().good == 6
        assert {h.key.sequence_hash for h in volume.live_headers()} == {3, 4, 5, 6, 7, 8}
