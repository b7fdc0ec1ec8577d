"""In which order inactive blocks are evicted. Pure; used under the pool's lock.

Every order lets a block of lower priority go before one of higher, and orders those of one priority by its own rule.
No step's cost grows with the pool, but for a heap's logarithm.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Container
from itertools import count
from typing import Protocol

from kvbm_core.block import Slot
from kvbm_core.config import ReuseName
from kvbm_core.frequency import FrequencySketch
from storage_agent.port import BlockKey

LEVEL_USES = (3, 8, 15)
"""Uses from which a block belongs to the second, third and fourth list of the multi-level LRU."""
_ORDER_BITS = 53
"""A rising number fits into so many bits for centuries; a priority goes above them."""


class ReuseOrder(Protocol):
    """The inactive blocks of one pool. A slot's identity, priority and order do not change while it is in it."""

    counts_uses: bool
    """Whether `used` wants to be called."""

    def insert(self, slot: Slot) -> None:
        """A block became inactive."""

    def remove(self, slot: Slot) -> None:
        """A block is in use again. Raises `KeyError` when it was not inactive."""

    def pop(self) -> Slot:
        """Take out the block to evict. Raises `KeyError` when there is none."""

    def used(self, slot: Slot) -> None:
        """A block was registered or matched."""

    def __len__(self) -> int: ...


class LruOrder:
    """The block that became inactive longest ago goes first."""

    counts_uses = False

    def __init__(self) -> None:
        self._lists: dict[int, OrderedDict[Slot, None]] = {}
        self._ranks: list[int] = []
        """Of the lists that there are, ascending: the lowest is emptied first."""
        self._length = 0

    def insert(self, slot: Slot) -> None:
        rank = slot.reuse_rank = self._rank(slot)
        inactive = self._lists.get(rank)
        if inactive is None:
            inactive = self._lists[rank] = OrderedDict()
            insort(self._ranks, rank)
        inactive[slot] = None
        self._length += 1

    def remove(self, slot: Slot) -> None:
        del self._lists[slot.reuse_rank][slot]
        self._length -= 1

    def pop(self) -> Slot:
        while self._ranks:
            inactive = self._lists[self._ranks[0]]
            if inactive:
                self._length -= 1
                return inactive.popitem(last=False)[0]
            del self._lists[self._ranks.pop(0)]
        raise KeyError("no inactive block")

    def used(self, slot: Slot) -> None:
        """Recency alone counts here."""

    def __len__(self) -> int:
        return self._length

    def _rank(self, slot: Slot) -> int:
        return slot.priority


class MultiLruOrder(LruOrder):
    """Four LRU lists, the coldest emptied first. A block's uses of late choose its list when it becomes inactive."""

    counts_uses = True

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self._frequency = FrequencySketch(blocks)

    def used(self, slot: Slot) -> None:
        self._frequency.use(_key(slot))

    def _rank(self, slot: Slot) -> int:
        level = bisect_right(LEVEL_USES, self._frequency.count(_key(slot)))
        return slot.priority * (len(LEVEL_USES) + 1) + level


class FifoOrder:
    """The block registered longest ago goes first, however often it was used since."""

    counts_uses = False

    def __init__(self) -> None:
        self._inactive = _LowestFirst()

    def insert(self, slot: Slot) -> None:
        self._inactive.add(slot, _order(slot.priority, slot.registered_order))

    def remove(self, slot: Slot) -> None:
        self._inactive.remove(slot)

    def pop(self) -> Slot:
        return self._inactive.pop()

    def used(self, slot: Slot) -> None:
        """Age alone counts here."""

    def __len__(self) -> int:
        return len(self._inactive)


class LineageOrder:
    """Leaves first: no block goes before its inactive children, so that shared prefixes outlive their tails.

    Of the leaves, the one that became inactive longest ago goes first.
    """

    counts_uses = False

    def __init__(self) -> None:
        self._by_key: dict[tuple[int, int, int], Slot] = {}
        self._children: dict[tuple[int, int, int], int] = {}
        """Inactive children by their parent's key; no zeros."""
        self._tiers: dict[int, _Leaves] = {}
        self._priorities: list[int] = []
        """Of the tiers that there are, ascending."""
        self._clock = count(1)

    def insert(self, slot: Slot) -> None:
        key, parent_key = _key(slot), _parent_key(slot)
        slot.inactive_order = next(self._clock)
        self._by_key[key] = slot
        self._leaves_with(slot).waiting[slot] = None
        siblings = self._children.get(parent_key, 0)
        self._children[parent_key] = siblings + 1
        if not siblings:
            parent = self._by_key.get(parent_key)
            if parent is not None:
                self._leaves_with(parent).is_leaf_no_more(parent)

    def remove(self, slot: Slot) -> None:
        del self._by_key[_key(slot)]
        self._leaves_with(slot).discard(slot)
        parent_key = _parent_key(slot)
        siblings = self._children.pop(parent_key) - 1
        if siblings:
            self._children[parent_key] = siblings
            return
        parent = self._by_key.get(parent_key)
        if parent is not None:
            self._leaves_with(parent).is_leaf_again(parent)

    def pop(self) -> Slot:
        for priority in self._priorities:
            slot = self._tiers[priority].oldest(self._children)
            if slot is not None:
                self.remove(slot)
                return slot
        # Without a leaf the parents go round in a ring, which no hash chain does: let any of them go.
        slot = next(iter(self._by_key.values()), None)
        if slot is None:
            raise KeyError("no inactive block")
        self.remove(slot)
        return slot

    def used(self, slot: Slot) -> None:
        """Descent and recency alone count here."""

    def __len__(self) -> int:
        return len(self._by_key)

    def _leaves_with(self, slot: Slot) -> _Leaves:
        leaves = self._tiers.get(slot.priority)
        if leaves is None:
            leaves = self._tiers[slot.priority] = _Leaves()
            insort(self._priorities, slot.priority)
        return leaves


class _Leaves:
    """Inactive blocks of one priority, of which leaves are taken out, the oldest first.

    Engines let go of tails before roots, so the oldest block is nearly always a leaf, and a queue does. A block that is
    none when its turn comes is passed over: older than all that wait, it goes first once it is a leaf.
    """

    def __init__(self) -> None:
        self.waiting: OrderedDict[Slot, None] = OrderedDict()
        self._overdue = _LowestFirst()
        """Leaves that were passed over."""

    def oldest(self, children: Container[tuple[int, int, int]]) -> Slot | None:
        """The leaf to evict, which stays; or None. `children` has the keys of those that are no leaves."""
        if self._overdue:
            return self._overdue.lowest()
        while self.waiting:
            slot = next(iter(self.waiting))
            if _key(slot) not in children:
                return slot
            del self.waiting[slot]
        return None

    def discard(self, slot: Slot) -> None:
        if slot in self.waiting:
            del self.waiting[slot]
        elif slot in self._overdue:
            self._overdue.remove(slot)

    def is_leaf_again(self, slot: Slot) -> None:
        if slot not in self.waiting:
            self._overdue.add(slot, slot.inactive_order)

    def is_leaf_no_more(self, slot: Slot) -> None:
        if slot in self._overdue:
            self._overdue.remove(slot)


class _LowestFirst:
    """Slots by a number that differs between any two of them, the lowest out first.

    The heap keeps a slot's entry when the slot is taken out or its number rises, and mends it when it surfaces: a slot
    that comes and goes costs the heap nothing, and the heap does not grow with the comings and goings.
    """

    def __init__(self) -> None:
        self._numbers: dict[Slot, int] = {}
        self._entries: dict[Slot, int] = {}
        """The lowest number under which the heap has a slot."""
        self._heap: list[tuple[int, Slot]] = []

    def add(self, slot: Slot, number: int) -> None:
        self._numbers[slot] = number
        entry = self._entries.get(slot)
        if entry is None or number < entry:
            self._push(slot, number)

    def remove(self, slot: Slot) -> None:
        del self._numbers[slot]

    def lowest(self) -> Slot:
        """The first of them, which stays. Raises `KeyError` when there is none."""
        while self._heap:
            entry, slot = self._heap[0]
            number = self._numbers.get(slot)
            if number == entry:
                return slot
            heapq.heappop(self._heap)
            if self._entries.get(slot) == entry:
                del self._entries[slot]
                if number is not None:
                    self._push(slot, number)
        raise KeyError("no inactive block")

    def pop(self) -> Slot:
        slot = self.lowest()
        heapq.heappop(self._heap)
        del self._entries[slot], self._numbers[slot]
        return slot

    def _push(self, slot: Slot, number: int) -> None:
        self._entries[slot] = number
        heapq.heappush(self._heap, (number, slot))

    def __contains__(self, slot: object) -> bool:
        return slot in self._numbers

    def __len__(self) -> int:
        return len(self._numbers)


def reuse_order(name: ReuseName, blocks: int) -> ReuseOrder:
    """An empty order of the kind that `KvbmConfig.reuse` names, for a pool of `blocks`."""
    match name:
        case "fifo":
            return FifoOrder()
        case "lru":
            return LruOrder()
        case "multi_lru":
            return MultiLruOrder(blocks)
        case "lineage":
            return LineageOrder()


def _order(priority: int, number: int) -> int:
    return priority << _ORDER_BITS | number


def _key(slot: Slot) -> BlockKey:
    assert slot.identity is not None, "an inactive block is registered"
    return slot.identity.key


def _parent_key(slot: Slot) -> tuple[int, int, int]:
    assert slot.identity is not None, "an inactive block is registered"
    namespace_id, group, _ = slot.identity.key
    return namespace_id, group, slot.identity.parent_hash
