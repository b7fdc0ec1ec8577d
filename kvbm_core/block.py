"""A block's life-cycle as a table, and the guards that hold a block while it is used.

A guard is released once: by `release`, at the end of its `with`, when a later guard takes the block over, or when
Python collects it, in any thread. An error leaves the block with the guard that had it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Protocol, Self

import numpy as np

from event_plane.hashing import SequenceHasher, Tokens, little_endian_u32
from kvbm_core.errors import BlockStateError, WrongIdentityError
from kvbm_core.hooks import Hooks, LifeStep
from kvbm_core.identity import BlockIdentity
from storage_agent.port import BlockKey

PRIORITY_MAX = 100
PRIORITY_DEFAULT = 35
"""A block of lower priority is evicted, and offloaded, before one of higher. Range and default are TensorRT-LLM's."""
_LOW_64 = 0xFFFF_FFFF_FFFF_FFFF
_TOKEN_BYTES = 4


class BlockState(StrEnum):
    RESET = "Reset"
    PARTIAL = "Partial"
    COMPLETE = "Complete"
    REGISTERED = "Registered"

    # An enum's own goes through Python code, which every look into the table would pay for.
    __hash__ = str.__hash__


class Trigger(StrEnum):
    INIT_SEQUENCE = "init_sequence"
    FILL = "fill"
    COMMIT = "commit"
    REGISTER = "register"
    RESET = "reset"
    """Given up before registration: aborted, invalidated, failed, or a duplicate that is not kept."""
    DISCARD = "discard"
    """The last guard of a block that nobody can find was dropped: a second copy, or one that was forgotten."""
    EVICT = "evict"
    """An inactive block's memory is wanted for another."""

    __hash__ = str.__hash__


# Python 3.11 finds an enum's member by way of Python code, which every block would pay for.
_COMMIT = Trigger.COMMIT
_FILL = Trigger.FILL
_INIT_SEQUENCE = Trigger.INIT_SEQUENCE
_RESET = Trigger.RESET

TRANSITIONS: dict[BlockState, dict[Trigger, BlockState]] = {
    BlockState.RESET: {Trigger.INIT_SEQUENCE: BlockState.PARTIAL, Trigger.RESET: BlockState.RESET},
    BlockState.PARTIAL: {
        Trigger.FILL: BlockState.PARTIAL,
        Trigger.COMMIT: BlockState.COMPLETE,
        Trigger.RESET: BlockState.RESET,
    },
    BlockState.COMPLETE: {Trigger.REGISTER: BlockState.REGISTERED, Trigger.RESET: BlockState.RESET},
    BlockState.REGISTERED: {Trigger.DISCARD: BlockState.RESET, Trigger.EVICT: BlockState.RESET},
}


def next_state(state: BlockState, trigger: Trigger) -> BlockState:
    """Raises `BlockStateError` where the table has no such step."""
    try:
        return TRANSITIONS[state][trigger]
    except KeyError:
        allowed = ", ".join(TRANSITIONS[state])
        raise BlockStateError(f"a {state} block cannot take {trigger}: it allows {allowed}") from None


_WRITTEN = next_state(next_state(next_state(BlockState.RESET, Trigger.INIT_SEQUENCE), Trigger.FILL), Trigger.COMMIT)


def diagram() -> str:
    """The table as a Mermaid state diagram, as docs/block-states.md shows it."""
    lines = ["stateDiagram-v2", f"    [*] --> {BlockState.RESET}"]
    for state, steps in TRANSITIONS.items():
        lines += [f"    {state} --> {target}: {trigger}" for trigger, target in steps.items()]
    return "\n".join(lines) + "\n"


@dataclass(slots=True, eq=False)
class Slot:
    """One block's memory in a pool, and what lies in it. Changed under the pool's lock."""

    index: int
    state: BlockState = BlockState.RESET
    salt: int | None = None
    """Seed of its sequence's token hashes; None where tokens are only counted."""
    tokens: bytearray | None = None
    """Of a sequence with a salt, four bytes each, until it is committed."""
    filled_tokens: int = 0
    identity: BlockIdentity | None = None
    references: int = 0
    """What holds it while it is registered, guards and second copies; 0 means inactive."""
    is_listed: bool = False
    """Whether its key finds it; not of a second copy, nor of a block that was forgotten."""
    first_copy: Slot | None = None
    """Of a second copy the slot that its key finds, which it keeps from being evicted."""
    was_matched: bool = False
    registered_order: int = 0
    """Rises with every registration in the pool."""
    priority: int = PRIORITY_DEFAULT
    reuse_rank: int = 0
    """The list of its pool's reuse order that has it."""
    inactive_order: int = 0
    """Rises with every block that becomes inactive, where the reuse order asks for it."""

    def step(self, trigger: Trigger) -> None:
        self.state = next_state(self.state, trigger)

    def write(self, identity: BlockIdentity) -> None:
        """From Reset to Complete in one step: all its bytes were written at once."""
        self.state = _WRITTEN
        self.filled_tokens = identity.block_tokens
        self.identity = identity

    def empty(self) -> None:
        """Forget what lay in it; the state is the caller's. What a registration sets anew stays as it is."""
        self.identity = self.tokens = None
        self.filled_tokens = 0


class Pool(Protocol):
    """What guards need of the pool that their block belongs to."""

    name: str
    page_tokens: int
    lock: threading.Lock
    hooks: Hooks

    def take_back(self, guard: Guard) -> None:
        """Take a released guard's block in, once; never waits."""

    def take_back_later(self, slot: Slot) -> None:
        """Take a collected guard's block in at the pool's next step. Takes no lock."""

    def note(self, step: LifeStep, slot: Slot) -> None:
        """Remember a step for the hooks, where there are any; under the lock."""

    def register(self, block: CompleteBlock, *, copied: bool = False, priority: int = ...) -> ImmutableBlock: ...
    def acquire(self, key: BlockKey) -> ImmutableBlock | None: ...
    def share(self, block: ImmutableBlock) -> ImmutableBlock: ...


class Guard:
    """Holds a block, and gives it back exactly once: the pool's lock decides which of several threads does it."""

    __slots__ = ("__weakref__", "holds", "owes", "pool", "slot")

    def __init__(self, pool: Pool, slot: Slot) -> None:
        self.pool = pool
        self.slot = slot
        """The block's, which may be another guard's by now; `held` is for everybody but the pool."""
        self.holds = True
        """Whether it may be used: it was neither released nor taken over."""
        self.owes = True
        """Whether the pool has yet to get the block back from it. Ended under the lock, so that it happens once."""

    def __del__(self) -> None:
        # Nobody else has this guard any more, so no lock is needed; and none may be taken, since the garbage
        # collector runs in the middle of anything, a pool's step included.
        if self.owes:
            self.pool.take_back_later(self.slot)

    @property
    def index(self) -> int:
        """The block's place in its pool's tensor. Raises `BlockStateError` once released."""
        return self.held().index

    def release(self) -> None:
        """Give the block back. Idempotent; never waits, so that a finaliser may call it."""
        if self.holds:
            self.holds = False
            self.pool.take_back(self)

    def check_pool(self, pool: Pool) -> None:
        """Raises `BlockStateError` when the block is another pool's."""
        if self.pool is not pool:
            raise BlockStateError(f"block {self.slot.index} is not of pool {pool.name}: give it to its own")

    def held(self, pool: Pool | None = None) -> Slot:
        """The block's slot. Raises `BlockStateError` once released, or when the block is another pool's than `pool`."""
        if pool is not None and self.pool is not pool:
            self.check_pool(pool)
        if not self.holds:
            guard = type(self).__name__
            raise BlockStateError(f"{guard} of block {self.slot.index} was released: allocate or match again")
        return self.slot

    def end(self) -> None:
        """Another guard takes the block over. For pools and guards, under the lock."""
        self.holds = self.owes = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class MutableBlock(Guard):
    """A block that is being written. Dropped, it is reset. Every step that fails changes nothing."""

    __slots__ = ()

    @property
    def state(self) -> BlockState:
        return self.held().state

    @property
    def filled_tokens(self) -> int:
        return self.held().filled_tokens

    def init_sequence(self, salt: int | None = None) -> None:
        """Start a sequence in a reset block. Raises `BlockStateError` when it is in use already.

        With the u64 `salt` of its token hashes the block keeps the tokens that are added, and `commit` checks them
        against the identity; without one tokens are only counted, with `fill`.
        """
        if salt is not None and not 0 <= salt <= _LOW_64:
            raise ValueError(f"salt {salt} is no u64: take it from KvbmConfig.salt_of()")
        with self.pool.lock:
            slot = self.held()
            slot.step(_INIT_SEQUENCE)
            slot.salt = salt
            slot.tokens = None if salt is None else bytearray()
            if self.pool.hooks.listeners:
                self.pool.note(LifeStep.INITIALISED, slot)
        self.pool.hooks.tell()

    def fill(self, tokens: int) -> None:
        """Count `tokens` more whose keys and values were written. Raises `BlockStateError` when they do not fit."""
        with self.pool.lock:
            slot = self.held()
            if slot.tokens is not None:
                raise BlockStateError(f"block {slot.index} keeps its tokens: give them with add_tokens, not with fill")
            self._fill(slot, tokens)

    def add_token(self, token: int) -> None:
        """Add one token id, a u32, whose keys and values were written. Raises as `add_tokens` does."""
        self.add_tokens((token,))

    def add_tokens(self, tokens: Tokens) -> None:
        """Add token ids whose keys and values were written; all or none.

        Raises `ValueError` for a token that is no u32, `BlockStateError` when they do not fit or the sequence was
        started without a salt.
        """
        added = little_endian_u32(tokens)
        with self.pool.lock:
            slot = self.held()
            kept = slot.tokens
            if kept is None and slot.state is BlockState.PARTIAL:
                raise BlockStateError(
                    f"block {slot.index} was started without a salt: give init_sequence one, or count tokens with fill"
                )
            self._fill(slot, len(added) // _TOKEN_BYTES)
            assert kept is not None, "only a Partial block is filled"
            kept += added

    def commit(self, identity: BlockIdentity) -> CompleteBlock:
        """Take a full block to Complete under its identity; this guard ends. On an error it goes on.

        Raises `BlockStateError` when it is not full, `WrongIdentityError` when its own tokens, or its size, are not
        those that `identity` names.
        """
        pool = self.pool
        with pool.lock:
            slot = self.held()
            state = next_state(slot.state, _COMMIT)
            if slot.filled_tokens != pool.page_tokens:
                raise BlockStateError(
                    f"block {slot.index} holds {slot.filled_tokens} of {pool.page_tokens} tokens: commit it when full"
                )
            check_identity(slot, identity, pool.page_tokens)
            self.end()
            slot.state = state
            slot.identity = identity
            slot.tokens = None
            if pool.hooks.listeners:
                pool.note(LifeStep.COMMITTED, slot)
        completed = CompleteBlock(pool, slot)
        pool.hooks.tell()
        return completed

    def reset(self) -> None:
        """Give up what was written and hold an empty block. Raises `BlockStateError` once released."""
        with self.pool.lock:
            slot = self.held()
            slot.step(_RESET)
            slot.empty()
            if self.pool.hooks.listeners:
                self.pool.note(LifeStep.RESET, slot)
        self.pool.hooks.tell()

    def _fill(self, slot: Slot, tokens: int) -> None:
        state = next_state(slot.state, _FILL)
        free = self.pool.page_tokens - slot.filled_tokens
        if not 0 < tokens <= free:
            raise BlockStateError(f"block {slot.index} has room for {free} tokens, not {tokens}: fill the next block")
        slot.state = state
        slot.filled_tokens += tokens


class CompleteBlock(Guard):
    """A full block that nobody can find yet. Dropped, it is reset."""

    __slots__ = ()

    @property
    def identity(self) -> BlockIdentity:
        identity = self.held().identity
        assert identity is not None, "a complete block has an identity"
        return identity

    def register(self, *, copied: bool = False, priority: int = PRIORITY_DEFAULT) -> ImmutableBlock:
        """Make it findable; this guard ends. `copied`: it is a copy of a block that another tier holds."""
        return self.pool.register(self, copied=copied, priority=priority)

    def reset(self) -> MutableBlock:
        """Give up what was written; this guard ends, and the one returned holds an empty block."""
        pool = self.pool
        with pool.lock:
            slot = self.held()
            slot.step(_RESET)
            self.end()
            if pool.hooks.listeners:
                pool.note(LifeStep.RESET, slot)
            slot.empty()
        emptied = MutableBlock(pool, slot)
        pool.hooks.tell()
        return emptied


class ImmutableBlock(Guard):
    """A registered block that may be read. The last one dropped, the block stays findable but may be evicted."""

    __slots__ = ()

    @property
    def identity(self) -> BlockIdentity:
        identity = self.held().identity
        assert identity is not None, "a registered block has an identity"
        return identity

    @property
    def priority(self) -> int:
        """0 to `PRIORITY_MAX`; the lower, the earlier it is evicted. The key's, so all guards share it."""
        slot = self.held()
        return (slot.first_copy or slot).priority

    @priority.setter
    def priority(self, priority: int) -> None:
        check_priority(priority)
        with self.pool.lock:
            slot = self.held()
            (slot.first_copy or slot).priority = priority

    @property
    def is_second_copy(self) -> bool:
        """Whether another block of the pool had the key before, and is the one that a match finds."""
        return self.held().first_copy is not None

    def clone(self) -> ImmutableBlock:
        """A second guard of the same block."""
        return self.pool.share(self)

    def downgrade(self) -> WeakBlock:
        """A reference that does not prevent eviction; this guard goes on."""
        return WeakBlock(self.pool, self.identity.key)


class WeakBlock:
    """Remembers a block without holding it, so there is nothing to release."""

    __slots__ = ("key", "pool")

    def __init__(self, pool: Pool, key: BlockKey) -> None:
        self.pool = pool
        self.key = key

    def upgrade(self) -> ImmutableBlock | None:
        """The block, if its pool still has it."""
        return self.pool.acquire(self.key)


def check_priority(priority: int) -> None:
    """Raises `ValueError` for one out of range."""
    if not 0 <= priority <= PRIORITY_MAX:
        raise ValueError(f"priority {priority} is out of range: give one from 0, evicted first, to {PRIORITY_MAX}")


def check_identity(slot: Slot, identity: BlockIdentity, page_tokens: int) -> None:
    """Raises `WrongIdentityError` when a full block of the pool holds something else than `identity` names.

    Tokens, where they were kept, are checked by the low half of the sequence hash, which needs no secret.
    """
    if identity.block_tokens != page_tokens:
        raise WrongIdentityError(
            f"the identity for block {slot.index} is of {identity.block_tokens} tokens, the pool's blocks of "
            f"{page_tokens}: hash the sequence with the pool's page size"
        )
    if slot.tokens is None or slot.salt is None:
        return
    hasher = SequenceHasher(slot.salt, b"", page_tokens, after=identity.parent_hash)
    own = hasher.extend(np.frombuffer(slot.tokens, "<u4"))[0] & _LOW_64
    named = identity.key.sequence_hash & _LOW_64
    if own != named:
        raise WrongIdentityError(
            f"block {slot.index} holds tokens whose hash after {identity.parent_hash:#x} ends in {own:016x}, its "
            f"identity's in {named:016x}: commit it under its own tokens' identity, started with that tenant's salt"
        )
