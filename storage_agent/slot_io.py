"""Slots of one slab to and from memory: headers and payloads in whole batches through NIXL."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from storage_agent.errors import CorruptBlock, SlabFormatError, TransferError
from storage_agent.nixl_transfer import DESCRIPTOR_COUNT_MAX, NixlTransfer, Offsets
from storage_agent.slab_file import SlabFile
from storage_agent.slab_format import PAGE_BYTES, ZERO_PAGE, SlotHeader, check_slot, pack_slot_header, page_ceiling

STAGING_BYTES_TARGET = 16 * 1024 * 1024
"""Memory that one batch is staged in: at least one slot, at most `BATCH_SLOTS_MAX`."""
BATCH_SLOTS_MAX = 256
assert BATCH_SLOTS_MAX <= DESCRIPTOR_COUNT_MAX

Item = TypeVar("Item")
Take = Callable[[int, CorruptBlock | None, memoryview], None]
"""Gets a slot's number in the batch, what is wrong with it if anything, and its payload, which lasts for the call."""


class SlotWrite(NamedTuple):
    """A payload bound for a slot. `number`: its place in the caller's batch. `payload` has format `B`."""

    number: int
    header: SlotHeader
    payload: memoryview


class SlotIO:
    """Batches of at most `batch_slots` slots. Thread-safe: one batch at a time, in order of arrival."""

    def __init__(self, slab: SlabFile, *, deadline_s: float) -> None:
        """Raises `TransferError` where NIXL cannot be had. `slab` stays open until this is closed."""
        self._slab = slab
        slot_bytes = slab.superblock.slot_bytes
        self.batch_slots = min(
            slab.superblock.capacity_blocks, BATCH_SLOTS_MAX, max(1, STAGING_BYTES_TARGET // slot_bytes)
        )
        self._transfer = NixlTransfer(
            f"volume {slab.superblock.volume_id}",
            slab.fd,
            slab.superblock.file_bytes,
            staging_bytes=self.batch_slots * slot_bytes,
            deadline_s=deadline_s,
        )

    def write(self, writes: Sequence[SlotWrite]) -> None:
        """Write header and payload of each in one descriptor; `sync` makes them durable.

        Raises `SlabFormatError` before anything is written, `TransferError` after which any part may be.
        """
        slot_bytes = self._slab.superblock.slot_bytes
        headers = [pack_slot_header(write.header) for write in writes]
        with self._transfer.exclusive() as staging:
            for number, (write, header) in enumerate(zip(writes, headers, strict=True)):
                at = number * slot_bytes
                end = at + PAGE_BYTES + write.header.payload_bytes
                padded_end = at + _used_bytes(write.header)
                staging[at : at + PAGE_BYTES] = header
                staging[at + PAGE_BYTES : end] = write.payload
                staging[end:padded_end] = bytes(padded_end - end)
            self._transfer.write(*self._extents([write.header for write in writes]))

    def read(self, headers: Sequence[SlotHeader], take: Take) -> None:
        """Read the slots of `headers`, check each against its own, and hand it to `take`.

        Raises `TransferError` before the first `take`.
        """
        if not headers:
            return
        slot_bytes = self._slab.superblock.slot_bytes
        with self._transfer.exclusive() as staging:
            self._transfer.read(*self._extents(headers))
            for number, header in enumerate(headers):
                at = number * slot_bytes
                payload = staging[at + PAGE_BYTES : at + PAGE_BYTES + header.payload_bytes].toreadonly()
                error: CorruptBlock | None = None
                try:
                    check_slot(bytes(staging[at : at + PAGE_BYTES]), payload, header)
                except CorruptBlock as caught:
                    error = caught
                take(number, error, payload)

    def erase(self, slots: Sequence[int]) -> None:
        """Zero slots' header pages, durably. Raises `TransferError`."""
        with self._transfer.exclusive() as staging:
            staging[:PAGE_BYTES] = ZERO_PAGE
            offsets = np.array([self._slab.superblock.slot_offset(slot) for slot in slots], dtype=np.uint64)
            self._transfer.write(offsets, np.zeros_like(offsets), np.full_like(offsets, PAGE_BYTES))
        self.sync()

    def sync(self) -> None:
        """Make everything written so far durable. Raises `TransferError` in doubt: a failed sync is never retried."""
        try:
            os.fdatasync(self._slab.fd)
        except OSError as error:
            raise TransferError(
                f"{self._slab.path} cannot be synced: {error.strerror}; check the device, then register it again",
                in_doubt=True,
            ) from error

    def forget_cached(self, headers: Sequence[SlotHeader]) -> None:
        """Have the next read of these slots come from the device, as far as the kernel heeds the advice."""
        if self._slab.mode == "O_DIRECT":
            return
        for header in headers:
            offset = self._slab.superblock.slot_offset(header.slot)
            os.posix_fadvise(self._slab.fd, offset, _used_bytes(header), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Wait for the batch under way. Idempotent."""
        self._transfer.close()

    def _extents(self, headers: Sequence[SlotHeader]) -> tuple[Offsets, Offsets, Offsets]:
        superblock = self._slab.superblock
        file_offsets = np.array([superblock.slot_offset(header.slot) for header in headers], dtype=np.uint64)
        staging_offsets = np.arange(len(headers), dtype=np.uint64) * np.uint64(superblock.slot_bytes)
        lengths = np.array([_used_bytes(header) for header in headers], dtype=np.uint64)
        return file_offsets, staging_offsets, lengths


def each_alone_if_one_fails(
    items: Sequence[Item], transfer: Callable[[Sequence[Item]], None]
) -> list[tuple[Item, TransferError | SlabFormatError]]:
    """Run `transfer` on all of `items`; if that fails, on each alone, so that one bad place fails one block only.

    Returns those that failed. A failure in doubt (a deadline) fails all at once: each alone would wait as long again.
    """
    if not items:
        return []
    try:
        transfer(items)
    except (TransferError, SlabFormatError) as error:
        if len(items) == 1 or (isinstance(error, TransferError) and error.in_doubt):
            return [(item, error) for item in items]
        return [failure for item in items for failure in each_alone_if_one_fails([item], transfer)]
    return []


def _used_bytes(header: SlotHeader) -> int:
    return PAGE_BYTES + page_ceiling(header.payload_bytes)
