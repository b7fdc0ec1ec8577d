"""Reads folded into one Access per block and flush. Pure: time is a parameter."""

from __future__ import annotations

from typing import Generic, TypeVar

from storage_agent.port import BlockKey

BlockT = TypeVar("BlockT")

FLUSH_INTERVAL_S = 0.5
FLUSH_BLOCKS = 512


class AccessFold(Generic[BlockT]):
    """Counts reads per place and block. Bounded by the blocks that the places hold. Not thread-safe.

    Due when 512 blocks wait, or half a second after the first of them was read.
    """

    def __init__(self) -> None:
        self._hits: dict[tuple[str, BlockKey], tuple[BlockT, int]] = {}
        self._first_s = 0.0

    def __len__(self) -> int:
        return len(self._hits)

    def add(self, place: str, key: BlockKey, block: BlockT, now_s: float) -> None:
        """One read of a block; `block` is what `drain` gives of it."""
        if not self._hits:
            self._first_s = now_s
        block, hits = self._hits.get((place, key), (block, 0))
        self._hits[place, key] = block, hits + 1

    def due_in_s(self, now_s: float) -> float | None:
        """Seconds until a flush is due, 0 when it is; None while nothing waits."""
        if not self._hits:
            return None
        if len(self._hits) >= FLUSH_BLOCKS:
            return 0.0
        return max(0.0, self._first_s + FLUSH_INTERVAL_S - now_s)

    def take(self, place: str, key: BlockKey) -> tuple[BlockT, int] | None:
        """What waits of one block, which is about to go: (block, hits), or None."""
        return self._hits.pop((place, key), None)

    def drain(self) -> list[tuple[str, BlockT, int]]:
        """All that waits, as (place, block, hits), first read first."""
        drained = [(place, block, hits) for (place, _), (block, hits) in self._hits.items()]
        self._hits.clear()
        return drained
