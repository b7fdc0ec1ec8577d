"""A pool's memory registered with NIXL, and sets of its blocks that peers may read or write.

A block that peers may read is held, and its seal wiped, before it may be used for anything else. A block that they may
write is taken only when each head's writer has said that it is through and the bytes have the checksums it named.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from kvbm_core.block import ImmutableBlock, MutableBlock
from kvbm_core.config import KvbmConfig
from kvbm_core.errors import BlockStateError, LayoutError, RemoteMemoryError
from kvbm_core.identity import BlockIdentity
from kvbm_core.packed_heads import heads_in
from kvbm_core.remote_grant import Grant, GrantState
from kvbm_core.remote_seal import Seal, SealState, damaged_heads, head_checksums
from kvbm_core.remote_sets import BlockSet, GrantedBlock, MutableNixlBlockSet, NixlBlockSet, WrittenBlock
from kvbm_core.remote_wire import ExportedBlock, SerializedNixlBlockLayout, WrittenNote, decode_note
from kvbm_core.seal_table import SealTable
from kvbm_core.serialized_layout import BufferPlace
from kvbm_core.storage import region_of
from kvbm_core.tier_pool import TierPool
from storage_agent.nixl_memory import NixlMemory
from storage_agent.nixl_window import PROGRESS_INTERVAL_S

IDLE_INTERVAL_S = 0.005
"""Between looks at peers while nothing is offered: who comes late is only told so."""


class NixlRegistration:
    """One pool's memory that peers reach. Thread-safe; a thread of its own lets their transfers go on.

    Peers that are given `layout` can reach all of the pool: give it to workers of the same model alone.
    """

    def __init__(self, tier: TierPool, config: KvbmConfig, *, name: str, seals: int = 0) -> None:
        """`seals`: most blocks that are offered at once; 0: as many as there are blocks.

        Raises `TransferError` where NIXL or its UCX backend cannot be had, `TensorAllocationError`.
        """
        self._pool, self._storage = tier
        self.ignored_notes = 0
        """Messages that meant nothing: of blocks that are not offered, or of heads that are not awaited."""
        # Kept mapped: a peer that reads memory which is not there ends this process.
        self._mapped = [each.flat for each in self._storage.memory]
        self._seals = SealTable(seals or self._storage.layout.blocks, self._storage.layout.heads)
        regions = [region_of(each) for each in (*self._storage.memory, self._seals.memory)]
        self._nixl = NixlMemory(name, regions)
        self.layout = SerializedNixlBlockLayout(
            self._storage.serialized(config),
            regions[0].place,
            self._nixl.metadata,
            int.from_bytes(os.urandom(8), "little"),
            BufferPlace(self._seals.memory.address, self._seals.memory.size_bytes),
        )
        self.changed = threading.Condition(threading.RLock())  # guards everything below
        self._generation = 0
        self._sets: set[BlockSet] = set()
        self._granted: dict[int, GrantedBlock] = {}
        """By generation: blocks that peers may write into still."""
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=f"remote-{name}", daemon=True)
        self._thread.start()
        self._end_nixl = weakref.finalize(self, self._nixl.close)  # before the interpreter ends

    @property
    def doomed_blocks(self) -> int:
        """Blocks that will not be taken and are kept, since a peer may write into them until it says that it is done.

        Those of a peer that died are kept until `cut_off`.
        """
        with self.changed:
            return len(self._doomed())

    def block_set(self, blocks: Iterable[ImmutableBlock]) -> NixlBlockSet:
        """Offer blocks to be read. The set holds them until it is dropped; their guards stay the caller's.

        Reads them, for their checksums. Raises `LayoutError` where one is named twice, `RemoteSealsExhaustedError`,
        `RemoteMemoryError` when closed.
        """
        held = [self._pool.share(block) for block in blocks]
        try:
            identities = [block.identity for block in held]
            heads = self._storage.layout.heads
            checksums = [head_checksums(heads_in(self._storage, block.index, 0, heads)) for block in held]
            with self.changed:
                exported = self._offer(SealState.READABLE, [block.index for block in held], identities, checksums)
                offered = NixlBlockSet(self, exported, held)
                self._sets.add(offered)
        except BaseException:
            for block in held:
                block.release()
            raise
        return offered

    def mutable_block_set(
        self, blocks: Sequence[MutableBlock], identities: Sequence[BlockIdentity], *, deadline_s: float
    ) -> MutableNixlBlockSet:
        """Offer empty blocks to be written within `deadline_s`, each under its identity, each head by one peer.

        The set takes the blocks over from their guards, which end. Raises as `block_set`, and `BlockStateError` for a
        block that is not empty; the guards go on then.
        """
        page_tokens, heads = self._storage.layout.page_tokens, self._storage.layout.heads
        self._pool.check_empty(blocks)
        for identity in identities:
            if identity.block_tokens != page_tokens:
                raise LayoutError(f"an identity of {identity.block_tokens} tokens is not of blocks of {page_tokens}")
        with self.changed:
            places = [block.index for block in blocks]
            exported = self._offer(SealState.WRITABLE, places, identities, [(0,) * heads] * len(blocks))
            taken = self._pool.take_over(blocks)
            granted = [GrantedBlock(block, each, Grant(heads)) for block, each in zip(taken, exported, strict=True)]
            self._granted |= {each.exported.generation: each for each in granted}
            offered = MutableNixlBlockSet(self, exported, granted, deadline_s)
            self._sets.add(offered)
        return offered

    def cut_off(self) -> int:
        """End every peer's transfers and use doomed blocks again; how many. End those who were to write them first.

        Peers that live get an error, and go on once they import what the sets export from then on. Raises
        `TransferError` where NIXL does not start again.
        """
        with self.changed:
            if self._closed:
                return 0
            self._nixl.renew()
            self.layout = replace(self.layout, metadata=self._nixl.metadata)
            doomed = self._doomed()
            for granted in doomed:
                granted.grant.cut_off()
                self.conclude(granted)
        return len(doomed)

    def close(self) -> None:
        """Drop every set and end all transfers of peers. Close it before the storage. Idempotent."""
        with self.changed:
            for offered in list(self._sets):
                offered.drop()
            self._closed = True
        self._thread.join()
        self._end_nixl()
        with self.changed:
            for granted in self._granted.values():  # nobody can write any more
                granted.block.release()
            self._granted.clear()
        self._mapped.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def withdraw(self, offered: BlockSet, wiped: Sequence[ExportedBlock]) -> bool:
        """See `remote_sets.Owner`."""
        if offered not in self._sets:
            return False
        self._sets.remove(offered)
        for block in wiped:
            self._seals.wipe(block.seal)
        self._seals.give_back(block.seal for block in offered.blocks)
        return True

    def conclude(self, granted: GrantedBlock) -> None:
        """See `remote_sets.Owner`."""
        state = granted.grant.state
        if state is GrantState.OPEN:
            return
        if granted.outcome is None:
            identity = granted.exported.identity
            is_taken = state is GrantState.TAKEN
            taken = self._pool.complete_many([granted.block], [identity])[0] if is_taken else None
            granted.outcome = WrittenBlock(identity, taken, granted.grant.reason)
            if not granted.was_dropped:
                said = SealState.TAKEN if is_taken else SealState.REFUSED
                nothing = (0,) * granted.grant.heads
                seal = Seal(self.layout.mark, granted.exported.generation, said, nothing)
                self._seals.write(granted.exported.seal, seal)
        if state is not GrantState.DOOMED:
            del self._granted[granted.exported.generation]
        if state is GrantState.ENDED:
            granted.block.release()
        self.changed.notify_all()

    def _doomed(self) -> list[GrantedBlock]:
        return [granted for granted in self._granted.values() if granted.grant.state is GrantState.DOOMED]

    def _offer(
        self,
        state: SealState,
        places: Sequence[int],
        identities: Sequence[BlockIdentity],
        checksums: Sequence[tuple[int, ...]],
    ) -> tuple[ExportedBlock, ...]:
        """Seal blocks. Hold the lock."""
        if self._closed:
            raise RemoteMemoryError("the registration is closed: register the storage again")
        if not len(set(places)) == len({identity.key for identity in identities}) == len(identities):
            raise LayoutError(f"a set of {len(identities)} blocks has one twice: offer each block once")
        exported = []
        seals = self._seals.take(len(places))
        for seal, place, identity, each in zip(seals, places, identities, checksums, strict=True):
            self._generation += 1
            self._seals.write(seal, Seal(self.layout.mark, self._generation, state, each))
            exported.append(ExportedBlock(place, seal, self._generation, identity))
        return tuple(exported)

    def _serve(self) -> None:
        while True:
            with self.changed:
                if self._closed:
                    return
                busy = bool(self._sets)
                for told in self._nixl.notifications():
                    self._hear(told)
                now_s = time.monotonic()
                for offered in self._sets:
                    if isinstance(offered, MutableNixlBlockSet):
                        offered.expire(now_s)
            time.sleep(PROGRESS_INTERVAL_S if busy else IDLE_INTERVAL_S)

    def _hear(self, told: bytes) -> None:
        note = decode_note(told)
        if note is None or note.mark != self.layout.mark:
            self.ignored_notes += 1
            return
        first = note.first_head - self.layout.layout.first_head
        if isinstance(note, WrittenNote):
            for generation, checksums in note.blocks:
                self._settle(generation, first, len(checksums), checksums)
        else:
            for generation in note.generations:
                self._settle(generation, first, note.heads, None)

    def _settle(self, generation: int, first: int, count: int, checksums: Sequence[int] | None) -> None:
        """A writer is through with heads, counted from the pool's first. No `checksums`: it gave them up."""
        granted = self._granted.get(generation)
        try:
            if granted is None:
                raise BlockStateError(f"generation {generation} is not offered")
            granted.grant.check_awaited(first, count)
        except BlockStateError:
            self.ignored_notes += 1
            return
        if checksums is None:
            granted.grant.given_up(first, count)
        else:
            damaged = damaged_heads(heads_in(self._storage, granted.exported.block, first, count), checksums)
            granted.grant.written(first, count, f"heads {damaged} are not what its writer sent" if damaged else "")
        self.conclude(granted)
