"""Sets of other workers' blocks as they were imported, and guards of blocks in them.

A worker of one tensor-parallel size finds its heads of a block in the pools of several workers of another: the parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import TracebackType
from typing import NamedTuple, Self

from kvbm_core.errors import RemoteBlockGoneError
from kvbm_core.identity import BlockIdentity
from kvbm_core.packed_heads import PackedHeads
from kvbm_core.remote_wire import ExportedBlock, SerializedBlockSet
from storage_agent.port import BlockKey


class ImportedBlockSet:
    """What one worker offered. `drop` ends every guard of its blocks here; the owner is told nothing."""

    def __init__(self, offered: SerializedBlockSet) -> None:
        self.offered = offered
        self.layout = offered.layout
        self.writable = offered.writable
        self.blocks = {block.identity.key: block for block in offered.blocks}
        self.is_dropped = False
        self.spoken_for: set[int] = set()
        """Generations of blocks that a guard here writes, wrote or gave up: nobody else may."""
        self._packed_heads = cache(partial(PackedHeads, offered.layout.layout))

    def offers(self, key: BlockKey, *, writable: bool) -> bool:
        """Whether a guard of the block may be made, to write it or to read it."""
        block = self.blocks.get(key)
        if block is None or self.is_dropped or self.writable != writable:
            return False
        return block.generation not in self.spoken_for

    def part(self, key: BlockKey, first_head: int, heads: int) -> RemotePart:
        return RemotePart(self, self.blocks[key], self._packed_heads(first_head, heads))

    @property
    def keys(self) -> list[BlockKey]:
        return list(self.blocks)

    def drop(self) -> None:
        """Idempotent."""
        self.is_dropped = True


class RemotePart(NamedTuple):
    """Some heads of a block, in one worker's pool."""

    imported: ImportedBlockSet
    exported: ExportedBlock
    packed: PackedHeads


class RemoteBlock:
    """A block in the memory of others. What it guards is their promise: a read or write finds out if they broke it."""

    def __init__(self, identity: BlockIdentity, parts: Sequence[RemotePart]) -> None:
        self.identity = identity
        self._parts = parts
        self._released = False

    @property
    def key(self) -> BlockKey:
        return self.identity.key

    def parts(self) -> Sequence[RemotePart]:
        """Where its heads lie. Raises `RemoteBlockGoneError` when it was released, or its set dropped here."""
        block = f"block {self.key.sequence_hash:032x}"
        if self._released:
            raise RemoteBlockGoneError(f"{type(self).__name__} of {block} was released: get it again")
        if any(part.imported.is_dropped for part in self._parts):
            raise RemoteBlockGoneError(f"the imported set of {block} was dropped: import it again")
        return self._parts

    def release(self) -> None:
        """Idempotent."""
        self._released = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class RemoteImmutableBlock(RemoteBlock):
    """A block that others have offered to be read."""


class RemoteMutableBlock(RemoteBlock):
    """A block that this worker alone writes its heads of, once. Released unwritten, it is given up to its owner."""

    def __init__(
        self,
        identity: BlockIdentity,
        parts: Sequence[RemotePart],
        given_up: deque[RemotePart],
        tell_given_up: Callable[[], None],
    ) -> None:
        """`given_up` takes parts whose owners wait for a word; `tell_given_up` sends it."""
        super().__init__(identity, parts)
        self.unspoken = list(parts)
        """Parts whose owners were told nothing, and to which nothing was sent."""
        self._given_up = given_up
        self._tell_given_up = tell_given_up

    def give_up(self) -> None:
        """Have the owners of what was not sent told so, at the next word to anybody."""
        while self.unspoken:
            self._given_up.append(self.unspoken.pop())

    def release(self) -> None:
        """Tell the owners of what was not sent that nothing will be. Idempotent."""
        super().release()
        if self.unspoken:
            self.give_up()
            self._tell_given_up()

    def __del__(self) -> None:
        # Nothing is sent here: the collector runs in the middle of anything.
        self.give_up()
