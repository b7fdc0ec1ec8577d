"""Volumes of kind `directory`: packed segment files on a shared file system; one host writes, any host reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from storage_agent.block_header import (
    PAGE_BYTES,
    BlockHeader,
    PartChecksums,
    check_header,
    check_parts,
    pack_header,
    page_ceiling,
    unpack_header,
)
from storage_agent.chains import chain_order
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.directory_folder import DirectoryFolder, Lying
from storage_agent.directory_format import Place
from storage_agent.directory_segments import Segment, block_pages, remove_segment, seal_segment
from storage_agent.directory_view import inspect
from storage_agent.errors import BlockFormatError, CorruptBlock, TransferError, VolumeError
from storage_agent.file_transfer import Extent
from storage_agent.fragmentation import Footprint, Stretch
from storage_agent.kinds import Opening, VolumeKind, slot_kind
from storage_agent.slot_rows import SlotRows
from storage_agent.slot_store import Recovered, SlotRead, SlotWrite, Take
from storage_agent.transfer_choice import open_transfer

STAGING_BYTES_TARGET = 16 * 1024 * 1024
BATCH_SLOTS_MAX = 256
SEGMENTS_MAX = 512
"""Files that a volume may keep open."""
_DEAD_SHARE = 0.5
"""A segment with more dead than this is rewritten."""


class DirectoryOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`segment_bytes`: size of a full segment file."""

    segment_bytes: Annotated[int, msgspec.Meta(ge=1 << 20, le=1 << 36)] = 1 << 28


class _Copy(NamedTuple):
    """A live block that compaction moves."""

    lying: Lying
    header: BlockHeader
    checksums: PartChecksums
    payload: bytes


class DirectoryStore:
    """Implements `slot_store.SlotStore` and `PackingStore`: one batch of transfers, or one change of files, at a time.

    Slots are the table's numbers; where a slot's block lies is known here. All state is guarded by the transfer's lock.
    """

    def __init__(
        self, descriptor: VolumeDescriptor, path: Path, options: DirectoryOptions, *, deadline_s: float
    ) -> None:
        """Open the folder, or make it. `path` is validated already. Raises `VolumeError`."""
        self._volume = descriptor.id
        self._capacity = descriptor.capacity_blocks
        self._block_bytes_max = descriptor.block_bytes_max
        self._slot_bytes = PAGE_BYTES + page_ceiling(descriptor.block_bytes_max)
        self._segment_bytes = _segment_bytes(descriptor, self._slot_bytes, options)
        self._batch_slots = min(BATCH_SLOTS_MAX, max(1, STAGING_BYTES_TARGET // self._slot_bytes))
        self._folder = DirectoryFolder(descriptor, path)
        self._segments: dict[int, Segment] = {}
        self._writing: Segment | None = None
        self._lying: dict[int, Lying] = {}
        """Where the block of a slot is."""
        self._damaged: dict[int, str] = {}
        """Slots whose block compaction found damaged, and what was wrong."""
        self._next_number = 1
        self._transfer = open_transfer(
            f"volume {descriptor.id}", {}, staging_bytes=self._batch_slots * self._slot_bytes, deadline_s=deadline_s
        )

    @property
    def mode(self) -> str:
        """See `SlotStore.mode`: what the file system takes, as probed."""
        return ", ".join(filter(None, (self._folder.mode, self._transfer.how)))

    @property
    def batch_slots(self) -> int:
        """See `SlotStore.batch_slots`."""
        return self._batch_slots

    def recover(self) -> Recovered:
        """See `SlotStore.recover`."""
        found = self._folder.recover(self._block_bytes_max)
        headers: list[BlockHeader] = []
        self._next_number = found.number_next
        with self._transfer.exclusive():
            for segment in found.segments:
                self._segments[segment.number] = segment
                self._transfer.add_file(segment.fd, max(self._segment_bytes, segment.end * PAGE_BYTES))
            for slot, (header, lying) in enumerate(found.blocks):
                headers.append(header._replace(slot=slot))
                self._hold(slot, lying)
            for segment in list(self._segments.values()):
                self._drop_if_dead(segment)
        rows = SlotRows.of(max(self._capacity, len(headers)), headers)
        return Recovered(rows, found.generation_next)

    def write(self, writes: Sequence[SlotWrite]) -> None:
        """See `SlotStore.write`: appended to the segment being written."""
        with self._transfer.exclusive() as staging:
            self._append_all(writes, staging)

    def sync(self) -> None:
        """See `SlotStore.sync`. A segment that was sealed meanwhile is durable already."""
        with self._transfer.exclusive():
            self._sync()

    def read(self, reads: Sequence[SlotRead], take: Take) -> None:
        """See `SlotStore.read`."""
        if not reads:
            return
        with self._transfer.exclusive() as staging:
            places = [lying.place if (lying := self._lying.get(read.header.slot)) else None for read in reads]
            extents = [
                extent
                for number, (read, place) in enumerate(zip(reads, places, strict=True))
                if place is not None
                for extent in self._read_extents(number, read, place)
            ]
            if extents:
                self._transfer.read(extents)
            for number, (read, place) in enumerate(zip(reads, places, strict=True)):
                at = number * self._slot_bytes
                start = at + PAGE_BYTES + read.offset % PAGE_BYTES
                payload = staging[start : start + read.payload_bytes].toreadonly()
                take(number, self._check(read, place, bytes(staging[at : at + PAGE_BYTES]), payload), payload)

    def erase(self, headers: Sequence[BlockHeader]) -> None:
        """See `SlotStore.erase`: the places are noted as deleted; the bytes go when their segment does."""
        with self._transfer.exclusive():
            self._delete_places([header.slot for header in headers])

    def forget_cached(self, headers: Sequence[BlockHeader]) -> None:
        """See `SlotStore.forget_cached`."""
        with self._transfer.exclusive():
            self._drop_cached([header.slot for header in headers])

    def resize(self, capacity_blocks: int) -> None:
        """See `SlotStore.resize`: a folder has no size of its own."""
        self._capacity = capacity_blocks

    def compact(self) -> int:
        """See `SlotStore.compact`: segments that are mostly dead are rewritten, each chain in one piece."""
        with self._transfer.exclusive():
            before = self._held_bytes()
            fragmented = {segment.number for segment in self._segments.values() if _is_fragmented(segment)}
            moving = {slot: lying for slot, lying in self._lying.items() if lying.place.segment in fragmented}
            headers = self._headers_of(moving)
        for start in range(0, len(headers), self._batch_slots):
            part = headers[start : start + self._batch_slots]
            with self._transfer.exclusive() as staging:
                self._move([header.slot for header in part], moving, staging)
        with self._transfer.exclusive():
            try:
                self._folder.prune_deleted(set(self._segments))
            except OSError as error:
                raise TransferError(f"{self._folder.path}: {error.strerror}") from error
            return max(0, before - self._held_bytes())

    @property
    def unit_bytes(self) -> int:
        """See `PackingStore.unit_bytes`."""
        return self._segment_bytes

    def footprint(self) -> Footprint:
        """See `PackingStore.footprint`. Without the lock, which transfers hold: figures may be of two moments."""
        segments = list(self._segments.values())
        live_bytes = sum(segment.live_pages for segment in segments) * PAGE_BYTES
        return Footprint(
            held_bytes=sum(segment.end for segment in segments) * PAGE_BYTES,
            live_bytes=live_bytes,
            reclaimable_bytes=sum(s.end - 1 - s.live_pages for s in segments if _is_fragmented(s)) * PAGE_BYTES,
            objects=len(segments),
            objects_least=-(-live_bytes // self._segment_bytes),
        )

    def stretches(self, slots: Sequence[int]) -> list[Stretch | None]:
        """See `PackingStore.stretches`. As `footprint`."""
        found = [self._lying.get(slot) for slot in slots]
        return [
            None if each is None else Stretch(each.place.segment, each.place.page, each.place.page + each.pages)
            for each in found
        ]

    def lay_out(self, headers: Sequence[BlockHeader]) -> None:
        """See `PackingStore.lay_out`: to the segment being written."""
        with self._transfer.exclusive():
            moving = {h.slot: self._lying[h.slot] for h in headers if h.slot in self._lying}
        slots = list(moving)
        for start in range(0, len(slots), self._batch_slots):
            with self._transfer.exclusive() as staging:
                self._move(slots[start : start + self._batch_slots], moving, staging)

    @property
    def upkeep_due(self) -> bool:
        """See `SlotStore.upkeep_due`: more is dead than alive."""
        with self._transfer.exclusive():
            pages = sum(s.end for s in self._segments.values() if s.is_sealed)
            live = sum(s.live_pages for s in self._segments.values() if s.is_sealed)
        dead_bytes = (pages - live) * PAGE_BYTES
        return dead_bytes > max(self._segment_bytes, live * PAGE_BYTES)

    def upkeep(self, copy_table: Callable[[], tuple[SlotRows, list[int]]]) -> None:
        """See `SlotStore.upkeep`."""
        if self.upkeep_due:
            self.compact()

    def close(self, *, in_order: bool, generation_next: int) -> None:
        """See `SlotStore.close`. What was being written is sealed, so that the next opener need not walk it."""
        if self._folder.is_closed:
            return
        try:
            with self._transfer.exclusive():
                if in_order and self._writing is not None:
                    self._seal(self._writing)
        except TransferError:
            pass  # then it is walked
        finally:
            self._transfer.close()
            for segment in self._segments.values():
                segment.close()
            self._folder.close()

    # Segments; hold `exclusive` for all of it

    def _append_all(self, writes: Sequence[SlotWrite], staging: memoryview) -> None:
        """To as many segments as it takes. Raises as `_append`."""
        rest = list(writes)
        while rest:
            segment = self._room_for(block_pages(rest[0].header))
            free_pages = self._segment_bytes // PAGE_BYTES - segment.end
            ends = accumulate(block_pages(write.header) for write in rest)
            fitting = sum(end <= free_pages for end in ends)
            self._append(segment, rest[:fitting], staging)
            rest = rest[fitting:]

    def _room_for(self, pages: int) -> Segment:
        """The segment being written, with room for `pages`. Raises `TransferError`."""
        writing = self._writing
        if writing is not None and (writing.end + pages) * PAGE_BYTES > self._segment_bytes:
            self._seal(writing)
            writing = None
        if writing is None:
            if len(self._segments) >= SEGMENTS_MAX:
                raise TransferError(
                    f"volume {self._volume!r} has {SEGMENTS_MAX} segments; compact it, or set a larger segment_bytes"
                )
            try:
                writing = self._folder.make_segment(self._next_number, self._segment_bytes)
            except OSError as error:
                raise TransferError(f"{self._folder.path}: no segment can be made: {error.strerror}") from error
            self._next_number += 1
            self._segments[writing.number] = writing
            self._transfer.add_file(writing.fd, self._segment_bytes)
            self._writing = writing
        return writing

    def _append(self, segment: Segment, writes: Sequence[SlotWrite], staging: memoryview) -> None:
        """Raises `BlockFormatError` with nothing written; `TransferError`, and nothing is appended to it any more."""
        page, at = segment.end, 0
        extents: list[Extent] = []
        placed: list[tuple[BlockHeader, Lying]] = []
        for write in writes:
            end = at + PAGE_BYTES + write.payload_bytes
            write.copy_payload(staging[at + PAGE_BYTES : end])
            header = write.header
            length = block_pages(header) * PAGE_BYTES
            staging[at : at + PAGE_BYTES] = pack_header(header, write.checksums, place=page, mark=segment.mark)
            staging[end : at + length] = bytes(at + length - end)
            extents.append((page * PAGE_BYTES, at, length, segment.fd))
            placed.append((header, Lying(Place(segment.number, page), block_pages(header))))
            page, at = page + length // PAGE_BYTES, at + length
        try:
            self._transfer.write(extents)
        except TransferError:
            self._give_up(segment)
            raise
        segment.end = page
        self._delete_places([header.slot for header, _ in placed])  # of an attempt of which a part was written
        for header, lying in placed:
            segment.written.append((header, lying.place.page))
            self._hold(header.slot, lying)

    def _delete_places(self, slots: Sequence[int]) -> None:
        """Raises `TransferError`, with nothing deleted."""
        try:
            self._folder.note_deleted([self._lying[slot].place for slot in slots if slot in self._lying])
        except OSError as error:
            raise TransferError(f"{self._folder.path}: deleting failed: {error.strerror}") from error
        for slot in slots:
            self._damaged.pop(slot, None)
            if slot in self._lying:
                self._let_go(self._lying.pop(slot))

    def _hold(self, slot: int, lying: Lying) -> None:
        self._lying[slot] = lying
        self._segments[lying.place.segment].live_pages += lying.pages

    def _let_go(self, lying: Lying) -> None:
        segment = self._segments[lying.place.segment]
        segment.live_pages -= lying.pages
        self._drop_if_dead(segment)

    def _give_up(self, segment: Segment) -> None:
        """After a write that failed: what lies past the last good block is cut off, the next write goes elsewhere."""
        with suppress(TransferError):  # then a walk ends before what failed
            self._seal(segment)

    def _seal(self, segment: Segment) -> None:
        try:
            if segment.end == 1:
                self._forget(segment)
            else:
                seal_segment(segment)
                self._drop_if_dead(segment)
        except OSError as error:
            raise TransferError(f"{segment.path} cannot be sealed: {error.strerror}", in_doubt=True) from error
        finally:
            if self._writing is segment:
                self._writing = None

    def _sync(self) -> None:
        if self._writing is None:
            return
        try:
            os.fdatasync(self._writing.fd)
        except OSError as error:
            raise TransferError(
                f"{self._writing.path} cannot be synced: {error.strerror}; check the file system, then register again",
                in_doubt=True,
            ) from error

    def _drop_if_dead(self, segment: Segment) -> None:
        if segment.is_sealed and segment.live_pages == 0:
            with suppress(OSError):  # its blocks are noted as deleted: the next opener finds it dead and tries again
                self._forget(segment)

    def _forget(self, segment: Segment) -> None:
        del self._segments[segment.number]
        self._transfer.forget_file(segment.fd)
        remove_segment(segment)

    def _held_bytes(self) -> int:
        return sum(segment.end for segment in self._segments.values()) * PAGE_BYTES

    # Reading and moving; hold `exclusive` for all of it

    def _read_extents(self, number: int, read: SlotRead, place: Place) -> Iterator[tuple[int, int, int, int]]:
        """(file offset, staging offset, length, fd): the header page, then the pages that the wanted bytes lie in."""
        fd = self._segments[place.segment].fd
        block_at, staged_at = place.page * PAGE_BYTES, number * self._slot_bytes
        end = page_ceiling(read.offset + read.payload_bytes)
        start = read.offset // PAGE_BYTES * PAGE_BYTES
        if start == 0:
            yield block_at, staged_at, PAGE_BYTES + end, fd
        else:
            yield block_at, staged_at, PAGE_BYTES, fd
            yield block_at + PAGE_BYTES + start, staged_at + PAGE_BYTES, end - start, fd

    def _check(self, read: SlotRead, place: Place | None, page: bytes, payload: memoryview) -> CorruptBlock | None:
        header = read.header
        if place is None:
            reason = self._damaged.get(header.slot, "nothing lies there")
            return CorruptBlock(f"slot {header.slot}: {reason}")
        try:
            mark = self._segments[place.segment].mark
            checksums = check_header(page, header, place=place.page, mark=mark)
            check_parts(payload, header, checksums, read.first)
        except CorruptBlock as error:
            return CorruptBlock(f"segment {place.segment}: {error}")
        return None

    def _headers_of(self, moving: dict[int, Lying]) -> list[BlockHeader]:
        """The blocks there, in the order to write them in."""
        headers: list[BlockHeader] = []
        for slot, lying in moving.items():
            try:
                headers.append(self._copy_of(slot, lying).header)
            except (CorruptBlock, OSError) as error:
                self._set_aside(slot, str(error))
        return chain_order(headers)

    def _copy_of(self, slot: int, lying: Lying) -> _Copy:
        """Raises `CorruptBlock`, `OSError`."""
        segment, page = self._segments[lying.place.segment], lying.place.page
        content = self._folder.read_block(segment, lying)
        try:
            header, checksums = unpack_header(bytes(content[:PAGE_BYTES]), slot, place=page, mark=segment.mark)
        except BlockFormatError as error:
            raise CorruptBlock(str(error)) from error
        payload = content[PAGE_BYTES : PAGE_BYTES + header.payload_bytes]
        check_parts(payload, header, checksums)
        return _Copy(lying, header, checksums, bytes(payload))

    def _move(self, slots: Sequence[int], moving: dict[int, Lying], staging: memoryview) -> None:
        """Copy blocks to the segment being written, durably, verify, then let go of the old places.

        Raises `TransferError`.
        """
        copies: list[_Copy] = []
        for slot in slots:
            if self._lying.get(slot) != moving[slot]:
                continue  # it was deleted meanwhile
            try:
                copies.append(self._copy_of(slot, moving[slot]))
            except (CorruptBlock, OSError) as error:
                self._set_aside(slot, str(error))
        if not copies:
            return
        writes = [SlotWrite(n, c.header, memoryview(c.payload), c.checksums) for n, c in enumerate(copies)]
        for copy in copies:
            del self._lying[copy.header.slot]
        try:
            self._append_all(writes, staging)
            self._sync()
        except TransferError:
            self._lying |= {copy.header.slot: copy.lying for copy in copies}
            raise
        self._drop_cached(slots)
        for copy in copies:
            slot = copy.header.slot
            try:
                self._copy_of(slot, self._lying[slot])
            except (CorruptBlock, OSError):
                self._take_back(copy)
            else:
                self._let_go(copy.lying)

    def _take_back(self, copy: _Copy) -> None:
        """A copy is not what was written: the block goes on where it was."""
        bad = self._lying[copy.header.slot]
        self._lying[copy.header.slot] = copy.lying
        with suppress(OSError):  # found again after a restart, it will be found damaged, and the block is a miss
            self._folder.note_deleted([bad.place])
        self._let_go(bad)

    def _drop_cached(self, slots: Sequence[int]) -> None:
        if self._folder.is_direct:
            return
        for slot in slots:
            lying = self._lying.get(slot)
            if lying is not None:
                fd, offset = self._segments[lying.place.segment].fd, lying.place.page * PAGE_BYTES
                os.posix_fadvise(fd, offset, lying.pages * PAGE_BYTES, os.POSIX_FADV_DONTNEED)

    def _set_aside(self, slot: int, reason: str) -> None:
        """A damaged block keeps its segment from going no longer; whoever reads it is told."""
        lying = self._lying.pop(slot)
        self._damaged[slot] = reason
        with suppress(OSError):  # found again after a restart, it will be found damaged again
            self._folder.note_deleted([lying.place])
        self._let_go(lying)


def _segment_bytes(descriptor: VolumeDescriptor, slot_bytes: int, options: DirectoryOptions) -> int:
    """No more than the volume can need. Raises `VolumeError` where a block or the volume is too large for segments."""
    volume_bytes = PAGE_BYTES + descriptor.capacity_blocks * slot_bytes
    if options.segment_bytes < PAGE_BYTES + slot_bytes:
        raise VolumeError(
            f"volume {descriptor.id!r}: a segment of {options.segment_bytes} bytes takes no block of "
            f"{descriptor.block_bytes_max}; set a larger segment_bytes"
        )
    if volume_bytes > options.segment_bytes * SEGMENTS_MAX // 2:
        raise VolumeError(
            f"volume {descriptor.id!r}: {volume_bytes} bytes make more than {SEGMENTS_MAX // 2} segments of "
            f"{options.segment_bytes}; set a larger segment_bytes"
        )
    return min(options.segment_bytes, volume_bytes)


def _is_fragmented(segment: Segment) -> bool:
    return segment.is_sealed and segment.live_pages < (segment.end - 1) * (1 - _DEAD_SHARE)


def _open_store(opening: Opening) -> DirectoryStore:
    options = opening.options
    assert isinstance(options, DirectoryOptions)
    return DirectoryStore(opening.descriptor, opening.required_path, options, deadline_s=opening.deadline_s)


KIND: VolumeKind = slot_kind(DirectoryOptions, _open_store, inspect=inspect)
