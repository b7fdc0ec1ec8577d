"""Shards of blocks that other processes write into slots of a volume: who may write what, and when a block is whole.

Pure: no I/O, time is a parameter. A shard is `granted` to a client, which locks its place (`slot_locks`) and confirms
before it writes; so an agent that was started anew finds by the locks who may still write. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from event_plane.schema import Namespace
from storage_agent.errors import LeaseError
from storage_agent.port import BlockKey
from storage_agent.shards import BlockLayout, ShardSpan
from storage_agent.slot_table import Reservation

GRANT_S = 30.0
"""A lease that is not confirmed in this time may go to another."""
ASSEMBLY_S = 120.0
"""A block whose missing shards nobody writes any more is given up after this time."""

IsLocked = Callable[[int, int], bool]
"""Whether a client may still write this shard (slot, shard)."""


class ShardState(StrEnum):
    MISSING = "missing"
    GRANTED = "granted"
    WRITING = "writing"
    DURABLE = "durable"


class ShardTrigger(StrEnum):
    GRANT = "grant"
    CONFIRM = "confirm"
    COMMIT = "commit"
    RELEASE = "release"
    EXPIRE = "expire"
    LOSE = "lose"


TRANSITIONS: dict[ShardState, dict[ShardTrigger, ShardState]] = {
    ShardState.MISSING: {ShardTrigger.GRANT: ShardState.GRANTED},
    ShardState.GRANTED: {
        ShardTrigger.CONFIRM: ShardState.WRITING,
        ShardTrigger.RELEASE: ShardState.MISSING,
        ShardTrigger.EXPIRE: ShardState.MISSING,
    },
    ShardState.WRITING: {
        ShardTrigger.COMMIT: ShardState.DURABLE,
        ShardTrigger.RELEASE: ShardState.MISSING,
        ShardTrigger.LOSE: ShardState.MISSING,
    },
    ShardState.DURABLE: {},
}


class BlockFacts(NamedTuple):
    """A whole block that is put in shards; every writer of it says the same. `span` is of all its shards."""

    key: BlockKey
    namespace: Namespace
    parent_hash: int
    depth: int
    block_tokens: int
    payload_bytes: int
    span: ShardSpan | None
    layout: BlockLayout | None


@dataclass(slots=True)
class _Shard:
    state: ShardState = ShardState.MISSING
    lease: int = 0
    checksum: int = 0


@dataclass(slots=True)
class Assembly:
    """A block that is written by several, and its slot."""

    facts: BlockFacts
    reserved: Reservation
    touched_s: float
    shards: list[_Shard]

    @property
    def slot(self) -> int:
        return self.reserved.slot

    @property
    def checksums(self) -> tuple[int, ...]:
        return tuple(shard.checksum for shard in self.shards)

    @property
    def is_whole(self) -> bool:
        return all(shard.state is ShardState.DURABLE for shard in self.shards)

    @property
    def is_idle(self) -> bool:
        """Nobody may write any of it."""
        return not any(shard.state in (ShardState.GRANTED, ShardState.WRITING) for shard in self.shards)


class LeaseTable:
    """Blocks under assembly on one volume, by key, and their leases, by number. Bounded by the volume's slots."""

    def __init__(self, session: int) -> None:
        """`session`: drawn anew with each table, 32 bits, so that no lease of an earlier agent is taken for ours."""
        self._next = session << 32 | 1
        self._assemblies: dict[BlockKey, Assembly] = {}
        self._leases: dict[int, tuple[Assembly, int]] = {}

    def __len__(self) -> int:
        return len(self._assemblies)

    def assembly(self, key: BlockKey) -> Assembly | None:
        return self._assemblies.get(key)

    def begin(self, facts: BlockFacts, reserved: Reservation, now_s: float) -> Assembly:
        """A block of which every shard is missing, in a slot that was reserved for it."""
        count = facts.span.count if facts.span is not None else 1
        made = Assembly(facts, reserved, now_s, [_Shard() for _ in range(count)])
        self._assemblies[facts.key] = made
        return made

    def grant(self, assembly: Assembly, shard: int, now_s: float) -> int:
        """A lease on one missing shard. Raises `LeaseError` where another has it, or it is durable."""
        self._step(assembly, shard, ShardTrigger.GRANT, now_s)
        lease, self._next = self._next, self._next + 1
        assembly.shards[shard].lease = lease
        self._leases[lease] = assembly, shard
        return lease

    def confirm(self, lease: int, now_s: float) -> bool:
        """The client holds the lock and is going to write. False: the lease has run out, it must not."""
        held = self._leases.get(lease)
        if held is None:
            return False
        assembly, shard = held
        if assembly.shards[shard].state is ShardState.GRANTED:
            self._step(assembly, shard, ShardTrigger.CONFIRM, now_s)
        return True

    def commit(self, lease: int, checksum: int, now_s: float) -> Assembly:
        """The shard is durable. Its block, which may be whole now. Raises `LeaseError`: not confirmed, or run out."""
        assembly, shard = self._held(lease)
        self._step(assembly, shard, ShardTrigger.COMMIT, now_s)
        assembly.shards[shard].checksum = checksum
        del self._leases[lease]
        return assembly

    def release(self, lease: int, now_s: float) -> None:
        """The client gives the shard up. Nothing where the lease has run out."""
        held = self._leases.get(lease)
        if held is not None:
            self._take_back(*held, ShardTrigger.RELEASE, now_s)

    def end(self, assembly: Assembly) -> None:
        """The block is published or given up: forget it."""
        for shard in assembly.shards:
            self._leases.pop(shard.lease, None)
        del self._assemblies[assembly.facts.key]

    def reclaim(self, now_s: float, is_locked: IsLocked) -> list[Assembly]:
        """Take back the leases of dead clients. Blocks that are given up, ended already: their slots are free."""
        for assembly, shard in list(self._leases.values()):
            state = assembly.shards[shard].state
            if state is ShardState.GRANTED and now_s - assembly.touched_s >= GRANT_S:
                self._take_back(assembly, shard, ShardTrigger.EXPIRE, now_s)
            elif state is ShardState.WRITING and not is_locked(assembly.slot, shard):
                self._take_back(assembly, shard, ShardTrigger.LOSE, now_s)
        given_up = [a for a in self._assemblies.values() if a.is_idle and now_s - a.touched_s >= ASSEMBLY_S]
        for assembly in given_up:
            self.end(assembly)
        return given_up

    def abandon_idle(self) -> list[Assembly]:
        """As `reclaim`, without waiting: for a volume that is closed."""
        idle: list[Assembly] = [assembly for assembly in self._assemblies.values() if assembly.is_idle]
        for assembly in idle:
            self.end(assembly)
        return idle

    def _held(self, lease: int) -> tuple[Assembly, int]:
        held = self._leases.get(lease)
        if held is None:
            raise LeaseError(f"lease {lease} has run out or was never given; ask for another and write again")
        return held

    def _take_back(self, assembly: Assembly, shard: int, trigger: ShardTrigger, now_s: float) -> None:
        self._step(assembly, shard, trigger, now_s)
        del self._leases[assembly.shards[shard].lease]

    def _step(self, assembly: Assembly, shard: int, trigger: ShardTrigger, now_s: float) -> None:
        state = assembly.shards[shard].state
        target = TRANSITIONS[state].get(trigger)
        if target is None:
            raise LeaseError(
                f"shard {shard} of block {assembly.facts.key.sequence_hash:032x} is {state.value}: it cannot "
                f"{trigger.value}"
            )
        assembly.shards[shard].state = target
        assembly.touched_s = now_s

