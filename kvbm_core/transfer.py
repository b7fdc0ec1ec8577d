"""One tier's memory with its pool, and copies between two tiers.

A copy holds the source's guards until it is registered in the target, so no block's memory is reused under it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kernels import gather_blocks, scatter_blocks
from kvbm_core.block import CompleteBlock, ImmutableBlock, MutableBlock
from kvbm_core.identity import BlockIdentity
from kvbm_core.pool import BlockPool
from kvbm_core.storage import TensorStorage


class TierPool(NamedTuple):
    """A tier: which blocks there are, and their bytes."""

    pool: BlockPool
    storage: TensorStorage


def complete(block: MutableBlock, identity: BlockIdentity) -> CompleteBlock:
    """Commit a block all of whose bytes were written at once."""
    block.init_sequence()
    block.fill(identity.block_tokens)
    return block.commit(identity)


def copy_to(source: TierPool, blocks: Sequence[ImmutableBlock], target: TierPool) -> list[ImmutableBlock]:
    """Copy registered blocks of one tier into another and register them there as copies, in order.

    Raises `PoolExhaustedError` when the target has no room; then nothing was copied.
    """
    allocation = target.pool.allocate(len(blocks))
    staging = gather_blocks(source.storage.tensor, [block.index for block in blocks]).to(target.storage.tensor.device)
    scatter_blocks(staging, target.storage.tensor, [block.index for block in allocation.blocks])
    return [
        complete(place, block.identity).register(copied=True)
        for place, block in zip(allocation.blocks, blocks, strict=True)
    ]
