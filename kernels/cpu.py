"""Kernels for tensors on the CPU: numpy, and compiled loops, over the tensors' memory. An `Implementation`.

torch's own copies wait for a team of threads at every call, which costs ten times the copy when the cores are busy.
What is compiled is imported late: numba takes half a second, and copies do not need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from kernels.reference import as_integers

SMALL_RUN_BYTES = 8 * 1024
"""Below this a Python step for each run of blocks costs more than numpy's indexing."""


class _Run(NamedTuple):
    """Blocks that follow one another on both sides."""

    source: int
    target: int
    blocks: int


def copy(
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    source_ids: torch.Tensor | None,
    target_ids: torch.Tensor | None,
) -> None:
    blocks = _block_count(sources[0], targets[0], source_ids, target_ids)
    runs = _runs(blocks, source_ids, target_ids)
    if sources[0][0].numel() * sources[0].element_size() * blocks >= SMALL_RUN_BYTES * len(runs):
        for source, target in zip(sources, targets, strict=True):
            reading, writing = _array(source), _array(target)
            for run in runs:
                np.copyto(writing[run.target : run.target + run.blocks], reading[run.source : run.source + run.blocks])
    else:
        for source, target in zip(sources, targets, strict=True):
            _copy_small(_array(source), _array(target), source_ids, target_ids)


def checksum(blocks: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    from kernels.nh64_cpu import checksum_rows

    rows = blocks.detach().flatten(1).view(torch.uint8).numpy()
    return torch.from_numpy(checksum_rows(rows, block_ids.numpy()))


def quantize(blocks: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
    from kernels import fp8_cpu

    fp8_cpu.quantize(blocks.detach(), values, scales)


def dequantize(values: torch.Tensor, scales: torch.Tensor, blocks: torch.Tensor) -> None:
    from kernels import fp8_cpu

    fp8_cpu.dequantize(values, scales, blocks)


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return as_integers(tensor).numpy()


def _block_count(
    source: torch.Tensor, target: torch.Tensor, source_ids: torch.Tensor | None, target_ids: torch.Tensor | None
) -> int:
    if source_ids is not None:
        return len(source_ids)
    return len(target_ids) if target_ids is not None else min(source.shape[0], target.shape[0])


def _runs(blocks: int, source_ids: torch.Tensor | None, target_ids: torch.Tensor | None) -> list[_Run]:
    """The fewest copies: ids that count up on both sides are one."""
    order = np.arange(blocks)
    source = order if source_ids is None else source_ids.numpy()
    target = order if target_ids is None else target_ids.numpy()
    starts = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
    bounds = [0, *starts.tolist(), blocks]
    return [
        _Run(int(source[start]), int(target[start]), end - start)
        for start, end in pairwise(bounds)
    ]


def _copy_small(
    source: np.ndarray[Any, Any],
    target: np.ndarray[Any, Any],
    source_ids: torch.Tensor | None,
    target_ids: torch.Tensor | None,
) -> None:
    if target_ids is not None:
        target[target_ids.numpy()] = source if source_ids is None else source[source_ids.numpy()]
    elif source_ids is None:
        np.copyto(target, source)
    elif source.flags.c_contiguous and target.flags.c_contiguous:
        np.take(source, source_ids.numpy(), axis=0, out=target, mode="clip")
    else:
        target[...] = source[source_ids.numpy()]
