"""Gets folded into one Access per block and flush. Pure: time is a parameter."""

from __future__ import annotations

from storage_agent.block_header import BlockHeader
from storage_agent.port import BlockKey

FLUSH_INTERVAL_S = 0.5
FLUSH_BLOCKS = 512


class AccessFold:
    """Counts gets per volume and block. Bounded by the blocks that volumes hold. Not thread-safe.

    Due when 512 blocks wait, or half a second after the first of them was read.
    """

    def __init__(self) -> None:
        self._hits: dict[tuple[str, BlockKey], tuple[BlockHeader, int]] = {}
        self._first_s = 0.0

    def __len__(self) -> int:
        return len(self._hits)

    def add(self, volume: str, header: BlockHeader, now_s: float) -> None:
        if not self._hits:
            self._first_s = now_s
        _, hits = self._hits.get((volume, header.key), (header, 0))
        self._hits[volume, header.key] = header, hits + 1

    def due_in_s(self, now_s: float) -> float | None:
        """Seconds until a flush is due, 0 when it is; None while nothing waits."""
        if not self._hits:
            return None
        if len(self._hits) >= FLUSH_BLOCKS:
            return 0.0
        return max(0.0, self._first_s + FLUSH_INTERVAL_S - now_s)

    def drain(self) -> list[tuple[str, BlockHeader, int]]:
        """All that waits, as (volume, header, hits), first read first."""
        drained = [(volume, header, hits) for (volume, _), (header, hits) in self._hits.items()]
        self._hits.clear()
        return drained
