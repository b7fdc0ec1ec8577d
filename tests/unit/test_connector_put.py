"""What changes in an engine's host memory between a block's save and its put comes to no volume."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import torch

from event_plane.memory_transport import MemoryPublisher
from event_plane.schema import Namespace, producer_id
from kvbm_core.config import KvbmConfig, TierVolumes
from kvbm_core.connectors.engine_blocks import EngineBlocks
from kvbm_core.connectors.host_cache import HostCache
from kvbm_core.manager import KvBlockManager
from storage_agent.agent import StorageAgent
from storage_agent.descriptor import VolumeDescriptor

CONFIG = KvbmConfig(
    layers=2,
    outer=1,
    heads=2,
    head_dim=6,
    page_tokens=4,
    device_blocks=6,
    device_memory="host",
    device_order="HND",
    disk=TierVolumes(volumes=("nvme",), retention_s=60.0),
    hash_secret="known to all who read this",
)
BLOCKS = EngineBlocks(Namespace(tenant="acme", model="m", kv_dtype="float16", block_tokens=4))


def test_a_block_that_changed_after_its_save_is_counted_forgotten_and_put_nowhere(tmp_path: Path) -> None:
    volume = VolumeDescriptor(id="nvme", path=str(tmp_path / "nvme.slab"), capacity_blocks=8, block_bytes_max=4_096)
    layers = [torch.zeros(16, 2, 4, 6, dtype=torch.float16) for _ in range(CONFIG.layers)]
    chain = BLOCKS.chain([1, 2, 3], [])
    keys = [identity.key for identity in chain]
    with StorageAgent("agent", publisher=None, allowed_roots=[tmp_path]) as agent:
        agent.register_volume(volume)
        with (
            closing(MemoryPublisher("memory://connector-put", producer=producer_id("engine"))) as publisher,
            KvBlockManager(CONFIG, publisher, agent) as manager,
            closing(HostCache(manager, layers)) as cache,
        ):
            saved = manager.register_many(manager.complete(manager.allocate(3).blocks, chain))
            cache.seal(saved)
            manager.device.payload(saved[1].index)[5] ^= 1
            for block in saved:
                block.release()

            manager.offload_soon(3).result()

            assert agent.holding(keys) == ["nvme", "", "nvme"]
            assert [manager.own_tier("host").pool.has(key) for key in keys] == [True, False, True]
            assert cache.counts()["wrong_blocks"] == 1
