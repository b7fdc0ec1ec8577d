"""What SGLang's metrics tell of a storage backend: pages and GB/s of its reads and writes."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

GB = 1 << 30
"""What SGLang's own backends divide by."""
KEPT_MAX = 1024
"""Batches of each kind between two calls of `take`; of more, the last ones."""


class StorageStats(NamedTuple):
    """SGLang's `StorageMetrics`: pages of each batch that moved any, and its GB/s."""

    prefetch_pgs: list[int]
    backup_pgs: list[int]
    prefetch_bandwidth: list[float]
    backup_bandwidth: list[float]


class StatsKept:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches: dict[str, deque[tuple[int, float]]] = {
            what: deque(maxlen=KEPT_MAX) for what in ("get", "put")
        }

    def moved(self, what: str, pages: int, page_bytes: int, took_s: float) -> None:
        """Implements `engine_store.Moved`: `page_bytes` are those of all `pages`."""
        with self._lock:
            self._batches[what].append((pages, page_bytes / GB / took_s if took_s else 0.0))

    def take(self) -> StorageStats:
        """What was told since the last call."""
        with self._lock:
            gets, puts = (list(self._batches[what]) for what in ("get", "put"))
            for batches in self._batches.values():
                batches.clear()
        return StorageStats(
            [pages for pages, _ in gets],
            [pages for pages, _ in puts],
            [speed for _, speed in gets],
            [speed for _, speed in puts],
        )
