"""`checksum_blocks` and `checksum_bytes`: NH-64 (`kernels.nh64`) of blocks where they lie, equal on CPU and GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kernels import dispatch
from kernels.errors import ShapeError
from kernels.nh64 import CHECKSUM_NAME, MASK64
from kernels.paged import block_indices

__all__ = ["CHECKSUM_NAME", "checksum_blocks", "checksum_bytes", "unsigned"]

BLOCK_BYTES_MAX = 1 << 40


def checksum_blocks(blocks: torch.Tensor, block_ids: Sequence[int] | torch.Tensor | None = None) -> torch.Tensor:
    """The checksum of each block of `[blocks, ...]`, or of those named, as int64 on the same device: its 64 bits.

    A block's bytes are those of its elements in the order of its shape, and must lie without gaps; blocks may have gaps
    between them. On a GPU nothing waits for it, and ids that lie there are not checked: one out of range gives the
    checksum of zeros. Raises `ShapeError` and `BlockIndexError`.
    """
    if blocks.dim() == 0:
        raise ShapeError("a tensor without axes has no blocks: give [blocks, ...]")
    if blocks.shape[0] and not blocks[0].is_contiguous():
        raise ShapeError(f"a block has strides {blocks.stride()[1:]}, with gaps or out of order: gather first")
    if blocks[:1].nbytes > BLOCK_BYTES_MAX:
        raise ShapeError(f"a block has {blocks[:1].nbytes} bytes, at most {BLOCK_BYTES_MAX}: cut it")
    ids = block_indices(range(blocks.shape[0]) if block_ids is None else block_ids, blocks)
    if not len(ids):
        return torch.empty(0, dtype=torch.int64, device=blocks.device)
    return dispatch.implementation_for(blocks.device).checksum(blocks, ids)


def checksum_bytes(payload: bytes | bytearray | memoryview) -> int:
    """The checksum of any bytes of the host's, 0 to 2^64 - 1. Raises `ShapeError` for a memoryview with gaps."""
    from kernels.nh64_cpu import checksum_rows

    if isinstance(payload, memoryview) and not payload.c_contiguous:
        raise ShapeError(f"the payload has strides {payload.strides}: give bytes that lie without gaps")
    row = np.frombuffer(payload, np.uint8).reshape(1, -1)
    return int(checksum_rows(row, np.zeros(1, np.int64))[0]) & MASK64


def unsigned(checksums: torch.Tensor) -> list[int]:
    """What `checksum_blocks` returned as numbers from 0 to 2^64 - 1, as a slot header keeps them; waits for a GPU."""
    return [number & MASK64 for number in checksums.tolist()]
