"""Lists of blocks of paged pools: to and from staging where they lie in order, and from one pool to another.

A pool is one tensor, `[blocks, ...]`, or, layer by layer, a sequence of tensors of one shape. `block_dim` is the axis
of each that counts blocks: 0 for `[blocks, layers, outer, page, inner]` and layers `[blocks, outer, page, inner]`, 1
for layers `[outer, blocks, page, inner]`. Any strides will do. Staging is `[n, *rest]` of a tensor and
`[n, layers, *rest]` of a sequence, `rest` being the pool's axes but `block_dim`. For some layers alone give slices of
both: `pool[:, 3:5]` (or `layers[3:5]`) and `staging[:, 3:5]`.

Block ids are a sequence of ints or an int tensor. Ids on the GPU are used as they are, without waiting for it: they are
not checked, one that is out of range gathers zeros and scatters nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kernels import dispatch
from kernels.errors import BlockIndexError, ShapeError

Pool = torch.Tensor | Sequence[torch.Tensor]
BlockIds = Sequence[int] | torch.Tensor
ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def gather_blocks(
    pool: Pool, block_ids: BlockIds, out: torch.Tensor | None = None, *, block_dim: int = 0
) -> torch.Tensor:
    """Copy paged blocks into staging and return it; a block may be named twice.

    `out` is written where given, in the pool's dtype and on its device; it may have strides, but no element twice.
    Raises `BlockIndexError` and `ShapeError`; then nothing is written.
    """
    layers, shape = _block_first(pool, block_dim)
    ids = block_indices(block_ids, layers[0])
    staging_shape = (len(ids), *shape)
    if out is None:
        out = torch.empty(staging_shape, dtype=layers[0].dtype, device=layers[0].device)
    else:
        _check_staging("out", out, layers[0], staging_shape)
    if out.numel():
        dispatch.implementation_for(out.device).copy(layers, _by_layer(out, pool), ids, None)
    return out


def scatter_blocks(staging: torch.Tensor, pool: Pool, block_ids: BlockIds, *, block_dim: int = 0) -> None:
    """Copy staging into the blocks of the pool, which it mutates.

    Raises `ShapeError`, and `BlockIndexError` for an id out of range or given twice (which of the two writes would win
    is not known); then nothing is written. Ids on the GPU are not looked at for that.
    """
    layers, shape = _block_first(pool, block_dim)
    for layer in layers:
        check_no_overlap("the pool", layer)
    ids = block_indices(block_ids, layers[0], once=True)
    _check_staging("staging", staging, layers[0], (len(ids), *shape), writes=False)
    if staging.numel():
        dispatch.implementation_for(staging.device).copy(_by_layer(staging, pool), layers, None, ids)


def copy_blocks(
    source: Pool,
    source_ids: BlockIds,
    target: Pool,
    target_ids: BlockIds,
    *,
    source_block_dim: int = 0,
    target_block_dim: int = 0,
) -> None:
    """Copy blocks of one pool into those of another on the same device, each byte once; mutates `target`.

    Where one pool is a sequence of layers and the other a tensor, the tensor is `[blocks, layers, *rest]`. No block may
    be read and written in one call. Raises `ShapeError`, and `BlockIndexError` as `scatter_blocks`; then nothing is
    written.
    """
    reads, _ = _block_first(source, source_block_dim)
    writes, _ = _block_first(target, target_block_dim)
    if not isinstance(source, torch.Tensor) and isinstance(target, torch.Tensor):
        writes = _split("the target", writes[0], len(reads))
    elif isinstance(source, torch.Tensor) and not isinstance(target, torch.Tensor):
        reads = _split("the source", reads[0], len(writes))
    if len(reads) != len(writes):
        raise ShapeError(f"the source has {len(reads)} layers, the target {len(writes)}: give the same of both")
    for layer in writes:
        check_no_overlap("the target", layer)
    from_ids, to_ids = block_indices(source_ids, reads[0]), block_indices(target_ids, writes[0], once=True)
    if len(from_ids) != len(to_ids):
        raise BlockIndexError(f"{len(from_ids)} blocks are read and {len(to_ids)} written: name one for the other")
    _check_staging("the source", reads[0], writes[0], (reads[0].shape[0], *writes[0].shape[1:]), writes=False)
    if len(to_ids) and writes[0].numel():
        dispatch.implementation_for(writes[0].device).copy(reads, writes, from_ids, to_ids)


def block_indices(block_ids: BlockIds, pool: torch.Tensor, *, once: bool = False) -> torch.Tensor:
    """The ids as int64 on the device of `pool`, `[blocks, ...]`; checked unless they and the pool lie on a GPU.

    Raises `BlockIndexError` for one out of range, and with `once` for one given twice.
    """
    if isinstance(block_ids, torch.Tensor):
        if block_ids.dim() != 1 or block_ids.dtype not in ID_DTYPES:
            raise BlockIndexError(f"block ids are {block_ids.dtype} {tuple(block_ids.shape)}: give a vector of ints")
        if block_ids.device.type != "cpu" and pool.device.type != "cpu":
            return block_ids.to(pool.device, torch.int64).contiguous()
        ids = block_ids.to("cpu", torch.int64)
    else:
        ids = torch.from_numpy(np.fromiter(block_ids, np.int64, len(block_ids)))
    blocks = pool.shape[0]
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= blocks):
        bad = next(block_id for block_id in ids.tolist() if not 0 <= block_id < blocks)
        raise BlockIndexError(f"block {bad} is outside the pool: give indexes from 0 to {blocks - 1}")
    if once:
        _check_once(ids)
    if pool.device.type == "cuda":
        # From pinned memory, so that this does not wait for what the GPU still has to do.
        return ids.pin_memory().to(pool.device, non_blocking=True)
    return ids.contiguous()


def check_no_overlap(name: str, written: torch.Tensor) -> None:
    """Raises `ShapeError` for a tensor with an axis that repeats itself, as `expand` makes."""
    if any(size > 1 and stride == 0 for size, stride in zip(written.shape, written.stride(), strict=True)):
        raise ShapeError(f"{name} has strides {written.stride()}, one element in several places: write into a copy")


def _block_first(pool: Pool, block_dim: int) -> tuple[list[torch.Tensor], tuple[int, ...]]:
    """The pool's tensors with the block axis in front, and the shape of one block of staging."""
    tensors = [pool] if isinstance(pool, torch.Tensor) else list(pool)
    if not tensors:
        raise ShapeError("the pool is a sequence without a layer: give one tensor a layer")
    first = tensors[0]
    for layer in tensors[1:]:
        if (layer.shape, layer.dtype, layer.device) != (first.shape, first.dtype, first.device):
            raise ShapeError(
                f"a layer is {tuple(layer.shape)} {layer.dtype} on {layer.device}, the first {tuple(first.shape)} "
                f"{first.dtype} on {first.device}: gather layers that differ one by one"
            )
    if not 0 <= block_dim < first.dim():
        raise ShapeError(f"block_dim is {block_dim}, the pool has shape {tuple(first.shape)}: name one of its axes")
    layers = [tensor.movedim(block_dim, 0) for tensor in tensors]
    rest = tuple(layers[0].shape[1:])
    return layers, rest if isinstance(pool, torch.Tensor) else (len(layers), *rest)


def _split(name: str, pool: torch.Tensor, layers: int) -> list[torch.Tensor]:
    """A block-first tensor as its layers."""
    if pool.dim() < 2 or pool.shape[1] != layers:
        shape = tuple(pool.shape)
        raise ShapeError(f"{name} has shape {shape}, the other {layers} layers: give [blocks, {layers}, ...]")
    return list(pool.unbind(1))


def _by_layer(staging: torch.Tensor, pool: Pool) -> list[torch.Tensor]:
    return [staging] if isinstance(pool, torch.Tensor) else list(staging.unbind(1))


def _check_once(ids: torch.Tensor) -> None:
    if len(set(ids.tolist())) == len(ids):
        return
    seen: set[int] = set()
    for block_id in ids.tolist():
        if block_id in seen:
            raise BlockIndexError(f"scatter_blocks: block {block_id} is written twice: give each target block once")
        seen.add(block_id)


def _check_staging(
    name: str, staging: torch.Tensor, pool: torch.Tensor, shape: tuple[int, ...], *, writes: bool = True
) -> None:
    if tuple(staging.shape) != shape:
        raise ShapeError(f"{name} has shape {tuple(staging.shape)}, the blocks need {shape}")
    if staging.dtype != pool.dtype:
        raise ShapeError(f"{name} holds {staging.dtype}, the pool {pool.dtype}: convert before copying")
    if staging.device != pool.device:
        raise ShapeError(f"{name} is on {staging.device}, the pool on {pool.device}: move it there first")
    if writes:
        check_no_overlap(name, staging)
