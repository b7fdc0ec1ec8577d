"""A volume that is one slab file: blocks go in and out through NIXL, each checked against its own header."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import CorruptBlock, SlabFormatError, TransferError, VolumeError
from storage_agent.port import BlockKey, Outcome, PutBlock, Result, VolumeStat
from storage_agent.slab_file import open_slab
from storage_agent.slab_format import Session, SlotHeader, payload_checksum
from storage_agent.slot_io import SlotIO, SlotWrite, each_alone_if_one_fails
from storage_agent.slot_table import Refusal, SlotTable

Announce = Callable[[Sequence[SlotHeader]], None]
"""Tells the world about blocks that were stored or freed. Called without locks, before the table changes again."""
Accept = Callable[[int, SlotHeader, memoryview], str]
"""Takes a verified payload (number in the batch, header, bytes that last for the call); says why it cannot, or ''."""


class ReadResult(NamedTuple):
    """`header` is what the slot held, where the block was read."""

    outcome: Outcome
    header: SlotHeader | None = None


class SlabVolume:
    """The blocks of one slab. Thread-safe: a short lock around the table, the transfer's own around staging.

    Sizes in bytes. Every block of a batch has its own outcome; nothing but a closed volume raises.
    """

    def __init__(
        self,
        descriptor: VolumeDescriptor,
        path: Path,
        *,
        on_stored: Announce,
        on_freed: Announce,
        ordering: AbstractContextManager[object] = nullcontext(),  # noqa: B008 - it holds nothing
        deadline_s: float = 30.0,
    ) -> None:
        """Open `path`, or make it, and find its blocks. `path` is validated already.

        `ordering` is held while a Store is announced and its block becomes live: listed under it, `live_headers` are
        what was announced so far. The Removes of blocks that are live no more may still come.

        Announces nothing itself: `live_headers` are the blocks found. Raises `VolumeError`.
        """
        self.descriptor = descriptor
        self._on_stored = on_stored
        self._on_freed = on_freed
        self._ordering = ordering
        self._slab = open_slab(descriptor, path)
        self._table_lock = threading.Lock()
        self._unpinned = threading.Condition(self._table_lock)
        self._degraded = ""
        self._payload_bytes = 0
        self._corrupt_total = 0
        self._read_bytes_total = self._write_bytes_total = 0
        self._read_seconds_total = self._write_seconds_total = 0.0
        try:
            self._table = self._recover()
            self._io = SlotIO(self._slab, deadline_s=deadline_s)
        except OSError as error:
            self._slab.close()
            raise VolumeError(f"volume {descriptor.id!r}: {path} cannot be recovered: {error.strerror}") from error
        except TransferError as error:
            self._slab.close()
            raise VolumeError(f"volume {descriptor.id!r} cannot be used: {error}") from error

    def live_headers(self) -> list[SlotHeader]:
        with self._table_lock:
            return list(self._table.live_headers())

    @property
    def batch_slots(self) -> int:
        """Blocks of one batch: what others on this volume wait for at most."""
        return self._io.batch_slots

    def live_header(self, key: BlockKey) -> SlotHeader | None:
        with self._table_lock:
            return self._table.live(key)

    @property
    def retired_total(self) -> int:
        """Blocks ever taken out of service here."""
        with self._table_lock:
            return self._table.retired_total

    def stat(self) -> VolumeStat:
        with self._table_lock:
            return VolumeStat(
                descriptor=self.descriptor,
                blocks=self._table.live_count,
                payload_bytes=self._payload_bytes,
                slots_free=self._table.free_count,
                mode=self._slab.mode,
                read_bytes_total=self._read_bytes_total,
                read_seconds_total=self._read_seconds_total,
                write_bytes_total=self._write_bytes_total,
                write_seconds_total=self._write_seconds_total,
                degraded=self._degraded,
                corrupt_total=self._corrupt_total,
            )

    def put(self, blocks: Sequence[PutBlock], *, read_back: bool = False) -> list[Outcome]:
        """Write blocks and make them durable. With `read_back`, also read and verify each before it is served."""
        outcomes: list[Outcome] = []
        for start in range(0, len(blocks), self.batch_slots):
            outcomes += self._put_batch(blocks[start : start + self.batch_slots], read_back)
        return outcomes

    def read(self, keys: Sequence[BlockKey], accept: Accept) -> list[ReadResult]:
        """Read and verify blocks; `accept` gets each good one. A corrupt one is freed, and its outcome says so."""
        results: list[ReadResult] = []
        for start in range(0, len(keys), self.batch_slots):
            results += self._read_batch(keys[start : start + self.batch_slots], start, accept)
        return results

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Free blocks, durably, once their readers are done."""
        outcomes: list[Outcome] = []
        for start in range(0, len(keys), self.batch_slots):
            outcomes += self._delete_batch(keys[start : start + self.batch_slots])
        return outcomes

    def close(self) -> None:
        """Close the file; its blocks stay. The caller sees to it that nothing else is under way. Idempotent."""
        if self._slab.fd < 0:
            return
        self._io.close()
        with self._table_lock:
            settled, generation_next = self._table.is_settled, self._table.generation_next
        try:
            if settled and not self._degraded:
                self._slab.write_session(Session(is_open=False, pid=os.getpid(), generation_next=generation_next))
        except OSError:
            pass  # then the session stays open, and the next opener checks every payload
        finally:
            self._slab.close()

    # Opening

    def _recover(self) -> SlotTable:
        """Build the table from the slots, free what is torn or older than its double, and mark the slab open."""
        session = self._slab.session
        was_closed = session is not None and not session.is_open
        newest: dict[BlockKey, SlotHeader] = {}
        erase: list[int] = []
        generation_next = session.generation_next if session is not None else 1
        for report, header in self._slab.scan(check_payloads=not was_closed):
            generation_next = max(generation_next, report.generation + 1)
            if report.state == "torn":
                erase.append(report.slot)
            if header is None:
                continue
            other = newest.get(header.key)
            if other is None or other.generation < header.generation:
                newest[header.key] = header
            if other is not None:
                erase.append(min(other, header, key=lambda h: h.generation).slot)
        self._slab.write_session(Session(is_open=True, pid=os.getpid(), generation_next=generation_next))
        self._slab.erase_headers(erase)
        recovered = list(newest.values())
        self._payload_bytes = sum(header.payload_bytes for header in recovered)
        return SlotTable(self.descriptor.capacity_blocks, recovered, generation_next)

    # Put

    def _put_batch(self, blocks: Sequence[PutBlock], read_back: bool) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        writes: list[SlotWrite] = []
        for index, block in enumerate(blocks):
            refused = self._refuse_put(block)
            if refused is None:
                write = self._reserve(index, block)
                if isinstance(write, SlotWrite):
                    writes.append(write)
                    continue
                refused = write
            outcomes[index] = refused
        failures = self._write_durably(writes, read_back)
        stored = [write for write in writes if write.number not in failures]
        with self._ordering:
            self._announce_stored([write.header for write in stored])
        for write in writes:
            failed = failures.get(write.number)
            header = write.header
            outcomes[write.number] = failed or self._outcome(header.key, Result.STORED, header.payload_bytes)
        return [outcomes[index] for index in range(len(blocks))]

    def _announce_stored(self, headers: list[SlotHeader]) -> None:
        try:
            if headers:
                self._on_stored(headers)
        finally:
            with self._table_lock:
                for header in headers:
                    self._table.publish(header)
                    self._payload_bytes += header.payload_bytes

    def _refuse_put(self, block: PutBlock) -> Outcome | None:
        size, limit = block.payload.nbytes, self.descriptor.block_bytes_max
        if size == 0:
            return self._outcome(block.key, Result.FAILED, reason="the block is empty")
        if size > limit:
            return self._outcome(
                block.key, Result.TOO_LARGE, reason=f"the block has {size} bytes, {self.descriptor.id!r} takes {limit}"
            )
        if not block.payload.c_contiguous:
            return self._outcome(block.key, Result.FAILED, reason="the payload is not contiguous; copy it first")
        if block.namespace.namespace_id != block.key.namespace_id:
            return self._outcome(
                block.key, Result.FAILED, reason=f"the key's namespace is not that of {block.namespace.tenant!r}"
            )
        return None

    def _reserve(self, index: int, block: PutBlock) -> SlotWrite | Outcome:
        payload = block.payload.cast("B")
        with self._table_lock:
            reserved = self._table.reserve(block.key)
        if reserved is Refusal.PRESENT:
            return self._outcome(block.key, Result.PRESENT, payload.nbytes)
        if reserved is Refusal.FULL:
            return self._outcome(
                block.key, Result.FULL, reason=f"all {self.descriptor.capacity_blocks} slots are taken; free some first"
            )
        if isinstance(reserved, Refusal):
            return self._outcome(block.key, Result.BUSY, reason="another put or delete of it is under way; try later")
        header = SlotHeader(
            slot=reserved.slot,
            key=block.key,
            namespace=block.namespace,
            parent_hash=block.parent_hash,
            depth=block.depth,
            block_tokens=block.block_tokens,
            payload_bytes=payload.nbytes,
            payload_checksum=payload_checksum(payload),
            generation=reserved.generation,
        )
        return SlotWrite(index, header, payload)

    def _write_durably(self, writes: list[SlotWrite], read_back: bool) -> dict[int, Outcome]:
        """Write the slots, sync once. The outcomes of those that failed; their slots are free again or held back."""
        if not writes:
            return {}
        started = time.monotonic()
        failed: dict[int, Outcome] = {}
        for write, error in each_alone_if_one_fails(writes, self._io.write):
            failed[write.number] = self._undo_put(write, error)
        written = [write for write in writes if write.number not in failed]
        try:
            if written:
                self._io.sync()
        except TransferError as error:
            for write in written:
                failed[write.number] = self._undo_put(write, error)
        good = [write for write in writes if write.number not in failed]
        if read_back and good:
            self._io.forget_cached([write.header for write in good])
            for write, reason in self._verify_written(good):
                failed[write.number] = self._undo_put(write, reason)
        with self._table_lock:
            self._write_bytes_total += sum(write.payload.nbytes for write in writes if write.number not in failed)
            self._write_seconds_total += time.monotonic() - started
        return failed

    def _verify_written(
        self, writes: list[SlotWrite]
    ) -> list[tuple[SlotWrite, TransferError | SlabFormatError | CorruptBlock]]:
        bad: list[tuple[SlotWrite, TransferError | SlabFormatError | CorruptBlock]] = []

        def check(part: Sequence[SlotWrite]) -> None:
            def collect(number: int, error: CorruptBlock | None, payload: memoryview) -> None:
                if error is not None:
                    bad.append((part[number], error))

            self._io.read([write.header for write in part], collect)

        unread = each_alone_if_one_fails(writes, check)
        return [*bad, *unread]

    def _undo_put(self, write: SlotWrite, error: TransferError | CorruptBlock | SlabFormatError) -> Outcome:
        """Free the slot of a failed put; where even that fails, hold it back until the volume is opened anew."""
        slot, reason = write.header.slot, str(error)
        if isinstance(error, SlabFormatError):  # nothing was written
            with self._table_lock:
                self._table.abandon(slot)
            return self._outcome(write.header.key, Result.FAILED, reason=reason)
        self._degrade(reason)
        if not (isinstance(error, TransferError) and error.in_doubt):
            try:
                self._io.erase([slot])
                with self._table_lock:
                    self._table.abandon(slot)
            except TransferError as second:
                reason = f"{reason}; slot {slot} is held back until the volume is opened again: {second}"
        return self._outcome(write.header.key, Result.FAILED, reason=reason)

    # Read

    def _read_batch(self, keys: Sequence[BlockKey], first_index: int, accept: Accept) -> list[ReadResult]:
        started = time.monotonic()
        with self._table_lock:
            pinned = [(number, header) for number, key in enumerate(keys) if (header := self._table.pin(key))]
        results: dict[int, ReadResult] = {}
        corrupt: list[SlotHeader] = []

        def read(part: Sequence[tuple[int, SlotHeader]]) -> None:
            def take(number: int, error: CorruptBlock | None, payload: memoryview) -> None:
                index, header = part[number]
                if error is not None:
                    corrupt.append(header)
                    outcome = self._outcome(header.key, Result.CORRUPT, reason=f"{type(error).__name__}: {error}")
                    results[index] = ReadResult(outcome)
                    return
                refused = accept(first_index + index, header, payload)
                result = Result.FAILED if refused else Result.HIT
                results[index] = ReadResult(self._outcome(header.key, result, header.payload_bytes, refused), header)

            self._io.read([header for _, header in part], take)

        try:
            for (index, header), error in each_alone_if_one_fails(pinned, read):
                self._degrade(str(error))
                results[index] = ReadResult(self._outcome(header.key, Result.FAILED, reason=str(error)))
        finally:
            with self._unpinned:
                for _, header in pinned:
                    self._table.unpin(header.slot)
                self._unpinned.notify_all()
        self._free_corrupt(corrupt)
        with self._table_lock:
            self._read_bytes_total += sum(r.header.payload_bytes for r in results.values() if r.header is not None)
            self._read_seconds_total += time.monotonic() - started
        missing = f"{self.descriptor.id!r} does not hold it"
        return [
            results.get(number) or ReadResult(self._outcome(key, Result.MISS, reason=missing))
            for number, key in enumerate(keys)
        ]

    def _free_corrupt(self, headers: list[SlotHeader]) -> None:
        if not headers:
            return
        with self._table_lock:
            self._corrupt_total += len(headers)
            # Another reader may have found the same, or the slot may hold a newer block by now.
            ours = []
            for header in headers:
                if self._table.live(header.key) is header:
                    self._table.retire(header.key)
                    ours.append(header)
        self._free_retired(ours)

    # Delete

    def _delete_batch(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        retired: dict[int, SlotHeader] = {}
        with self._table_lock:
            for index, key in enumerate(keys):
                header = self._table.retire(key)
                if isinstance(header, SlotHeader):
                    retired[index] = header
                elif header is None:
                    outcomes[index] = self._outcome(
                        key, Result.MISS, reason=f"{self.descriptor.id!r} does not hold it"
                    )
                else:
                    outcomes[index] = self._outcome(
                        key, Result.BUSY, reason="another put or delete of it is under way; try later"
                    )
        failures = self._free_retired(list(retired.values()))
        for index, header in retired.items():
            failed = failures.get(header.slot)
            outcomes[index] = failed or self._outcome(header.key, Result.DELETED, header.payload_bytes)
        return [outcomes[index] for index in range(len(keys))]

    def _free_retired(self, headers: list[SlotHeader]) -> dict[int, Outcome]:
        """Wait for readers, erase the headers, announce, release. The outcomes of those that failed, by slot."""
        if not headers:
            return {}
        with self._unpinned:
            self._unpinned.wait_for(lambda: not any(self._table.is_pinned(header.slot) for header in headers))
        failed: dict[int, Outcome] = {}

        def erase(part: Sequence[SlotHeader]) -> None:
            self._io.erase([header.slot for header in part])

        for header, error in each_alone_if_one_fails(headers, erase):
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

    def _restore(self, header: SlotHeader) -> None:
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
