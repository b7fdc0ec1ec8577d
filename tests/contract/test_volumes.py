"""Every kind of volume of ours, held to the contract that other packages' are held to."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage_agent.block_header import PAGE_BYTES, BlockHeader
from storage_agent.slab_format import Superblock
from storage_agent.volume import Volume
from storage_agent.volume_contract import BLOCK_BYTES, CAPACITY, VolumeCase, VolumeContract


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


class TestMemory(VolumeContract):
    @pytest.fixture
    def case(self) -> VolumeCase:
        return VolumeCase(kind="memory", lasts=False)


class TestFaultyWithoutFaults(VolumeContract):
    @pytest.fixture
    def case(self) -> VolumeCase:
        return VolumeCase(kind="faulty", lasts=False)
