"""`device_memory = "host"`: an engine keeps its GPU's blocks itself, and the core's first pool is host memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from event_plane.memory_transport import MemoryPublisher
from event_plane.schema import Tier, producer_id
from kvbm_core.budget import MachineFacts, check_budget
from kvbm_core.config import KvbmConfig, TierVolumes
from kvbm_core.errors import ConfigError
from kvbm_core.manager import KvBlockManager
from kvbm_core.sequence import TokenBlockSequence
from storage_agent.agent import StorageAgent
from storage_agent.descriptor import VolumeDescriptor

CONFIG = KvbmConfig(
    layers=2,
    outer=1,
    heads=2,
    head_dim=16,
    page_tokens=4,
    device_blocks=4,
    device_memory="host",
    device_order="HND",
    disk=TierVolumes(volumes=("nvme",), retention_s=60.0),
    hash_secret="known to all who read this",
)


def test_blocks_of_the_engines_host_are_g2_and_come_back_from_a_volume(tmp_path: Path) -> None:
    blocks = TokenBlockSequence(CONFIG, "acme", range(16)).blocks
    agent = StorageAgent("agent", publisher=None, allowed_roots=[tmp_path])
    agent.register_volume(
        VolumeDescriptor(id="nvme", path=str(tmp_path / "nvme.slab"), capacity_blocks=8, block_bytes_max=4_096)
    )
    publisher = MemoryPublisher("memory://engines-host", producer=producer_id("core"))
    with KvBlockManager(CONFIG, publisher, agent) as core:
        places = core.allocate(4).blocks
        for number, place in enumerate(places):
            core.device.block_view(place.index).fill_(number + 1)
        for block in core.register_many(core.complete(places, blocks)):
            block.release()
        assert core.offload(4) == 4
        assert list(core.pools()) == ["host"]
        assert core.device.tier is Tier.G2
        assert [block.index for block in core.match(blocks)] == [0, 1, 2, 3]  # and lets go of them
        assert core.reset("host") == 4

        found = core.onboard(blocks)

        assert found.sources == ["nvme"] * 4
        assert [float(core.device.block_view(block.index).float().mean()) for block in found.blocks] == [1, 2, 3, 4]
        assert core.explain(blocks[0].key).copies[0].tier == "G2"
        found.release()
    publisher.close()
    agent.close()


def test_a_second_pool_in_host_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="two pools in host memory"):
        KvbmConfig(
            layers=1, heads=1, head_dim=1, device_blocks=1, device_memory="host", host_blocks=1, hash_secret="x" * 16
        )


def test_budget_counts_the_engines_host_as_host_memory_beside_a_gpu() -> None:
    facts = MachineFacts(host_available_bytes=CONFIG.headroom_bytes, locked_bytes_max=None, device_free_bytes=1 << 40)

    refused = check_budget(CONFIG, facts)

    assert {refusal.setting for refusal in refused} == {"headroom_bytes"}
