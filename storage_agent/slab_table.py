"""The slot table of a slab, saved beside it: what recovery starts from instead of a look at every slot.

It is only ever a shortcut. Where it is absent, damaged or of another time, every slot is looked at; and what a read
returns is checked against the slot's own header, whatever the table says.
"""

from __future__ import annotations

import struct
from pathlib import Path

import xxhash

from storage_agent.errors import BlockFormatError
from storage_agent.files import replace_file
from storage_agent.slot_rows import ROW, SlotRows

_MAGIC = b"KVATABL\0"
_VERSION = 2
# magic, version, bytes of names, the slab's mark, the table's, capacity
_HEAD = struct.Struct("<8sIIQQQ")
_CHECKSUM = struct.Struct("<Q")


def save_table(path: Path, rows: SlotRows, *, slab_mark: int, table_mark: int) -> None:
    """Durable when it returns, and whole at any moment. Raises `OSError`."""
    body, names = rows.pack()
    head = _HEAD.pack(_MAGIC, _VERSION, len(names), slab_mark, table_mark, len(rows))
    digest = xxhash.xxh3_64(head)
    digest.update(body)
    digest.update(names)
    replace_file(path, [head, body, names, _CHECKSUM.pack(digest.intdigest())])


def load_table(
    path: Path, *, slab_mark: int, capacity: int, table_marks: tuple[int, int]
) -> tuple[SlotRows, int] | None:
    """The rows saved for this slab under one of these marks, and which; None where there are none to be trusted."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if len(content) < _HEAD.size + _CHECKSUM.size:
        return None
    magic, version, names_bytes, of_slab, mark, count = _HEAD.unpack_from(content)
    rows_end = _HEAD.size + count * ROW.itemsize
    if (
        (magic, version, of_slab, count) != (_MAGIC, _VERSION, slab_mark, capacity)
        or mark not in table_marks
        or len(content) != rows_end + names_bytes + _CHECKSUM.size
    ):
        return None
    view = memoryview(content)
    (stored,) = _CHECKSUM.unpack_from(content, len(content) - _CHECKSUM.size)
    if xxhash.xxh3_64_intdigest(view[: -_CHECKSUM.size]) != stored:
        return None
    try:
        return SlotRows.unpack(view[_HEAD.size : rows_end], view[rows_end : -_CHECKSUM.size]), mark
    except BlockFormatError:
        return None
