"""`quantize_blocks` and `dequantize_blocks`: half the bytes for cold tiers, as 8-bit floats with a scale a head.

A group is one head of one layer and outer of a block, its tokens × head_dim elements. Its scale is its largest
magnitude / 448, so that it fills the range of e4m3. With x an element, what comes back differs from it by at most
max(|x| × 2^-4, scale × 2^-10), plus the rounding of the result's own dtype. A group that holds an infinity or NaN has
the scale NaN and comes back as NaN, never as numbers that look right.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels import dispatch
from kernels.errors import ShapeError
from kernels.layouts import KvLayout, check_blocks

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_GROUPED = ("layers", "outer", "heads", "tokens", "head_dim")


class QuantizedBlocks(NamedTuple):
    """`values`: float8_e4m3fn in the layout of the blocks; `scales`: float32 `[n, layers, outer, heads]`, always."""

    values: torch.Tensor
    scales: torch.Tensor


def quantize_blocks(blocks: torch.Tensor, layout: KvLayout) -> QuantizedBlocks:
    """Quantise `[n, *layout.axes]` of float16, bfloat16 or float32, any strides. Raises `ShapeError`."""
    check_blocks("blocks", blocks, layout)
    if blocks.dtype not in FLOATS:
        raise ShapeError(f"blocks hold {blocks.dtype}: quantise {', '.join(map(str, FLOATS))}")
    values = torch.empty(blocks.shape, dtype=torch.float8_e4m3fn, device=blocks.device)
    grouped = _grouped(blocks, layout)
    scales = torch.empty(grouped.shape[:4], dtype=torch.float32, device=blocks.device)
    if not blocks.numel():
        return QuantizedBlocks(values, scales.fill_(1.0))
    dispatch.implementation_for(blocks.device, fp8=True).quantize(grouped, _grouped(values, layout), scales)
    return QuantizedBlocks(values, scales)


def dequantize_blocks(
    values: torch.Tensor, scales: torch.Tensor, layout: KvLayout, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """The blocks back, contiguous `[n, *layout.axes]` in `dtype`. Raises `ShapeError`."""
    check_blocks("values", values, layout)
    if values.dtype != torch.float8_e4m3fn or dtype not in FLOATS:
        raise ShapeError(f"values hold {values.dtype}, wanted are {dtype}: give float8_e4m3fn, ask for one of {FLOATS}")
    grouped = _grouped(values, layout)
    if scales.shape != grouped.shape[:4] or scales.dtype != torch.float32 or scales.device != values.device:
        raise ShapeError(
            f"scales are {tuple(scales.shape)} {scales.dtype} on {scales.device}: these values need "
            f"{tuple(grouped.shape[:4])} float32 on {values.device}"
        )
    blocks = torch.empty(values.shape, dtype=dtype, device=values.device)
    if blocks.numel():
        dispatch.implementation_for(values.device, fp8=True).dequantize(grouped, scales, _grouped(blocks, layout))
    return blocks


def _grouped(blocks: torch.Tensor, layout: KvLayout) -> torch.Tensor:
    """A view with a group's elements last: `[n, layers, outer, heads, tokens, head_dim]`."""
    return blocks.permute(0, *(1 + layout.axes.index(axis) for axis in _GROUPED))
