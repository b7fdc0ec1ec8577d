"""A tensor-parallel worker with a block manager of its own, as a process too: it offloads shards to an owner's slab.

The process prints what the offload counted. Told to halt after some batches, it says so when the next one's shards are
written but neither synced nor committed, and waits to be killed.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import torch

from event_plane.memory_transport import MemoryPublisher
from event_plane.schema import producer_id
from kvbm_core.block import ImmutableBlock
from kvbm_core.config import KvbmConfig, TierVolumes
from kvbm_core.identity import BlockIdentity
from kvbm_core.manager import KvBlockManager
from kvbm_core.onboard import Onboarded
from kvbm_core.sequence import TokenBlockSequence
from storage_agent.client_storage import ClientStorage

LAYERS, OUTER, PAGE_TOKENS, HEADS, HEAD_DIM = 2, 2, 4, 4, 16
BLOCK_BYTES = LAYERS * OUTER * PAGE_TOKENS * HEADS * HEAD_DIM * 2
BATCH_BLOCKS = 2
_lives = count()


class CoreWorker:
    """Worker `rank` of `size`, over the volume `volume` of the agent at `url`."""

    def __init__(self, url: str, rank: int, size: int, volume: str = "shared") -> None:
        self.config = KvbmConfig(
            layers=LAYERS,
            outer=OUTER,
            page_tokens=PAGE_TOKENS,
            heads=HEADS,
            head_dim=HEAD_DIM,
            tensor_parallel_rank=rank,
            tensor_parallel_size=size,
            device_blocks=16,
            host_blocks=16,
            disk=TierVolumes(volumes=(volume,), retention_s=60.0),
            transfer_blocks=BATCH_BLOCKS,
            hash_secret="a secret of the tests",
            model="tiny",
            headroom_bytes=0,
        )
        life = f"memory://core-worker-{os.getpid()}-{next(_lives)}"
        self.publisher = MemoryPublisher(life, producer=producer_id(f"worker-{rank}"))
        self.storage = ClientStorage(url)
        self.manager = KvBlockManager(self.config, self.publisher, self.storage)

    def sequence(self, blocks: int, first_token: int = 0) -> list[BlockIdentity]:
        tokens = np.arange(first_token, first_token + blocks * PAGE_TOKENS, dtype=np.uint32)
        return TokenBlockSequence(self.config, "acme", tokens).blocks

    def compute_and_offload(self, wanted: Sequence[BlockIdentity]) -> None:
        """Returns when the blocks are on the volume, as far as they go there."""
        places = self.manager.allocate(len(wanted)).blocks
        for place, identity in zip(places, wanted, strict=True):
            self.manager.device.block_view(place.index).view(torch.int16).copy_(self.elements(identity))
        held = self.manager.register_many(self.manager.complete(places, wanted))
        self.manager.offload(len(wanted))
        for block in reversed(held):
            block.release()

    def onboard(self, wanted: Sequence[BlockIdentity]) -> Onboarded:
        """Checks the bytes of what is found, and lets go of it."""
        found = self.manager.onboard(wanted)
        for block in found.blocks:
            assert self.is_right(block), f"block {block.identity.depth} of worker {self.config.tensor_parallel_rank}"
        for block in reversed(found.blocks):
            block.release()
        return found

    def is_right(self, block: ImmutableBlock) -> bool:
        there = self.manager.device.block_view(block.index).view(torch.int16)
        return torch.equal(there, self.elements(block.identity))

    def elements(self, identity: BlockIdentity) -> torch.Tensor:
        """This worker's heads of a block, `[layers, outer, tokens, heads, head_dim]`: random ones of its own."""
        shape = (LAYERS, OUTER, PAGE_TOKENS, HEADS, HEAD_DIM)
        whole = np.random.default_rng(identity.key.sequence_hash).integers(-(2**15), 2**15, shape, dtype=np.int16)
        shard = self.config.shard
        return torch.from_numpy(np.split(whole, shard.count, axis=3)[shard.index])

    def close(self) -> None:
        self.manager.close()
        self.publisher.close()
        self.storage.close()


def halt() -> None:
    print("halted", flush=True)
    threading.Event().wait()


def main(url: str, rank: int, size: int, block_count: int, halt_after: int) -> None:
    worker = CoreWorker(url, rank, size)
    syncs, sync = count(), os.fdatasync

    def sync_or_halt(fd: Any) -> None:
        if next(syncs) == halt_after:  # reached with the shards written
            halt()
        sync(fd)

    os.fdatasync = sync_or_halt
    wanted = worker.sequence(block_count)
    for start in range(0, block_count, BATCH_BLOCKS):  # batches that are offloaded together go in any order
        worker.compute_and_offload(wanted[start : start + BATCH_BLOCKS])
    totals = worker.manager.totals()
    print(dict(totals.put), dict(totals.put_refused), flush=True)
    worker.close()


if __name__ == "__main__":
    main(sys.argv[1], *(int(each) for each in sys.argv[2:]))
