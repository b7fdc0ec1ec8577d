"""How blocks lie: stretches of chains, runs of free slots, and the figures made of them. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from storage_agent.block_header import BlockHeader

SAMPLED_CHAINS = 64
SAMPLED_BLOCKS = 2048
"""Of all sampled chains together."""
_GOLDEN = 0.6180339887498949
"""Steps of this share of the whole fall evenly, and on no pattern in it."""


class Stretch(NamedTuple):
    """Bytes, or slots, `start` to `end` of file or object number `unit`."""

    unit: int
    start: int
    end: int


class Footprint(NamedTuple):
    """See `port.Fragmentation`."""

    held_bytes: int
    live_bytes: int
    reclaimable_bytes: int
    objects: int
    objects_least: int


def count_extents(stretches: Sequence[Stretch]) -> int:
    """Requests that read them in this order: one for each part that lies in one piece."""
    breaks = sum(
        (before.unit, before.end) != (after.unit, after.start)
        for before, after in pairwise(stretches)
    )
    return breaks + 1 if stretches else 0


def runs_of(headers: Iterable[BlockHeader]) -> list[list[BlockHeader]]:
    """Parts in which each block follows its parent."""
    runs: list[list[BlockHeader]] = []
    for header in headers:
        if runs and header.parent_hash and header.parent_hash == runs[-1][-1].key.sequence_hash:
            runs[-1].append(header)
        else:
            runs.append([header])
    return runs


def sampled(count: int) -> list[int]:
    """Numbers below `count`, `SAMPLED_CHAINS` at most, spread over all of it; the same each time."""
    if count <= SAMPLED_CHAINS:
        return list(range(count))
    return sorted({int(number * _GOLDEN % 1.0 * count) for number in range(SAMPLED_CHAINS)})


def expected_breaks(parents: Sequence[int], parents_of_all: npt.NDArray[np.uint64]) -> float:
    """Breaks that no layout avoids: of a parent's n children only one can follow it.

    `parents`: hashes, cut to 64 bits, that the steps of the sample begin at; `parents_of_all`: those of every block.
    """
    if not parents:
        return 0.0
    hashes, steps = np.unique(np.array(parents, np.uint64), return_counts=True)
    ordered = np.sort(parents_of_all)
    children = np.searchsorted(ordered, hashes, "right") - np.searchsorted(ordered, hashes, "left")
    return float((steps * (1.0 - 1.0 / np.maximum(children, 1))).sum())


class FreeStretches:
    """Free slots, ascending, as stretches to take from."""

    def __init__(self, free: npt.NDArray[np.intp]) -> None:
        starts = np.flatnonzero(np.diff(free, prepend=-2) != 1)
        lengths = np.diff(starts, append=len(free))
        self._by_length = sorted(zip(lengths.tolist(), free[starts].tolist(), strict=True))
        """(slots, first slot), the shortest first."""

    def take(self, count: int, stretches_max: int) -> list[int]:
        """`count` slots: of the shortest stretch that has them, else of the longest ones. None where it takes more than
        `stretches_max`, or there are not so many."""
        fits = bisect_left(self._by_length, (count, -1))
        if fits < len(self._by_length):
            return self._cut(fits, count) if stretches_max >= 1 else []
        chosen, left = 0, count
        while left > 0 and chosen < len(self._by_length):
            chosen += 1
            left -= self._by_length[-chosen][0]
        if left > 0 or chosen > stretches_max:
            return []
        slots: list[int] = []
        for _ in range(chosen):
            slots += self._cut(len(self._by_length) - 1, min(count - len(slots), self._by_length[-1][0]))
        return slots

    def _cut(self, at: int, count: int) -> list[int]:
        length, first = self._by_length.pop(at)
        if length > count:
            insort(self._by_length, (length - count, first + count))
        return list(range(first, first + count))
