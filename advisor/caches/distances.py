"""How far apart the uses of a block are, in different blocks: an LRU cache finds what is nearer than its capacity."""

from __future__ import annotations

from typing import Any

from advisor.index.jit import inlined, kernel

Array = Any
"""As numba types it."""

NEVER_BEFORE = -1


@inlined
def _add(tree: Array, at: int, amount: int) -> None:
    """`tree` sums by prefix (Fenwick); positions count from 0."""
    at += 1
    while at < len(tree):
        tree[at] += amount
        at += at & -at


@inlined
def _sum_to(tree: Array, at: int) -> int:
    at += 1
    total = 0
    while at > 0:
        total += tree[at]
        at -= at & -at
    return total


@kernel
def stack_distances(ids: Array, last: Array, tree: Array, out: Array) -> None:
    """`out[i]`: different blocks used since access i's block was, that one included (Mattson); -1 at its first use.

    `last` (by block) and `tree` (accesses + 1, zeros) are scratch.
    """
    last[:] = -1
    for i in range(len(ids)):
        block = ids[i]
        before = last[block]
        if before < 0:
            out[i] = NEVER_BEFORE
        else:
            out[i] = _sum_to(tree, i) - _sum_to(tree, before) + 1
            _add(tree, before, -1)
        _add(tree, i, 1)
        last[block] = i
