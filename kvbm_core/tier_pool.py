"""A tier that the core owns: which blocks there are, and their bytes."""

from __future__ import annotations

from typing import NamedTuple

from kvbm_core.pool import BlockPool
from kvbm_core.storage import TensorStorage


class TierPool(NamedTuple):
    """A pool and the memory that its blocks lie in."""

    pool: BlockPool
    storage: TensorStorage

    @property
    def name(self) -> str:
        """`device`, `host` or `staging`: the location without a number, as reasons name it."""
        return self.storage.location.partition(":")[0]
