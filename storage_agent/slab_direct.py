"""A slab's payloads to and from memory of callers', by the backend of NIXL's that reaches it; checked where they lie.

A GPU's memory goes by the backend that was proven (`gpu_direct`), the host's by POSIX; whole pages only.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Sequence

from storage_agent import gpu_direct
from storage_agent.block_header import (
    PAGE_BYTES,
    ChecksumName,
    PartChecksums,
    check_header,
    compare_parts,
)
from storage_agent.direct_memory import DirectMemory, DirectSpan
from storage_agent.errors import CorruptBlock, TransferError
from storage_agent.file_transfer import FileTransfer
from storage_agent.nh64_sums import nh64_of_tensors
from storage_agent.nixl_loading import keep_for_ever
from storage_agent.nixl_memory import MemoryPlace, MemoryRegion
from storage_agent.nixl_spans import POSIX, NixlSpans, Operation
from storage_agent.slab_file import SlabFile
from storage_agent.slot_store import SlotRead, SlotWrite

MEMORIES_MAX = 16
"""That NIXL knows at a time; each has an agent of its own."""

_log = logging.getLogger(__name__)


class SlabDirect:
    """Of one open slab. Thread-safe; transfers of one memory go one after another."""

    def __init__(self, name: str, slab: SlabFile, *, deadline_s: float) -> None:
        self._name = name
        self._slab = slab
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._fd = -1
        """A second one of the same open file, from the first transfer on."""
        self._may_close = True
        # A memory that nobody has any more goes from here, and NIXL lets go of it, before it is freed.
        self._ways: weakref.WeakKeyDictionary[DirectMemory, NixlSpans | str] = weakref.WeakKeyDictionary()
        """By memory: what moves its bytes, or why nothing does."""

    def fault(self, span: DirectSpan, payload_bytes: int, offset: int) -> str:
        """See `DirectStore.span_fault`."""
        for value, what in ((payload_bytes, "length"), (offset, "place in the payload"), (span.address, "address")):
            if value % PAGE_BYTES:
                return f"its {what}, {value}, is not a multiple of {PAGE_BYTES}"
        way = self._way(span.memory)
        return way if isinstance(way, str) else ""

    def write_payloads(self, writes: Sequence[SlotWrite], spans: Sequence[DirectSpan]) -> None:
        """Sum payloads, whose checksums `writes` have then, and write them, not durably. Raises `TransferError`."""
        tensors = [span.bytes.view(-1, write.part_bytes) for write, span in zip(writes, spans, strict=True)]
        for write, sums in zip(writes, nh64_of_tensors(tensors), strict=True):
            write.note_checksums(PartChecksums(sums, ChecksumName.NH64))
        self._move("WRITE", [self._payload_at(write.slot) for write in writes], spans, [span.nbytes for span in spans])

    def read(
        self, transfer: FileTransfer, reads: Sequence[SlotRead], spans: Sequence[DirectSpan]
    ) -> dict[int, CorruptBlock | None]:
        """See `DirectStore.read_spans`. `transfer` reads the header pages, for which it has staging."""
        found: dict[int, CorruptBlock | None] = {}
        try:
            checksums = self._check_headers(transfer, reads, found)
            numbers = [number for number, sums in checksums.items() if sums.name is ChecksumName.NH64]
            if not numbers:
                return found
            self._move(
                "READ",
                [self._payload_at(reads[number].header.slot) + reads[number].offset for number in numbers],
                [spans[number] for number in numbers],
                [reads[number].payload_bytes for number in numbers],
            )
            tensors = [
                spans[number].bytes[: reads[number].payload_bytes].view(-1, reads[number].header.part_bytes)
                for number in numbers
            ]
            summed = nh64_of_tensors(tensors)
        except TransferError as error:
            if error.in_doubt:
                raise
            return found
        for number, sums in zip(numbers, summed, strict=True):
            fault: CorruptBlock | None = None
            try:
                compare_parts(sums, reads[number].header, checksums[number], reads[number].first)
            except CorruptBlock as error:
                fault = error
            found[number] = fault
        return found

    def forget(self) -> None:
        """Wait for what is under way, then have NIXL let go of file and memory: the file's size has changed."""
        with self._lock:
            ways = list(self._ways.values())
            self._ways.clear()
        for way in ways:
            if isinstance(way, NixlSpans):
                way.close()

    def close(self) -> None:
        """Let go of everything but what a late device may use still. Idempotent.

        While late writes may still come the file stays locked, so that nobody opens the slab and has them in its slots.
        The kernel has the requests of the POSIX backend, and with them the file. Other backends have threads that may
        begin some at any time: the descriptor stays open, and the slab cannot be opened until this process ends.
        """
        self.forget()
        with self._lock:
            if self._fd >= 0 and self._may_close:
                os.close(self._fd)
            self._fd = -1

    def _payload_at(self, slot: int) -> int:
        return self._slab.superblock.slot_offset(slot) + PAGE_BYTES

    def _check_headers(
        self, transfer: FileTransfer, reads: Sequence[SlotRead], found: dict[int, CorruptBlock | None]
    ) -> dict[int, PartChecksums]:
        """The checksums by number; those whose header is not theirs are put into `found`."""
        superblock, fd = self._slab.superblock, self._slab.fd
        extents = [
            (superblock.slot_offset(read.header.slot), number * PAGE_BYTES, PAGE_BYTES, fd)
            for number, read in enumerate(reads)
        ]
        with transfer.exclusive() as staging:
            transfer.read(extents)
            pages = [bytes(staging[at : at + PAGE_BYTES]) for _, at, _, _ in extents]
        checksums: dict[int, PartChecksums] = {}
        for number, (read, page) in enumerate(zip(reads, pages, strict=True)):
            try:
                checksums[number] = check_header(page, read.header, place=read.header.slot, mark=superblock.mark)
            except CorruptBlock as error:
                found[number] = error
        return checksums

    def _way(self, memory: DirectMemory) -> NixlSpans | str:
        with self._lock:
            way = self._ways.get(memory)
            if way is not None:
                return way
            if len(self._ways) >= MEMORIES_MAX:
                return f"{MEMORIES_MAX} memories are in use already; put all blocks' memory into fewer"
            backend, parameters = "POSIX", POSIX
            if memory.kind == "VRAM":
                backend, parameters = gpu_direct.wait(0.0).backend, {}
                if not backend:
                    return gpu_direct.said()  # not kept: it may be proven in a moment
            try:
                if self._fd < 0:
                    self._fd = os.dup(self._slab.fd)
                way = NixlSpans(
                    self._name,
                    backend,
                    parameters,
                    [MemoryRegion(memory.address, memory.size_bytes, MemoryPlace(memory.kind, memory.device))],
                    self._fd,
                    self._slab.superblock.file_bytes,
                    deadline_s=self._deadline_s,
                )
            except (TransferError, OSError) as error:
                way = str(error)
                _log.warning("%s: %s goes through the host's memory: %s", self._name, memory.kind, error)
            self._ways[memory] = way
            return way

    def _move(
        self,
        operation: Operation,
        file_offsets: Sequence[int],
        spans: Sequence[DirectSpan],
        sizes_bytes: Sequence[int],
    ) -> None:
        by_memory: dict[DirectMemory, tuple[list[MemoryRegion], list[int]]] = {}
        for file_offset, span, size in zip(file_offsets, spans, sizes_bytes, strict=True):
            regions, offsets = by_memory.setdefault(span.memory, ([], []))
            regions.append(MemoryRegion(span.address, size, MemoryPlace(span.memory.kind, span.memory.device)))
            offsets.append(file_offset)
        for memory, (regions, offsets) in by_memory.items():
            way = self._way(memory)
            if isinstance(way, str):
                raise TransferError(f"{self._name}: {way}")
            try:
                way.transfer(operation, regions, offsets)
            except TransferError as error:
                if error.in_doubt:
                    keep_for_ever(memory)  # freed, it would be another's by the time the device writes there
                    with self._lock:
                        self._may_close &= operation == "READ" or memory.kind == "DRAM"
                        self._ways[memory] = str(error)
                raise
