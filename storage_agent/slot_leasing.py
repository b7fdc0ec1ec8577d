"""Puts by other processes into a volume of slots: they write the payload, the volume checks it and serves the block.

The header is written here, when every shard is durable, and nothing without a header is ever served or recovered; so a
block that was given up half-way leaves nothing behind but a free slot.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, runtime_checkable

from storage_agent.block_header import BlockHeader, PartChecksums, fold_checksums
from storage_agent.errors import BlockFormatError, LeaseError
from storage_agent.leases import Assembly, BlockFacts, LeaseTable, ShardState
from storage_agent.port import BlockKey, Outcome, PutBlock, Result
from storage_agent.slot_store import SlotWrite
from storage_agent.slot_table import Refusal, Reservation, SlotTable


@runtime_checkable
class LeasableStore(Protocol):
    """What a `SlotStore` offers besides where other processes can write into its slots."""

    @property
    def batch_slots(self) -> int:
        """See `SlotStore.batch_slots`."""

    def write_headers(self, writes: Sequence[SlotWrite]) -> None:
        """Write the header pages alone; the payloads are on the medium already. Raises as `SlotStore.write`."""

    def shard_is_locked(self, slot: int, shard: int) -> bool:
        """Whether a client may still write there."""

    def locked_shards(self) -> list[tuple[int, int]]:
        """(slot, shard) of all that clients may still write."""


class Grant(NamedTuple):
    """A lease on one shard: write it to part `shard` of `slot`."""

    lease: int
    slot: int
    shard: int


Refuse = Callable[[PutBlock, int], Outcome | None]
"""Why a block of so many bytes cannot be put, if so."""
Present = Callable[[PutBlock, int], Outcome]
"""Of a block that is there: whether with the shards, of so many bytes, that were to be put."""
Finish = Callable[[Sequence[SlotWrite]], dict[int, Outcome]]
"""Writes headers, checks what was written, announces and serves the blocks; frees the slots of those that failed."""


class SlotLeasing:
    """Leases on one volume's slots. Thread-safe."""

    def __init__(
        self,
        volume: str,
        table: SlotTable,
        table_lock: threading.Lock,
        store: LeasableStore,
        *,
        refuse: Refuse,
        present: Present,
        finish: Finish,
    ) -> None:
        """Slots that clients of an earlier agent may still write are held back until they are done."""
        self._volume = volume
        self._table = table
        self._table_lock = table_lock
        self._store = store
        self._refuse = refuse
        self._present = present
        self._finish = finish
        self._lock = threading.Lock()
        self._leases = LeaseTable(int.from_bytes(os.urandom(4), "little"))
        self._held_back: list[int] = []
        """Slots that may still be written under a lease that nobody here knows."""
        with table_lock:
            for slot, _ in store.locked_shards():
                if table.hold(slot):
                    self._held_back.append(slot)

    @property
    def open_count(self) -> int:
        """Blocks under assembly, and slots held back."""
        with self._lock:
            return len(self._leases) + len(self._held_back)

    def lease(self, blocks: Sequence[tuple[BlockFacts, int]]) -> list[Grant | Outcome]:
        """A lease for each (facts, shard).

        `partial` where that shard is durable already, `busy` where another client has it.
        """
        now_s = time.monotonic()
        with self._lock:
            return [self._lease(facts, shard, now_s) for facts, shard in blocks]

    def confirm(self, leases: Sequence[int]) -> list[bool]:
        """Clients that locked their places ask whether they may write now."""
        now_s = time.monotonic()
        with self._lock:
            return [self._leases.confirm(lease, now_s) for lease in leases]

    def commit(self, written: Sequence[tuple[int, int]]) -> list[Outcome]:
        """(lease, XXH3-64) of shards that are durable. `stored` for each whose block is served now, else `partial`.

        `failed`, with the reason, where the lease has run out or the bytes are not what the client says.
        """
        now_s = time.monotonic()
        outcomes: dict[int, Outcome] = {}
        of_block: dict[BlockKey, list[int]] = {}
        whole: list[Assembly] = []
        with self._lock:
            for number, (lease, checksum) in enumerate(written):
                try:
                    assembly = self._leases.commit(lease, checksum, now_s)
                except LeaseError as error:
                    outcomes[number] = self._outcome(BlockKey(0, 0, 0), Result.FAILED, reason=str(error))
                    continue
                outcomes[number] = self._partial(assembly)
                of_block.setdefault(assembly.facts.key, []).append(number)
                if assembly.is_whole:
                    self._leases.end(assembly)
                    whole.append(assembly)
        for assembly, outcome in zip(whole, self._publish(whole), strict=True):
            for number in of_block[assembly.facts.key]:
                outcomes[number] = outcome
        return [outcomes[number] for number in range(len(written))]

    def release(self, leases: Sequence[int]) -> None:
        """Clients give up; they let go of their locks first."""
        now_s = time.monotonic()
        with self._lock:
            for lease in leases:
                self._leases.release(lease, now_s)

    def reclaim(self) -> int:
        """Take back what dead clients had. Slots that are free again."""
        with self._lock:
            given_up = [a.slot for a in self._leases.reclaim(time.monotonic(), self._store.shard_is_locked)]
            if self._held_back:
                locked = {slot for slot, _ in self._store.locked_shards()}
                given_up += [slot for slot in self._held_back if slot not in locked]
                self._held_back = [slot for slot in self._held_back if slot in locked]
        self._free(given_up)
        return len(given_up)

    def close(self) -> None:
        """Give up every block of which nobody writes a shard now. What is left is held back by the next opener."""
        self.reclaim()
        with self._lock:
            idle = [assembly.slot for assembly in self._leases.abandon_idle()]
        self._free(idle)

    def _lease(self, facts: BlockFacts, shard: int, now_s: float) -> Grant | Outcome:
        assembly = self._leases.assembly(facts.key)
        if assembly is None:
            begun = self._begin(facts, shard, now_s)
            if isinstance(begun, Outcome):
                return begun
            assembly = begun
        elif assembly.facts != facts:
            reason = "another shard of it was put with other facts; put all with the same layout, sizes and parent"
            return self._outcome(facts.key, Result.FAILED, reason=reason)
        if not 0 <= shard < len(assembly.shards):
            reason = f"there is no shard {shard} of {len(assembly.shards)}; count from 0"
            return self._outcome(facts.key, Result.FAILED, reason=reason)
        state = assembly.shards[shard].state
        if state is ShardState.DURABLE:
            return self._partial(assembly)
        if state is not ShardState.MISSING:
            return self._outcome(facts.key, Result.BUSY, reason=f"another client writes shard {shard}; try later")
        return Grant(self._leases.grant(assembly, shard, now_s), assembly.slot, shard)

    def _begin(self, facts: BlockFacts, shard: int, now_s: float) -> Assembly | Outcome:
        block = PutBlock(facts.key, facts.namespace, memoryview(b""), span=facts.span, layout=facts.layout)
        refused = self._refuse(block, facts.payload_bytes)
        if refused is not None:
            return refused
        try:
            with self._table_lock:
                reserved = self._table.reserve(facts.key, facts.payload_bytes)
        except BlockFormatError as error:
            return self._outcome(facts.key, Result.FAILED, reason=str(error))
        if isinstance(reserved, Reservation):
            return self._leases.begin(facts, reserved, now_s)
        if reserved is Refusal.PRESENT:
            if facts.span is None:
                return self._present(block, facts.payload_bytes)
            return self._present(replace(block, span=replace(facts.span, first=shard)), facts.span.shard_bytes)
        if reserved is Refusal.FULL:
            return self._outcome(facts.key, Result.FULL, reason="all slots are taken; free some first")
        return self._outcome(facts.key, Result.BUSY, reason="another put or delete of it is under way; try later")

    def _publish(self, whole: Sequence[Assembly]) -> list[Outcome]:
        writes = [
            SlotWrite(number, _header(assembly), memoryview(b""), PartChecksums(assembly.checksums))
            for number, assembly in enumerate(whole)
        ]
        outcomes: dict[int, Outcome] = {}
        for start in range(0, len(writes), self._store.batch_slots):
            outcomes |= self._finish(writes[start : start + self._store.batch_slots])
        return [outcomes[number] for number in range(len(whole))]

    def _free(self, slots: Sequence[int]) -> None:
        with self._table_lock:
            for slot in slots:
                self._table.abandon(slot)

    def _partial(self, assembly: Assembly) -> Outcome:
        durable = sum(shard.state is ShardState.DURABLE for shard in assembly.shards)
        reason = f"{durable} of {len(assembly.shards)} shards are durable; the block is served when all are"
        return self._outcome(assembly.facts.key, Result.PARTIAL, reason=reason)

    def _outcome(self, key: BlockKey, result: Result, payload_bytes: int = 0, reason: str = "") -> Outcome:
        return Outcome(key, result, self._volume, payload_bytes, reason)


def _header(assembly: Assembly) -> BlockHeader:
    facts = assembly.facts
    return BlockHeader(
        slot=assembly.slot,
        key=facts.key,
        namespace=facts.namespace,
        parent_hash=facts.parent_hash,
        depth=facts.depth,
        block_tokens=facts.block_tokens,
        payload_bytes=facts.payload_bytes,
        payload_checksum=fold_checksums(assembly.checksums),
        generation=assembly.reserved.generation,
        span=facts.span,
        layout=facts.layout,
    )
