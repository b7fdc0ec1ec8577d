"""Headers of many blocks, saved beside them: what recovery starts from instead of a look at every one.

It is only ever a shortcut. Where it is absent, damaged or of another time, every block is looked at; and what a read
returns is checked against the block's own header, whatever the table says.
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
# magic, version, bytes of names, the file's mark, the table's, rows
_HEAD = struct.Struct("<8sIIQQQ")
_CHECKSUM = struct.Struct("<Q")


def save_rows(path: Path, rows: SlotRows, *, file_mark: int, table_mark: int) -> None:
    """Durable when it returns, and whole at any moment. Raises `OSError`."""
    body, names = rows.pack()
    head = _HEAD.pack(_MAGIC, _VERSION, len(names), file_mark, table_mark, len(rows))
    digest = xxhash.xxh3_64(head)
    digest.update(body)
    digest.update(names)
    replace_file(path, [head, body, names, _CHECKSUM.pack(digest.intdigest())], permissions=0o644)


def load_rows(
    path: Path, *, file_mark: int, row_count: int | None, table_marks: tuple[int, int]
) -> tuple[SlotRows, int] | None:
    """The rows saved for this file under one of these marks, and which; None where there are none to be trusted."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if len(content) < _HEAD.size + _CHECKSUM.size:
        return None
    magic, version, names_bytes, of_file, mark, count = _HEAD.unpack_from(content)
    rows_end = _HEAD.size + count * ROW.itemsize
    if (
        (magic, version, of_file) != (_MAGIC, _VERSION, file_mark)
        or count != (count if row_count is None else row_count)
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
