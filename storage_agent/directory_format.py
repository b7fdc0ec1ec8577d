"""The bytes of a directory volume: a folder of packed segment files. Pure: no I/O.

    volume                      one page: what the volume is, and how many times it was opened to write
    owner                       who has it open to write, in words; what is locked
    00000001.segment            page 0 says whose it is; then blocks, each a header page (`block_header`) and its
                                payload rounded up to 4 KiB, without gaps
    00000001.index              the headers of that segment and where they lie, as a `slot_rows` table
    00000002.writing            the segment being written; it gets its last name when it is full and durable
    deleted                     pages of places that hold no block any more, appended

Segments only ever grow at their end, and a sealed one never changes, so readers on other hosts need no lock. Deleted
bytes go when their segment is rewritten.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from storage_agent.block_header import BODY_BYTES, open_seal, seal
from storage_agent.errors import BlockFormatError

FORMAT_VERSION = 1
VOLUME_NAME, OWNER_NAME, DELETED_NAME = "volume", "owner", "deleted"
SEALED, WRITING, INDEX = ".segment", ".writing", ".index"

_VOLUME_MAGIC = b"KVADIRY\0"
_VOLUME = struct.Struct("<8sIIQQQ64s")  # magic, version, id length, mark, lives, block bytes, id
_SEGMENT_MAGIC = b"KVASEGM\0"
_SEGMENT = struct.Struct("<8sIIQQQ")  # magic, version, reserved, the volume's mark, its own, number
_DELETED_MAGIC = b"KVADEAD\0"
_DELETED = struct.Struct("<8sIIQQ")  # magic, version, places, the volume's mark, number of the page
_PLACE = struct.Struct("<II")  # segment, page in it
PLACES_A_PAGE = (BODY_BYTES - _DELETED.size) // _PLACE.size


class Place(NamedTuple):
    """Where a block lies: page `page` of segment number `segment` is its header."""

    segment: int
    page: int


@dataclass(frozen=True, slots=True)
class DirectoryLabel:
    """What a directory volume is. `lives`: how many times it was opened to write."""

    volume_id: str
    block_bytes_max: int
    mark: int
    lives: int = 0


def segment_name(number: int, suffix: str) -> str:
    return f"{number:08d}{suffix}"


def pack_label(label: DirectoryLabel) -> bytes:
    name = label.volume_id.encode()
    facts = (FORMAT_VERSION, len(name), label.mark, label.lives, label.block_bytes_max, name)
    return seal(_VOLUME.pack(_VOLUME_MAGIC, *facts))


def unpack_label(page: bytes) -> DirectoryLabel:
    """Raises `BlockFormatError` for what is no label of this version."""
    body = open_seal(page, _VOLUME_MAGIC, "label")
    _, version, name_bytes, mark, lives, block_bytes_max, name = _VOLUME.unpack_from(body)
    if version != FORMAT_VERSION:
        raise BlockFormatError(f"it has directory format {version}, this version reads {FORMAT_VERSION}")
    return DirectoryLabel(name[:name_bytes].decode(), block_bytes_max, mark, lives)


def pack_segment(number: int, *, volume_mark: int, mark: int) -> bytes:
    return seal(_SEGMENT.pack(_SEGMENT_MAGIC, FORMAT_VERSION, 0, volume_mark, mark, number))


def unpack_segment(page: bytes, number: int, *, volume_mark: int) -> int:
    """The segment's mark. Raises `BlockFormatError` where it is not that segment of that volume."""
    _, version, _, of_volume, mark, of_number = _SEGMENT.unpack_from(open_seal(page, _SEGMENT_MAGIC, "segment"))
    if (version, of_volume, of_number) != (FORMAT_VERSION, volume_mark, number):
        raise BlockFormatError(f"the segment was written as number {of_number} of another volume or version")
    return int(mark)


def pack_deleted(places: Sequence[Place], first_page: int, *, volume_mark: int) -> bytes:
    """Pages of the file `deleted`, from page `first_page` on."""
    pages: list[bytes] = []
    for start in range(0, len(places), PLACES_A_PAGE):
        part = places[start : start + PLACES_A_PAGE]
        number = first_page + len(pages)
        facts = _DELETED.pack(_DELETED_MAGIC, FORMAT_VERSION, len(part), volume_mark, number)
        pages.append(seal(facts + b"".join(_PLACE.pack(*place) for place in part)))
    return b"".join(pages)


def unpack_deleted(page: bytes, number: int, *, volume_mark: int) -> list[Place]:
    """Raises `BlockFormatError` where it is not that page of that volume: the end of what was written durably."""
    body = open_seal(page, _DELETED_MAGIC, "page of deleted places")
    _, version, count, of_volume, of_number = _DELETED.unpack_from(body)
    if (version, of_volume, of_number) != (FORMAT_VERSION, volume_mark, number):
        raise BlockFormatError(f"page {number} of deleted places was written as {of_number} or elsewhere")
    return [Place(*_PLACE.unpack_from(body, _DELETED.size + n * _PLACE.size)) for n in range(count)]
