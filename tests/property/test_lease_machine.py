"""The lease table against a model: who may write which shard, when a block is whole, what is given up."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from event_plane.schema import Namespace
from storage_agent.errors import LeaseError
from storage_agent.leases import ASSEMBLY_S, GRANT_S, TRANSITIONS, BlockFacts, LeaseTable, ShardState, ShardTrigger
from storage_agent.port import BlockKey
from storage_agent.shards import ShardSpan
from storage_agent.slot_table import Reservation
from tests.examples import examples

NAMESPACE = Namespace(tenant="lease")
SHARDS = 3


def facts(number: int) -> BlockFacts:
    span = ShardSpan(10, 0, SHARDS)
    return BlockFacts(BlockKey(NAMESPACE.namespace_id, 0, number), NAMESPACE, 0, 0, 16, 30, span, None)


class Leases(RuleBasedStateMachine):
    """Two blocks of three shards, clients that lock before they confirm and may die at any time."""

    @initialize()
    def begin(self) -> None:
        self.now_s = 0.0
        self.table = LeaseTable(7)
        self.locked: set[tuple[int, int]] = set()
        self.leases: dict[int, tuple[int, int]] = {}
        """Given and not over: (block, shard)."""
        self.writing: set[int] = set()
        self.durable: set[tuple[int, int]] = set()
        self.next_slot = 0
        self.slots: dict[int, int] = {}

    @rule(block=st.integers(0, 1), shard=st.integers(0, SHARDS - 1))
    def ask(self, block: int, shard: int) -> None:
        key = facts(block).key
        if self.table.assembly(key) is None:
            self.slots[block] = self.next_slot
            self.table.begin(facts(block), Reservation(self.next_slot, self.next_slot + 1), self.now_s)
            self.next_slot += 1
        assembly = self.table.assembly(key)
        assert assembly is not None
        taken = (block, shard) in self.durable or (block, shard) in self.leases.values()
        if taken:
            with pytest.raises(LeaseError, match="it cannot grant"):
                self.table.grant(assembly, shard, self.now_s)
        else:
            lease = self.table.grant(assembly, shard, self.now_s)
            assert lease >> 32 == 7
            self.leases[lease] = block, shard

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0))
    def lock_and_confirm(self, pick: int) -> None:
        lease = sorted(self.leases)[pick % len(self.leases)]
        block, shard = self.leases[lease]
        self.locked.add((self.slots[block], shard))
        assert self.table.confirm(lease, self.now_s)
        self.writing.add(lease)

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0), checksum=st.integers(0, 9))
    def commit(self, pick: int, checksum: int) -> None:
        lease = sorted(self.leases)[pick % len(self.leases)]
        block, shard = self.leases[lease]
        if lease not in self.writing:
            with pytest.raises(LeaseError, match="it cannot commit"):
                self.table.commit(lease, checksum, self.now_s)
            return
        assembly = self.table.commit(lease, checksum, self.now_s)
        self.over(lease)
        self.durable.add((block, shard))
        assert assembly.checksums[shard] == checksum
        assert assembly.is_whole == ({(block, each) for each in range(SHARDS)} <= self.durable)
        with pytest.raises(LeaseError, match="has run out"):
            self.table.commit(lease, checksum, self.now_s)
        if assembly.is_whole:
            self.table.end(assembly)
            self.durable -= {(block, each) for each in range(SHARDS)}

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0))
    def release(self, pick: int) -> None:
        lease = sorted(self.leases)[pick % len(self.leases)]
        self.over(lease)
        self.table.release(lease, self.now_s)
        self.table.release(lease, self.now_s)
        assert not self.table.confirm(lease, self.now_s)

    @precondition(lambda self: self.locked)
    @rule(pick=st.integers(0))
    def a_client_dies(self, pick: int) -> None:
        self.locked.discard(sorted(self.locked)[pick % len(self.locked)])

    @rule(seconds=st.sampled_from([1.0, GRANT_S, ASSEMBLY_S]))
    def time_goes_on(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def reclaim(self) -> None:
        given_up = self.table.reclaim(self.now_s, lambda slot, shard: (slot, shard) in self.locked)
        for lease, (block, shard) in list(self.leases.items()):
            is_dead = lease in self.writing and (self.slots[block], shard) not in self.locked
            if is_dead or not self.still_has(lease):
                assert is_dead or lease not in self.writing, "one that may write keeps its lease"
                self.over(lease)
        for assembly in given_up:
            block = assembly.facts.key.sequence_hash
            assert block not in {each for each, _ in self.leases.values()}, "nobody may write it any more"
            assert self.now_s - assembly.touched_s >= ASSEMBLY_S
            self.durable -= {(block, shard) for shard in range(SHARDS)}

    def still_has(self, lease: int) -> bool:
        block, shard = self.leases[lease]
        assembly = self.table.assembly(facts(block).key)
        return assembly is not None and assembly.shards[shard].state in (ShardState.GRANTED, ShardState.WRITING)

    def over(self, lease: int) -> None:
        block, shard = self.leases.pop(lease)
        if lease in self.writing:
            self.writing.remove(lease)
        self.locked.discard((self.slots[block], shard))

    @invariant()
    def shards_are_as_the_model_says(self) -> None:
        if not hasattr(self, "table"):
            return
        for block in range(2):
            assembly = self.table.assembly(facts(block).key)
            held = {shard for each, shard in self.durable if each == block}
            shards = assembly.shards if assembly is not None else []
            assert {n for n, shard in enumerate(shards) if shard.state is ShardState.DURABLE} == held


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


def test_every_state_and_trigger_is_in_the_table() -> None:
    assert set(TRANSITIONS) == set(ShardState)
    assert {trigger for steps in TRANSITIONS.values() for trigger in steps} == set(ShardTrigger)


def test_a_lease_of_an_earlier_agent_is_not_taken_for_one_of_ours() -> None:
    before, after = LeaseTable(1), LeaseTable(2)
    lease = before.grant(before.begin(facts(1), Reservation(0, 1), 0.0), 0, 0.0)
    after.grant(after.begin(facts(1), Reservation(0, 1), 0.0), 0, 0.0)
    assert not after.confirm(lease, 0.0)
    with pytest.raises(LeaseError, match="has run out or was never given"):
        after.commit(lease, 1, 0.0)
