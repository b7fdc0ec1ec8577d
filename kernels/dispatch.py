"""Which implementation works on a tensor: Triton where it lies on a GPU, `kernels.cpu` where on the CPU.

All offer the same few functions over arguments that the public operations have checked. Without Triton, on a GPU too
old for an operation (fp8 needs compute capability 8.9), and on any other device the reference does it, in plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch

from kernels import cpu, reference

FP8_CAPABILITY_MIN = (8, 9)


class Implementation(Protocol):
    """What `kernels.cpu`, `kernels.reference` and `kernels.triton_launch` offer."""

    def copy(
        self,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        source_ids: torch.Tensor | None,
        target_ids: torch.Tensor | None,
    ) -> None:
        """For each pair: block i of the target, `target[target_ids[i]]`, becomes `source[source_ids[i]]`.

        Ids that are None count up from 0. All pairs have the same shape after the block axis, dtype and device.
        """

    def checksum(self, blocks: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """NH-64 of `blocks[i]` for each id, int64; each block lies without gaps, one stride apart."""

    def quantize(self, blocks: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
        """All with the axes `[blocks, layers, outer, heads, tokens, head_dim]`, scales without the last two."""

    def dequantize(self, values: torch.Tensor, scales: torch.Tensor, blocks: torch.Tensor) -> None:
        """The inverse of `quantize`, the same axes."""


def implementation_for(device: torch.device, *, fp8: bool = False) -> Implementation:
    """The implementation for tensors of `device`; `fp8` where it converts to or from 8-bit floats."""
    if device.type == "cpu":
        return cpu
    if device.type != "cuda" or (fp8 and torch.cuda.get_device_capability(device) < FP8_CAPABILITY_MIN):
        return reference
    return _triton() or reference


@cache
def _triton() -> Implementation | None:
    try:
        from kernels import triton_launch
    except ModuleNotFoundError as absent:
        if absent.name != "triton":
            raise
        return None
    return triton_launch
