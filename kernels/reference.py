"""The reference that every other implementation is compared with: plain torch, on any device. An `Implementation`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.errors import ShapeError
from kernels.fp8 import E4M3_MAX, SCALE_MIN

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy(
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    source_ids: torch.Tensor | None,
    target_ids: torch.Tensor | None,
) -> None:
    for one, other in zip(sources, targets, strict=True):
        source, target = as_integers(one), as_integers(other)
        taken = source if source_ids is None else source.index_select(0, source_ids)
        if target_ids is None:
            target.copy_(taken)
        else:
            target.index_copy_(0, target_ids, taken)


def checksum(blocks: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """By way of the host, where its definition is compiled."""
    from kernels.nh64_cpu import checksum_rows

    rows = blocks.detach().flatten(1).view(torch.uint8).cpu().numpy()
    return torch.from_numpy(checksum_rows(rows, block_ids.cpu().numpy())).to(blocks.device)


def quantize(blocks: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
    for layer in range(blocks.shape[1]):
        wide = blocks[:, layer].float()
        largest = wide.abs().amax(dim=(-2, -1))
        scale = (largest / E4M3_MAX).clamp_min(SCALE_MIN)
        scale = torch.where(largest.isfinite(), scale, torch.nan)
        scales[:, layer] = scale
        scaled = (wide * (1.0 / scale)[..., None, None]).clamp(-E4M3_MAX, E4M3_MAX)
        values[:, layer] = scaled.to(values.dtype)


def dequantize(values: torch.Tensor, scales: torch.Tensor, blocks: torch.Tensor) -> None:
    for layer in range(values.shape[1]):
        blocks[:, layer] = (values[:, layer].float() * scales[:, layer, ..., None, None]).to(blocks.dtype)


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same size, so that no copy depends on what the bits mean."""
    try:
        return tensor.detach().view(_INTEGERS[tensor.element_size()])
    except KeyError:
        raise ShapeError(f"{tensor.dtype} takes {tensor.element_size()} bytes: copy it as smaller elements") from None
