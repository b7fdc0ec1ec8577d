"""Random use of a pool against a model: no block lost, none held twice, and the events tell what the pool has."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from event_plane.schema import Namespace
from kvbm_core.block import BlockState, CompleteBlock, ImmutableBlock, MutableBlock, WeakBlock
from kvbm_core.errors import BlockStateError, PoolExhaustedError
from kvbm_core.identity import BlockIdentity
from kvbm_core.pool import BlockPool
from kvbm_core.reuse import reuse_order
from storage_agent.port import BlockKey

BLOCKS = 5
PAGE_TOKENS = 4
NAMESPACE = Namespace(tenant="acme", block_tokens=PAGE_TOKENS)
NAMESPACE_ID = NAMESPACE.namespace_id
numbers = st.integers(1, 7)
picks = st.integers(0, 1_000)


def _identity(number: int) -> BlockIdentity:
    return BlockIdentity(BlockKey(NAMESPACE_ID, 0, number), NAMESPACE, 0, number, 0, PAGE_TOKENS)


class BlockPoolMachine(RuleBasedStateMachine):
    @initialize(reuse=st.sampled_from(["fifo", "lru", "multi_lru", "lineage"]), duplicates=st.sampled_from(["allow", "reject"]))
    def open_pool(self, reuse: str, duplicates: str) -> None:
        self.events: list[tuple[str, int]] = []
        self.duplicates = duplicates
        self.pool = BlockPool(
            name="device:0",
            blocks=BLOCKS,
            page_tokens=PAGE_TOKENS,
            reuse=reuse_order(reuse, BLOCKS),  # type: ignore[arg-type]
            duplicates=duplicates,  # type: ignore[arg-type]
            on_store=lambda identity, copied: self.events.append(("store", identity.key.sequence_hash)),
            on_remove=lambda identity: self.events.append(("remove", identity.key.sequence_hash)),
        )
        self.mutable: list[MutableBlock] = []
        self.complete: list[CompleteBlock] = []
        self.immutable: list[ImmutableBlock] = []
        self.weak: list[WeakBlock] = []
        self.registered: set[int] = set()
        """The model: keys that can be found."""

    def _held(self) -> set[int]:
        return {guard.index for guard in (*self.mutable, *self.complete, *self.immutable)}

    @rule(count=st.integers(0, BLOCKS + 1))
    def allocate(self, count: int) -> None:
        room = BLOCKS - len(self._held())
        before = list(self.events)
        try:
            allocation = self.pool.allocate(count)
        except PoolExhaustedError:
            assert count > room
            assert self.events == before
            return
        assert count <= room
        indexes = {block.index for block in allocation.blocks}
        assert len(indexes) == count
        assert not indexes & self._held()
        assert all(block.state is BlockState.RESET and not block.filled_tokens for block in allocation.blocks)
        removed = [number for kind, number in self.events[len(before) :] if kind == "remove"]
        assert [identity.key.sequence_hash for identity in allocation.evicted] == removed
        self.mutable += allocation.blocks
        assert not {block.identity.key.sequence_hash for block in self.immutable} & set(removed)
        self.registered.difference_update(removed)

    @precondition(lambda self: self.mutable)
    @rule(pick=picks)
    def begin(self, pick: int) -> None:
        block = self.mutable[pick % len(self.mutable)]
        if block.state is BlockState.RESET:
            block.init_sequence()
            assert block.state is BlockState.PARTIAL
            return
        try:
            block.init_sequence()
        except BlockStateError:
            assert block.state is BlockState.PARTIAL
        else:
            raise AssertionError("a block in use was started again")

    @precondition(lambda self: self.mutable)
    @rule(pick=picks, tokens=st.integers(0, PAGE_TOKENS))
    def fill(self, pick: int, tokens: int) -> None:
        block = self.mutable[pick % len(self.mutable)]
        before = (block.state, block.filled_tokens)
        fits = before[0] is BlockState.PARTIAL and 0 < tokens <= PAGE_TOKENS - before[1]
        try:
            block.fill(tokens)
        except BlockStateError:
            assert not fits
            assert (block.state, block.filled_tokens) == before
        else:
            assert fits
            assert block.filled_tokens == before[1] + tokens

    @precondition(lambda self: self.mutable)
    @rule(pick=picks, number=numbers, full=st.booleans())
    def commit(self, pick: int, number: int, full: bool) -> None:
        block = self.mutable[pick % len(self.mutable)]
        if full:
            if block.state is BlockState.RESET:
                block.init_sequence()
            if block.filled_tokens < PAGE_TOKENS:
                block.fill(PAGE_TOKENS - block.filled_tokens)
        ready = block.filled_tokens == PAGE_TOKENS
        place = block.index
        try:
            complete = block.commit(_identity(number))
        except BlockStateError:
            assert not ready
            assert block.index == place
        else:
            assert ready
            self.mutable.remove(block)
            self.complete.append(complete)
            assert complete.index == place

    @precondition(lambda self: self.complete)
    @rule(pick=picks)
    def register(self, pick: int) -> None:
        block = self.complete.pop(pick % len(self.complete))
        number, place = block.identity.key.sequence_hash, block.index
        known = number in self.registered
        immutable = block.register()
        self.immutable.append(immutable)
        assert immutable.identity.key.sequence_hash == number
        if known and self.duplicates == "reject":
            assert immutable.index != place
        else:
            assert immutable.index == place
            self.registered.add(number)
        assert (self.events[-1] == ("store", number)) or known

    @rule(wanted=st.lists(numbers, max_size=5))
    def match(self, wanted: list[int]) -> None:
        found = self.pool.match([_identity(number).key for number in wanted])
        expected = next((i for i, number in enumerate(wanted) if number not in self.registered), len(wanted))
        assert [block.identity.key.sequence_hash for block in found] == wanted[:expected]
        self.immutable += found

    @precondition(lambda self: self.immutable)
    @rule(pick=picks, weakly=st.booleans())
    def reference(self, pick: int, weakly: bool) -> None:
        block = self.immutable[pick % len(self.immutable)]
        if weakly:
            self.weak.append(block.downgrade())
        else:
            self.immutable.append(block.clone())

    @precondition(lambda self: self.weak)
    @rule(pick=picks)
    def upgrade(self, pick: int) -> None:
        weak = self.weak.pop(pick % len(self.weak))
        block = weak.upgrade()
        assert (block is not None) == (weak.key.sequence_hash in self.registered)
        if block is not None:
            self.immutable.append(block)

    @rule(pick=picks, kind=st.sampled_from(["mutable", "complete", "immutable"]), explicit=st.booleans())
    def drop(self, pick: int, kind: str, explicit: bool) -> None:
        guards = getattr(self, kind)
        if not guards:
            return
        guard = guards.pop(pick % len(guards))
        if explicit:
            guard.release()
        del guard

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        occupancy = self.pool.occupancy()
        assert occupancy.active + occupancy.inactive + occupancy.reset == BLOCKS
        assert occupancy.active == len(self._held())
        writing = [guard.index for guard in (*self.mutable, *self.complete)]
        assert len(set(writing)) == len(writing)
        assert not set(writing) & {guard.index for guard in self.immutable}

    @invariant()
    def events_tell_what_the_pool_has(self) -> None:
        told: set[int] = set()
        for kind, number in self.events:
            assert (number in told) == (kind == "remove"), "a Store twice, or a Remove without a Store"
            told.symmetric_difference_update({number})
        assert told == {key.sequence_hash for key in self.pool.registered_keys()} == self.registered

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for guards in (self.mutable, self.complete, self.immutable):
            guards.clear()
        assert self.pool.occupancy().active == 0
        evicted = self.pool.allocate(BLOCKS).evicted
        assert len(evicted) == len(self.registered)
        assert self.pool.registered_keys() == []


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
