"""Sets of a registered pool's blocks that peers may read or write, as their owner holds them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from kvbm_core.block import CompleteBlock, ImmutableBlock, MutableBlock
from kvbm_core.errors import RemoteBlockGoneError
from kvbm_core.identity import BlockIdentity
from kvbm_core.remote_grant import Grant, GrantState
from kvbm_core.remote_wire import ExportedBlock, SerializedBlockSet, SerializedNixlBlockLayout


class WrittenBlock(NamedTuple):
    """What became of a block that peers were to write: `block` is the caller's to register, or None for a `reason`."""

    identity: BlockIdentity
    block: CompleteBlock | None
    reason: str


@dataclass(slots=True, eq=False)
class GrantedBlock:
    """A block that peers may write. Changed under its registration's lock."""

    block: MutableBlock
    exported: ExportedBlock
    grant: Grant
    outcome: WrittenBlock | None = None
    was_dropped: bool = False
    """With its set; its seal is another block's by now."""


class Owner(Protocol):
    """What sets need of the registration that made them."""

    layout: SerializedNixlBlockLayout
    changed: threading.Condition

    def withdraw(self, offered: BlockSet, wiped: Sequence[ExportedBlock]) -> bool:
        """Forget a set and wipe these seals. False where that was done. Under the lock."""

    def conclude(self, granted: GrantedBlock) -> None:
        """Do what follows from what its grant has come to. Under the lock."""


class BlockSet:
    """Blocks that are offered to peers until the set is dropped. A context manager that drops it."""

    writable: bool

    def __init__(self, owner: Owner, blocks: tuple[ExportedBlock, ...]) -> None:
        self.blocks = blocks
        self._owner = owner
        self._dropped = False

    def export(self) -> bytes:
        """What peers import, carried to them by any means. Raises `RemoteBlockGoneError` once dropped."""
        if self._dropped:
            raise RemoteBlockGoneError(f"this set of {len(self.blocks)} blocks was dropped: offer them again")
        return SerializedBlockSet(self._owner.layout, self.writable, self.blocks).encode()

    def drop(self) -> None:
        """Take the blocks back everywhere. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.drop()


class NixlBlockSet(BlockSet):
    """Blocks that peers may read. After `drop` none of them reads these, nor takes what it is reading meanwhile."""

    writable = False

    def __init__(self, owner: Owner, blocks: tuple[ExportedBlock, ...], held: Sequence[ImmutableBlock]) -> None:
        super().__init__(owner, blocks)
        self._held = held

    def drop(self) -> None:
        self._dropped = True
        with self._owner.changed:
            self._owner.withdraw(self, self.blocks)
        for block in self._held:  # not before the seals are wiped: its memory may be used again at once
            block.release()


class MutableNixlBlockSet(BlockSet):
    """Blocks that peers are to write. After `drop` none is taken any more; their memory is kept while it is written."""

    writable = True

    def __init__(
        self, owner: Owner, blocks: tuple[ExportedBlock, ...], granted: Sequence[GrantedBlock], deadline_s: float
    ) -> None:
        super().__init__(owner, blocks)
        self._granted = granted
        self._deadline_s = deadline_s
        self._until_s = time.monotonic() + deadline_s
        self._was_collected = False

    def collect(self) -> list[WrittenBlock]:
        """What became of each block, in order; waits until that is known of all, at most until the set's deadline.

        Drop the set afterwards, when the writers have seen what became of it.
        """
        with self._owner.changed:
            self._was_collected = True
            self._owner.changed.wait_for(lambda: all(granted.outcome is not None for granted in self._granted))
            return [granted.outcome for granted in self._granted if granted.outcome is not None]

    def expire(self, now_s: float) -> None:
        """Give up what was not written in time. Under the registration's lock."""
        if now_s >= self._until_s:
            self._give_up(f"it was not written within {self._deadline_s} s")

    def drop(self) -> None:
        self._dropped = True
        with self._owner.changed:
            is_open = [granted.exported for granted in self._granted if granted.grant.state is GrantState.OPEN]
            if not self._owner.withdraw(self, is_open):
                return
            for granted in self._granted:
                granted.was_dropped = True
            self._give_up("its owner dropped it")
        for granted in self._granted:
            if not self._was_collected and granted.outcome is not None and granted.outcome.block is not None:
                granted.outcome.block.release()

    def _give_up(self, reason: str) -> None:
        for granted in self._granted:
            if granted.grant.state is GrantState.OPEN:
                granted.grant.fail(reason)
                self._owner.conclude(granted)
