"""The index in a file: written beside a running index, read in bulk.

A save copies the block and placement tables chunk by chunk, holding the lock for one chunk at a time; rows that change
before they are copied are kept first (see keep.py) and follow in the file. Row by row this costs a batch some 15 ns a
row, and nothing has to be copied at once: copying a page before its first change would cost 4 KB for each row, and
forking would freeze the service's threads and sockets in the child. What can be made again (hash table, heat, steps)
is not saved. The file appears under its name whole or not at all.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import xxhash

from advisor.index.errors import IndexDamaged
from advisor.index.keys import PlaceKey
from advisor.index.layout import (
    BLOCK_DTYPE,
    BLOCK_FREE,
    BLOCK_ROWS,
    BLOCK_TOP,
    BLOCKS_FREE,
    GHOSTS,
    KEEP_BLOCKS_BELOW,
    KEEP_BLOCKS_FROM,
    KEEP_PLACEMENTS_BELOW,
    KEEP_PLACEMENTS_FROM,
    KEPT_BLOCK_DTYPE,
    KEPT_BLOCKS,
    KEPT_PLACEMENT_DTYPE,
    KEPT_PLACEMENTS,
    LIMBO,
    PLACE_DTYPE,
    PLACEMENT_DTYPE,
    PLACEMENT_FREE,
    PLACEMENT_TOP,
    PLACEMENTS_FREE,
    REALM_DTYPE,
    TOUCHED_COUNT,
    Array,
    Tables,
    release,
)
from advisor.turnstile import Turnstile

MAGIC = b"KVINDEX1"
FORMAT = 1
CHUNK_BYTES = 256 << 10
"""Copied in one hold of the lock: about as long as a batch takes."""
READ_BYTES = 8 << 20
_TRAILER = struct.Struct("<QQ8s")

STATE_SAVED = (
    BLOCK_TOP, BLOCK_FREE, BLOCKS_FREE, BLOCK_ROWS, GHOSTS, PLACEMENT_TOP, PLACEMENT_FREE, PLACEMENTS_FREE,
    TOUCHED_COUNT, LIMBO,
)  # fmt: skip

_SECTIONS = {
    "blocks": BLOCK_DTYPE,
    "placements": PLACEMENT_DTYPE,
    "places": PLACE_DTYPE,
    "realms": REALM_DTYPE,
    "touched": np.dtype(np.int32),
    "kept_blocks": KEPT_BLOCK_DTYPE,
    "kept_placements": KEPT_PLACEMENT_DTYPE,
}
"""In the file's order."""


class Section(msgspec.Struct, frozen=True):
    rows: int
    row_bytes: int
    checksum: int
    """XXH3-64."""


class Contents(msgspec.Struct, frozen=True):
    """The file's last part but one: what is in it."""

    format: int
    state: list[int]
    places: list[tuple[int, int, str]]
    sections: dict[str, Section]
    extra: bytes


@dataclass(slots=True)
class Save:
    """An index as it was when this was made, until `close`. One at a time; made by `ArrayIndex.begin_save`."""

    tables: Tables
    lock: Turnstile
    state: list[int]
    place_keys: list[PlaceKey]
    places: Array
    realms: Array
    touched: Array
    done: Callable[[], None]
    closed: bool = False

    @classmethod
    def begin(
        cls, tables: Tables, lock: Turnstile, place_keys: list[PlaceKey], realms: int, done: Callable[[], None]
    ) -> Save:
        """The caller holds the lock."""
        s = tables.state
        s[[KEPT_BLOCKS, KEPT_PLACEMENTS, KEEP_BLOCKS_FROM, KEEP_PLACEMENTS_FROM]] = 0
        s[KEEP_BLOCKS_BELOW], s[KEEP_PLACEMENTS_BELOW] = s[BLOCK_TOP], s[PLACEMENT_TOP]
        return cls(
            tables,
            lock,
            s[list(STATE_SAVED)].tolist(),
            list(place_keys),
            tables.places[: len(place_keys)].copy(),
            tables.realms[:realms].copy(),
            tables.touched[: int(s[TOUCHED_COUNT])].copy(),
            done,
        )

    def __enter__(self) -> Save:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the save, written or not. Idempotent."""
        with self.lock:
            if self.closed:
                return
            self.closed = True
            self.tables.state[[KEEP_BLOCKS_BELOW, KEEP_PLACEMENTS_BELOW]] = 0
            for kept in (self.tables.kept_blocks, self.tables.kept_placements, self.tables.kept_bits):
                release(kept)
            self.done()

    def write(self, path: Path, extra: bytes = b"") -> int:
        """Write the file whole under `path`; `extra` comes back from `load`. Returns its bytes. Raises `OSError`.

        What was there before stays until the new file is safe on the disk.
        """
        temporary = path.with_name(path.name + ".tmp")
        try:
            with open(temporary, "wb", buffering=0) as file:
                size = self._write(file, extra)
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return size

    def _write(self, file: BinaryIO, extra: bytes) -> int:
        _write_all(file, MAGIC)
        tops = dict(zip(STATE_SAVED, self.state, strict=True))
        sections: dict[str, Section] = {}

        def add(name: str, rows: int, pieces: Iterator[memoryview]) -> None:
            digest = xxhash.xxh3_64()
            for piece in pieces:
                digest.update(piece)
                _write_all(file, piece)
            sections[name] = Section(rows, _SECTIONS[name].itemsize, digest.intdigest())

        add("blocks", tops[BLOCK_TOP], self._copied(self.tables.blocks, tops[BLOCK_TOP], KEEP_BLOCKS_FROM))
        add(
            "placements",
            tops[PLACEMENT_TOP],
            self._copied(self.tables.placements, tops[PLACEMENT_TOP], KEEP_PLACEMENTS_FROM),
        )
        # All is copied: from here on no row needs keeping, and those kept stay as they are.
        s = self.tables.state
        kept_blocks = self.tables.kept_blocks[: int(s[KEPT_BLOCKS])]
        kept_placements = self.tables.kept_placements[: int(s[KEPT_PLACEMENTS])]
        for name, rows in (
            ("places", self.places),
            ("realms", self.realms),
            ("touched", self.touched),
            ("kept_blocks", kept_blocks),
            ("kept_placements", kept_placements),
        ):
            add(name, len(rows), iter([_bytes_of(rows)]))
        places = [(key.producer, key.tier, key.location) for key in self.place_keys]
        contents = msgspec.msgpack.encode(Contents(FORMAT, self.state, places, sections, extra))
        _write_all(file, contents)
        _write_all(file, _TRAILER.pack(len(contents), xxhash.xxh3_64_intdigest(contents), MAGIC))
        return file.tell()

    def _copied(self, table: Array, rows: int, copied_to: int) -> Iterator[memoryview]:
        """The table in pieces, each copied under the lock, which raises `state[copied_to]` past it."""
        view = _bytes_of(table)
        buffer = memoryview(bytearray(CHUNK_BYTES))
        row_bytes = table.itemsize
        step = CHUNK_BYTES // row_bytes
        for first in range(0, rows, step):
            end = min(first + step, rows)
            piece = buffer[: (end - first) * row_bytes]
            with self.lock:
                piece[:] = view[first * row_bytes : end * row_bytes]
                self.tables.state[copied_to] = end
            yield piece


def read_contents(path: Path, file: BinaryIO) -> Contents:
    """What a saved index holds. Raises `IndexDamaged`."""
    size = file.seek(0, os.SEEK_END)
    if size < len(MAGIC) + _TRAILER.size:
        raise IndexDamaged(f"{path} has {size} bytes: it was cut")
    file.seek(size - _TRAILER.size)
    length, checksum, magic = _TRAILER.unpack(file.read(_TRAILER.size))
    start = size - _TRAILER.size - length
    if magic != MAGIC or start < len(MAGIC):
        raise IndexDamaged(f"{path} does not end as a saved index does: it was cut, or is none")
    file.seek(start)
    encoded = file.read(length)
    if xxhash.xxh3_64_intdigest(encoded) != checksum:
        raise IndexDamaged(f"{path} was altered: the checksum of its contents is not theirs")
    try:
        contents = msgspec.msgpack.decode(encoded, type=Contents)
    except msgspec.DecodeError as error:
        raise IndexDamaged(f"{path} cannot be understood ({error}): another version wrote it") from error
    held = {name: section.row_bytes for name, section in contents.sections.items()}
    if contents.format != FORMAT or held != {name: dtype.itemsize for name, dtype in _SECTIONS.items()}:
        raise IndexDamaged(f"{path} has format {contents.format}, this version reads {FORMAT}")
    if len(MAGIC) + sum(each.rows * each.row_bytes for each in contents.sections.values()) != start:
        raise IndexDamaged(f"{path} has {start} bytes of tables, its contents say another number: it was altered")
    file.seek(0)
    if file.read(len(MAGIC)) != MAGIC:
        raise IndexDamaged(f"{path} does not start as a saved index does: it was altered")
    return contents


def read_tables(path: Path, file: BinaryIO, contents: Contents, tables: Tables) -> None:
    """Read all sections into `tables`, which are empty and large enough. Raises `IndexDamaged`."""
    kept: dict[str, Array] = {}
    for name, dtype in _SECTIONS.items():
        section = contents.sections[name]
        table: Array
        if name in ("kept_blocks", "kept_placements"):
            table = kept[name] = np.zeros(section.rows, dtype)
        else:
            table = getattr(tables, name)[: section.rows]
        digest = xxhash.xxh3_64()
        view = _bytes_of(table)
        for first in range(0, len(view), READ_BYTES):
            piece = view[first : first + READ_BYTES]
            if _read_all(file, piece) != len(piece):
                raise IndexDamaged(f"{path} ends within its {name}: it was cut")
            digest.update(piece)
        if digest.intdigest() != section.checksum:
            raise IndexDamaged(f"{path} was altered: the checksum of its {name} is not theirs")
    _put_back(tables.blocks, kept["kept_blocks"])
    _put_back(tables.placements, kept["kept_placements"])
    tables.state[list(STATE_SAVED)] = contents.state


def _put_back(table: Array, kept: Array) -> None:
    rows = kept["row"].copy()
    before = kept.view(np.uint8).reshape(len(kept), kept.itemsize)[:, 8:]
    table.view(np.uint8).reshape(len(table), table.itemsize)[rows] = before


def _bytes_of(rows: Array) -> memoryview:
    flat: Any = rows.view(np.ndarray).view(np.uint8).reshape(-1)
    return memoryview(flat)


def _write_all(file: BinaryIO, content: bytes | memoryview) -> None:
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]


def _read_all(file: BinaryIO, into: memoryview) -> int:
    done = 0
    while done < len(into):
        count = file.readinto(into[done:])  # type: ignore[attr-defined]
        if not count:
            break
        done += count
    return done
