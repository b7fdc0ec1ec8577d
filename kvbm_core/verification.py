"""What the bytes of host blocks were when they were known to be right, and whether they still are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kernels import checksum_blocks
from kvbm_core.copies import are_alike
from kvbm_core.layout import Int64s
from kvbm_core.storage import TensorStorage

Bools = NDArray[np.bool_]


class BlockSums:
    """The checksum (`kernels.checksum`) of each block of host or staging memory, taken when its bytes came in.

    A block is compared with it when its bytes go out: memory that was written by mistake meanwhile, or a copy that went
    wrong, is found. Used by whoever holds the blocks' guards, so that no two threads touch one entry.
    """

    def __init__(self, near: TensorStorage) -> None:
        """`near` is fully contiguous."""
        self._near = near
        self._sums = np.zeros(near.layout.blocks, dtype=np.int64)

    def take(self, blocks: Sequence[int]) -> None:
        """These blocks hold what they should."""
        self._sums[blocks] = _sums(self._near, blocks)

    def take_copies(self, source: TensorStorage, from_blocks: Sequence[int], blocks: Sequence[int]) -> Bools:
        """Blocks were copied in from the device: which of them read as they do there.

        Where the two layouts differ their sums cannot be compared, and what came in is taken for right.
        """
        self.take(blocks)
        if not are_alike(source, self._near):
            return np.ones(len(blocks), dtype=np.bool_)
        return np.asarray(_sums(source, from_blocks) == self._sums[blocks])

    def check_copies(self, blocks: Sequence[int], target: TensorStorage, to_blocks: Sequence[int]) -> Bools:
        """Blocks were copied out to the device: which of them are right there, or, where layouts differ, were here."""
        alike = are_alike(self._near, target)
        now = _sums(target, to_blocks) if alike else _sums(self._near, blocks)
        return np.asarray(now == self._sums[blocks])


def _sums(storage: TensorStorage, blocks: Sequence[int]) -> Int64s:
    return checksum_blocks(storage.tensor, blocks).cpu().numpy()
