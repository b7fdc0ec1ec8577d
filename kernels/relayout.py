"""`permute_blocks` between layouts, and `reshard_blocks` between tensor-parallel sizes and layouts: one pass each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels import dispatch
from kernels.errors import ShapeError
from kernels.layouts import KvLayout, check_blocks
from kernels.paged import check_no_overlap


def permute_blocks(
    blocks: torch.Tensor, source: KvLayout, target: KvLayout, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Copy blocks from the layout `source`, any strides, into `target`; `[n, *target.axes]`.

    `out` is written where given: the shape of the result, the dtype and device of `blocks`. Raises `ShapeError`.
    """
    check_blocks("blocks", blocks, source)
    view = blocks.permute(source.order(target))
    if out is None:
        out = torch.empty(view.shape, dtype=blocks.dtype, device=blocks.device)
    else:
        _check_out(out, view)
    if out.numel():
        dispatch.implementation_for(out.device).copy([view], [out], None, None)
    return out


def reshard_blocks(
    shards: Sequence[torch.Tensor | None],
    source: KvLayout,
    target: KvLayout,
    target_count: int,
    target_ranks: Sequence[int] | None = None,
) -> list[torch.Tensor]:
    """Cut blocks that `len(shards)` tensor-parallel workers hold, in rank order, for `target_count` workers.

    Each shard is `[n, *source.axes]` with its worker's part of the heads. Returns a tensor `[n, *target.axes]` for each
    of `target_ranks`, all by default. A shard that no wanted rank touches may be None. Raises `ShapeError`.
    """
    ranks = range(target_count) if target_ranks is None else target_ranks
    example = _check_shards(shards, source)
    held = example.shape[source.head_axis]
    heads = held * len(shards)
    if target_count < 1 or heads % target_count:
        raise ShapeError(f"{heads} heads cannot be cut for {target_count} workers: choose a divisor of {heads}")
    wanted = heads // target_count
    results = []
    for rank in ranks:
        if not 0 <= rank < target_count:
            raise ShapeError(f"there is no target rank {rank}: give ranks from 0 to {target_count - 1}")
        results.append(_one_target(shards, example, source, target, rank * wanted, wanted))
    return results


def _one_target(
    shards: Sequence[torch.Tensor | None],
    example: torch.Tensor,
    source: KvLayout,
    target: KvLayout,
    first_head: int,
    wanted: int,
) -> torch.Tensor:
    """The shard of `wanted` heads from `first_head` on, from every source shard that overlaps them."""
    held = example.shape[source.head_axis]
    shape = [example.shape[axis] for axis in source.order(target)]
    shape[target.head_axis] = wanted
    result = torch.empty(shape, dtype=example.dtype, device=example.device)
    if not result.numel():
        return result
    for rank in range(first_head // held, -(-(first_head + wanted) // held)):
        shard = shards[rank]
        if shard is None:
            raise ShapeError(
                f"shard {rank} is None, but heads {first_head} to {first_head + wanted - 1} are wanted: give it"
            )
        start, end = max(first_head, rank * held), min(first_head + wanted, (rank + 1) * held)
        taken = shard.narrow(source.head_axis, start - rank * held, end - start).permute(source.order(target))
        place = result.narrow(target.head_axis, start - first_head, end - start)
        dispatch.implementation_for(result.device).copy([taken], [place], None, None)
    return result


def _check_shards(shards: Sequence[torch.Tensor | None], layout: KvLayout) -> torch.Tensor:
    """Any one of the shards. Raises `ShapeError` where there is none, or two differ."""
    given = [shard for shard in shards if shard is not None]
    if not given:
        raise ShapeError("every shard is None or there is none: give those that the wanted ranks touch")
    first = given[0]
    check_blocks("a shard", first, layout)
    for shard in given[1:]:
        if (shard.shape, shard.dtype, shard.device) != (first.shape, first.dtype, first.device):
            raise ShapeError(
                f"a shard is {tuple(shard.shape)} {shard.dtype} on {shard.device}, another {tuple(first.shape)} "
                f"{first.dtype} on {first.device}: all shards of a block are alike"
            )
    return first


def _check_out(out: torch.Tensor, view: torch.Tensor) -> None:
    if (out.shape, out.dtype, out.device) != (view.shape, view.dtype, view.device):
        raise ShapeError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}, the result {tuple(view.shape)} {view.dtype} on "
            f"{view.device}: make it so"
        )
    check_no_overlap("out", out)
