"""Random use of a pool, threads included, against a model: no block lost, none held twice, and what is told is true."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Sequence

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from event_plane.schema import Namespace
from kvbm_core.block import BlockState, CompleteBlock, Guard, ImmutableBlock, MutableBlock, WeakBlock
from kvbm_core.config import ReuseName
from kvbm_core.errors import BlockStateError, PoolExhaustedError
from kvbm_core.hooks import BlockStep, LifeStep
from kvbm_core.identity import BlockIdentity
from kvbm_core.pool import BlockPool, PoolOccupancy
from kvbm_core.reuse import reuse_order
from storage_agent.port import BlockKey
from tests.examples import examples

BLOCKS = 5
PAGE_TOKENS = 4
THREADS = 3
NAMESPACE = Namespace(tenant="acme", block_tokens=PAGE_TOKENS)
NAMESPACE_ID = NAMESPACE.namespace_id
NUMBERS = range(1, 8)
numbers = st.sampled_from(NUMBERS)
picks = st.integers(0, 1_000)
reuses: st.SearchStrategy[ReuseName] = st.sampled_from(["fifo", "lru", "multi_lru", "lineage"])
priorities = st.sampled_from([0, 35, 100])

NEXT_PLACE: dict[LifeStep, dict[str, str]] = {
    LifeStep.ALLOCATED: {"reset": "written"},
    LifeStep.INITIALISED: {"written": "written"},
    LifeStep.COMMITTED: {"written": "complete"},
    LifeStep.REGISTERED: {"complete": "active"},
    LifeStep.DUPLICATE: {"complete": "unlisted"},
    LifeStep.MATCHED: {"active": "active", "inactive": "active"},
    LifeStep.FORGOTTEN: {"active": "unlisted"},
    LifeStep.RELEASED: {"written": "returned", "complete": "returned", "active": "active", "unlisted": "unlisted"},
    LifeStep.INACTIVE: {"active": "inactive"},
    LifeStep.EVICTED: {"inactive": "reset"},
    LifeStep.RESET: {"written": "written", "complete": "written", "returned": "reset", "unlisted": "reset"},
}
"""What a step makes of a block that is in some place; anything else must not be told."""


def identity_of(number: int) -> BlockIdentity:
    """Blocks 1, 2, 4 … are chained as a binary tree is."""
    return BlockIdentity(BlockKey(NAMESPACE_ID, 0, number), NAMESPACE, number // 2, 1, 0, PAGE_TOKENS)


def number_of(block: CompleteBlock | ImmutableBlock) -> int:
    return block.identity.key.sequence_hash


class PoolUser:
    """What one thread of an engine does at random with a pool, and the guards it then holds."""

    def __init__(self, pool: BlockPool, seed: int, released_by_all: Sequence[Guard]) -> None:
        self._pool = pool
        self._chance = random.Random(seed)
        self._released_by_all = list(released_by_all)
        self.immutable: list[ImmutableBlock] = []

    def run(self) -> None:
        for _ in range(12):
            self._chance.choice((self._compute, self._match, self._scan, self._let_go, self._release_what_others_do))()

    def _some(self) -> list[int]:
        return [self._chance.choice(NUMBERS) for _ in range(self._chance.randint(0, 3))]

    def _compute(self) -> None:
        wanted = [identity_of(number) for number in self._some()]
        try:
            places = self._pool.allocate(len(wanted)).blocks
        except PoolExhaustedError:
            return
        complete = self._pool.complete_many(places, wanted)
        if self._chance.random() < 0.8:
            self.immutable += self._pool.register_many(complete)

    def _match(self) -> None:
        self.immutable += self._pool.match([identity_of(number).key for number in self._some()])

    def _scan(self) -> None:
        found = self._pool.scan([identity_of(number).key for number in self._some()])
        self.immutable += [block for block in found if block is not None]

    def _let_go(self) -> None:
        count = self._chance.randint(0, len(self.immutable))
        leaving, self.immutable = self.immutable[:count], self.immutable[count:]
        if self._chance.random() < 0.5:
            self._pool.release_many(leaving)

    def _release_what_others_do(self) -> None:
        if self._released_by_all:
            self._released_by_all.pop().release()


def at_once(works: Sequence[Callable[[], None]]) -> None:
    """Each in a thread of its own, which are switched as often as Python can."""
    threads = [threading.Thread(target=work) for work in works]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval_s)


class BlockPoolMachine(RuleBasedStateMachine):
    """No rule has a precondition: what threads leave behind differs from run to run, and Hypothesis must not see it."""

    @initialize(reuse=reuses, duplicates=st.sampled_from(["allow", "reject"]))
    def open_pool(self, reuse: ReuseName, duplicates: str) -> None:
        self.events: list[tuple[str, int]] = []
        self.steps: list[BlockStep] = []
        self.told = 0
        """How many of the steps `places` has followed."""
        self.places = ["reset"] * BLOCKS
        self.duplicates = duplicates
        self.pool = BlockPool(
            name="device:0",
            blocks=BLOCKS,
            page_tokens=PAGE_TOKENS,
            reuse=reuse_order(reuse, BLOCKS),
            duplicates=duplicates,  # type: ignore[arg-type]
            on_store=lambda identity, copied: self.events.append(("store", identity.key.sequence_hash)),
            on_remove=lambda identity: self.events.append(("remove", identity.key.sequence_hash)),
        )
        self.pool.hooks.add(self.steps.append)
        self.mutable: list[MutableBlock] = []
        self.complete: list[CompleteBlock] = []
        self.immutable: list[ImmutableBlock] = []
        self.weak: list[WeakBlock] = []
        self.registered: set[int] = set()
        """The model: keys that can be found."""

    def _held(self) -> set[int]:
        """Places that are in use: those of guards, and of the blocks that second copies hold."""
        guards = {guard.index for guard in (*self.mutable, *self.complete, *self.immutable)}
        firsts = {block.held().first_copy for block in self.immutable}
        return guards | {first.index for first in firsts if first is not None}

    @rule(count=st.integers(0, BLOCKS + 1))
    def allocate(self, count: int) -> None:
        held = self._held()
        before = list(self.events)
        try:
            allocation = self.pool.allocate(count)
        except PoolExhaustedError:
            assert count > BLOCKS - len(held)
            assert self.events == before
            return
        assert count <= BLOCKS - len(held)
        indexes = {block.index for block in allocation.blocks}
        assert len(indexes) == count
        assert not indexes & held
        assert all(block.state is BlockState.RESET and not block.filled_tokens for block in allocation.blocks)
        removed = [number for kind, number in self.events[len(before) :] if kind == "remove"]
        assert [identity.key.sequence_hash for identity in allocation.evicted] == removed
        assert not {number_of(block) for block in self.immutable if block.held().is_listed} & set(removed)
        self.mutable += allocation.blocks
        self.registered.difference_update(removed)

    @rule(pick=picks)
    def begin(self, pick: int) -> None:
        if not self.mutable:
            return
        block = self.mutable[pick % len(self.mutable)]
        was_reset = block.state is BlockState.RESET
        try:
            block.init_sequence()
        except BlockStateError:
            assert not was_reset
        else:
            assert was_reset
        assert block.state is BlockState.PARTIAL

    @rule(pick=picks, tokens=st.integers(0, PAGE_TOKENS))
    def fill(self, pick: int, tokens: int) -> None:
        if not self.mutable:
            return
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

    @rule(pick=picks, number=numbers, full=st.booleans())
    def commit(self, pick: int, number: int, full: bool) -> None:
        if not self.mutable:
            return
        block = self.mutable[pick % len(self.mutable)]
        if full:
            if block.state is BlockState.RESET:
                block.init_sequence()
            if block.filled_tokens < PAGE_TOKENS:
                block.fill(PAGE_TOKENS - block.filled_tokens)
        ready = block.filled_tokens == PAGE_TOKENS
        place = block.index
        try:
            complete = block.commit(identity_of(number))
        except BlockStateError:
            assert not ready
            assert block.index == place
        else:
            assert ready
            self.mutable.remove(block)
            self.complete.append(complete)
            assert complete.index == place

    @rule(wanted=st.lists(numbers, max_size=BLOCKS))
    def complete_at_once(self, wanted: list[int]) -> None:
        """All of some blocks' bytes were written at once; a block that is being written already is refused."""
        if not self.mutable:
            return
        chosen = self.mutable[: len(wanted)]
        ready = all(block.state is BlockState.RESET for block in chosen)
        try:
            complete = self.pool.complete_many(chosen, [identity_of(n) for n, _ in zip(wanted, chosen, strict=False)])
        except BlockStateError:
            assert not ready
            assert all(block.holds for block in chosen)
        else:
            assert ready
            self.mutable = self.mutable[len(chosen) :]
            self.complete += complete

    @rule(pick=picks, kind=st.sampled_from(["mutable", "complete"]))
    def reset(self, pick: int, kind: str) -> None:
        guards = getattr(self, kind)
        if not guards:
            return
        guard = guards.pop(pick % len(guards))
        place = guard.index
        block = guard.reset() if kind == "complete" else guard
        block.reset()
        assert (block.index, block.state, block.filled_tokens) == (place, BlockState.RESET, 0)
        self.mutable.append(block)

    @rule(count=st.integers(1, BLOCKS), priority=priorities)
    def register(self, count: int, priority: int) -> None:
        if not self.complete:
            return
        blocks, self.complete = self.complete[:count], self.complete[count:]
        before = [(block.index, number_of(block)) for block in blocks]
        immutable = self.pool.register_many(blocks, priority=priority)
        for block, (place, number) in zip(immutable, before, strict=True):
            assert number_of(block) == number
            is_known = number in self.registered
            assert (block.index != place) == (is_known and self.duplicates == "reject")
            assert block.is_second_copy == (is_known and self.duplicates == "allow")
            assert is_known or self.events.count(("store", number)) == self.events.count(("remove", number)) + 1
            self.registered.add(number)
        self.immutable += immutable

    @rule(wanted=st.lists(numbers, max_size=5))
    def match(self, wanted: list[int]) -> None:
        found = self.pool.match([identity_of(number).key for number in wanted])
        expected = next((i for i, number in enumerate(wanted) if number not in self.registered), len(wanted))
        assert [number_of(block) for block in found] == wanted[:expected]
        self.immutable += found

    @rule(wanted=st.lists(numbers, max_size=5))
    def scan(self, wanted: list[int]) -> None:
        found = self.pool.scan([identity_of(number).key for number in wanted])
        assert [block is not None for block in found] == [number in self.registered for number in wanted]
        self.immutable += [block for block in found if block is not None]

    @rule(pick=picks, weakly=st.booleans(), priority=priorities)
    def reference(self, pick: int, weakly: bool, priority: int) -> None:
        if not self.immutable:
            return
        block = self.immutable[pick % len(self.immutable)]
        block.priority = priority
        if weakly:
            self.weak.append(block.downgrade())
        else:
            self.immutable.append(block.clone())
            assert self.immutable[-1].priority == priority

    @rule(pick=picks)
    def forget(self, pick: int) -> None:
        if not self.immutable:
            return
        block = self.immutable[pick % len(self.immutable)]
        is_found = block.held().is_listed
        self.pool.forget(block)
        if is_found:
            self.registered.remove(number_of(block))
        assert block.holds

    @rule(pick=picks)
    def upgrade(self, pick: int) -> None:
        if not self.weak:
            return
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

    @rule()
    def drop_all_at_once(self) -> None:
        self.pool.release_many([*self.immutable, *self.immutable, *self.mutable, *self.complete])
        self.immutable, self.mutable, self.complete = [], [], []

    @rule()
    def empty_the_pool(self) -> None:
        is_idle = not self._held()
        try:
            emptied = self.pool.reset()
        except BlockStateError:
            assert not is_idle
        else:
            assert is_idle
            assert {identity.key.sequence_hash for identity in emptied} == self.registered
            assert self.pool.occupancy() == PoolOccupancy(active=0, inactive=0, reset=BLOCKS)
            self.registered.clear()

    @rule(seed=picks)
    def threads_at_work(self, seed: int) -> None:
        """Three threads use the pool at once, and each releases guards that the others release too."""
        users = [PoolUser(self.pool, seed + number, self.immutable) for number in range(THREADS)]
        at_once([user.run for user in users])
        self.immutable = [block for block in self.immutable if block.holds]
        for user in users:
            self.immutable += user.immutable
        del users
        # In which order they did it cannot be known; the invariants hold whichever it was.
        self.registered = {key.sequence_hash for key in self.pool.registered_keys()}

    @rule()
    def threads_release_the_same_guards(self) -> None:
        guards = [*self.immutable, *self.mutable, *self.complete]
        self.immutable, self.mutable, self.complete = [], [], []

        def release_all() -> None:
            for guard in guards:
                guard.release()

        at_once([release_all] * THREADS)

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        occupancy = self.pool.occupancy()
        assert occupancy.active + occupancy.inactive + occupancy.reset == BLOCKS
        assert occupancy.active == len(self._held())
        writing = [guard.index for guard in (*self.mutable, *self.complete)]
        assert len(set(writing)) == len(writing)
        assert not set(writing) & {guard.index for guard in self.immutable}
        by_number: dict[int, set[int]] = {}
        for block in self.immutable:
            if block.held().is_listed:
                by_number.setdefault(number_of(block), set()).add(block.index)
        assert all(len(places) == 1 for places in by_number.values())

    @invariant()
    def events_tell_what_the_pool_has(self) -> None:
        told: set[int] = set()
        for kind, number in self.events:
            assert (number in told) == (kind == "remove"), "a Store twice, or a Remove without a Store"
            told.symmetric_difference_update({number})
        assert told == {key.sequence_hash for key in self.pool.registered_keys()} == self.registered
        with self.pool.standing_still() as identities:
            assert {identity.key.sequence_hash for identity in identities} == told

    @invariant()
    def hooks_tell_where_every_block_is(self) -> None:
        occupancy = self.pool.occupancy()
        for step in self.steps[self.told :]:
            place = self.places[step.block]
            assert place in NEXT_PLACE[step.step], f"{step} of a block that is {place}"
            self.places[step.block] = NEXT_PLACE[step.step][place]
        self.told = len(self.steps)
        assert occupancy.inactive == self.places.count("inactive")
        assert occupancy.reset == self.places.count("reset")
        kinds = [step.step for step in self.steps]
        counters = self.pool.counters()
        assert counters.allocated == kinds.count(LifeStep.ALLOCATED)
        assert counters.registered == kinds.count(LifeStep.REGISTERED)
        assert counters.registered == len([kind for kind, _ in self.events if kind == "store"])
        assert counters.duplicates == kinds.count(LifeStep.DUPLICATE)
        assert counters.matched <= kinds.count(LifeStep.MATCHED)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for guards in (self.mutable, self.complete, self.immutable):
            guards.clear()
        assert self.pool.occupancy().active == 0
        evicted = self.pool.allocate(BLOCKS).evicted
        assert len(evicted) == len(self.registered)
        assert self.pool.registered_keys() == []
        assert self.pool.hooks.failures == 0


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=examples(50), stateful_step_count=30, deadline=None)
