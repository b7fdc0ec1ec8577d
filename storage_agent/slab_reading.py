"""Slots read from a slab and checked: by its owner, and by clients of the owner in their own processes."""

from __future__ import annotations

from collections.abc import Sequence

from storage_agent.block_header import PAGE_BYTES, check_header, check_parts, page_ceiling
from storage_agent.errors import CorruptBlock
from storage_agent.file_transfer import Extent, FileTransfer
from storage_agent.slab_file import SlabFile
from storage_agent.slot_store import SlotRead, Take


def read_slots(transfer: FileTransfer, slab: SlabFile, reads: Sequence[SlotRead], take: Take) -> None:
    """See `SlotStore.read`. `transfer` has staging for one slot at least."""
    if not reads:
        return
    superblock = slab.superblock
    slot_bytes, mark = superblock.slot_bytes, superblock.mark
    with transfer.exclusive() as staging:
        staged_slots = len(staging) // slot_bytes

        def check_and_take(first: int, end: int) -> None:
            for number in range(first, end):
                read = reads[number]
                header, at = read.header, number % staged_slots * slot_bytes
                start = at + PAGE_BYTES + read.offset % PAGE_BYTES
                payload = staging[start : start + read.payload_bytes].toreadonly()
                fault: CorruptBlock | None = None
                try:
                    page = bytes(staging[at : at + PAGE_BYTES])
                    checksums = check_header(page, header, place=header.slot, mark=mark)
                    check_parts(payload, header, checksums, read.first)
                except CorruptBlock as error:
                    fault = error
                take(number, fault, payload)

        extents = [_extents(slab, read, number % staged_slots * slot_bytes) for number, read in enumerate(reads)]
        if all(len(each) == 1 for each in extents):  # what has arrived is taken while the rest is under way
            transfer.read([extent for extent, in extents], arrived=check_and_take, reuse_after=staged_slots)
        else:
            for start in range(0, len(reads), staged_slots):
                end = min(start + staged_slots, len(reads))
                transfer.read([extent for each in extents[start:end] for extent in each])
                check_and_take(start, end)


def _extents(slab: SlabFile, read: SlotRead, staged_at: int) -> list[Extent]:
    """The header page to `staged_at`, behind it the pages of the wanted bytes."""
    slot_at = slab.superblock.slot_offset(read.header.slot)
    offset = read.offset
    end = page_ceiling(offset + read.payload_bytes)
    if offset < PAGE_BYTES:
        return [(slot_at, staged_at, PAGE_BYTES + end, slab.fd)]
    start = offset // PAGE_BYTES * PAGE_BYTES
    return [
        (slot_at, staged_at, PAGE_BYTES, slab.fd),
        (slot_at + PAGE_BYTES + start, staged_at + PAGE_BYTES, end - start, slab.fd),
    ]
