"""Eviction orders: which block of a place goes first. The live planner and replay use the same classes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from advisor.index.block_index import Block, Order


class LfuOrder:
    """Least frequently used: uses counted while in the place, forgotten when it leaves.

    Ties go to the block that reached its count longest ago. Finding the coldest block is O(1) amortised.
    """

    def __init__(self) -> None:
        self._count: dict[Block, int] = {}
        self._buckets: dict[int, OrderedDict[Block, None]] = {}
        self._lowest = 1

    def stored(self, block: Block) -> None:
        self._count[block] = 1
        self._buckets.setdefault(1, OrderedDict())[block] = None
        self._lowest = 1

    def touched(self, block: Block, hits: int) -> None:
        count = self._count[block]
        self._leave(block, count)
        self._count[block] = count + hits
        self._buckets.setdefault(count + hits, OrderedDict())[block] = None

    def removed(self, block: Block) -> None:
        self._leave(block, self._count.pop(block))

    def _leave(self, block: Block, count: int) -> None:
        bucket = self._buckets[count]
        del bucket[block]
        if not bucket:
            del self._buckets[count]

    def coldest(self) -> Iterator[Block]:
        if not self._buckets:
            return
        if self._lowest not in self._buckets:
            self._lowest = min(self._buckets)
        yield from self._buckets[self._lowest]
        for count in sorted(self._buckets):
            if count > self._lowest:
                yield from self._buckets[count]


EVICTION_ORDERS: dict[str, Callable[[], Order] | None] = {"lru": None, "lfu": LfuOrder}
"""By policy name. None: the place's own recency order is the answer."""


def eviction_order(name: str) -> Order | None:
    """A fresh order for one place. Raises `KeyError` for a name not in `EVICTION_ORDERS`."""
    make = EVICTION_ORDERS[name]
    return None if make is None else make()
