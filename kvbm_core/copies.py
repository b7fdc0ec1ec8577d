"""Copies of blocks between two pieces of memory, whatever their layouts, and the checksums that they are held to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import kernels
from kvbm_core.layout import FullyContiguousLayout
from kvbm_core.storage import TensorStorage


def copy_blocks(
    source: TensorStorage,
    from_blocks: Sequence[int],
    target: TensorStorage,
    to_blocks: Sequence[int],
    layer: int | None = None,
) -> None:
    """Copy blocks, or one layer of them, in order; returns when the bytes are there.

    The layouts may differ in all but a block's extents and dtype. Raises `RuntimeError` where a device fails.
    """
    if layer is None and are_alike(source, target):
        copy_tensors(source.tensor, from_blocks, target.tensor, to_blocks)
    else:
        for each in range(source.layout.layers) if layer is None else (layer,):
            copy_tensors(source.layer_tensors[each], from_blocks, target.layer_tensors[each], to_blocks)
    for device in {source.device, target.device}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def are_alike(source: TensorStorage, target: TensorStorage) -> bool:
    """Whether a block's elements follow each other in one order on both sides."""
    layouts = source.layout, target.layout
    return all(isinstance(each, FullyContiguousLayout) for each in layouts) and layouts[0].order == layouts[1].order


def copy_tensors(
    source: torch.Tensor, from_blocks: Sequence[int], target: torch.Tensor, to_blocks: Sequence[int]
) -> None:
    """Copy blocks between two tensors `[blocks, ...]` of one shape a block, on one device or two, in order.

    On a GPU it is queued. Raises `RuntimeError` where a device fails.
    """
    if source.device == target.device:
        kernels.copy_blocks(source, from_blocks, target, to_blocks)
        return
    staging = kernels.gather_blocks(source, from_blocks).to(target.device)
    kernels.scatter_blocks(staging, target, to_blocks)
