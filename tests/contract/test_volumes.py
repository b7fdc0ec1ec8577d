"""Every kind of volume of ours, held to the contract that other packages' are held to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from storage_agent import transfer_choice
from storage_agent.block_header import PAGE_BYTES, BlockHeader
from storage_agent.descriptor import OptionValue, VolumeDescriptor
from storage_agent.slab_format import Superblock
from storage_agent.slot_classes import SlotClass
from storage_agent.volume import Volume
from storage_agent.volume_contract import BLOCK_BYTES, CAPACITY, VolumeCase, VolumeContract, payload


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


class TestSlab(VolumeContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> VolumeCase:
        path = tmp_path / "contract.slab"
        slab = Superblock("contract", CAPACITY, BLOCK_BYTES)

        def damage(volume: Volume, header: BlockHeader) -> None:
            flip(path, slab.slot_offset(header.slot) + PAGE_BYTES + 77)

        return VolumeCase(kind="slab", path=path, damage=damage)


@dataclass(frozen=True, kw_only=True)
class CaseOfClasses(VolumeCase):
    """Most slots hold the contract's largest block, the last five one twice as large."""

    def descriptor(self, **fields: Any) -> VolumeDescriptor:
        asked = super().descriptor(**fields)
        small, large = asked.block_bytes_max, 2 * asked.block_bytes_max
        classes = [
            {"block_bytes": small, "blocks": asked.capacity_blocks - 5},
            {"block_bytes": large, "blocks": 5},
        ]
        return msgspec.structs.replace(asked, block_bytes_max=large, options={"classes": classes})


class TestSlabClasses(VolumeContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> VolumeCase:
        path = tmp_path / "contract.slab"
        classes = (SlotClass(BLOCK_BYTES, CAPACITY - 5), SlotClass(2 * BLOCK_BYTES, 5))
        slab = Superblock("contract", CAPACITY, 2 * BLOCK_BYTES, classes=classes)

        def damage(volume: Volume, header: BlockHeader) -> None:
            flip(path, slab.slot_offset(header.slot) + PAGE_BYTES + 77)

        return CaseOfClasses(kind="slab", path=path, damage=damage, resizes=False, room_bytes=2 * BLOCK_BYTES)


class TestDirectory(VolumeContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> VolumeCase:
        folder = tmp_path / "contract"

        def damage(volume: Volume, header: BlockHeader) -> None:
            """Where the block's payload is, by its bytes."""
            number = header.key.sequence_hash >> 64
            for path in [*folder.glob("*.segment"), *folder.glob("*.writing")]:
                place = path.read_bytes().find(payload(number))
                if place > 0:
                    flip(path, place + 77)

        return VolumeCase(kind="directory", path=folder, damage=damage)


def without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_choice, "nixl_fault", lambda: "as asked by a test")


class TestSlabOnThreads(TestSlab):
    @pytest.fixture(autouse=True)
    def forced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        without_nixl(monkeypatch)

    def test_its_mode_says_so(self, volume: Volume) -> None:
        assert volume.stat().mode.endswith(", threads")


class TestDirectoryOnThreads(TestDirectory):
    @pytest.fixture(autouse=True)
    def forced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        without_nixl(monkeypatch)

    def test_its_mode_says_so(self, volume: Volume) -> None:
        assert volume.stat().mode.endswith(", threads")


class TestMemory(VolumeContract):
    @pytest.fixture
    def case(self) -> VolumeCase:
        return VolumeCase(kind="memory", lasts=False)


class TestFaultyDirectoryWithoutFaults(VolumeContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> VolumeCase:
        options: dict[str, OptionValue] = {"inner": "directory", "inner_options": {"segment_bytes": 1 << 20}}
        return VolumeCase(kind="faulty", path=tmp_path / "contract", options=options)


class TestFaultyWithoutFaults(VolumeContract):
    @pytest.fixture
    def case(self) -> VolumeCase:
        return VolumeCase(kind="faulty", lasts=False)
