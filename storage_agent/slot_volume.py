"""A volume of slots on any store: blocks go in and out in batches, each checked against its own header."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import msgspec

from storage_agent.block_header import PAGE_BYTES, BlockHeader, page_ceiling
from storage_agent.corruption_log import CorruptionLog
from storage_agent.descriptor import CAPACITY_BLOCKS_MAX, VolumeDescriptor
from storage_agent.errors import BlockFormatError, CorruptBlock, ShardError, TransferError, VolumeError
from storage_agent.port import BlockKey, CompactReport, Outcome, PutBlock, Result, ScrubReport, VolumeStat
from storage_agent.shards import Shard, Slice, check_layout, check_span, gather, lacking
from storage_agent.sliced_read import plan_read, whole_read
from storage_agent.slot_direct import DirectStore, SlotDirect
from storage_agent.slot_layout import SlotLayout
from storage_agent.slot_leasing import LeasableStore, SlotLeasing
from storage_agent.slot_moving import settle_into_classes, shrink
from storage_agent.slot_rows import SlotRows
from storage_agent.slot_store import SlotRead, SlotStore, SlotWrite, each_alone_if_one_fails, read_each
from storage_agent.slot_table import Refusal, SlotTable
from storage_agent.transfers import Transfers
from storage_agent.volume import Accept, Announce, ReadResult

WriteFault = TransferError | BlockFormatError | CorruptBlock
WriteAll = Callable[[Sequence[SlotWrite]], None]
PayloadOf = Callable[[PutBlock], memoryview]
"""The bytes that go through the host's memory, of format `B`; called before a slot is taken."""


class SlotVolume:
    """Implements `volume.Volume` on a `SlotStore`, which it owns.

    Thread-safe: a short lock around the table, the store's own around its medium.
    """

    def __init__(
        self,
        descriptor: VolumeDescriptor,
        store: SlotStore,
        *,
        on_stored: Announce,
        on_freed: Announce,
        ordering: AbstractContextManager[object] = nullcontext(),  # noqa: B008 - it holds nothing
    ) -> None:
        """Find the store's blocks; make its capacity that of `descriptor`. For the rest see `kinds.Opening`.

        Announces nothing itself: `live_headers` are the blocks found. Raises `VolumeError`, with `store` closed.
        """
        self.descriptor = descriptor
        self._store = store
        self._on_stored = on_stored
        self._on_freed = on_freed
        self._ordering = ordering
        self._table_lock = threading.Lock()
        self._unpinned = threading.Condition(self._table_lock)
        self._resizing = threading.Lock()
        self._degraded = ""
        self._corrupt_total = 0
        self._corruption = CorruptionLog(descriptor.id)
        self._reads, self._writes = Transfers(), Transfers()
        self._closed = False
        try:
            recovered = store.recover()
            self._payload_bytes = recovered.rows.payload_bytes()
            self._table = SlotTable(*recovered)
            self.leasing = self._lease_slots()
            """Puts by other processes; None where the medium is out of their reach."""
            self.direct = self._go_direct()
            """Puts and gets of spans; None where they go through the host's memory always."""
            self._layout = SlotLayout(
                self._table,
                self._unpinned,
                store,
                slot_bytes=PAGE_BYTES + page_ceiling(descriptor.block_bytes_max),
                read_all=self._read_headers,
                verify=self._slots_that_differ,
            )
            if self._table.capacity != descriptor.capacity_blocks:
                self.resize(descriptor.capacity_blocks)
        except OSError as error:
            store.close(in_order=False, generation_next=0)
            raise VolumeError(f"volume {descriptor.id!r} cannot be recovered: {error.strerror}") from error
        except TransferError as error:
            store.close(in_order=False, generation_next=0)
            raise VolumeError(f"volume {descriptor.id!r} cannot be used: {error}") from error
        except VolumeError:
            store.close(in_order=False, generation_next=0)
            raise

    def _lease_slots(self) -> SlotLeasing | None:
        store = self._store
        if not isinstance(store, LeasableStore):
            return None
        return SlotLeasing(
            self.descriptor.id,
            self._table,
            self._table_lock,
            store,
            refuse=self._refuse_put,
            present=self._present,
            finish=lambda writes: self._write_and_serve(writes, store.write_headers, read_back=True),
        )

    def _go_direct(self) -> SlotDirect | None:
        store = self._store
        if not isinstance(store, DirectStore):
            return None

        def put_batch(blocks: Sequence[PutBlock], write_all: WriteAll) -> list[Outcome]:
            outcomes = self._put_batch(blocks, write_all, _nothing_in_host, read_back=False)
            self._keep_up_if_due()
            return outcomes

        return SlotDirect(
            self.descriptor.id,
            self._table,
            self._unpinned,
            store,
            put_batch=put_batch,
            free_corrupt=self._free_corrupt,
            degrade=self._degrade,
            count_read=self._count_read,
        )

    def live_headers(self) -> list[BlockHeader]:
        """See `Volume.live_headers`."""
        with self._table_lock:
            return list(self._table.live_headers())

    @property
    def batch_slots(self) -> int:
        """See `Volume.batch_slots`."""
        return self._store.batch_slots

    def live_header(self, key: BlockKey) -> BlockHeader | None:
        """See `Volume.live_header`."""
        with self._table_lock:
            return self._table.live(key)

    @property
    def retired_total(self) -> int:
        """See `Volume.retired_total`."""
        with self._table_lock:
            return self._table.retired_total

    def stat(self) -> VolumeStat:
        """See `Volume.stat`."""
        fragmentation = self._layout.fragmentation()
        with self._table_lock:
            return VolumeStat(
                descriptor=self.descriptor,
                blocks=self._table.live_count,
                payload_bytes=self._payload_bytes,
                slots_free=self._table.free_count,
                mode=self._store.mode,
                read_bytes_total=self._reads.payload_bytes,
                read_seconds_total=self._reads.seconds,
                write_bytes_total=self._writes.payload_bytes,
                write_seconds_total=self._writes.seconds,
                degraded=self._degraded,
                corrupt_total=self._corrupt_total,
                classes=self._table.class_stats(),
                fragmentation=fragmentation,
                read_times=list(self._reads.times),
                write_times=list(self._writes.times),
            )

    def put(self, blocks: Sequence[PutBlock], *, read_back: bool = False) -> list[Outcome]:
        """See `Volume.put`."""
        outcomes: list[Outcome] = []
        for start in range(0, len(blocks), self.batch_slots):
            batch = blocks[start : start + self.batch_slots]
            outcomes += self._put_batch(batch, self._store.write, _bytes_in_host, read_back)
            self._keep_up_if_due()
        return outcomes

    def read(self, keys: Sequence[BlockKey], accept: Accept, wanted: Shard | None = None) -> list[ReadResult]:
        """See `Volume.read`."""
        results: list[ReadResult] = []
        for start in range(0, len(keys), self.batch_slots):
            results += self._read_batch(keys[start : start + self.batch_slots], start, accept, wanted)
        return results

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """See `Volume.delete`."""
        outcomes: list[Outcome] = []
        for start in range(0, len(keys), self.batch_slots):
            outcomes += self._delete_batch(keys[start : start + self.batch_slots])
            self._keep_up_if_due()
        return outcomes

    def scrub(self) -> ScrubReport:
        """See `Volume.scrub`."""
        keys = [header.key for header in self.live_headers()]
        results = self.read(keys, lambda number, header, payload: "")
        counts = dict.fromkeys((Result.HIT, Result.CORRUPT, Result.FAILED), 0)
        payload_bytes = 0
        for read in results:
            if read.outcome.result in counts:  # a miss was deleted meanwhile
                counts[read.outcome.result] += 1
                payload_bytes += read.outcome.payload_bytes
        return ScrubReport(counts[Result.HIT], counts[Result.CORRUPT], counts[Result.FAILED], payload_bytes)

    def compact(self) -> int:
        """See `Volume.compact`."""
        try:
            with self._resizing:
                settled_bytes = 0
                if self._table.classes:
                    settled_bytes = settle_into_classes(self._table, self._unpinned, self._store, self._read_headers)
                freed_bytes = settled_bytes + self._store.compact()
                self._layout.fragmentation(fresh=True)
                return freed_bytes
        except TransferError as error:
            raise self._cannot_be_compacted(error) from error

    def lay_out(self, keys: Sequence[BlockKey]) -> CompactReport:
        """See `Volume.lay_out`."""
        try:
            with self._resizing:
                return self._layout.lay_out(keys)
        except TransferError as error:
            raise self._cannot_be_compacted(error) from error

    def _cannot_be_compacted(self, error: TransferError) -> VolumeError:
        self._degrade(str(error))
        return VolumeError(f"volume {self.descriptor.id!r} cannot be compacted: {error}")

    def resize(self, capacity_blocks: int) -> VolumeStat:
        """See `Volume.resize`. To shrink, blocks in slots that go are copied into slots that stay."""
        if not 1 <= capacity_blocks <= CAPACITY_BLOCKS_MAX:
            raise VolumeError(
                f"volume {self.descriptor.id!r}: capacity_blocks is {capacity_blocks}; set it between 1 and "
                f"{CAPACITY_BLOCKS_MAX}"
            )
        if self._table.classes and capacity_blocks != self._table.capacity:
            raise VolumeError(
                f"volume {self.descriptor.id!r} keeps its {self._table.capacity} slots, which are of several classes; "
                "make another volume of the wanted classes and move the blocks there"
            )
        with self._resizing:
            capacity_now = self._table.capacity
            if capacity_blocks > capacity_now:
                self._store.resize(capacity_blocks)
                with self._table_lock:
                    self._table.grow(capacity_blocks)
            elif capacity_blocks < capacity_now:
                shrink(
                    self.descriptor.id, capacity_blocks, self._table, self._unpinned, self._store, self._read_headers
                )
            with self._table_lock:
                self.descriptor = msgspec.structs.replace(self.descriptor, capacity_blocks=capacity_blocks)
        return self.stat()

    def close(self) -> None:
        """See `Volume.close`."""
        if self._closed:
            return
        self._closed = True
        self._corruption.close()
        if self.leasing is not None:
            self.leasing.close()
        with self._table_lock:
            settled, generation_next = self._table.is_settled, self._table.generation_next
        in_order = settled and not self._degraded
        try:
            self._store.upkeep(self._copy_table)
        except (OSError, TransferError):
            pass  # then the next opener has more to look at
        finally:
            self._store.close(in_order=in_order, generation_next=generation_next)

    def _copy_table(self) -> tuple[SlotRows, list[int]]:
        with self._table_lock:
            return self._table.settled_rows()

    def _read_headers(self, headers: Sequence[BlockHeader]) -> list[tuple[BlockHeader, bytes]]:
        blocks: list[tuple[BlockHeader, bytes]] = []

        def keep(number: int, header: BlockHeader, payload: memoryview) -> str:
            blocks.append((header, bytes(payload)))
            return ""

        self.read([header.key for header in headers], keep)
        return blocks

    def _keep_up_if_due(self) -> None:
        if not self._store.upkeep_due:
            return
        try:
            self._store.upkeep(self._copy_table)
        except (OSError, TransferError) as error:
            self._degrade(f"the medium cannot be kept in order: {error}")

    # Put

    def _put_batch(
        self, blocks: Sequence[PutBlock], write_all: WriteAll, payload_of: PayloadOf, read_back: bool
    ) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        writes: list[SlotWrite] = []
        try:
            for index, block in enumerate(blocks):
                refused = self._refuse_put(block, block.payload.nbytes)
                if refused is None:
                    write = self._reserve(index, block, payload_of(block))
                    if isinstance(write, SlotWrite):
                        writes.append(write)
                        continue
                    refused = write
                outcomes[index] = refused
        except BaseException:  # a payload that was released, an interrupt: nothing was written
            with self._table_lock:
                for write in writes:
                    self._table.abandon(write.header.slot)
            raise
        outcomes |= self._write_and_serve(writes, write_all, read_back)
        return [outcomes[index] for index in range(len(blocks))]

    def _write_and_serve(self, writes: Sequence[SlotWrite], write_all: WriteAll, read_back: bool) -> dict[int, Outcome]:
        """Write slots, announce and serve what is durable. Outcomes by number in the batch."""
        try:
            failures = self._write_durably(writes, write_all, read_back)
        except BaseException as error:  # opened anew, the volume has these slots again
            self._degrade(f"a put was cut short by {error!r}")
            raise
        outcomes = dict(failures)
        headers: list[BlockHeader] = []
        volume = self.descriptor.id
        for write in writes:
            if write.number not in failures:
                header = write.header
                headers.append(header)
                outcomes[write.number] = Outcome(header.key, Result.STORED, volume, header.payload_bytes)
        with self._ordering:
            self._announce_stored(headers)
        return outcomes

    def _announce_stored(self, headers: list[BlockHeader]) -> None:
        try:
            if headers:
                self._on_stored(headers)
        finally:
            with self._table_lock:
                publish = self._table.publish
                for header in headers:
                    publish(header)
                    self._payload_bytes += header.payload_bytes

    def _refuse_put(self, block: PutBlock, size: int) -> Outcome | None:
        limit = self.descriptor.block_bytes_max
        if size > limit:
            reason = f"the block has {size} bytes, {self.descriptor.id!r} takes {limit}"
            return self._outcome(block.key, Result.TOO_LARGE, reason=reason)
        reason = ""
        if size == 0:
            reason = "the block is empty"
        elif not block.payload.c_contiguous:
            reason = "the payload is not contiguous; copy it first"
        elif block.namespace.namespace_id != block.key.namespace_id:
            reason = f"the key's namespace is not that of {block.namespace.tenant!r}"
        else:
            try:
                if block.layout is not None:
                    check_layout(block.layout)
                if block.span is not None:
                    check_span(block.span, size, block.layout)
            except ShardError as error:
                reason = str(error)
        return self._outcome(block.key, Result.FAILED, reason=reason) if reason else None

    def _reserve(self, index: int, block: PutBlock, payload: memoryview) -> SlotWrite | Outcome:
        payload_bytes = block.payload.nbytes
        try:
            with self._table_lock:
                reserved = self._table.reserve(block.key, payload_bytes)
        except BlockFormatError as error:
            return self._outcome(block.key, Result.FAILED, reason=str(error))
        if reserved is Refusal.PRESENT:
            return self._present(block, block.payload.nbytes)
        if reserved is Refusal.FULL:
            which = f"slots for {payload_bytes} bytes" if self._table.classes else f"{self._table.capacity} slots"
            reason = f"all {which} are taken; free some first"
            return self._outcome(block.key, Result.FULL, reason=reason)
        if isinstance(reserved, Refusal):
            return self._outcome(block.key, Result.BUSY, reason="another put or delete of it is under way; try later")
        header = BlockHeader(
            reserved.slot,
            block.key,
            block.namespace,
            block.parent_hash,
            block.depth,
            block.block_tokens,
            payload_bytes,
            0,  # the write reckons its checksum
            reserved.generation,
            block.span,
            block.layout,
        )
        return SlotWrite(index, header, payload)

    def _present(self, block: PutBlock, payload_bytes: int) -> Outcome:
        """Of a block that is there: whether with the shards, of so many bytes, that were to be put."""
        with self._table_lock:
            held = self._table.live(block.key)
        if held is not None:
            reason = lacking(held.span, held.payload_bytes, block.span, payload_bytes)
            if reason:
                return self._outcome(block.key, Result.FAILED, reason=reason)
        return self._outcome(block.key, Result.PRESENT, payload_bytes)

    def _write_durably(self, writes: Sequence[SlotWrite], write_all: WriteAll, read_back: bool) -> dict[int, Outcome]:
        """Write the slots, sync once. The outcomes of those that failed; their slots are free again or held back."""
        if not writes:
            return {}
        started = time.monotonic()
        failed: dict[int, Outcome] = {}
        for write, error in each_alone_if_one_fails(writes, write_all):
            failed[write.number] = self._undo_put(write, error)
        written = [write for write in writes if write.number not in failed]
        good = written
        try:
            if written:
                self._store.sync()
        except TransferError as error:
            good = []
            for write in written:
                failed[write.number] = self._undo_put(write, error)
        if read_back and good:
            self._store.forget_cached([write.header for write in good])
            for write, reason in self._verify_written(good):
                failed[write.number] = self._undo_put(write, reason)
        with self._table_lock:
            payload_bytes = sum([w.payload_bytes for w in good if w.number not in failed])
            self._writes.add(payload_bytes, time.monotonic() - started)
        return failed

    def _verify_written(self, writes: list[SlotWrite]) -> list[tuple[SlotWrite, WriteFault]]:
        faults: dict[int, CorruptBlock | None] = {}

        def note(number: int, error: CorruptBlock | None, payload: memoryview) -> None:
            faults[number] = error

        reads = [whole_read(write.header) for write in writes]
        unread = read_each(self._store, reads, note, faults)
        return [(writes[number], error) for number, error in [*faults.items(), *unread] if error is not None]

    def _slots_that_differ(self, writes: Sequence[SlotWrite]) -> set[int]:
        self._store.forget_cached([write.header for write in writes])
        return {write.slot for write, _ in self._verify_written(list(writes))}

    def _undo_put(self, write: SlotWrite, error: WriteFault) -> Outcome:
        """Free the slot of a failed put; where even that fails, hold it back until the volume is opened anew."""
        slot, reason = write.header.slot, str(error)
        if isinstance(error, BlockFormatError):  # nothing was written
            with self._table_lock:
                self._table.abandon(slot)
            return self._outcome(write.header.key, Result.FAILED, reason=reason)
        self._degrade(reason)
        if not (isinstance(error, TransferError) and error.in_doubt):
            try:
                self._store.erase([write.header])
                with self._table_lock:
                    self._table.abandon(slot)
            except TransferError as second:
                reason = f"{reason}; slot {slot} is held back until the volume is opened again: {second}"
        return self._outcome(write.header.key, Result.FAILED, reason=reason)

    # Read

    def _read_batch(
        self, keys: Sequence[BlockKey], first_index: int, accept: Accept, wanted: Shard | None
    ) -> list[ReadResult]:
        started = time.monotonic()
        with self._table_lock:
            pinned = self._table.pin(keys)
        answers: dict[int, ReadResult] = {}
        places: list[int] = []
        reads: list[SlotRead] = []
        cuts: dict[int, list[Slice]] = {}
        results: dict[int, ReadResult] = {}
        corrupt: list[tuple[BlockHeader, str]] = []
        volume = self.descriptor.id

        def take(number: int, error: CorruptBlock | None, stored: memoryview) -> None:
            header = reads[number].header
            if error is not None:
                reason = f"{type(error).__name__}: {error}"
                corrupt.append((header, reason))
                outcome = self._outcome(header.key, Result.CORRUPT, reason=reason)
                results[number] = ReadResult(outcome)
                return
            if number in cuts:
                stored = gather(cuts[number], stored, cuts[number][0].shard)
            refused = accept(first_index + places[number], header, stored)
            result = Result.FAILED if refused else Result.HIT
            outcome = Outcome(header.key, result, volume, stored.nbytes, refused)
            results[number] = ReadResult(outcome, header)

        try:
            for index, header in pinned:
                if wanted is None:
                    places.append(index)
                    reads.append(whole_read(header))
                    continue
                try:
                    asked, parts = plan_read(header, wanted)
                except ShardError as error:
                    answers[index] = ReadResult(self._outcome(header.key, Result.FAILED, reason=str(error)))
                    continue
                if parts:
                    cuts[len(reads)] = parts
                places.append(index)
                reads.append(asked)
            for number, fault in read_each(self._store, reads, take, results):
                self._degrade(str(fault))
                results[number] = ReadResult(
                    self._outcome(reads[number].header.key, Result.FAILED, reason=str(fault))
                )
        finally:
            with self._unpinned:
                self._table.unpin([header.slot for _, header in pinned])
                self._unpinned.notify_all()
        self._free_corrupt(corrupt)
        self._count_read(
            sum([r.outcome.payload_bytes for r in results.values() if r.header is not None]), time.monotonic() - started
        )
        for number, result in results.items():
            answers[places[number]] = result
        missing = f"{volume!r} does not hold it"
        return [
            answers.get(number) or ReadResult(self._outcome(key, Result.MISS, reason=missing))
            for number, key in enumerate(keys)
        ]

    def _count_read(self, payload_bytes: int, seconds: float) -> None:
        with self._table_lock:
            self._reads.add(payload_bytes, seconds)

    def _free_corrupt(self, found: Sequence[tuple[BlockHeader, str]]) -> None:
        """`found`: each with what is wrong with it."""
        if not found:
            return
        for header, reason in found:
            self._corruption.found(header.key, reason)
        with self._table_lock:
            self._corrupt_total += len(found)
            # Another reader may have found the same, or the slot may hold a newer block by now.
            ours = []
            for header, _ in found:
                if self._table.live(header.key) == header:
                    self._table.retire(header.key)
                    ours.append(header)
        self._free_retired(ours)

    # Delete

    def _delete_batch(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        retired: dict[int, BlockHeader] = {}
        with self._table_lock:
            for index, key in enumerate(keys):
                header = self._table.retire(key)
                if isinstance(header, BlockHeader):
                    retired[index] = header
                elif header is None:
                    outcomes[index] = self._outcome(key, Result.MISS, reason=f"{self.descriptor.id!r} does not hold it")
                else:
                    reason = "another put or delete of it is under way; try later"
                    outcomes[index] = self._outcome(key, Result.BUSY, reason=reason)
        failures = self._free_retired(list(retired.values()))
        for index, header in retired.items():
            failed = failures.get(header.slot)
            outcomes[index] = failed or self._outcome(header.key, Result.DELETED, header.payload_bytes)
        return [outcomes[index] for index in range(len(keys))]

    def _free_retired(self, headers: list[BlockHeader]) -> dict[int, Outcome]:
        """Wait for readers, erase the headers, announce, release. The outcomes of those that failed, by slot."""
        if not headers:
            return {}
        with self._unpinned:
            self._unpinned.wait_for(lambda: not any(self._table.is_pinned(header.slot) for header in headers))
        failed: dict[int, Outcome] = {}
        for header, error in each_alone_if_one_fails(headers, self._store.erase):
            self._degrade(str(error))
            failed[header.slot] = self._outcome(header.key, Result.FAILED, reason=str(error))
            if not (isinstance(error, TransferError) and error.in_doubt):
                self._restore(header)
        freed = [header for header in headers if header.slot not in failed]
        try:
            if freed:
                self._on_freed(freed)
        finally:
            with self._table_lock:
                for header in freed:
                    self._table.release(header.slot)
                    self._payload_bytes -= header.payload_bytes
        return failed

    def _restore(self, header: BlockHeader) -> None:
        """Serve a block again that could not be freed; a listing made meanwhile lacks it, so it is announced again."""
        with self._ordering:
            try:
                self._on_stored([header])
            finally:
                with self._table_lock:
                    self._table.restore(header.slot)

    def _degrade(self, reason: str) -> None:
        with self._table_lock:
            self._degraded = self._degraded or reason

    def _outcome(self, key: BlockKey, result: Result, payload_bytes: int = 0, reason: str = "") -> Outcome:
        return Outcome(key, result, self.descriptor.id, payload_bytes, reason)


def _bytes_in_host(block: PutBlock) -> memoryview:
    return block.host_payload.cast("B")


def _nothing_in_host(block: PutBlock) -> memoryview:
    return memoryview(b"")
