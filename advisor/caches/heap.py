"""A heap of blocks by key, smallest first, that says where each block is in it (-1: nowhere)."""

from __future__ import annotations

from typing import Any

from advisor.index.jit import inlined, routine

Array = Any
"""As numba types it."""


@routine
def sift_up(heap: Array, places: Array, keys: Array, at: int) -> None:
    block = heap[at]
    key = keys[block]
    while at > 0:
        above = (at - 1) >> 1
        other = heap[above]
        if keys[other] <= key:
            break
        heap[at] = other
        places[other] = at
        at = above
    heap[at] = block
    places[block] = at


@routine
def sift_down(heap: Array, places: Array, keys: Array, size: int, at: int) -> None:
    block = heap[at]
    key = keys[block]
    while True:
        below = 2 * at + 1
        if below >= size:
            break
        if below + 1 < size and keys[heap[below + 1]] < keys[heap[below]]:
            below += 1
        other = heap[below]
        if keys[other] >= key:
            break
        heap[at] = other
        places[other] = at
        at = below
    heap[at] = block
    places[block] = at


@inlined
def enter(heap: Array, places: Array, keys: Array, size: int, block: int) -> int:
    """The new size."""
    heap[size] = block
    sift_up(heap, places, keys, size)
    return size + 1


@inlined
def take_out(heap: Array, places: Array, keys: Array, size: int, block: int) -> int:
    """The new size."""
    at = places[block]
    places[block] = -1
    last = heap[size - 1]
    if last != block:
        heap[at] = last
        places[last] = at
        sift_up(heap, places, keys, at)
        sift_down(heap, places, keys, size - 1, places[last])
    return size - 1


@inlined
def rekeyed(heap: Array, places: Array, keys: Array, size: int, block: int) -> None:
    """Call it after the key of a block in the heap changed."""
    sift_up(heap, places, keys, places[block])
    sift_down(heap, places, keys, size, places[block])
