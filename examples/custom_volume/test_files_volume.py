"""The kind of this package, held to the contract of volumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage_agent.block_header import PAGE_BYTES, BlockHeader
from storage_agent.volume import Volume
from storage_agent.volume_contract import VolumeCase, VolumeContract


class TestFiles(VolumeContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> VolumeCase:
        folder = tmp_path / "blocks"

        def damage(volume: Volume, header: BlockHeader) -> None:
            path = folder / f"{header.slot}.block"
            content = bytearray(path.read_bytes())
            content[PAGE_BYTES + 77] ^= 0x10
            path.write_bytes(content)

        return VolumeCase(kind="files", path=folder, damage=damage)
