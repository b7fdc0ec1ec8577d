"""Slots read from a slab and checked: by its owner, and by clients of the owner in their own processes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from storage_agent.block_header import PAGE_BYTES, check_header, check_parts, page_ceiling
from storage_agent.errors import CorruptBlock
from storage_agent.file_transfer import FileTransfer, Offsets
from storage_agent.slab_format import Superblock
from storage_agent.slot_store import SlotRead, Take


def read_slots(transfer: FileTransfer, superblock: Superblock, reads: Sequence[SlotRead], take: Take) -> None:
    """See `SlotStore.read`. `transfer` has the slab as its one file, and staging for a slot each."""
    if not reads:
        return
    extents = _extents(superblock, reads)
    with transfer.exclusive() as staging:

        def check_and_take(first: int, end: int) -> None:
            for number in range(first, end):
                read, at = reads[number], number * superblock.slot_bytes
                start = at + PAGE_BYTES + read.offset % PAGE_BYTES
                payload = staging[start : start + read.payload_bytes].toreadonly()
                fault: CorruptBlock | None = None
                try:
                    page = bytes(staging[at : at + PAGE_BYTES])
                    checksums = check_header(page, read.header, place=read.header.slot, mark=superblock.mark)
                    check_parts(payload, read.header, checksums, read.first)
                except CorruptBlock as error:
                    fault = error
                take(number, fault, payload)

        if len(extents) == len(reads):  # what has arrived is taken while the rest is under way
            transfer.read(*columns(extents), arrived=check_and_take)
        else:
            transfer.read(*columns(extents))
            check_and_take(0, len(reads))


def columns(extents: Sequence[tuple[int, int, int]]) -> tuple[Offsets, Offsets, Offsets]:
    """Offsets in the file, offsets in staging and lengths of (file, staging, length)."""
    file_offsets, staging_offsets, lengths = np.array(extents, dtype=np.uint64).T.copy()
    return file_offsets, staging_offsets, lengths


def _extents(superblock: Superblock, reads: Sequence[SlotRead]) -> list[tuple[int, int, int]]:
    """(file, staging, length): each header page to its place in staging, behind it the pages of the wanted bytes."""
    extents: list[tuple[int, int, int]] = []
    for number, read in enumerate(reads):
        slot_at, staged_at = superblock.slot_offset(read.header.slot), number * superblock.slot_bytes
        end = page_ceiling(read.offset + read.payload_bytes)
        start = read.offset // PAGE_BYTES * PAGE_BYTES
        if start == 0:
            extents.append((slot_at, staged_at, PAGE_BYTES + end))
        else:
            extents.append((slot_at, staged_at, PAGE_BYTES))
            extents.append((slot_at + PAGE_BYTES + start, staged_at + PAGE_BYTES, end - start))
    return extents
