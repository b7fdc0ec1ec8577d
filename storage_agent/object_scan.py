"""What lies under a volume's prefix: its objects by list and index, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from storage_agent.block_header import PAGE_BYTES, BlockHeader, check_header, check_parts, is_sound
from storage_agent.errors import BlockFormatError, CorruptBlock
from storage_agent.object_bucket import Bucket, Listed
from storage_agent.object_format import (
    HEAD_BYTES,
    ObjectIndex,
    blocks_name,
    freed_name,
    index_bytes,
    is_begun,
    mark_in,
    unpack_freed,
    unpack_index,
)

_FIRST_READ_BYTES = 32 * 1024
"""Most indexes are read with their head."""
_READERS = 16


@dataclass(frozen=True, slots=True)
class FoundObject:
    """`index` None: `fault` says why it cannot be used; `is_ours` whether it was a volume's object once."""

    mark: int
    size_bytes: int
    index: ObjectIndex | None = None
    fault: str = ""
    is_ours: bool = True
    freed: frozenset[int] = frozenset()
    """Numbers of its blocks that are free, or whose bytes are not there."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Objects by mark. `freed`: those that something is freed of."""

    blocks: dict[int, int]
    """Sizes in bytes."""
    freed: set[int]


def list_volume(bucket: Bucket, prefix: str) -> Listing:
    """Raises `TransferError`. What has no name of ours is left out."""

    def marks(folder: str) -> Iterator[tuple[int, Listed]]:
        for listed in bucket.list(folder):
            mark = mark_in(listed.name, folder)
            if mark is not None:
                yield mark, listed

    return Listing(
        blocks={mark: listed.size_bytes for mark, listed in marks(f"{prefix}/blocks")},
        freed={mark for mark, _ in marks(f"{prefix}/freed")},
    )


def scan_objects(bucket: Bucket, prefix: str, listing: Listing, payload_bytes_max: int) -> Iterator[FoundObject]:
    """Every object that was listed and is still there, several read at once. Raises `TransferError`."""

    def look(item: tuple[int, int]) -> FoundObject | None:
        mark, size_bytes = item
        return _look(bucket, prefix, mark, size_bytes, mark in listing.freed, payload_bytes_max)

    with ThreadPoolExecutor(_READERS, thread_name_prefix="object-scan") as readers:
        for found in readers.map(look, sorted(listing.blocks.items())):
            if found is not None:
                yield found


def check_block(bucket: Bucket, prefix: str, found: FoundObject, entry: int) -> str:
    """What is wrong with a block's header or payload, or ''. Raises `TransferError`."""
    assert found.index is not None
    block = found.index.block(entry)
    content = bucket.get_range(blocks_name(prefix, found.mark), block.offset, block.end) or b""
    try:
        checksums = check_header(content[:PAGE_BYTES], block.header, place=block.offset, mark=found.mark)
        check_parts(memoryview(content)[PAGE_BYTES:], block.header, checksums)
    except CorruptBlock as error:
        return str(error)
    return "" if len(content) == block.end - block.offset else f"it has {len(content)} bytes"


def _look(
    bucket: Bucket, prefix: str, mark: int, size_bytes: int, has_freed: bool, payload_bytes_max: int
) -> FoundObject | None:
    name = blocks_name(prefix, mark)
    if size_bytes < HEAD_BYTES:
        return FoundObject(mark, size_bytes, fault=f"{name} has {size_bytes} bytes", is_ours=False)
    start = bucket.get_range(name, 0, min(size_bytes, _FIRST_READ_BYTES))
    if start is None:
        return None
    try:
        length = index_bytes(start)
        if length > len(start):
            rest = bucket.get_range(name, len(start), min(length, size_bytes)) if length <= size_bytes else b""
            start += rest or b""
        index = unpack_index(start, mark)
        freed = _freed(bucket, prefix, mark, len(index)) if has_freed else set()
    except BlockFormatError as error:
        return FoundObject(mark, size_bytes, fault=f"{name}: {error}", is_ours=is_begun(start))
    cut = {
        number
        for number, block in enumerate(index.blocks)
        if block.end > size_bytes or is_sound(block.header, payload_bytes_max)
    }
    return FoundObject(mark, size_bytes, index, freed=frozenset(freed | cut))


def _freed(bucket: Bucket, prefix: str, mark: int, count: int) -> set[int]:
    found = bucket.get(freed_name(prefix, mark))
    if found is None:
        return set()
    try:
        return {number for number in unpack_freed(found[0], mark) if number < count}
    except BlockFormatError:
        return set()  # what was freed comes back, whole: a block says itself what it is


def newest_of_each(objects: list[FoundObject]) -> dict[int, dict[int, BlockHeader]]:
    """By mark and number of the block: of blocks that are there twice, the one of the highest generation.

    The copies that a compaction cut short leaves are of one generation; the one in the larger object stays.
    """
    best: dict[object, tuple[int, int, int, int]] = {}
    for found in objects:
        for number, block in enumerate(found.index.blocks if found.index is not None else ()):
            if number in found.freed:
                continue
            rank = (block.header.generation, found.size_bytes, found.mark, number)
            if best.get(block.header.key, (0, 0, 0, 0)) < rank:
                best[block.header.key] = rank
    kept: dict[int, dict[int, BlockHeader]] = {}
    by_mark = {found.mark: found for found in objects}
    for _, _, mark, number in best.values():
        index = by_mark[mark].index
        assert index is not None
        kept.setdefault(mark, {})[number] = index.block(number).header
    return kept
