"""One function per operation: checks its arguments once, then chooses an implementation by the pool's device.

Only the torch reference exists, and tensors on a GPU use it too; Triton kernels come with issue 5.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels import reference
from kernels.errors import BlockIndexError, ShapeError


def gather_blocks(pool: torch.Tensor, block_ids: Sequence[int], out: torch.Tensor | None = None) -> torch.Tensor:
    """Copy paged blocks into contiguous staging; returns the staging, `[len(block_ids), *pool.shape[1:]]`.

    `pool` is `[blocks, ...]` with any strides; a block may be named twice. `out` is written where given, and must be
    contiguous with the pool's dtype and device. Raises `BlockIndexError` and `ShapeError`; then nothing is written.
    """
    _check_range(pool, block_ids)
    shape = (len(block_ids), *pool.shape[1:])
    if out is None:
        out = torch.empty(shape, dtype=pool.dtype, device=pool.device)
    else:
        _check_staging("out", out, pool, shape)
    if block_ids:
        reference.gather(pool, _indices(block_ids, pool.device), out)
    return out


def scatter_blocks(staging: torch.Tensor, pool: torch.Tensor, block_ids: Sequence[int]) -> None:
    """Copy contiguous staging `[len(block_ids), *pool.shape[1:]]` into the pool's blocks; mutates `pool`.

    Raises `BlockIndexError` for an index out of range or given twice (the order of the two writes would be
    undefined) and `ShapeError`; then nothing is written.
    """
    _check_range(pool, block_ids)
    _check_staging("staging", staging, pool, (len(block_ids), *pool.shape[1:]))
    if len(set(block_ids)) != len(block_ids):
        twice = next(block_id for i, block_id in enumerate(block_ids) if block_id in block_ids[:i])
        raise BlockIndexError(f"scatter_blocks: block {twice} is written twice: give each target block once")
    if block_ids:
        reference.scatter(staging, pool, _indices(block_ids, pool.device))


def _indices(block_ids: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(block_ids, dtype=torch.int64, device=device)


def _check_range(pool: torch.Tensor, block_ids: Sequence[int]) -> None:
    blocks = pool.shape[0] if pool.dim() else 0
    for block_id in block_ids:
        if not 0 <= block_id < blocks:
            raise BlockIndexError(f"block {block_id} is outside the pool: give indexes from 0 to {blocks - 1}")


def _check_staging(name: str, staging: torch.Tensor, pool: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(staging.shape) != shape:
        raise ShapeError(f"{name} has shape {tuple(staging.shape)}, the blocks need {shape}")
    if staging.dtype != pool.dtype:
        raise ShapeError(f"{name} holds {staging.dtype}, the pool {pool.dtype}: convert before copying")
    if staging.device != pool.device:
        raise ShapeError(f"{name} is on {staging.device}, the pool on {pool.device}: move it there first")
    if not staging.is_contiguous():
        raise ShapeError(f"{name} has strides {staging.stride()}: staging must be contiguous")
