"""Bytes in the place of a model's keys and values, which tell whose they are: for demos, scenarios and drills."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvbm_core.block import ImmutableBlock
from kvbm_core.identity import BlockIdentity
from kvbm_core.manager import KvBlockManager


def expected_bytes(blocks: Sequence[BlockIdentity], block_bytes: int) -> torch.Tensor:
    """What "computing" blocks gives: a pattern that only each one's key has, `[len(blocks), block_bytes]` of u8."""
    seeds = []
    for block in blocks:
        key = block.key
        mixed = (key.sequence_hash ^ key.sequence_hash >> 64 ^ key.namespace_id) & 0xFFFF_FFFF_FFFF_FFFF
        seeds.append(mixed - (1 << 64) if mixed >> 63 else mixed)
    words = torch.arange(-(-block_bytes // 8), dtype=torch.int64) * 0x9E37_79B9_7F4A_7C1
    pattern = torch.tensor(seeds, dtype=torch.int64)[:, None] + words
    return pattern.view(torch.uint8)[:, :block_bytes]


def compute_pattern(manager: KvBlockManager, wanted: Sequence[BlockIdentity]) -> list[ImmutableBlock]:
    """Guards of device blocks that hold their pattern, registered. Raises `PoolExhaustedError`."""
    if not wanted:
        return []
    places = manager.allocate(len(wanted)).blocks
    tensor = manager.device_tensor
    pattern = expected_bytes(wanted, manager.config.block_bytes).contiguous().view(tensor.dtype)
    tensor[[place.index for place in places]] = pattern.reshape(len(wanted), *tensor.shape[1:]).to(tensor.device)
    return manager.register_many(manager.complete(places, wanted))


def wrong_patterns(manager: KvBlockManager, held: Sequence[ImmutableBlock]) -> int:
    """How many device blocks, wherever they came from, do not hold what computing them would have given."""
    if not held:
        return 0
    there = manager.device_tensor[[block.index for block in held]].reshape(len(held), -1).view(torch.uint8).cpu()
    right = expected_bytes([block.identity for block in held], manager.config.block_bytes)
    return int((there != right).any(dim=1).sum())
