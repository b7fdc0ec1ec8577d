"""Blocks best first, in place and no further than they are asked for: kernels allocate nothing."""

from __future__ import annotations

from typing import Any

from advisor.index.jit import inlined, rule

Array = Any
"""As numba types it."""


@inlined
def _before(values: Array, depths: Array, a: int, b: int) -> bool:
    """Higher value first, then nearer to the root, then seen first."""
    if values[a] != values[b]:
        return bool(values[a] > values[b])
    if depths[a] != depths[b]:
        return bool(depths[a] < depths[b])
    return a < b


@inlined
def _sink(blocks: Array, values: Array, depths: Array, at: int, count: int) -> None:
    block = blocks[at]
    while True:
        below = 2 * at + 1
        if below >= count:
            break
        if below + 1 < count and _before(values, depths, blocks[below + 1], blocks[below]):
            below += 1
        if not _before(values, depths, blocks[below], block):
            break
        blocks[at] = blocks[below]
        at = below
    blocks[at] = block


@rule
def heap_up(blocks: Array, count: int, values: Array, depths: Array) -> None:
    """Make `blocks[:count]` a heap whose best block is the first."""
    for at in range(count // 2 - 1, -1, -1):
        _sink(blocks, values, depths, at, count)


@rule
def take_best(blocks: Array, count: int, values: Array, depths: Array) -> int:
    """The best block of the heap, which is moved to its end: it holds one less from now on."""
    best = blocks[0]
    blocks[0] = blocks[count - 1]
    blocks[count - 1] = best
    _sink(blocks, values, depths, 0, count - 1)
    return int(best)
