"""Slots of a slab as they lie on it, read in long strides: what recovery and `kvadvisor verify` go by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from storage_agent.block_header import (
    PAGE_BYTES,
    ZERO_PAGE,
    BlockHeader,
    check_parts,
    is_sound,
    unpack_header,
)
from storage_agent.errors import BlockFormatError, CorruptBlock
from storage_agent.files import read_into, whole_pages
from storage_agent.inspection import SlotFinding, SlotReport
from storage_agent.slab_file import SlabFile
from storage_agent.slab_format import SlotRun

_STRIDE_BYTES = 8 * 1024 * 1024
_WHOLE_SLOT_BYTES_MAX = 64 * 1024
"""Slots up to this size are read with their payloads even where only headers are wanted: one read instead of many."""


class Look(NamedTuple):
    """A slot that is not free. `header` where its header is whole; `fault` where it is torn all the same."""

    slot: int
    header: BlockHeader | None
    fault: str


def look(slab: SlabFile, first: int, end: int, *, check_payloads: bool) -> Iterator[Look]:
    """Slots `first` to `end` that are not free, in order.

    Without `check_payloads` a slot is called live by its header. A slot that cannot be read is torn.
    """
    for run in slab.superblock.runs:
        run_first, run_end = max(first, run.first), min(end, run.end)
        if run_first < run_end:
            yield from _look_at_run(slab, run, run_first, run_end, check_payloads)


def _look_at_run(slab: SlabFile, run: SlotRun, first: int, end: int, check_payloads: bool) -> Iterator[Look]:
    slot_bytes = run.slot_bytes
    is_whole = check_payloads or slot_bytes <= _WHOLE_SLOT_BYTES_MAX
    slots_a_read = max(1, _STRIDE_BYTES // slot_bytes) if is_whole else 1
    read_bytes = slot_bytes if is_whole else PAGE_BYTES
    view = whole_pages(min(slots_a_read, end - first) * read_bytes)
    for start in range(first, end, slots_a_read):
        stop = min(start + slots_a_read, end)
        try:
            read_into(slab.fd, view[: (stop - start) * read_bytes], slab.superblock.slot_offset(start))
        except OSError:
            yield from _look_one_by_one(slab, run, start, stop, check_payloads)
            continue
        for slot in range(start, stop):
            at = (slot - start) * read_bytes
            found = _look_at(slab, run, slot, view[at : at + read_bytes], check_payloads)
            if found is not None:
                yield found


def reports(slab: SlabFile) -> Iterator[SlotReport]:
    """Every slot in order, payloads checked, from the volume alone."""
    following = 0
    capacity = slab.superblock.capacity_blocks
    for slot, header, fault in look(slab, 0, capacity, check_payloads=True):
        yield from (SlotReport(free, "free") for free in range(following, slot))
        following = slot + 1
        if header is None:
            yield SlotReport(slot, "torn", reason=fault)
        else:
            state: SlotFinding = "torn" if fault else "live"
            yield SlotReport(slot, state, header.key, header.generation, header.payload_bytes, fault)
    yield from (SlotReport(free, "free") for free in range(following, capacity))


def _look_one_by_one(slab: SlabFile, run: SlotRun, start: int, stop: int, check_payloads: bool) -> Iterator[Look]:
    view = whole_pages(run.slot_bytes if check_payloads else PAGE_BYTES)
    for slot in range(start, stop):
        try:
            read_into(slab.fd, view, slab.superblock.slot_offset(slot))
        except OSError as error:
            yield Look(slot, None, f"slot {slot} cannot be read: {error.strerror}")
            continue
        found = _look_at(slab, run, slot, view, check_payloads)
        if found is not None:
            yield found


def _look_at(slab: SlabFile, run: SlotRun, slot: int, view: memoryview, check_payloads: bool) -> Look | None:
    page = bytes(view[:PAGE_BYTES])
    if page == ZERO_PAGE:
        return None
    try:
        header, checksums = unpack_header(page, slot, place=slot, mark=slab.superblock.mark)
    except BlockFormatError as error:
        return Look(slot, None, str(error))
    fault = is_sound(header, run.block_bytes)
    if check_payloads and not fault:
        try:
            check_parts(view[PAGE_BYTES : PAGE_BYTES + header.payload_bytes], header, checksums)
        except CorruptBlock as error:
            fault = str(error)
    return Look(slot, header, fault)

