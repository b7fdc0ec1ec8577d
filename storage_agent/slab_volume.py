"""Volumes of kind `slab`: one local file of equal slots, in whole batches through NIXL."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from storage_agent.block_header import (
    PAGE_BYTES,
    ZERO_PAGE,
    BlockHeader,
    pack_header,
    page_ceiling,
)
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.direct_memory import DirectSpan
from storage_agent.errors import CorruptBlock, TransferError
from storage_agent.file_transfer import DESCRIPTOR_COUNT_MAX
from storage_agent.inspection import SlotReport
from storage_agent.kinds import Opening, VolumeKind, slot_kind
from storage_agent.saved_rows import save_rows
from storage_agent.slab_direct import SlabDirect
from storage_agent.slab_file import open_slab, open_slab_read_only, session_of_this_process
from storage_agent.slab_intents import SlabIntents
from storage_agent.slab_reading import read_slots
from storage_agent.slab_recovery import recover_slab
from storage_agent.slab_scan import reports
from storage_agent.slot_classes import SlotClasses
from storage_agent.slot_locks import locked_shards, shard_is_locked
from storage_agent.slot_rows import SlotRows
from storage_agent.slot_store import Recovered, SlotRead, SlotWrite, Take
from storage_agent.transfer_choice import open_transfer

STAGING_BYTES_TARGET = 16 * 1024 * 1024
"""Payloads under way at once: at least one slot, at most a batch."""
BATCH_BYTES_TARGET = 4 * STAGING_BYTES_TARGET
"""Payloads of one batch: at least one slot, at most `BATCH_SLOTS_MAX`."""
BATCH_SLOTS_MAX = 256
assert 2 * BATCH_SLOTS_MAX <= DESCRIPTOR_COUNT_MAX
_SAVE_REGIONS_MIN = 64
_SAVE_SHARE = 8
"""The table is saved when more than one region in so many changed: a recovery looks at no more slots than that."""


class SlabOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`format_device`: a block device that holds something other than a slab is made one, and loses it.

    `classes`: sizes of slots, see `slot_classes`; all of `block_bytes_max` where there are none.
    """

    format_device: bool = False
    classes: SlotClasses = ()


NO_OPTIONS = SlabOptions()
_log = logging.getLogger(__name__)


class SlabStore:
    """Implements `slot_store.SlotStore`: one batch of transfers at a time, in order of arrival."""

    def __init__(
        self, descriptor: VolumeDescriptor, path: Path, options: SlabOptions = NO_OPTIONS, *, deadline_s: float
    ) -> None:
        """Open `path`, or make it. `path` is validated already. Raises `VolumeError`."""
        self._slab = open_slab(descriptor, path, may_overwrite=options.format_device)
        self._intents_lock = threading.Lock()
        self._saving = threading.Lock()
        self._save_above_regions = 0
        """So many must have changed before a full disk is tried again."""
        superblock = self._slab.superblock
        slot_bytes = superblock.slot_bytes
        self._batch_slots = min(BATCH_SLOTS_MAX, max(1, BATCH_BYTES_TARGET // (slot_bytes - PAGE_BYTES)))
        self._staged_slots = min(self._batch_slots, max(1, STAGING_BYTES_TARGET // (slot_bytes - PAGE_BYTES)))
        self._intents: SlabIntents
        self._transfer = open_transfer(
            f"volume {descriptor.id}",
            {self._slab.fd: superblock.file_bytes},
            staging_bytes=self._staged_slots * slot_bytes,
            deadline_s=deadline_s,
        )
        self._direct = SlabDirect(f"volume {descriptor.id}", self._slab, deadline_s=deadline_s)

    @property
    def mode(self) -> str:
        """See `SlotStore.mode`: `O_DIRECT` or `buffered`, and `threads` where NIXL cannot be had, as probed."""
        return ", ".join(filter(None, (self._slab.mode, self._transfer.how)))

    @property
    def batch_slots(self) -> int:
        """See `SlotStore.batch_slots`."""
        return self._batch_slots

    def recover(self) -> Recovered:
        """See `SlotStore.recover`."""
        recovered, found = recover_slab(self._slab)
        self._intents = SlabIntents(self._slab.superblock, found, _draw_mark())
        return recovered

    def write(self, writes: Sequence[SlotWrite]) -> None:
        """See `SlotStore.write`: header and payload of each in one extent."""
        self._tell([write.slot for write in writes])
        superblock, fd = self._slab.superblock, self._slab.fd
        slot_bytes, mark, staged_slots = superblock.slot_bytes, superblock.mark, self._staged_slots
        extents = [
            (
                superblock.slot_offset(write.slot),
                number % staged_slots * slot_bytes,
                PAGE_BYTES + page_ceiling(write.payload.nbytes),
                fd,
            )
            for number, write in enumerate(writes)
        ]
        with self._transfer.exclusive() as staging:

            def stage(first: int, end: int) -> None:
                for number in range(first, end):
                    write, (_, at, length, _) = writes[number], extents[number]
                    payload_at = at + PAGE_BYTES
                    payload_end = payload_at + write.payload.nbytes
                    write.copy_payload(staging[payload_at:payload_end])
                    staging[at:payload_at] = pack_header(write.header, write.checksums, place=write.slot, mark=mark)
                    if payload_end < at + length:
                        staging[payload_end : at + length] = bytes(at + length - payload_end)

            self._transfer.write(extents, stage=stage, reuse_after=staged_slots)

    def read(self, reads: Sequence[SlotRead], take: Take) -> None:
        """See `SlotStore.read`."""
        read_slots(self._transfer, self._slab, reads, take)

    def span_fault(self, span: DirectSpan, payload_bytes: int, offset: int = 0) -> str:
        """See `DirectStore.span_fault`."""
        return self._direct.fault(span, payload_bytes, offset)

    def write_spans(self, writes: Sequence[SlotWrite], spans: Sequence[DirectSpan]) -> None:
        """See `DirectStore.write_spans`."""
        self._direct.write_payloads(writes, spans)
        self.write_headers(writes)

    def read_spans(self, reads: Sequence[SlotRead], spans: Sequence[DirectSpan]) -> dict[int, CorruptBlock | None]:
        """See `DirectStore.read_spans`."""
        return self._direct.read(self._transfer, reads, spans)

    def write_headers(self, writes: Sequence[SlotWrite]) -> None:
        """See `LeasableStore.write_headers`."""
        superblock = self._slab.superblock
        pages = [pack_header(w.header, w.checksums, place=w.slot, mark=superblock.mark) for w in writes]
        self._tell([write.slot for write in writes])
        with self._transfer.exclusive() as staging:
            extents = []
            for number, (write, page) in enumerate(zip(writes, pages, strict=True)):
                staging[number * PAGE_BYTES : (number + 1) * PAGE_BYTES] = page
                extents.append(
                    (superblock.slot_offset(write.slot), number * PAGE_BYTES, PAGE_BYTES, self._slab.fd)
                )
            self._transfer.write(extents)

    def shard_is_locked(self, slot: int, shard: int) -> bool:
        """See `LeasableStore.shard_is_locked`."""
        return shard_is_locked(self._slab.fd, slot, shard)

    def locked_shards(self) -> list[tuple[int, int]]:
        """See `LeasableStore.locked_shards`."""
        return locked_shards(self._slab.fd)

    def erase(self, headers: Sequence[BlockHeader]) -> None:
        """See `SlotStore.erase`: zeroes the header pages."""
        slots = [header.slot for header in headers]
        self._tell(slots)
        with self._transfer.exclusive() as staging:
            staging[:PAGE_BYTES] = ZERO_PAGE
            slot_offset, fd = self._slab.superblock.slot_offset, self._slab.fd
            self._transfer.write([(slot_offset(slot), 0, PAGE_BYTES, fd) for slot in slots])
        self.sync()

    def sync(self) -> None:
        """See `SlotStore.sync`. A failed sync is never retried: it is in doubt for good."""
        with self._intents_lock:
            written = self._intents.written.copy()
        self._fdatasync()
        with self._intents_lock:
            self._intents.synced(written)

    def forget_cached(self, headers: Sequence[BlockHeader]) -> None:
        """See `SlotStore.forget_cached`."""
        if self._slab.mode == "O_DIRECT":
            return
        for header in headers:
            offset = self._slab.superblock.slot_offset(header.slot)
            length = PAGE_BYTES + page_ceiling(header.payload_bytes)
            os.posix_fadvise(self._slab.fd, offset, length, os.POSIX_FADV_DONTNEED)

    def resize(self, capacity_blocks: int) -> None:
        """See `SlotStore.resize`."""
        with self._transfer.exclusive(), self._intents_lock:
            self._slab.resize(capacity_blocks)
            self._transfer.resize(self._slab.fd, self._slab.superblock.file_bytes)
            self._direct.forget()
            self._intents = SlabIntents(self._slab.superblock, None, _draw_mark())

    @property
    def slots_in_order(self) -> bool:
        """See `OrderedStore`."""
        return True

    def compact(self) -> int:
        """Nothing: slots of one size do not fragment, and a `SlotVolume` sees to classes."""
        return 0

    @property
    def upkeep_due(self) -> bool:
        """See `SlotStore.upkeep_due`."""
        if self._slab.table_path is None:
            return False
        with self._intents_lock:
            changed = self._intents.changed_regions
        share = self._slab.superblock.regions // _SAVE_SHARE
        return changed > max(_SAVE_REGIONS_MIN, share, self._save_above_regions)

    def upkeep(self, copy_table: Callable[[], tuple[SlotRows, list[int]]]) -> None:
        """See `SlotStore.upkeep`."""
        table_path = self._slab.table_path
        if table_path is None or not self._slab.is_in_place:
            return
        with self._saving:
            with self._intents_lock:
                intents = self._intents
                intents.begin_save()
                table_mark = intents.table_next
            rows, unsettled = copy_table()
            superblock = self._slab.superblock
            if len(rows) != superblock.capacity_blocks:
                return  # it is being resized
            try:
                save_rows(table_path, rows, file_mark=superblock.mark, table_mark=table_mark)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                # The slab has its own room and serves on; its next opening has more to look at.
                self._save_above_regions = 2 * intents.changed_regions
                _log.warning("%s: no room for the slot table: %s", table_path, error.strerror)
                return
            self._save_above_regions = 0
            with self._intents_lock:
                if self._intents is intents:
                    intents.end_save(unsettled, _draw_mark())
                    self._slab.write_intents(intents.page())
                    os.fdatasync(self._slab.fd)

    def close(self, *, in_order: bool, generation_next: int) -> None:
        """See `SlotStore.close`."""
        if self._slab.fd < 0:
            return
        self._transfer.close()
        self._direct.close()
        try:
            if in_order:
                self._slab.write_session(session_of_this_process(is_open=False, generation_next=generation_next))
        except OSError:
            pass  # then the session stays open, and the next opener checks payloads
        finally:
            self._slab.close()

    def _tell(self, slots: Sequence[int]) -> None:
        """See to it that a recovery will look at `slots`, before they change. Raises `TransferError`."""
        with self._intents_lock:
            must_write, must_last = self._intents.note(slots, self._batch_slots)
            if not must_write:
                return
            try:
                self._slab.write_intents(self._intents.page())
            except OSError as error:
                raise TransferError(f"{self._slab.path} cannot be written: {error.strerror}") from error
            if must_last:
                written = self._intents.written.copy()
                self._fdatasync()
                self._intents.synced(written)

    def _fdatasync(self) -> None:
        try:
            os.fdatasync(self._slab.fd)
        except OSError as error:
            raise TransferError(
                f"{self._slab.path} cannot be synced: {error.strerror}; check the device, then register it again",
                in_doubt=True,
            ) from error


class SlabInspection:
    """Implements `inspection.Inspection`."""

    def __init__(self, descriptor: VolumeDescriptor, path: Path) -> None:
        """Raises `VolumeError` where there is no such slab."""
        self._slab = open_slab_read_only(descriptor, path)

    @property
    def was_closed_in_order(self) -> bool:
        """See `Inspection.was_closed_in_order`."""
        return self._slab.was_closed_in_order

    def reports(self) -> Iterator[SlotReport]:
        """See `Inspection.reports`."""
        return reports(self._slab)

    def close(self) -> None:
        """See `Inspection.close`."""
        self._slab.close()


def _open_store(opening: Opening) -> SlabStore:
    options = opening.options
    assert isinstance(options, SlabOptions)
    return SlabStore(opening.descriptor, opening.required_path, options, deadline_s=opening.deadline_s)


def _inspect(opening: Opening) -> SlabInspection:
    return SlabInspection(opening.descriptor, opening.required_path)


KIND: VolumeKind = slot_kind(SlabOptions, _open_store, inspect=_inspect)


def _draw_mark() -> int:
    return int.from_bytes(os.urandom(8), "little")
