"""One tier's blocks: reset, active or inactive, and no block in two of them. Thread-safe."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from kvbm_core.block import (
    PRIORITY_DEFAULT,
    TRANSITIONS,
    BlockState,
    CompleteBlock,
    Guard,
    ImmutableBlock,
    MutableBlock,
    Slot,
    Trigger,
    check_identity,
    check_priority,
    next_state,
)
from kvbm_core.errors import BlockStateError, PoolExhaustedError
from kvbm_core.hooks import BlockStep, Hooks, LifeStep
from kvbm_core.identity import BlockIdentity
from kvbm_core.registry import BlockRegistry, OnRemove, OnStore
from kvbm_core.reuse import ReuseOrder
from storage_agent.port import BlockKey

# Python 3.11 finds an enum's member by way of Python code, which every block would pay for.
_DISCARD = Trigger.DISCARD
_EVICT = Trigger.EVICT
_INIT_SEQUENCE = Trigger.INIT_SEQUENCE
_REGISTER = Trigger.REGISTER
_RESET = Trigger.RESET


class Allocation(NamedTuple):
    """Blocks to write, and what had to leave the pool for them."""

    blocks: list[MutableBlock]
    evicted: list[BlockIdentity]


class PoolOccupancy(NamedTuple):
    """Blocks by what may happen to them: in use, findable and evictable, or empty. They sum to the pool's size."""

    active: int
    inactive: int
    reset: int


class BlockPlace(NamedTuple):
    """A registered block's slot, what holds it (0: it is inactive), and its priority."""

    slot: int
    references: int
    priority: int


@dataclass(slots=True)
class PoolCounters:
    """What a pool did since it started, in blocks.

    Eviction pressure is `evicted` of `allocated`: 0 while empty blocks suffice, 1 when each allocation pushes one out;
    `evicted_unmatched` of `evicted` says how much was kept for nothing.
    """

    allocated: int = 0
    refused: int = 0
    """Asked for by allocations that were refused, since active blocks left too few."""
    evicted: int = 0
    evicted_unmatched: int = 0
    """Evicted without a match since they were registered."""
    registered: int = 0
    duplicates: int = 0
    """Registered under a key that was there: kept as a second copy, or reset."""
    requested: int = 0
    """Keys asked for by match and scan."""
    matched: int = 0
    """Keys found by match and scan."""
    released_by_collector: int = 0
    """Guards that nobody released: Python's garbage collector did."""


class BlockPool:
    """Slots 0 … `blocks` - 1 and who holds them. The callbacks run under the lock and must only note what happened.

    `duplicates` says what becomes of a block registered under a key that is there: `reject` resets it and gives out the
    first, `allow` keeps it as a second copy that holds the first and is reset when its last guard goes.
    """

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
        hooks: Hooks | None = None,
    ) -> None:
        self.name = name
        self.blocks = blocks
        self.page_tokens = page_tokens
        self.hooks = Hooks() if hooks is None else hooks
        self.lock = threading.Lock()
        self._reset = deque(Slot(index) for index in range(blocks))
        self._inactive = reuse
        self._registry = BlockRegistry(on_store, on_remove)
        self._duplicates = duplicates
        self._counters = PoolCounters()
        # Both are filled without the lock, which this very thread may hold: the garbage collector runs in the middle of
        # anything, and what it collects may release guards. They are emptied at the start of every step.
        self._released: deque[Guard] = deque()
        self._collected: deque[Slot] = deque()

    def allocate(self, count: int) -> Allocation:
        """Take `count` blocks, all or none: reset ones first, then evict inactive ones in reuse order.

        Raises `PoolExhaustedError` when active blocks leave too few, `ValueError` for a negative count.
        """
        if count < 0:
            raise ValueError(f"{count} blocks cannot be allocated: ask for none or more")
        with self.lock:
            self._take_returned()
            there = len(self._reset) + len(self._inactive)
            if count > there:
                self._counters.refused += count
                raise PoolExhaustedError(
                    f"pool {self.name} can give {there} of its {self.blocks} blocks, not {count}: "
                    f"release blocks, ask for fewer, or raise its size"
                )
            evicted = self._evict(count - len(self._reset))
            slots = [self._reset.popleft() for _ in range(count)]
            self._counters.allocated += count
            self._note_all(LifeStep.ALLOCATED, slots)
        # The guards are there before the hooks are told, here and below: what interrupts a hook loses no block.
        allocation = Allocation([MutableBlock(self, slot) for slot in slots], evicted)
        self.hooks.tell()
        return allocation

    def complete_many(self, blocks: Sequence[MutableBlock], identities: Sequence[BlockIdentity]) -> list[CompleteBlock]:
        """Commit reset blocks all of whose bytes were written at once; their guards end. All or none.

        Raises `BlockStateError` for a block that is another pool's or in use, `WrongIdentityError` for an identity of
        another page size.
        """
        with self.lock:
            slots = self._held(blocks)
            for slot, identity in zip(slots, identities, strict=True):
                next_state(slot.state, _INIT_SEQUENCE)
                check_identity(slot, identity, self.page_tokens)
            for block, slot, identity in zip(blocks, slots, identities, strict=True):
                block.holds = block.owes = False
                slot.write(identity)
            self._note_all(LifeStep.INITIALISED, slots)
            self._note_all(LifeStep.COMMITTED, slots)
        completed = [CompleteBlock(self, slot) for slot in slots]
        self.hooks.tell()
        return completed

    def take_over(self, blocks: Sequence[MutableBlock]) -> list[MutableBlock]:
        """Empty blocks under other guards, for who writes them from now on; their guards end. All or none.

        Raises `BlockStateError` as `check_empty` does.
        """
        with self.lock:
            slots = self._empty(blocks)
            for block in blocks:
                block.end()
        return [MutableBlock(self, slot) for slot in slots]

    def check_empty(self, blocks: Sequence[MutableBlock]) -> None:
        """Raises `BlockStateError` for a block that is another pool's, was released, is given twice or not empty."""
        with self.lock:
            self._empty(blocks)

    def register(
        self, block: CompleteBlock, *, copied: bool = False, priority: int = PRIORITY_DEFAULT
    ) -> ImmutableBlock:
        """Make a complete block findable. A rejected duplicate is reset and the block that was first returned.

        Raises `BlockStateError` for another pool's block, which keeps its guard.
        """
        check_priority(priority)
        with self.lock:
            self._take_returned()
            slot = block.held(self)
            block.end()
            (kept,) = self._register((slot,), copied, priority)
        registered = ImmutableBlock(self, kept)
        self.hooks.tell()
        return registered

    def register_many(
        self, blocks: Sequence[CompleteBlock], *, copied: bool = False, priority: int = PRIORITY_DEFAULT
    ) -> list[ImmutableBlock]:
        """Make complete blocks findable, in order; their guards end. All or none.

        `copied`: they are copies of blocks that another tier holds. `priority` is 0 to `PRIORITY_MAX`; the lower, the
        earlier a block is evicted. A duplicate raises the first's to its own. Raises as `register` does.
        """
        check_priority(priority)
        with self.lock:
            self._take_returned()
            slots = self._held(blocks)
            for block in blocks:
                block.holds = block.owes = False
            kept = self._register(slots, copied, priority)
        registered = [ImmutableBlock(self, slot) for slot in kept]
        self.hooks.tell()
        return registered

    def match(self, keys: Sequence[BlockKey]) -> list[ImmutableBlock]:
        """Guards of the leading keys that are registered, up to the first that is not."""
        found = []
        with self.lock:
            self._take_returned()
            for key in keys:
                slot = self._registry.find(key)
                if slot is None:
                    break
                self._match(slot)
                found.append(slot)
            self._counters.requested += len(keys)
            self._counters.matched += len(found)
        matched = [ImmutableBlock(self, slot) for slot in found]
        self.hooks.tell()
        return matched

    def scan(self, keys: Sequence[BlockKey]) -> list[ImmutableBlock | None]:
        """A guard of each key that is registered, None for the others."""
        with self.lock:
            self._take_returned()
            found = [self._registry.find(key) for key in keys]
            there = [slot for slot in found if slot is not None]
            for slot in there:
                self._match(slot)
            self._counters.requested += len(keys)
            self._counters.matched += len(there)
        matched = [None if slot is None else ImmutableBlock(self, slot) for slot in found]
        self.hooks.tell()
        return matched

    def acquire(self, key: BlockKey) -> ImmutableBlock | None:
        """A guard of one registered block, or None. No match: it counts as no use of the block."""
        with self.lock:
            self._take_returned()
            slot = self._registry.find(key)
            if slot is None:
                return None
            self._reference(slot)
        acquired = ImmutableBlock(self, slot)
        self.hooks.tell()
        return acquired

    def share(self, block: ImmutableBlock) -> ImmutableBlock:
        """A second guard of a block that is held. Raises `BlockStateError` when it was released meanwhile."""
        with self.lock:
            slot = block.held()
            slot.references += 1
        return ImmutableBlock(self, slot)

    def has(self, key: BlockKey) -> bool:
        """Whether a block is registered now; without a guard it may be gone the next moment."""
        with self.lock:
            return key in self._registry

    def find(self, key: BlockKey) -> BlockPlace | None:
        """Where a registered block lies now, for whoever explains it; takes no guard."""
        with self.lock:
            slot = self._registry.find(key)
            return None if slot is None else BlockPlace(slot.index, slot.references, slot.priority)

    def forget(self, block: ImmutableBlock) -> None:
        """Let nobody find a held block again whose bytes have turned out wrong; its last guard resets it.

        A second copy is found by nobody anyway. Raises `BlockStateError` when the guard was released.
        """
        with self.lock:
            slot = block.held(self)
            if slot.is_listed:
                self._registry.drop(block.identity)
                slot.is_listed = False
                if self.hooks.listeners:
                    self.note(LifeStep.FORGOTTEN, slot)
        self.hooks.tell()

    def registered_keys(self) -> list[BlockKey]:
        """Every registered key."""
        with self.lock:
            return self._registry.keys()

    @contextmanager
    def standing_still(self) -> Iterator[list[BlockIdentity]]:
        """Every registered block; none comes, goes or is told of meanwhile."""
        with self.lock:
            yield self._registry.identities()

    def occupancy(self) -> PoolOccupancy:
        with self.lock:
            self._take_returned()
            occupancy = self._occupancy()
        self.hooks.tell()
        return occupancy

    def counters(self) -> PoolCounters:
        """A copy of the counters at this moment."""
        with self.lock:
            self._take_returned()
            return replace(self._counters)

    def reset(self) -> list[BlockIdentity]:
        """Empty the whole pool, and return what it had. Raises `BlockStateError` while a block is in use."""
        with self.lock:
            self._take_returned()
            active = self._occupancy().active
            if active:
                raise BlockStateError(f"pool {self.name} has {active} blocks in use: release them, then reset it")
            emptied = [self._vacate(self._inactive.pop()) for _ in range(len(self._inactive))]
        self.hooks.tell()
        return emptied

    def release_many(self, guards: Sequence[Guard]) -> None:
        """Give blocks back in this order, which the reuse order sees; those released before are passed over.

        Raises `BlockStateError` for another pool's; then none was given back.
        """
        for guard in guards:
            if guard.pool is not self:
                guard.check_pool(self)
        for guard in guards:
            guard.holds = False
        self._released.extend(guards)
        self._take_back_if_free()

    def take_back(self, guard: Guard) -> None:
        self._released.append(guard)
        self._take_back_if_free()

    def take_back_later(self, slot: Slot) -> None:
        self._collected.append(slot)

    def note(self, step: LifeStep, slot: Slot) -> None:
        if self.hooks.listeners:
            self.hooks.note(BlockStep(step, self.name, slot.index, slot.identity))

    def _note_all(self, step: LifeStep, slots: Sequence[Slot]) -> None:
        if self.hooks.listeners:
            for slot in slots:
                self.note(step, slot)

    def _occupancy(self) -> PoolOccupancy:
        inactive, reset = len(self._inactive), len(self._reset)
        return PoolOccupancy(active=self.blocks - inactive - reset, inactive=inactive, reset=reset)

    def _held(self, blocks: Sequence[Guard]) -> list[Slot]:
        """The slots of guards that are all this pool's, all held, and all different."""
        slots = [block.held(self) for block in blocks]
        if len(set(slots)) < len(slots):
            raise BlockStateError(f"a block is given twice among {[slot.index for slot in slots]}: give each once")
        return slots

    def _empty(self, blocks: Sequence[MutableBlock]) -> list[Slot]:
        slots = self._held(blocks)
        for slot in slots:
            if slot.state is not BlockState.RESET:
                raise BlockStateError(f"block {slot.index} is {slot.state}: give an empty one, as allocate does")
        return slots

    def _take_back_if_free(self) -> None:
        """Take in what was released, or leave it to the next step where one is under way."""
        if self.lock.acquire(blocking=False):
            try:
                self._take_returned()
            finally:
                self.lock.release()
            self.hooks.tell()

    def _take_returned(self) -> None:
        while self._released:
            guard = self._released.popleft()
            if guard.owes:
                guard.owes = False
                self._give_back(guard.slot)
        while self._collected:
            self._counters.released_by_collector += 1
            self._give_back(self._collected.popleft())

    def _give_back(self, slot: Slot) -> None:
        if self.hooks.listeners:
            self.note(LifeStep.RELEASED, slot)
        if not slot.references:
            self._make_reset(slot, _RESET)
            return
        slot.references -= 1
        if not slot.references:
            self._make_inactive(slot)

    def _make_inactive(self, slot: Slot) -> None:
        """Nobody holds the registered block any more."""
        if slot.is_listed:
            self._inactive.insert(slot)
            if self.hooks.listeners:
                self.note(LifeStep.INACTIVE, slot)
            return
        first = slot.first_copy
        self._make_reset(slot, _DISCARD)
        if first is not None:
            first.references -= 1
            if not first.references:
                self._make_inactive(first)

    def _reference(self, slot: Slot) -> None:
        if not slot.references:
            self._inactive.remove(slot)
        slot.references += 1
        if self.hooks.listeners:
            self.note(LifeStep.MATCHED, slot)

    def _match(self, slot: Slot) -> None:
        self._reference(slot)
        slot.was_matched = True
        if self._inactive.counts_uses:
            self._inactive.used(slot)

    def _register(self, slots: Sequence[Slot], copied: bool, priority: int) -> list[Slot]:
        """Register blocks, and return the slots that their guards are to hold."""
        kept = []
        for slot in slots:
            identity = slot.identity
            assert identity is not None, "a complete block has an identity"
            first = self._registry.add(identity, slot, copied)
            if first is not slot:
                kept.append(self._register_duplicate(slot, first, priority))
                continue
            slot.state = TRANSITIONS[slot.state][_REGISTER]
            slot.references = 1
            slot.is_listed = True
            slot.first_copy = None
            slot.was_matched = False
            slot.priority = priority
            self._counters.registered += 1
            slot.registered_order = self._counters.registered
            if self._inactive.counts_uses:
                self._inactive.used(slot)
            if self.hooks.listeners:
                self.note(LifeStep.REGISTERED, slot)
            kept.append(slot)
        return kept

    def _register_duplicate(self, slot: Slot, first: Slot, priority: int) -> Slot:
        self._counters.duplicates += 1
        if self.hooks.listeners:
            self.note(LifeStep.DUPLICATE, slot)
        self._reference(first)
        first.priority = max(first.priority, priority)
        if self._duplicates == "reject":
            self._make_reset(slot, _RESET)
            return first
        slot.step(_REGISTER)
        slot.references = 1
        slot.is_listed = False
        slot.first_copy = first
        return slot

    def _evict(self, count: int) -> list[BlockIdentity]:
        """Reset the inactive blocks that the reuse order names; none for a count of 0 or less."""
        evicted = []
        for _ in range(count):
            slot = self._inactive.pop()
            if not slot.was_matched:
                self._counters.evicted_unmatched += 1
            evicted.append(self._vacate(slot))
        self._counters.evicted += len(evicted)
        return evicted

    def _vacate(self, slot: Slot) -> BlockIdentity:
        """Reset a block that was inactive; what it was."""
        identity = slot.identity
        assert identity is not None, "a registered block has an identity"
        self._registry.drop(identity)
        self._make_reset(slot, _EVICT)
        return identity

    def _make_reset(self, slot: Slot, trigger: Trigger) -> None:
        slot.state = TRANSITIONS[slot.state][trigger]
        if self.hooks.listeners:
            self.note(LifeStep.EVICTED if trigger is _EVICT else LifeStep.RESET, slot)
        slot.empty()
        self._reset.append(slot)
