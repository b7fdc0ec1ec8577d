"""Blocks in other workers' memory, over NIXL: register a pool, offer its blocks, read and write those of others.

    owner                                     another worker, of any tensor-parallel size
    registration = nixl_register(tier, config, name="worker-0")
    with registration.block_set(blocks) as offered:
        send(offered.export())                memory.import_(received)
                                              remote = memory.get_remote_blocks_immutable(keys)
                                              outcomes = memory.read(remote, targets)

Only whole, verified blocks are ever committed, on either side.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Self

from kvbm_core.block import BlockState, CompleteBlock, Guard, ImmutableBlock, MutableBlock
from kvbm_core.config import KvbmConfig
from kvbm_core.errors import (
    BlockStateError,
    LayoutError,
    RemoteBlockGoneError,
    RemoteMemoryError,
    RemotePeerError,
    RemoteWriteInDoubtError,
)
from kvbm_core.packed_heads import heads_in, put_heads_in
from kvbm_core.remote_blocks import (
    ImportedBlockSet,
    RemoteBlock,
    RemoteImmutableBlock,
    RemoteMutableBlock,
    RemotePart,
)
from kvbm_core.remote_moves import await_taken, batches, give_up, pull_parts, push_parts, room_bytes
from kvbm_core.remote_owner import NixlRegistration
from kvbm_core.remote_sets import MutableNixlBlockSet, NixlBlockSet, WrittenBlock
from kvbm_core.remote_wire import SerializedNixlBlockLayout, decode_block_set
from kvbm_core.serialized_layout import check_same_blocks, peers_for
from kvbm_core.tier_pool import TierPool
from storage_agent.nixl_window import NixlWindow
from storage_agent.port import BlockKey

__all__ = [
    "ImportedBlockSet",
    "MutableNixlBlockSet",
    "NixlBlockSet",
    "NixlRegistration",
    "RemoteImmutableBlock",
    "RemoteMemory",
    "RemoteMutableBlock",
    "SerializedNixlBlockLayout",
    "WrittenBlock",
    "nixl_register",
]

WINDOW_BYTES = 16 * 1024 * 1024


def nixl_register(tier: TierPool, config: KvbmConfig, *, name: str, seals: int = 0) -> NixlRegistration:
    """Make a pool's memory reachable for peers. See `NixlRegistration`, which must be closed before the storage is."""
    return NixlRegistration(tier, config, name=name, seals=seals)


class RemoteMemory:
    """What one worker knows of others' memory. Thread-safe; moves one batch at a time, through a window of its own."""

    def __init__(
        self,
        tier: TierPool,
        config: KvbmConfig,
        *,
        name: str,
        window_bytes: int = WINDOW_BYTES,
        deadline_s: float = 10.0,
    ) -> None:
        """Reads go into blocks of `tier`, writes come from them. `deadline_s`: of each batch, and of an owner's answer.

        Raises `LayoutError` for a window that does not hold a block, `TransferError` where NIXL's UCX cannot be had.
        """
        self._pool, self._storage = tier
        self._ours = self._storage.serialized(config)
        least_bytes = room_bytes(config.heads, self._storage.layout.block_bytes)
        if window_bytes < least_bytes:
            raise LayoutError(f"window_bytes = {window_bytes} does not hold a block: set at least {least_bytes}")
        self._deadline_s = deadline_s
        self._window = NixlWindow(name, window_bytes, deadline_s=deadline_s)
        self._lock = threading.Lock()
        self._imported: list[ImportedBlockSet] = []
        """The latest first."""
        self._given_up: deque[RemotePart] = deque()
        """Parts whose owners are to be told that nothing will be written into them."""

    def import_(self, exported: bytes) -> ImportedBlockSet:
        """Take what another worker's block set exported; of the same again, the set that there is.

        Raises `LayoutFormatError` for bytes that are none, `LayoutError` where its blocks are not of our model.
        """
        offered = decode_block_set(exported)
        check_same_blocks(offered.layout.layout, self._ours)
        with self._lock:
            self._imported = [each for each in self._imported if not each.is_dropped]
            known = next((each for each in self._imported if each.offered == offered), None)
            if known is None:
                known = ImportedBlockSet(offered)
                self._imported.insert(0, known)
        return known

    def get_remote_blocks_immutable(self, keys: Sequence[BlockKey]) -> list[RemoteImmutableBlock]:
        """Guards of the leading keys all of whose heads that we hold are offered, up to the first that is not."""
        found = []
        for key in keys:
            parts = self._parts_to_read(key)
            if not parts:
                break
            found.append(RemoteImmutableBlock(parts[0].exported.identity, parts))
        return found

    def get_remote_blocks_mutable(self, keys: Sequence[BlockKey]) -> list[RemoteMutableBlock]:
        """Guards of blocks that owners offered to be written, to write our heads of each; all or none.

        With more workers than heads several hold the same: only those with `KvbmConfig.holds_first_copy` write them.
        Raises `RemoteBlockGoneError` for one that is not offered, or that we have written or given up, `LayoutError`
        for one named twice.
        """
        if len(set(keys)) != len(keys):
            raise LayoutError(f"{len(keys)} blocks are to be written, and one of them twice: name each once")
        with self._lock:
            parts_of = [self._parts_to_write(key) for key in keys]
            for parts in parts_of:
                for part in parts:
                    part.imported.spoken_for.add(part.exported.generation)
        return [
            RemoteMutableBlock(parts[0].exported.identity, parts, self._given_up, self._tell_given_up)
            for parts in parts_of
        ]

    def read(
        self, blocks: Sequence[RemoteImmutableBlock], targets: Sequence[MutableBlock]
    ) -> list[CompleteBlock | RemoteMemoryError]:
        """Read our heads of each block into an empty block of the tier, and commit it once all are verified.

        In order: the complete block, the target's guard having ended; or why not, and the guard goes on, its block's
        memory in no known state. Raises `RemoteBlockGoneError` for a released guard, `BlockStateError` for a target
        that is not empty; nothing was read then.
        """
        jobs = self._jobs(blocks, targets)
        for target in targets:
            if target.state is not BlockState.RESET:
                raise BlockStateError(f"block {target.index} is {target.state}: read into empty blocks")
        failed: dict[int, RemoteMemoryError] = {}
        gone: dict[bytes, RemotePeerError] = {}
        """By owner: who did not answer is not waited for again."""
        for batch in self._batches(jobs):
            owner = batch[0].part.imported.layout.metadata
            moved = pull_parts(self._window, [job.part for job in batch], gone.get(owner))
            for job, heads in zip(batch, moved, strict=True):
                if isinstance(heads, RemoteMemoryError):
                    failed.setdefault(job.number, heads)
                    if isinstance(heads, RemotePeerError):
                        gone[owner] = heads
                else:
                    first = job.part.packed.first_head - self._ours.first_head
                    put_heads_in(self._storage, targets[job.number].index, first, heads)
        sound = [number for number in range(len(blocks)) if number not in failed]
        completed = self._pool.complete_many([targets[n] for n in sound], [blocks[n].identity for n in sound])
        outcomes: dict[int, CompleteBlock | RemoteMemoryError] = {**failed, **dict(zip(sound, completed, strict=True))}
        return [outcomes[number] for number in range(len(blocks))]

    def write(
        self, blocks: Sequence[RemoteMutableBlock], sources: Sequence[ImmutableBlock | CompleteBlock]
    ) -> list[RemoteMemoryError | None]:
        """Write our heads of each source, a block of the tier, into a remote block; None where its owners took it.

        Waits until the owners have judged, also of what other writers owe them, at most `deadline_s`. A block is
        written once, whatever comes of it. Raises `RemoteBlockGoneError` for a guard that was released or written.
        """
        jobs = self._jobs(blocks, sources)
        for block in blocks:
            if not block.unspoken:
                raise RemoteBlockGoneError(f"block {block.key.sequence_hash:032x} was written: a guard writes once")
        failed: dict[int, RemoteMemoryError] = {}
        sent = []
        for batch in self._batches(jobs):
            for job, error in zip(batch, self._push(batch, sources), strict=True):
                if error is None:
                    sent.append(job)
                else:
                    failed.setdefault(job.number, error)
                if error is None or isinstance(error, RemoteWriteInDoubtError):
                    blocks[job.number].unspoken.remove(job.part)
        for block in blocks:
            block.give_up()
        self._tell_given_up()
        for batch in self._batches(sent):
            judged = await_taken(self._window, [job.part for job in batch], self._deadline_s)
            for job, error in zip(batch, judged, strict=True):
                if error is not None:
                    failed.setdefault(job.number, error)
        return [failed.get(number) for number in range(len(blocks))]

    def close(self) -> None:
        """Tell owners what will not be written, and let go of everything. Idempotent."""
        self._tell_given_up()
        with self._lock:
            for imported in self._imported:
                imported.drop()
        self._window.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _parts_to_read(self, key: BlockKey) -> list[RemotePart]:
        """The fewest and latest that hold our heads of a block; none where a head is offered by nobody."""
        with self._lock:
            offering = [each for each in self._imported if each.offers(key, writable=False)]
        try:
            chosen = peers_for(self._ours, [each.layout.layout for each in offering])
        except LayoutError:
            return []
        parts = []
        head, end = self._ours.first_head, self._ours.first_head + self._ours.heads
        for imported in (offering[number] for number in chosen):
            theirs = imported.layout.layout
            until = min(end, theirs.first_head + theirs.heads)
            parts.append(imported.part(key, head, until - head))
            head = until
        return parts

    def _parts_to_write(self, key: BlockKey) -> list[RemotePart]:
        """Our heads in every pool that waits for them. Hold the lock. Raises `RemoteBlockGoneError` for none."""
        parts = []
        for imported in self._imported:
            theirs = imported.layout.layout
            head = max(self._ours.first_head, theirs.first_head)
            end = min(self._ours.first_head + self._ours.heads, theirs.first_head + theirs.heads)
            if head < end and imported.offers(key, writable=True):
                parts.append(imported.part(key, head, end - head))
        if not parts:
            raise RemoteBlockGoneError(
                f"block {key.sequence_hash:032x} is not offered to be written, or was written or given up here: import "
                "a set that has it"
            )
        return parts

    def _jobs(self, blocks: Sequence[RemoteBlock], ours: Sequence[Guard]) -> list[_Job]:
        """Raises `RemoteBlockGoneError` for a released guard, `BlockStateError` for another pool's, `LayoutError`."""
        if len(ours) != len(blocks):
            raise LayoutError(f"{len(blocks)} remote blocks and {len(ours)} of ours: give one for each")
        for guard in ours:
            guard.check_pool(self._pool)
        return [_Job(number, part) for number, block in enumerate(blocks) for part in block.parts()]

    def _push(
        self, batch: Sequence[_Job], sources: Sequence[ImmutableBlock | CompleteBlock]
    ) -> Sequence[RemoteMemoryError | None]:
        heads = []
        for number, part in batch:
            first = part.packed.first_head - self._ours.first_head
            heads.append(heads_in(self._storage, sources[number].index, first, part.packed.heads))
        try:
            return push_parts(self._window, [job.part for job in batch], heads)
        except RemotePeerError as error:
            return [error] * len(batch)

    def _tell_given_up(self) -> None:
        parts = []
        while self._given_up:
            parts.append(self._given_up.popleft())
        for batch in self._batches([_Job(0, part) for part in parts]):
            give_up(self._window, [job.part for job in batch])

    def _batches(self, jobs: Sequence[_Job]) -> list[list[_Job]]:
        numbers = batches([job.part for job in jobs], self._window.window_bytes)
        return [[jobs[number] for number in batch] for batch in numbers]


class _Job(NamedTuple):
    """A part of block `number` of a call."""

    number: int
    part: RemotePart
