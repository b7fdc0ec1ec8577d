"""Lists of blocks in two arrays of neighbours. A list's head is a number past all blocks, where its ends meet."""

from __future__ import annotations

from typing import Any

from advisor.index.jit import inlined

Array = Any
"""As numba types it."""


@inlined
def clear(newer: Array, older: Array, blocks: int) -> None:
    """Make every head from `blocks` on an empty list."""
    for head in range(blocks, len(newer)):
        newer[head] = head
        older[head] = head


@inlined
def push(newer: Array, older: Array, head: int, block: int) -> None:
    """Enter a block that is in no list as the newest of one."""
    before = older[head]
    newer[before] = block
    older[block] = before
    newer[block] = head
    older[head] = block


@inlined
def unlink(newer: Array, older: Array, block: int) -> None:
    a = older[block]
    b = newer[block]
    newer[a] = b
    older[b] = a


@inlined
def oldest(newer: Array, head: int) -> int:
    """`head` itself where the list is empty."""
    return newer[head]
