"""Parquet recordings on disk: written and read group by group, each group proved by its checksum.

A group is written when its space is reserved, so a full disk costs the group that did not fit and no other. The file
has another name until it is whole: `OUT.part` is unfinished, lacks Parquet's footer and is refused.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from zlib_ng.zlib_ng import crc32

from event_plane import wire
from event_plane.errors import RecordingError, WireError
from event_plane.parquet_rows import COLUMNS_READ, SCHEMA, RecordedBatch, from_table, row_count, to_table
from event_plane.part_file import PartFile
from event_plane.schema import RECORD_COUNT_MAX, Batch

GROUP_ROWS: Final = 131_072
"""Rows that close a row group. A batch lies in one group, so a group is at most one batch longer."""
GROUP_BYTES: Final = 64 * 1024 * 1024
"""Bytes of encoded batches that close a row group before."""
FACTS_KEY: Final = b"kvadvisor.recording"
"""Key of the file's metadata that holds `RecordingFacts` as JSON."""
VERSION: Final = 1

_GROUP_BYTES_MAX: Final = 1 << 30
_FOOTER_BYTES_PER_GROUP: Final = 16 * 1024
_FOOTER_BYTES: Final = 128 * 1024
_TEXT_COLUMNS: Final = [field.name for field in SCHEMA if pa.types.is_dictionary(field.type)]
_REPEATED_COLUMNS: Final = [
    *_TEXT_COLUMNS, "position", "received_at", "producer", "epoch", "sequence", "batch_flags", "batch_timestamp_us",
    "first_event_sequence", "snapshot_as_of", "snapshot_through", "flags", "tier", "group", "depth", "block_size",
    "block_tokens", "hits", "reserved", "location_index", "namespace_index",
]  # fmt: skip
_RISING_COLUMNS: Final = ("timestamp_us", "event_sequence", "extra_index")
_DAMAGES: Final = (pa.ArrowException, OSError, WireError, ValueError, TypeError, OverflowError, RecordingError)


class GroupFacts(msgspec.Struct, frozen=True):
    """One row group. `crc32` is chained over its batches' canonical bytes (`wire.encode`), in order."""

    first_position: int
    last_position: int
    batches: int
    events: int
    crc32: int


class RecordingFacts(msgspec.Struct, frozen=True):
    """What a recording's footer says of its groups."""

    version: int
    groups: list[GroupFacts]


class ParquetRecorder:
    """Writes one recording. Not thread-safe; holds at most one group in memory.

    `path` appears, replacing what had its name, when `close` returns. After an error it holds the groups before, where
    there is one.
    """

    def __init__(self, path: Path, *, group_rows: int = GROUP_ROWS) -> None:
        """Raises `RecordingError` where the file cannot be made, `ValueError` for a number of rows out of range."""
        if not 1 <= group_rows <= GROUP_ROWS:
            raise ValueError(f"row groups of {group_rows} rows are out of range: 1 to {GROUP_ROWS}")
        self.path = path
        self.batches = 0
        self.events = 0
        self._group_rows = group_rows
        self._waiting: list[RecordedBatch] = []
        self._waiting_rows = 0
        self._waiting_bytes = 0
        self._crc = 0
        self._groups: list[GroupFacts] = []
        self._closed = False
        self._file_bytes = 0
        self._part = PartFile(path)
        self._file = self._part.file
        try:
            self._writer = pq.ParquetWriter(
                self._file,
                SCHEMA,
                compression="zstd",
                compression_level=3,
                use_dictionary=_REPEATED_COLUMNS,
                # Past it a text would be written out for each row: the space reserved would not do.
                dictionary_pagesize_limit=_GROUP_BYTES_MAX,
                column_encoding=dict.fromkeys(_RISING_COLUMNS, "DELTA_BINARY_PACKED"),
                write_statistics=[field.name for field in SCHEMA if not pa.types.is_dictionary(field.type)],
                write_page_checksum=True,
            )
        except OSError as error:
            self._part.discard()
            raise self._part.unwritable(error) from error

    @property
    def size_bytes(self) -> int:
        """Of the file so far, and of what waits for its next group, in the wire format. From any thread."""
        return self._file_bytes + self._waiting_bytes

    def write(self, batch: Batch, source: str = "", *, received_us: int = 0, position: int | None = None) -> None:
        """Take a batch, whose place in the recording is its position where none is given.

        Raises `WireError` for one that the wire format cannot say, `RecordingError` for a disk that is full: the file
        is closed then.
        """
        encoded = wire.encode(batch)
        self._crc = crc32(encoded, self._crc)
        self.batches += 1
        self.events += len(batch.records)
        place = self.batches if position is None else position
        self._waiting.append(RecordedBatch(batch, source, place, received_us))
        self._waiting_rows += row_count(batch)
        self._waiting_bytes += len(encoded)
        if self._waiting_rows >= self._group_rows or self._waiting_bytes >= GROUP_BYTES:
            try:
                self._write_group()
            except OSError as error:
                raise self._cut(error) from error

    def close(self) -> None:
        """Write what waits and the footer; the file has its name and is durable when it returns. Idempotent.

        Raises `RecordingError` as `write` does.
        """
        if self._closed:
            return
        try:
            self._write_group()
        except OSError as error:
            raise self._cut(error) from error
        self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_group(self) -> None:
        """Raises `OSError` with the file as it was, and its footer's space reserved."""
        if not self._waiting:
            return
        table = to_table(self._waiting)
        self._file.flush()
        footer_bytes = _FOOTER_BYTES + _FOOTER_BYTES_PER_GROUP * (len(self._groups) + 1)
        os.posix_fallocate(self._file.fileno(), self._file.tell(), table.nbytes + table.nbytes // 8 + footer_bytes)
        self._writer.write_table(table, row_group_size=table.num_rows)
        self._groups.append(
            GroupFacts(
                first_position=self._waiting[0].position,
                last_position=self._waiting[-1].position,
                batches=len(self._waiting),
                events=sum(len(each.batch.records) for each in self._waiting),
                crc32=self._crc,
            )
        )
        self._file_bytes = self._file.tell()
        self._waiting = []
        self._waiting_rows = self._waiting_bytes = self._crc = 0

    def _finish(self) -> None:
        self._closed = True
        facts = msgspec.json.encode(RecordingFacts(VERSION, self._groups))
        try:
            self._writer.add_key_value_metadata({FACTS_KEY: facts})
            self._writer.close()
            self._file.flush()
        except OSError as error:
            raise self._part.unwritable(error) from error
        self._file_bytes, self._waiting_bytes = self._file.tell(), 0
        self._part.finish(self._file_bytes)

    def _cut(self, error: OSError) -> RecordingError:
        """Keep the groups before the one that did not fit."""
        kept = sum(group.batches for group in self._groups)
        if not kept:
            self._closed = True
            with contextlib.suppress(OSError):
                self._writer.close()
            self._part.discard()
            self._waiting_bytes = 0
            return self._part.unwritable(error)
        self._finish()
        return RecordingError(
            f"{self.path} holds the first {kept:,} of {self.batches:,} batches and no more ({error.strerror}): free"
            " space, or record to another disk"
        )


def write_parquet(path: Path, recorded: Iterable[RecordedBatch]) -> int:
    """Write a whole recording; returns its batches. Raises as `ParquetRecorder` does."""
    with ParquetRecorder(path) as recorder:
        for each in recorded:
            recorder.write(each.batch, each.source, received_us=each.received_us, position=each.position or None)
    return recorder.batches


def read_parquet(path: Path) -> Generator[RecordedBatch, None, None]:
    """The batches of a recording, in order; no more than one group is in memory.

    Raises `RecordingError` for a file that is no recording or unfinished, and one that names the group and its
    positions where it is damaged, before any batch of that group.
    """
    with _opened(path) as (file, facts):
        for number, group in enumerate(facts.groups):
            yield from _checked_group(path, file, number, group)


def read_facts(path: Path) -> RecordingFacts:
    """What the footer of a recording says: its groups are not read. Raises `RecordingError` as `read_parquet` does."""
    with _opened(path) as (_, facts):
        return facts


def _checked_group(path: Path, file: pq.ParquetFile, number: int, facts: GroupFacts) -> list[RecordedBatch]:
    try:
        declared = file.metadata.row_group(number)
        if declared.num_rows > GROUP_ROWS + RECORD_COUNT_MAX or declared.total_byte_size > _GROUP_BYTES_MAX:
            raise RecordingError(f"it says {declared.num_rows} rows in {declared.total_byte_size} bytes")
        recorded = list(from_table(file.read_row_group(number, columns=list(COLUMNS_READ))))
        crc = 0
        for each in recorded:
            crc = crc32(wire.encode(each.batch), crc)
        if crc != facts.crc32 or len(recorded) != facts.batches:
            raise RecordingError(f"its checksum is {crc:#010x}, {facts.crc32:#010x} was written")
    except _DAMAGES as error:
        said = str(error).partition("\n")[0]
        raise RecordingError(
            f"{path}, row group {number} (positions {facts.first_position} to {facts.last_position}) is damaged"
            f" ({said}): restore a copy of the file, or record it again"
        ) from error
    return recorded


@contextlib.contextmanager
def _opened(path: Path) -> Generator[tuple[pq.ParquetFile, RecordingFacts], None, None]:
    try:
        size_bytes = path.stat().st_size
        file = pq.ParquetFile(
            path,
            page_checksum_verification=True,
            thrift_string_size_limit=max(size_bytes, 1),
            thrift_container_size_limit=max(size_bytes, 1),
        )
    except (pa.ArrowException, ValueError) as error:
        said = str(error).partition("\n")[0]
        raise RecordingError(
            f"{path} cannot be read as Parquet ({said}): it is damaged, or its recorder was killed before it wrote the"
            " footer; record it again"
        ) from error
    except OSError as error:
        raise RecordingError(
            f"{path} cannot be read ({error.strerror or str(error).partition(chr(10))[0]}): check the path, or record"
            " it again"
        ) from error
    with file:
        yield file, _facts(path, file)


def _facts(path: Path, file: pq.ParquetFile) -> RecordingFacts:
    packed = (file.metadata.metadata or {}).get(FACTS_KEY)
    if packed is None:
        raise RecordingError(f"{path} is Parquet of another origin: give one that `kvadvisor record` wrote")
    try:
        facts = msgspec.json.decode(packed, type=RecordingFacts)
    except msgspec.MsgspecError as error:
        raise RecordingError(f"{path} has a damaged footer ({error}): record it again") from error
    if facts.version != VERSION:
        raise RecordingError(f"{path} has format version {facts.version}, this reader knows {VERSION}: upgrade it")
    missing = [name for name in COLUMNS_READ if name not in file.schema.names]
    if missing or len(facts.groups) != file.metadata.num_row_groups:
        raise RecordingError(
            f"{path} was changed since it was recorded ({len(facts.groups)} groups were written,"
            f" {file.metadata.num_row_groups} are there; columns missing: {missing}): record it again"
        )
    return facts
