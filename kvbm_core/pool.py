"""One tier's blocks: reset, active or inactive, and no block in two of them. Thread-safe."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

from kvbm_core.block import CompleteBlock, ImmutableBlock, MutableBlock, Slot, Trigger
from kvbm_core.errors import BlockStateError, PoolExhaustedError
from kvbm_core.identity import BlockIdentity
from kvbm_core.registry import BlockRegistry, OnRemove, OnStore
from kvbm_core.reuse import ReuseOrder
from storage_agent.port import BlockKey


class Allocation(NamedTuple):
    """Blocks to write, and what had to leave the pool for them."""

    blocks: list[MutableBlock]
    evicted: list[BlockIdentity]


class PoolOccupancy(NamedTuple):
    """Blocks by what may happen to them: in use, findable and evictable, or empty. They sum to the pool's size."""

    active: int
    inactive: int
    reset: int


class BlockPool:
    """Slots 0 … `blocks` - 1 and who holds them. The callbacks run under the lock and must only note what happened."""

    def __init__(
        self,
        *,
        name: str,
        blocks: int,
        page_tokens: int,
        reuse: ReuseOrder,
        duplicates: Literal["allow", "reject"],
        on_store: OnStore,
        on_remove: OnRemove,
    ) -> None:
        self.name = name
        self.blocks = blocks
        self.page_tokens = page_tokens
        self._lock = threading.Lock()
        self._slots = [Slot(index) for index in range(blocks)]
        self._reset = deque(self._slots)
        self._inactive = reuse
        self._registry = BlockRegistry(duplicates, on_store, on_remove)
        self._registrations = 0
        # Filled by the garbage collector, which may run while this thread holds the lock; emptied under the lock.
        self._returned: deque[Slot] = deque()

    def allocate(self, count: int) -> Allocation:
        """Take `count` blocks, all or none: reset ones first, then evict inactive ones in reuse order.

        Raises `PoolExhaustedError` when active blocks leave too few.
        """
        with self._lock:
            self._take_returned()
            there = len(self._reset) + len(self._inactive)
            if count > there:
                raise PoolExhaustedError(
                    f"pool {self.name} can give {there} of its {self.blocks} blocks, not {count}: "
                    f"release blocks, ask for fewer, or raise its size"
                )
            evicted = []
            for _ in range(count - len(self._reset)):
                identity = self._evict()
                if identity is not None:
                    evicted.append(identity)
            slots = [self._reset.popleft() for _ in range(count)]
        return Allocation([MutableBlock(self, slot) for slot in slots], evicted)

    def register(self, block: CompleteBlock, *, copied: bool = False) -> ImmutableBlock:
        """Make a complete block findable. A rejected duplicate is reset and the block that was first returned.

        Raises `BlockStateError` for another pool's block, which keeps its guard.
        """
        if not block.belongs_to(self):
            raise BlockStateError(f"block {block.index} is not of pool {self.name}: register it in its own")
        identity = block.identity
        with self._lock:
            self._take_returned()
            slot = block.hand_over()
            kept = self._registry.add(identity, slot, copied)
            if kept is slot:
                slot.step(Trigger.REGISTER)
                self._registrations += 1
                slot.registered_order = self._registrations
                slot.references = 1
            else:
                self._make_reset(slot, Trigger.RESET)
                self._reference(kept)
        return ImmutableBlock(self, kept)

    def match(self, keys: Sequence[BlockKey]) -> list[ImmutableBlock]:
        """Guards of the leading keys that are registered, up to the first that is not."""
        found = []
        with self._lock:
            self._take_returned()
            for key in keys:
                slot = self._registry.find(key)
                if slot is None:
                    break
                self._reference(slot)
                found.append(slot)
        return [ImmutableBlock(self, slot) for slot in found]

    def acquire(self, key: BlockKey) -> ImmutableBlock | None:
        """A guard of one registered block, or None."""
        found = self.match([key])
        return found[0] if found else None

    def share(self, slot: Slot, identity: BlockIdentity) -> ImmutableBlock:
        """A second guard of a block that is held already. Raises `BlockStateError` when it was let go meanwhile."""
        with self._lock:
            if slot.identity is not identity:
                raise BlockStateError(f"block {slot.index} was let go by another thread meanwhile: match it again")
            self._reference(slot)
        return ImmutableBlock(self, slot)

    def has(self, key: BlockKey) -> bool:
        """Whether a block is registered now; without a guard it may be gone the next moment."""
        with self._lock:
            return key in self._registry

    def registered_keys(self) -> list[BlockKey]:
        """Every registered key."""
        with self._lock:
            return self._registry.keys()

    @contextmanager
    def standing_still(self) -> Iterator[list[BlockIdentity]]:
        """Every registered block; none comes, goes or is told of meanwhile."""
        with self._lock:
            yield self._registry.identities()

    def occupancy(self) -> PoolOccupancy:
        with self._lock:
            self._take_returned()
            inactive, reset = len(self._inactive), len(self._reset)
        return PoolOccupancy(active=self.blocks - inactive - reset, inactive=inactive, reset=reset)

    def take_back(self, slot: Slot) -> None:
        with self._lock:
            self._give_back(slot)

    def take_back_later(self, slot: Slot) -> None:
        self._returned.append(slot)

    def _take_returned(self) -> None:
        while self._returned:
            self._give_back(self._returned.popleft())

    def _give_back(self, slot: Slot) -> None:
        if not slot.references:
            self._make_reset(slot, Trigger.RESET)
            return
        slot.references -= 1
        if not slot.references:
            self._inactive.insert(slot.index, slot.registered_order)

    def _reference(self, slot: Slot) -> None:
        if not slot.references:
            self._inactive.remove(slot.index)
        slot.references += 1

    def _evict(self) -> BlockIdentity | None:
        """Reset one inactive block. Its identity where that was the key's last copy."""
        slot = self._slots[self._inactive.pop()]
        identity = slot.identity
        assert identity is not None, "an inactive block is registered"
        last = self._registry.drop(identity, slot)
        self._make_reset(slot, Trigger.EVICT)
        return identity if last else None

    def _make_reset(self, slot: Slot, trigger: Trigger) -> None:
        slot.step(trigger)
        slot.identity = None
        slot.filled_tokens = 0
        self._reset.append(slot)
