"""Tensor-parallel workers of one model with registered pools, and bytes in them that say which element they are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import torch

from event_plane.schema import Namespace
from kvbm_core.block import ImmutableBlock
from kvbm_core.config import KvbmConfig
from kvbm_core.identity import BlockIdentity
from kvbm_core.pool import BlockPool
from kvbm_core.remote import RemoteMemory, nixl_register
from kvbm_core.reuse import FifoOrder
from kvbm_core.storage import open_device
from kvbm_core.tier_pool import TierPool
from storage_agent.port import BlockKey

LAYERS, OUTER, PAGE_TOKENS, HEADS, HEAD_DIM = 3, 2, 4, 8, 16
NAMESPACE = Namespace(tenant="acme", model="m", kv_dtype="float16", block_tokens=PAGE_TOKENS)


def identity(number: int) -> BlockIdentity:
    key = BlockKey(NAMESPACE.namespace_id, 0, number << 64 | number)
    return BlockIdentity(key, NAMESPACE, 0, number, number, PAGE_TOKENS)


def keys(numbers: Sequence[int]) -> list[BlockKey]:
    return [identity(number).key for number in numbers]


def elements(number: int) -> torch.Tensor:
    """Of the whole block, `[layers, outer, tokens, heads, head_dim]`; no two alike within it."""
    shape = (LAYERS, OUTER, PAGE_TOKENS, HEADS, HEAD_DIM)
    count = int(np.prod(shape))
    return (torch.arange(count, dtype=torch.int32) * 7 + number * 1_009).to(torch.int16).view(torch.float16).view(shape)


class Rank:
    """Worker `rank` of `size`."""

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        order: str = "NHD",
        layout: str = "fully_contiguous",
        deadline_s: float = 30.0,
        blocks: int = 8,
        seals: int = 0,
        model_layers: int = LAYERS,
    ) -> None:
        self.config = KvbmConfig(
            layers=model_layers,
            outer=OUTER,
            page_tokens=PAGE_TOKENS,
            heads=HEADS,
            head_dim=HEAD_DIM,
            dtype="float16",
            tensor_parallel_rank=rank,
            tensor_parallel_size=size,
            device_blocks=blocks,
            device_order=order,  # type: ignore[arg-type]
            device_layout=layout,  # type: ignore[arg-type]
            hash_secret="sixteen characters",
        )
        self.first_head = self.config.shard.index * self.config.shard_heads
        self.heads = self.config.shard_heads
        self.storage = open_device(self.config.device_pool_layout)
        self.stored: list[int] = []
        self.removed: list[int] = []
        self.pool = BlockPool(
            name="device:0",
            blocks=blocks,
            page_tokens=PAGE_TOKENS,
            reuse=FifoOrder(),
            duplicates="reject",
            on_store=lambda identity, copied: self.stored.append(identity.depth),
            on_remove=lambda identity: self.removed.append(identity.depth),
        )
        tier = TierPool(self.pool, self.storage)
        self._stack = ExitStack()
        self._stack.callback(self.storage.close)
        self.registration = self._stack.enter_context(
            nixl_register(tier, self.config, name=f"rank-{rank}-of-{size}", seals=seals)
        )
        self.memory = self._stack.enter_context(
            RemoteMemory(tier, self.config, name=f"mover-{rank}-of-{size}", window_bytes=1 << 18, deadline_s=deadline_s)
        )

    def close(self) -> None:
        self._stack.close()

    def computed(self, numbers: Sequence[int]) -> list[ImmutableBlock]:
        """Registered blocks that hold this worker's heads of `elements`."""
        blocks = self.pool.allocate(len(numbers)).blocks
        for block, number in zip(blocks, numbers, strict=True):
            self.fill(block.index, number)
        complete = self.pool.complete_many(blocks, [identity(number) for number in numbers])
        return self.pool.register_many(complete)

    def fill(self, place: int, number: int) -> None:
        for layer in range(LAYERS):
            self.storage.layer_view(place, layer).copy_(self.expected(number)[layer])

    def expected(self, number: int) -> torch.Tensor:
        return elements(number)[:, :, :, self.first_head : self.first_head + self.heads]

    def holds(self, place: int, number: int) -> bool:
        """Whether the block's memory is, bit for bit, this worker's heads of `elements`."""
        found = torch.stack([self.storage.layer_view(place, layer) for layer in range(LAYERS)])
        return torch.equal(found.view(torch.int16), self.expected(number).contiguous().view(torch.int16))
