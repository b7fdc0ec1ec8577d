"""The CPU reference that every other implementation is compared with, in plain torch. It runs on any device."""

from __future__ import annotations

import torch


def gather(pool: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor) -> None:
    """`out[i] = pool[block_ids[i]]`. Arguments are checked by `kernels.dispatch`."""
    torch.index_select(pool, 0, block_ids, out=out)


def scatter(staging: torch.Tensor, pool: torch.Tensor, block_ids: torch.Tensor) -> None:
    """`pool[block_ids[i]] = staging[i]`. Arguments are checked by `kernels.dispatch`."""
    pool.index_copy_(0, block_ids, staging)
