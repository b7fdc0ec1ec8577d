"""In which order inactive blocks are evicted. Pure; used under the pool's lock."""

from __future__ import annotations

import heapq
from typing import Literal, Protocol


class ReuseOrder(Protocol):
    """The inactive blocks of one pool, by slot index."""

    def insert(self, index: int, registered_order: int) -> None:
        """A block became inactive. `registered_order` rises with every registration in the pool."""

    def remove(self, index: int) -> None:
        """A block is in use again. Raises `KeyError` when it was not inactive."""

    def pop(self) -> int:
        """Take out the block to evict. Raises `KeyError` when there is none."""

    def __len__(self) -> int: ...


class LruOrder:
    """The block that became inactive longest ago goes first."""

    def __init__(self) -> None:
        self._order: dict[int, None] = {}

    def insert(self, index: int, registered_order: int) -> None:
        self._order[index] = None

    def remove(self, index: int) -> None:
        del self._order[index]

    def pop(self) -> int:
        if not self._order:
            raise KeyError("no inactive block")
        index = next(iter(self._order))
        del self._order[index]
        return index

    def __len__(self) -> int:
        return len(self._order)


class FifoOrder:
    """The block registered longest ago goes first, however often it was used since."""

    def __init__(self) -> None:
        self._registered: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def insert(self, index: int, registered_order: int) -> None:
        self._registered[index] = registered_order
        heapq.heappush(self._heap, (registered_order, index))
        # Entries of blocks taken out again stay in the heap until they surface; this bounds how many.
        if len(self._heap) > 2 * len(self._registered) + 64:
            self._heap = [(order, i) for i, order in self._registered.items()]
            heapq.heapify(self._heap)

    def remove(self, index: int) -> None:
        del self._registered[index]

    def pop(self) -> int:
        while self._registered:
            order, index = heapq.heappop(self._heap)
            if self._registered.get(index) == order:
                del self._registered[index]
                return index
        raise KeyError("no inactive block")

    def __len__(self) -> int:
        return len(self._registered)


def reuse_order(name: Literal["lru", "fifo"]) -> ReuseOrder:
    """An empty order of the kind that `KvbmConfig.reuse` names."""
    return LruOrder() if name == "lru" else FifoOrder()
