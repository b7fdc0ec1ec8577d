"""Volumes of kind `remote`, held to the contract of every kind against a real agent that owns a slab."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from storage_agent.agent import StorageAgent
from storage_agent.block_header import PAGE_BYTES, BlockHeader
from storage_agent.descriptor import OptionValue, VolumeDescriptor
from storage_agent.endpoints import Endpoint
from storage_agent.kinds import prepare
from storage_agent.port import Result
from storage_agent.service import AgentService
from storage_agent.slab_format import Superblock
from storage_agent.slot_volume import SlotVolume
from storage_agent.volume import Volume
from storage_agent.volume_contract import (
    BLOCK_BYTES,
    CAPACITY,
    Told,
    VolumeCase,
    VolumeContract,
    block,
    key,
    keys,
    payload,
    results,
)


@dataclass(frozen=True, kw_only=True)
class RemoteCase(VolumeCase):
    """The owner runs as long as the volume is open; what it announces is what is told."""

    folder: Path

    @contextmanager
    def opened(self, told: Told | None = None, **fields: Any) -> Iterator[Volume]:
        told = told or Told()
        remote = self.descriptor(**fields)
        slab = VolumeDescriptor(
            id="there",
            path=str(self.folder / "there.slab"),
            capacity_blocks=remote.capacity_blocks,
            block_bytes_max=remote.block_bytes_max,
        )
        with StorageAgent("owner", publisher=None, allowed_roots=[self.folder]) as owner:
            owner.register_volume(slab)
            (owned,) = owner.volumes()
            assert isinstance(owned, SlotVolume)
            owned._on_stored, owned._on_freed = told.stored.extend, told.freed.extend
            with AgentService(owner, "tcp://127.0.0.1:*") as service:
                kind, opening = prepare(remote, [], {"peer": Endpoint(url=service.command_url)})
                volume = kind.open(replace(opening, on_stored=_never, on_freed=_never))
                try:
                    yield volume
                finally:
                    volume.close()


def _never(headers: object) -> None:
    raise AssertionError("its owner tells of what is on it")


class TestRemote(VolumeContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> VolumeCase:
        slab = Superblock("there", CAPACITY, BLOCK_BYTES)

        def damage(volume: Volume, header: BlockHeader) -> None:
            with (tmp_path / "there.slab").open("r+b") as file:
                file.seek(slab.slot_offset(header.slot) + PAGE_BYTES + 77)
                (byte,) = file.read(1)
                file.seek(-1, 1)
                file.write(bytes([byte ^ 0x10]))

        options: dict[str, OptionValue] = {"endpoint": "peer", "volume": "there"}
        return RemoteCase(kind="remote", folder=tmp_path, options=options, resizes=False, damage=damage)

    def test_a_delete_waits_for_the_reader_of_its_slot(self, volume: Volume) -> None:
        """It need not: a reader here has a copy of its own, which a delete meanwhile does not touch."""
        volume.put([block(1)])
        seen: list[bytes] = []

        def accept(index: int, header: BlockHeader, view: memoryview) -> str:
            assert results(volume.delete(keys(1))) == [Result.DELETED]
            seen.append(bytes(view))
            return ""

        assert results(volume.read(keys(1), accept)) == [Result.HIT]
        assert seen == [payload(1)]
        assert volume.live_header(key(1)) is None
