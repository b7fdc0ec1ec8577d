"""A block's life-cycle as a table, and the guards that hold a block while it is used.

A guard is released once: by `release`, at the end of its `with`, when a later guard takes the block over, or when
Python collects it, in any thread. An error leaves the block with the guard that had it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Protocol, Self

from kvbm_core.errors import BlockStateError
from kvbm_core.identity import BlockIdentity
from storage_agent.port import BlockKey


class BlockState(StrEnum):
    RESET = "Reset"
    PARTIAL = "Partial"
    COMPLETE = "Complete"
    REGISTERED = "Registered"


class Trigger(StrEnum):
    INIT_SEQUENCE = "init_sequence"
    FILL = "fill"
    COMMIT = "commit"
    REGISTER = "register"
    RESET = "reset"
    """The guard was dropped before registration: aborted, failed, or a duplicate that is not kept."""
    EVICT = "evict"
    """An inactive block's memory is wanted for another."""


TRANSITIONS: dict[BlockState, dict[Trigger, BlockState]] = {
    BlockState.RESET: {Trigger.INIT_SEQUENCE: BlockState.PARTIAL, Trigger.RESET: BlockState.RESET},
    BlockState.PARTIAL: {
        Trigger.FILL: BlockState.PARTIAL,
        Trigger.COMMIT: BlockState.COMPLETE,
        Trigger.RESET: BlockState.RESET,
    },
    BlockState.COMPLETE: {Trigger.REGISTER: BlockState.REGISTERED, Trigger.RESET: BlockState.RESET},
    BlockState.REGISTERED: {Trigger.EVICT: BlockState.RESET},
}


def next_state(state: BlockState, trigger: Trigger) -> BlockState:
    """Raises `BlockStateError` where the table has no such step."""
    try:
        return TRANSITIONS[state][trigger]
    except KeyError:
        allowed = ", ".join(TRANSITIONS[state])
        raise BlockStateError(f"a {state} block cannot take {trigger}: it allows {allowed}") from None


def diagram() -> str:
    """The table as a Mermaid state diagram, as docs/block-states.md shows it."""
    lines = ["stateDiagram-v2", f"    [*] --> {BlockState.RESET}"]
    for state, steps in TRANSITIONS.items():
        lines += [f"    {state} --> {target}: {trigger}" for trigger, target in steps.items()]
    return "\n".join(lines) + "\n"


@dataclass(slots=True, eq=False)
class Slot:
    """One block's memory in a pool, and what lies in it. Changed by its guard, or under the pool's lock."""

    index: int
    state: BlockState = BlockState.RESET
    filled_tokens: int = 0
    identity: BlockIdentity | None = None
    references: int = 0
    """Immutable guards that hold it; 0 while registered means inactive."""
    registered_order: int = 0

    def step(self, trigger: Trigger) -> None:
        self.state = next_state(self.state, trigger)


class Pool(Protocol):
    """What guards need of the pool that their block belongs to."""

    page_tokens: int

    def take_back(self, slot: Slot) -> None:
        """Give a block back now."""

    def take_back_later(self, slot: Slot) -> None:
        """Give a block back at the pool's next step; takes no lock, so that the garbage collector may call it."""

    def register(self, block: CompleteBlock, *, copied: bool = False) -> ImmutableBlock: ...
    def acquire(self, key: BlockKey) -> ImmutableBlock | None: ...
    def share(self, slot: Slot, identity: BlockIdentity) -> ImmutableBlock: ...


class _Guard:
    """Gives its block back exactly once. `weakref.finalize` decides which of several threads does it."""

    def __init__(self, pool: Pool, slot: Slot) -> None:
        self._pool = pool
        self._slot = slot
        self._finalizer = weakref.finalize(self, pool.take_back_later, slot)
        self._finalizer.atexit = False

    @property
    def index(self) -> int:
        """The block's place in its pool's tensor. Raises `BlockStateError` once released."""
        return self._held().index

    def release(self) -> None:
        """Give the block back. Idempotent."""
        if self._finalizer.detach() is not None:
            self._pool.take_back(self._slot)

    def belongs_to(self, pool: Pool) -> bool:
        return self._pool is pool

    def hand_over(self) -> Slot:
        """Stop guarding without giving the block back; for the pool and the next guard."""
        slot = self._held()
        if self._finalizer.detach() is None:
            raise BlockStateError(f"block {slot.index} was released by another thread meanwhile")
        return slot

    def _held(self) -> Slot:
        if not self._finalizer.alive:
            guard = type(self).__name__
            raise BlockStateError(f"{guard} of block {self._slot.index} was released: allocate or match again")
        return self._slot

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class MutableBlock(_Guard):
    """A block that is being written. Dropped, it is reset."""

    @property
    def state(self) -> BlockState:
        return self._held().state

    @property
    def filled_tokens(self) -> int:
        return self._held().filled_tokens

    def init_sequence(self) -> None:
        """Start a sequence in a reset block. Raises `BlockStateError` when it is in use already."""
        self._held().step(Trigger.INIT_SEQUENCE)

    def fill(self, tokens: int) -> None:
        """Count `tokens` more whose keys and values were written. Raises `BlockStateError` when they do not fit."""
        slot = self._held()
        state = next_state(slot.state, Trigger.FILL)
        free = self._pool.page_tokens - slot.filled_tokens
        if not 0 < tokens <= free:
            raise BlockStateError(f"block {slot.index} has room for {free} tokens, not {tokens}: fill the next block")
        slot.state = state
        slot.filled_tokens += tokens

    def commit(self, identity: BlockIdentity) -> CompleteBlock:
        """Take a full block to Complete under its identity; this guard ends. On `BlockStateError` it goes on."""
        slot = self._held()
        state = next_state(slot.state, Trigger.COMMIT)
        if slot.filled_tokens != self._pool.page_tokens:
            raise BlockStateError(
                f"block {slot.index} holds {slot.filled_tokens} of {self._pool.page_tokens} tokens: commit it when full"
            )
        self.hand_over()
        slot.state = state
        slot.identity = identity
        return CompleteBlock(self._pool, slot)


class CompleteBlock(_Guard):
    """A full block that nobody can find yet. Dropped, it is reset."""

    @property
    def identity(self) -> BlockIdentity:
        identity = self._held().identity
        assert identity is not None, "a complete block has an identity"
        return identity

    def register(self, *, copied: bool = False) -> ImmutableBlock:
        """Make it findable; this guard ends. `copied`: it is a copy of a block that another tier holds."""
        return self._pool.register(self, copied=copied)


class ImmutableBlock(_Guard):
    """A registered block that may be read. The last one dropped, the block stays findable but may be evicted."""

    @property
    def identity(self) -> BlockIdentity:
        identity = self._held().identity
        assert identity is not None, "a registered block has an identity"
        return identity

    def clone(self) -> ImmutableBlock:
        """A second guard of the same block."""
        return self._pool.share(self._held(), self.identity)

    def downgrade(self) -> WeakBlock:
        """A reference that does not prevent eviction; this guard goes on."""
        return WeakBlock(self._pool, self.identity.key)


class WeakBlock:
    """Remembers a block without holding it, so there is nothing to release."""

    def __init__(self, pool: Pool, key: BlockKey) -> None:
        self._pool = pool
        self.key = key

    def upgrade(self) -> ImmutableBlock | None:
        """The block, if its pool still has it."""
        return self._pool.acquire(self.key)
