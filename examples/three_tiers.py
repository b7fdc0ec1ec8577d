"""One document whose blocks lie in three tiers, and the columns in which a core counts them.

    python examples/three_tiers.py

Other documents push its tail out of a small device and a small host; a request for all of it then finds two blocks on
the device, two in the host and two on a volume. No column is called "cache hit": where a block was, what was moved for
it and how long that took are different questions.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from event_plane.memory_transport import MemoryPublisher
from event_plane.schema import Tier, producer_id
from kvbm_core.block import ImmutableBlock
from kvbm_core.config import KvbmConfig, TierVolumes
from kvbm_core.identity import BlockIdentity
from kvbm_core.manager import KvBlockManager
from kvbm_core.sequence import TokenBlockSequence
from storage_agent.agent import StorageAgent
from storage_agent.descriptor import VolumeDescriptor

CONFIG = KvbmConfig(
    model="example",
    layers=2,
    heads=2,
    head_dim=64,
    device_blocks=8,
    host_blocks=12,
    disk=TierVolumes(volumes=("nvme",), retention_s=3600.0),
    hash_secret="known to everyone who reads this",
)


def compute(manager: KvBlockManager, blocks: Sequence[BlockIdentity]) -> list[ImmutableBlock]:
    """What the model would do: write keys and values into device blocks, then make them findable."""
    places = manager.allocate(len(blocks)).blocks
    for place, block in zip(places, blocks, strict=True):
        manager.device_tensor[place.index] = block.depth
    return manager.register_many(manager.complete(places, blocks))


def release(blocks: Sequence[ImmutableBlock]) -> None:
    """The root last, so that tails are evicted before what many share."""
    for block in reversed(blocks):
        block.release()


def document(number: int, blocks: int) -> list[BlockIdentity]:
    tokens = range(number * 100_000, number * 100_000 + blocks * CONFIG.page_tokens)
    return TokenBlockSequence(CONFIG, "acme", tokens).blocks


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        agent = StorageAgent("agent", publisher=None, allowed_roots=[Path(folder)])
        agent.register_volume(
            VolumeDescriptor(
                id="nvme",
                path=str(Path(folder, "nvme.slab")),
                capacity_blocks=64,
                block_bytes_max=CONFIG.block_bytes,
            )
        )
        publisher = MemoryPublisher("memory://three-tiers", producer=producer_id("core"))
        with KvBlockManager(CONFIG, publisher, agent) as manager:
            wanted = document(0, 6)
            release(compute(manager, wanted))
            manager.offload(6)  # to the host, and on to the volume
            for other in (1, 2):  # others push its tail out of the device, and then out of the host
                release(compute(manager, document(other, 4)))
                manager.offload(4)
                release(manager.match(wanted[:2]))  # its beginning stays in use

            found = manager.onboard(wanted, budget_ms=1_000.0)
            account = found.account
            print(f"asked for     {account.asked} blocks, {account.tokens_asked} tokens, {account.bytes_asked} bytes")
            print(f"ready         {account.ready} in the device")
            print(f"waiting       {account.waiting} for another request's transfer")
            for tier in (Tier.G2, Tier.G3, Tier.G4):
                print(f"found in {tier.name}   {account.found[tier]}")
            print(f"absent        {account.absent}")
            print(f"sources       {' '.join(found.sources)}")
            for path, moved_bytes in account.bytes_moved.items():
                print(f"moved         {moved_bytes} bytes {path}, in {account.load_seconds[path] * 1e3:.2f} ms")
            print(f"tokens        {account.tokens_matched} of {account.tokens_asked} matched")
            for pool, (occupancy, counters) in manager.pools().items():
                print(
                    f"{pool:<13} {sum(occupancy)} blocks: {occupancy.active} active, {occupancy.inactive} inactive, "
                    f"{occupancy.reset} reset; {counters.evicted} evicted of {counters.allocated} allocated"
                )
            release(found.blocks)
        publisher.close()
        agent.close()


if __name__ == "__main__":
    main()
