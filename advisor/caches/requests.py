"""A trace as the kernels read it: every block a small integer, counted from 0 in the order of first use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from advisor.caches.kernels_of_tree import find_next_uses

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RequestTrace:
    """Request r uses blocks `ids[ends[r - 1]:ends[r]]`, root to leaf. All arrays are int64.

    `input_tokens` and `block_tokens` (of each block but a partial last one) are by request; `depths` and `parents` (-1
    for a root) by block.
    """

    ids: Ints
    ends: Ints
    input_tokens: Ints
    block_tokens: Ints
    depths: Ints
    parents: Ints

    @classmethod
    def of(
        cls, hashes: npt.NDArray[np.uint64], ends: Any, depths: Any, input_tokens: Any, block_tokens: Any
    ) -> RequestTrace:
        """`hashes` u64 (n, 2): the halves of each access's block, unique to its whole path; `depths` by access."""
        whole = np.ascontiguousarray(hashes).view(np.dtype("V16")).ravel()
        _, firsts, sorted_ids = np.unique(whole, return_index=True, return_inverse=True)
        by_first_use = np.empty(len(firsts), np.int64)
        by_first_use[np.argsort(firsts)] = np.arange(len(firsts))
        ids = by_first_use[sorted_ids.ravel()]
        depth_of_access = np.asarray(depths, np.int64)
        depth_of_block = np.zeros(len(firsts), np.int64)
        depth_of_block[ids] = depth_of_access
        parents = np.full(len(firsts), -1, np.int64)
        inner = np.flatnonzero(depth_of_access > 0)
        parents[ids[inner]] = ids[inner - 1]
        by_request = [np.asarray(values, np.int64) for values in (ends, input_tokens, block_tokens)]
        return cls(ids, by_request[0], by_request[1], by_request[2], depth_of_block, parents)

    @property
    def requests(self) -> int:
        return len(self.ends)

    @property
    def blocks(self) -> int:
        """Different blocks."""
        return len(self.depths)

    @cached_property
    def next_uses(self) -> Ints:
        """By access: the number of the request that uses its block next; far beyond the last where none does."""
        found = np.empty(len(self.ids), np.int64)
        find_next_uses(self.ids, self.ends, np.empty(self.blocks, np.int64), found)
        return found
