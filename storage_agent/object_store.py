"""Slots of a volume in objects of a bucket: packed several to an object, found again by their indexes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import structlog

from storage_agent.block_header import (
    PAGE_BYTES,
    BlockHeader,
    PartChecksums,
    check_header,
    check_parts,
    pack_header,
    part_checksums,
)
from storage_agent.chains import chain_order
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import CorruptBlock, TransferError, VolumeError
from storage_agent.fragmentation import Footprint, Stretch, runs_of
from storage_agent.nixl_objects import NixlObjects, ObjectLanes, ObjectRange
from storage_agent.object_bucket import Bucket
from storage_agent.object_catalogue import ObjectCatalogue, Place
from storage_agent.object_format import ObjectIndex, StoredBlock, blocks_name, freed_name, pack_freed, pack_index
from storage_agent.object_owner import ObjectOwner
from storage_agent.object_reading import ReadPlan
from storage_agent.object_scan import FoundObject, list_volume, newest_of_each, scan_objects
from storage_agent.slot_rows import SlotRows
from storage_agent.slot_store import Recovered, SlotRead, SlotWrite, Take

STAGING_BYTES_TARGET = 16 * 1024 * 1024
LANES_BYTES_TARGET = 4 * STAGING_BYTES_TARGET
LANES_MAX = 4
BATCH_SLOTS_MAX = 256
_FACTS_BYTES_MAX = PAGE_BYTES + 256
"""A block's share of an index: its row, its time, and names no longer than its header page has room for."""
_UPKEEP_BATCHES = 2
"""A put or delete that finds the volume wasteful copies no more than so many batches before it returns."""
_PUTTERS_MAX = 8
_LOOKS_MAX = 4
"""Times a read follows a block that a compaction carries from object to object."""

Answer = TypeVar("Answer")
_log = structlog.get_logger()


class Packed(NamedTuple):
    """A block bound for an object. `stored_ms`: when it was put first, since 1970."""

    header: BlockHeader
    payload: memoryview
    checksums: PartChecksums
    stored_ms: int

    @property
    def bytes_in_object(self) -> int:
        return PAGE_BYTES + self.header.payload_bytes


class ObjectStore:
    """Implements `slot_store.SlotStore` and `PackingStore`.

    An object never changes; what is freed of one is said by another.
    After the server failed to answer, every call fails at once, until the volume is opened anew.
    """

    mode = "S3 through NIXL"
    def __init__(
        self,
        descriptor: VolumeDescriptor,
        bucket: Bucket,
        prefix: str,
        *,
        object_bytes: int,
        lease_s: float,
        deadline_s: float,
    ) -> None:
        """Raises `VolumeError` where NIXL's OBJ backend cannot be had."""
        self._descriptor = descriptor
        self._bucket = bucket
        self._prefix = prefix
        self._object_bytes = object_bytes
        self._owner = ObjectOwner(bucket, prefix, descriptor.id, lease_s)
        self._lock = threading.Lock()  # guards the four below
        self._catalogue = ObjectCatalogue()
        self._being_put: set[int] = set()
        self._strangers: frozenset[int] = frozenset()
        self._broken = ""
        self._freeing = threading.Lock()
        self._compacting = threading.Lock()
        self._closed = False
        self._slot_bytes = _FACTS_BYTES_MAX + PAGE_BYTES + descriptor.block_bytes_max
        self._batch_slots = min(BATCH_SLOTS_MAX, max(1, STAGING_BYTES_TARGET // self._slot_bytes))
        staging_bytes = self._batch_slots * self._slot_bytes
        what = f"volume {descriptor.id}"

        def make_lane() -> NixlObjects:
            return NixlObjects(what, bucket.nixl_parameters, staging_bytes=staging_bytes, deadline_s=deadline_s)

        try:
            self._lanes = ObjectLanes(make_lane, max(1, min(LANES_MAX, LANES_BYTES_TARGET // staging_bytes)))
        except TransferError as error:
            raise VolumeError(f"volume {descriptor.id!r} cannot be used: {error}") from error

    @property
    def batch_slots(self) -> int:
        """See `SlotStore.batch_slots`."""
        return self._batch_slots

    # Recovery

    def recover(self) -> Recovered:
        """See `SlotStore.recover`. Raises `TransferError` too: no answer."""
        generation_next = self._owner.acquire()
        listing = list_volume(self._bucket, self._prefix)
        found = list(scan_objects(self._bucket, self._prefix, listing, self._descriptor.block_bytes_max))
        self._strangers = frozenset(each.mark for each in found if not each.is_ours)
        for each in found:
            if each.index is None:
                _log.warning("object of a volume cannot be used", volume=self._descriptor.id, reason=each.fault)
        headers = self._adopt(found, listing.freed)
        capacity = max(self._descriptor.capacity_blocks, len(headers))
        return Recovered(SlotRows.of(capacity, headers), generation_next)

    def _adopt(self, found: list[FoundObject], freed_lists: set[int]) -> list[BlockHeader]:
        """Give the blocks slots. What nobody needs is deleted, what is not served any more is said to be free."""
        kept = newest_of_each(found)
        headers: list[BlockHeader] = []
        partly_freed: list[int] = []
        for each in found:
            if each.index is None or each.mark not in kept:
                continue
            slots: dict[int, int] = {}
            for number, header in kept[each.mark].items():
                slots[number] = len(headers)
                headers.append(header._replace(slot=slots[number]))
            self._catalogue.add(each.index, slots, each.size_bytes)
            if len(each.freed) != len(each.index) - len(slots):
                partly_freed.append(each.mark)
        self._say_what_is_freed(partly_freed)
        useless = [each.mark for each in found if each.is_ours and each.mark not in kept]
        self._delete_objects(useless)
        known = {each.mark for each in found}
        self._bucket.delete([freed_name(self._prefix, mark) for mark in freed_lists - known])
        return headers

    # Put

    def write(self, writes: Sequence[SlotWrite]) -> None:
        """See `SlotStore.write`: as few objects as their size allows, all put at once, durable when it returns."""
        self._require_writable()
        now_ms = int(time.time() * 1000)
        blocks = [Packed(write.header, write.payload, write.checksums, now_ms) for write in writes]
        put = self._put_objects(list(_groups([blocks], self._object_bytes)))
        with self._lock:
            slots = iter([write.header.slot for write in writes])
            for index in put:
                self._catalogue.add(index, {number: next(slots) for number in range(len(index))})
            self._being_put.difference_update(index.mark for index in put)

    def sync(self) -> None:
        """Nothing: an object that was put is durable, or there was an error."""

    def _put_objects(self, groups: Sequence[Sequence[Packed]]) -> list[ObjectIndex]:
        """Put an object for each group, all at once. Their marks stay in `_being_put` until they are in the catalogue.

        Raises `BlockFormatError` before anything is put; `TransferError`, with nothing of it left if that can be.
        """
        with self._lanes.lane() as lane:
            indexes: list[ObjectIndex] = []
            ranges: list[ObjectRange] = []
            at = 0
            for blocks in groups:
                index = _pack_object(lane.staging[at:], blocks)
                indexes.append(index)
                ranges.append(ObjectRange(blocks_name(self._prefix, index.mark), 0, index.object_bytes, at))
                at += index.object_bytes
            marks = [index.mark for index in indexes]
            with self._lock:
                self._being_put.update(marks)
            try:
                failures = self._transferred(lane.write, ranges)
                if failures:
                    number, said = next(iter(failures.items()))
                    reason = self._why_not_put(ranges[number], lane.staging)
                    self._delete_objects(marks)
                    raise TransferError(reason or f"{self._bucket.place}/{ranges[number].name} cannot be put: {said}")
            except TransferError:
                with self._lock:
                    self._being_put.difference_update(marks)
                raise
        return indexes

    def _why_not_put(self, failed: ObjectRange, staging: memoryview) -> str:
        """What the server says, which NIXL does not: it is asked again by obstore. Empty where it takes it now."""
        try:
            self._bucket.put(failed.name, bytes(staging[failed.staging_offset :][: failed.length]))
        except TransferError as error:
            return str(error)
        return ""

    # Get

    def read(self, reads: Sequence[SlotRead], take: Take) -> None:
        """See `SlotStore.read`."""
        if not reads:
            return
        self._require_answer()
        with self._lanes.lane() as lane:
            plan = ReadPlan(self._prefix, reads, self._look_up(reads))
            faults = self._fetch(lane, plan)
            for number in range(len(reads)):
                payload = lane.staging[plan.payload_at(number) : plan.staged_end(number)].toreadonly()
                take(number, faults.get(number) or self._fault_of(lane, plan, number), payload)

    def _fault_of(self, lane: NixlObjects, plan: ReadPlan, number: int) -> CorruptBlock | None:
        """What is wrong with a block that was read to its place in staging."""
        read, place, at = plan.reads[number], plan.places[number], plan.staged_at[number]
        payload = lane.staging[plan.payload_at(number) : plan.staged_end(number)]
        try:
            checksums = check_header(
                bytes(lane.staging[at : at + PAGE_BYTES]), read.header, place=place.offset, mark=place.mark
            )
            check_parts(payload, read.header, checksums, read.first)
        except CorruptBlock as error:
            return error
        return None

    def _fetch(self, lane: NixlObjects, plan: ReadPlan) -> dict[int, CorruptBlock]:
        """Everything to its place in staging; what is wrong with blocks that are not to be had, by number.

        Neighbours come by one range; where that fails, each of them is asked for alone. Raises `TransferError`.
        """
        faults: dict[int, CorruptBlock] = {}
        wanted = list(self._read_ranges(lane, plan, plan.merged()))
        for _ in range(_LOOKS_MAX):
            if not wanted:
                return faults
            alone = [(part, [number]) for number in wanted for part in plan.alone(number)]
            failed = self._read_ranges(lane, plan, alone)
            wanted = []
            for number, said in failed.items():
                (place,) = self._look_up([plan.reads[number]])
                if place != plan.places[number]:  # a compaction carried it elsewhere
                    plan.places[number] = place
                    wanted.append(number)
                else:
                    faults[number] = self._what_is_missing(plan.alone(number)[-1], said)
        raise TransferError(f"slot {plan.reads[wanted[0]].header.slot} was moved {_LOOKS_MAX} times while it was read")

    def _look_up(self, reads: Sequence[SlotRead]) -> list[Place]:
        places: list[Place] = []
        with self._lock:
            for read in reads:
                place = self._catalogue.place(read.header.slot)
                if place is None:
                    raise TransferError(f"slot {read.header.slot} holds nothing")
                places.append(place)
        return places

    def _read_ranges(
        self, lane: NixlObjects, plan: ReadPlan, ranges: Sequence[tuple[ObjectRange, list[int]]]
    ) -> dict[int, str]:
        """What NIXL says of the reads whose range failed, by number."""
        for _, numbers in ranges:
            for number in numbers:
                lane.spoil(plan.payload_at(number))
                lane.spoil(plan.staged_end(number))
        failures = self._transferred(lane.read, [part for part, _ in ranges])
        return {number: said for at, said in failures.items() for number in ranges[at][1]}

    def _what_is_missing(self, part: ObjectRange, said: str) -> CorruptBlock:
        """Why a range cannot be read: NIXL does not say. Raises `TransferError` where it is there."""
        size = self._asked(lambda: self._bucket.size_bytes(part.name))
        if size is None:
            return CorruptBlock(f"object {part.name} is gone")
        if size < part.offset + part.length:
            return CorruptBlock(f"object {part.name} has {size} bytes, {part.offset + part.length} were put")
        raise TransferError(f"{self._bucket.place}/{part.name} cannot be read: {said}")

    # Free

    def erase(self, headers: Sequence[BlockHeader]) -> None:
        """See `SlotStore.erase`: an object without blocks is deleted, what is free of others is put beside them."""
        slots = [header.slot for header in headers]
        with self._freeing:
            with self._lock:
                changed = self._catalogue.after_freeing(slots)
            if not changed:
                return  # a put failed: what may be there of it all the same is an orphan
            self._require_writable()
            with self._lock:
                counts = {mark: len(self._catalogue.objects[mark].index) for mark in changed}
            self._delete_objects([mark for mark, freed in changed.items() if len(freed) == counts[mark]])
            partly = {mark: freed for mark, freed in changed.items() if len(freed) < counts[mark]}
            self._put_freed({mark: pack_freed(mark, counts[mark], freed) for mark, freed in partly.items()})
            with self._lock:
                self._catalogue.free(slots)

    def _say_what_is_freed(self, marks: Iterable[int]) -> None:
        with self._lock:
            known = {mark: self._catalogue.objects[mark] for mark in marks}
            packed = {mark: pack_freed(mark, len(each.index), each.freed) for mark, each in known.items()}
        self._put_freed(packed)

    def _put_freed(self, packed: dict[int, bytes]) -> None:
        """Several at once, by mark."""
        if not packed:
            return
        self._owner.require()
        names = [freed_name(self._prefix, mark) for mark in packed]
        with ThreadPoolExecutor(min(_PUTTERS_MAX, len(packed)), thread_name_prefix="object-freed") as putters:
            self._asked(lambda: list(putters.map(self._bucket.put, names, packed.values())))

    def _delete_objects(self, marks: Iterable[int]) -> None:
        """Blocks before what is freed of them, so that a crash in between leaves none that come back."""
        names = list(marks)
        if not names:
            return
        self._owner.require()  # a process that stood still must not delete what another has taken over
        self._asked(lambda: self._bucket.delete([blocks_name(self._prefix, mark) for mark in names]))
        self._asked(lambda: self._bucket.delete([freed_name(self._prefix, mark) for mark in names]))

    # Upkeep

    def forget_cached(self, headers: Sequence[BlockHeader]) -> None:
        """Nothing: every read is of the server."""

    def resize(self, capacity_blocks: int) -> None:
        """Nothing: slots are numbers."""

    def expired(self, before_ms: int) -> list[BlockHeader]:
        """Blocks that were put before then."""
        with self._lock:
            return self._catalogue.expired(before_ms)

    def compact(self) -> int:
        """See `SlotStore.compact`: small and half-empty objects become few full ones. Deletes orphans first.

        Raises `TransferError` where objects are gone or cut, so that the volume is opened anew without them.
        """
        self._require_writable()
        self._compare_with_listing()
        return self._rewrite_wasteful(blocks_max=self._descriptor.capacity_blocks)

    def _rewrite_wasteful(self, blocks_max: int) -> int:
        with self._compacting:
            with self._lock:
                marks = self._catalogue.worth_rewriting(self._object_bytes, blocks_max)
                before = {mark: self._catalogue.objects[mark].index.object_bytes for mark in marks}
                found = {block.header.slot: (place, block) for place, block in self._catalogue.blocks_of(marks)}
            ordered = [found[header.slot] for header in chain_order([block.header for _, block in found.values()])]
            written_bytes = self._rewrite_all(ordered)
            with self._lock:
                gone_bytes = sum(size for mark, size in before.items() if mark not in self._catalogue.objects)
        return max(0, gone_bytes - written_bytes)

    def _rewrite_all(self, ordered: Sequence[tuple[Place, StoredBlock]]) -> int:
        """Copy blocks into fresh objects in this order, batch by batch. Bytes written. Hold `_compacting`."""
        written_bytes = 0
        for start in range(0, len(ordered), self._batch_slots):
            part = ordered[start : start + self._batch_slots]
            written_bytes += self._rewrite(
                [place for place, _ in part],
                [block.header for _, block in part],
                [block.stored_ms for _, block in part],
            )
        return written_bytes

    @property
    def unit_bytes(self) -> int:
        """See `PackingStore.unit_bytes`."""
        return self._object_bytes

    def footprint(self) -> Footprint:
        """See `PackingStore.footprint`."""
        with self._lock:
            object_bytes, held_bytes = self._catalogue.footprint
            wasteful = self._catalogue.worth_rewriting(self._object_bytes, self._descriptor.capacity_blocks)
            known = [self._catalogue.objects[mark] for mark in wasteful]
            return Footprint(
                held_bytes=object_bytes,
                live_bytes=held_bytes,
                reclaimable_bytes=sum(each.index.object_bytes - each.held_bytes for each in known),
                objects=len(self._catalogue.objects),
                objects_least=-(-held_bytes // self._object_bytes),
            )

    def stretches(self, slots: Sequence[int]) -> list[Stretch | None]:
        """See `PackingStore.stretches`."""
        with self._lock:
            found = [self._catalogue.stored(slot) for slot in slots]
        return [
            None if each is None else Stretch(each[0].mark, each[1].offset, each[1].end) for each in found
        ]

    def lay_out(self, headers: Sequence[BlockHeader]) -> None:
        """See `PackingStore.lay_out`: to fresh objects, and no chain into two that fits into one."""
        self._require_writable()
        with self._compacting:
            with self._lock:
                found = [self._catalogue.stored(header.slot) for header in headers]
            self._rewrite_all([each for each in found if each is not None])

    def _rewrite(self, places: list[Place], headers: list[BlockHeader], times_ms: list[int]) -> int:
        """Copy blocks into fresh objects and hold them there. Bytes written. A corrupt one stays where it is."""
        good: list[tuple[Place, Packed]] = []

        def keep(number: int, error: CorruptBlock | None, payload: memoryview) -> None:
            if error is None:
                header, copy = headers[number], memoryview(bytes(payload))
                checksums = part_checksums(copy, header.part_bytes)
                good.append((places[number], Packed(header, copy, checksums, times_ms[number])))

        still = [number for number, header in enumerate(headers) if self._is_at(header.slot, places[number])]
        places, headers = [places[n] for n in still], [headers[n] for n in still]
        times_ms = [times_ms[n] for n in still]
        self.read([SlotRead(header, 0, header.parts) for header in headers], keep)
        groups = list(_groups(_chains([block for _, block in good]), self._object_bytes))
        indexes = self._put_objects(groups) if groups else []
        sources = iter([place for place, _ in good])
        self._require_same(indexes, [block.header for _, block in good])
        for index in indexes:
            self._switch(index, [next(sources) for _ in range(len(index))])
        return sum(index.object_bytes for index in indexes)

    def _require_same(self, indexes: Sequence[ObjectIndex], headers: Sequence[BlockHeader]) -> None:
        """Read objects back before the old copies of their blocks, `headers` in all, go.

        Raises `TransferError` where they are not what was put, and deletes them.
        """
        reads = [SlotRead(header, 0, header.parts) for header in headers]
        places = [
            Place(index.mark, number, stored.offset)
            for index in indexes
            for number, stored in enumerate(index.blocks)
        ]
        with self._lanes.lane() as lane:
            plan = ReadPlan(self._prefix, reads, places)
            faults: dict[int, object] = dict(self._read_ranges(lane, plan, plan.merged()))
            for number in set(range(len(reads))).difference(faults):
                if (error := self._fault_of(lane, plan, number)) is not None:
                    faults[number] = error
        if faults:
            marks = [index.mark for index in indexes]
            number, said = next(iter(faults.items()))
            self._delete_objects(marks)
            with self._lock:
                self._being_put.difference_update(marks)
            raise TransferError(f"{blocks_name(self._prefix, places[number].mark)} is not what was put: {said}")

    def _is_at(self, slot: int, place: Place) -> bool:
        with self._lock:
            return self._catalogue.place(slot) == place

    def _switch(self, index: ObjectIndex, sources: list[Place]) -> None:
        """Blocks are served from their copies from now on; the old ones are free on the server when it returns."""
        with self._freeing:
            with self._lock:
                slots = self._catalogue.move(index, sources)
                self._being_put.discard(index.mark)
                old = {source.mark for source in sources}
                emptied = [mark for mark in old if mark not in self._catalogue.objects]
            if len(slots) < len(index):  # deleted meanwhile
                old.add(index.mark)
                if not slots:
                    emptied.append(index.mark)
            self._say_what_is_freed(old.difference(emptied))
            self._delete_objects(emptied)

    def _compare_with_listing(self) -> None:
        """Delete orphans: objects that a failed put left. Raises `TransferError` where some of ours are gone or cut."""
        with self._lock:
            before = {mark: known.size_bytes for mark, known in self._catalogue.objects.items()}
            unsettled = self._being_put | self._strangers
        listing = self._asked(lambda: list_volume(self._bucket, self._prefix))
        with self._lock:
            after = self._catalogue.objects.keys() | self._being_put
        known = before.keys() | after | unsettled
        self._delete_objects(listing.blocks.keys() - known)
        self._asked(lambda: self._bucket.delete([freed_name(self._prefix, m) for m in listing.freed - known]))
        lost = [m for m, size in before.items() if m in after and listing.blocks.get(m) != size]
        if lost:
            reason = f"{len(lost)} objects of {self._bucket.place}/{self._prefix} are gone or have another length"
            self._broken = self._broken or reason
            raise TransferError(f"{reason}, {blocks_name(self._prefix, lost[0])} first")

    @property
    def upkeep_due(self) -> bool:
        """See `SlotStore.upkeep_due`: most of what lies there is dead, or in far more objects than need be."""
        with self._lock:
            return self._catalogue.is_wasteful(self._object_bytes)

    def upkeep(self, copy_table: Callable[[], tuple[SlotRows, list[int]]]) -> None:
        """See `SlotStore.upkeep`. The indexes are the table: there is none to save."""
        if self.upkeep_due and not self._broken:
            self._require_writable()
            self._rewrite_wasteful(blocks_max=_UPKEEP_BATCHES * self._batch_slots)

    def close(self, *, in_order: bool, generation_next: int) -> None:
        """See `SlotStore.close`."""
        if self._closed:
            return
        self._closed = True
        self._lanes.close()
        self._owner.release(in_order=in_order, generation_next=generation_next)

    # Server

    def _transferred(
        self, transfer: Callable[[Sequence[ObjectRange]], dict[int, str]], ranges: Sequence[ObjectRange]
    ) -> dict[int, str]:
        """What failed, by number, of a server that answers all the same. Raises `TransferError` where it does not."""
        try:
            failures = transfer(ranges)
        except TransferError as error:
            self._broken = self._broken or str(error)
            # The object's name is never used again, nor is the memory: nothing that is written late does harm.
            raise TransferError(str(error)) from error
        if failures:
            self._asked(lambda: self._bucket.size_bytes(ranges[next(iter(failures))].name))
        return failures

    def _asked(self, ask: Callable[[], Answer]) -> Answer:
        try:
            return ask()
        except TransferError as error:
            self._broken = self._broken or str(error)
            raise

    def _require_answer(self) -> None:
        if self._broken:
            raise TransferError(self._broken)

    def _require_writable(self) -> None:
        self._require_answer()
        self._owner.require()


def _groups(chains: Iterable[Sequence[Packed]], object_bytes: int) -> Iterator[list[Packed]]:
    """Blocks in order, as many together as an object of that size takes, at least one.

    A chain that fits into one object begins another rather than lie in two, where the one before is half full.
    """
    group: list[Packed] = []
    total = 0
    for chain in chains:
        chain_bytes = sum(block.bytes_in_object for block in chain)
        ends_here = 2 * total >= object_bytes and chain_bytes <= object_bytes < total + chain_bytes
        for block in chain:
            if group and (ends_here or total + block.bytes_in_object > object_bytes):
                yield group
                group, total = [], 0
            ends_here = False
            group.append(block)
            total += block.bytes_in_object
    if group:
        yield group


def _chains(blocks: Sequence[Packed]) -> Iterator[list[Packed]]:
    by_slot = {block.header.slot: block for block in blocks}
    for run in runs_of(block.header for block in blocks):
        yield [by_slot[header.slot] for header in run]


def _pack_object(staging: memoryview, blocks: Sequence[Packed]) -> ObjectIndex:
    """Write an object of `blocks` at the start of `staging`. Raises `BlockFormatError`."""
    mark = int.from_bytes(os.urandom(8), "little")
    packed, index = pack_index(mark, [(block.header, block.stored_ms) for block in blocks])
    staging[: len(packed)] = packed
    for block, stored in zip(blocks, index.blocks, strict=True):
        page = pack_header(block.header, block.checksums, place=stored.offset, mark=mark)
        staging[stored.offset : stored.offset + PAGE_BYTES] = page
        staging[stored.offset + PAGE_BYTES : stored.end] = block.payload
    return index
