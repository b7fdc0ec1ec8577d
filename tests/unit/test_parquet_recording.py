"""Parquet recordings: columns that say what the page says, groups that are proved, files that are whole or refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import duckdb
import msgspec
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from event_plane.errors import RecordingError
from event_plane.parquet import FACTS_KEY, ParquetRecorder, read_parquet, write_parquet
from event_plane.parquet_rows import SCHEMA, RecordedBatch
from event_plane.part_file import part_of
from event_plane.recording import detect_format
from event_plane.schema import (
    DEPTH_UNKNOWN,
    RECORD_DTYPE,
    Batch,
    BatchKind,
    BatchTables,
    EventRecord,
    EventType,
    Namespace,
    SnapshotRange,
    to_records,
)
from event_plane.wire import encode
from tests.disks import file_size_limit

DOCS = Path(__file__).parents[2] / "docs" / "recordings.md"
LLAMA = Namespace(tenant="blue", model="llama", block_tokens=16)


def batch_of(sequence: int, *events: EventRecord) -> Batch:
    tables = BatchTables()
    records = to_records(list(events), tables, sequence * 100)
    return Batch(
        7, 3, sequence, records, namespaces=tuple(tables.namespaces), locations=tuple(tables.locations),
        extra=tuple(tables.extra), timestamp_us=1_700_000_000_000_000,
    )  # fmt: skip


def stores(sequence: int, count: int) -> Batch:
    blocks = range(sequence * 1_000, sequence * 1_000 + count)
    return batch_of(sequence, *(EventRecord(EventType.STORE, 3, (9 << 64) + block, LLAMA, "nvme0") for block in blocks))


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Four batches: two stores, a Clear of everything, no event, an unknown type."""
    odd = np.zeros(1, RECORD_DTYPE)
    odd["event_type"], odd["storage_location"], odd["namespace"] = 77, 5, 6
    path = tmp_path / "mixed.parquet"
    with ParquetRecorder(path) as recorder:
        first = EventRecord(EventType.STORE, 3, (2**63 + 1) << 64 | 5, LLAMA, "nvme0", depth=0, extra={"lora": 3})
        recorder.write(batch_of(0, first, EventRecord(EventType.STORE, 1, 6, LLAMA, "gpu")), "agent", received_us=1_000)
        recorder.write(batch_of(1, EventRecord(EventType.CLEAR, 0)), "agent", received_us=2_000)
        recorder.write(
            Batch(7, 3, 2, np.empty(0, RECORD_DTYPE), BatchKind.LOST, snapshot=SnapshotRange(through=8)), "agent"
        )
        recorder.write(Batch(7, 3, 9, odd), "agent")
    return path


def test_columns_are_those_that_the_page_lists() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", DOCS.read_text(), re.MULTILINE)
    documented = {name: kind for name, kind in rows if name in SCHEMA.names}
    kinds = {
        "dictionary<values=string, indices=int32, ordered=0>": "text",
        "dictionary<values=string, indices=int16, ordered=0>": "text",
        "dictionary<values=string, indices=int8, ordered=0>": "text",
        "timestamp[us, tz=UTC]": "timestamp, UTC",
    }
    code = {field.name: kinds.get(str(field.type), str(field.type)) for field in SCHEMA}
    assert list(documented) == SCHEMA.names
    assert documented == {
        field.name: code[field.name] + (", or null" if field.nullable else "") for field in SCHEMA
    }


def test_rows_say_in_words_what_records_say_by_index(mixed: Path) -> None:
    rows = pq.read_table(mixed).to_pylist()
    assert [row["event_type"] for row in rows] == ["store", "store", "clear", "none", "77"]
    assert [row["location"] for row in rows] == ["nvme0", "gpu", None, None, None]
    assert [row["tenant"] for row in rows] == ["blue", "blue", None, None, None]
    assert [row["extra"] for row in rows] == ['{"lora":3}', None, None, None, None]
    assert msgspec.json.decode(rows[0]["namespace"], type=Namespace) == LLAMA
    assert [row["kind"] for row in rows] == ["events", "events", "events", "lost", "events"]
    assert [row["snapshot_through"] for row in rows] == [None, None, None, 8, None]
    assert [row["depth"] for row in rows[:2]] == [0, DEPTH_UNKNOWN]
    assert [row["position"] for row in rows] == [1, 1, 2, 3, 4]
    assert [row["envelope"] is not None for row in rows] == [True, False, True, True, True]
    assert rows[0]["received_at"].timestamp() == 0.001
    assert rows[4]["received_at"] is None


def test_pandas_polars_and_duckdb_read_hashes_to_the_last_bit(mixed: Path) -> None:
    halves = [(5, 2**63 + 1), (6, 0), (0, 0), (0, 0), (0, 0)]
    columns = ["sequence_hash_lo", "sequence_hash_hi"]
    frame = pd.read_parquet(mixed)
    assert list(zip(*(frame[name].tolist() for name in columns), strict=True)) == halves
    assert pl.read_parquet(mixed).select(columns).rows() == halves
    assert duckdb.read_parquet(str(mixed)).select(*columns).fetchall() == halves


def test_groups_end_at_whole_batches_and_are_named_in_the_footer(tmp_path: Path) -> None:
    path = tmp_path / "groups.parquet"
    with ParquetRecorder(path, group_rows=10) as recorder:
        for sequence in range(5):
            recorder.write(stores(sequence, 6))
    file = pq.ParquetFile(path)
    assert [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)] == [12, 12, 6]
    groups = msgspec.json.decode(file.metadata.metadata[FACTS_KEY])["groups"]
    assert [(g["first_position"], g["last_position"], g["batches"], g["events"]) for g in groups] == [
        (1, 2, 2, 12), (3, 4, 2, 12), (5, 5, 1, 6),
    ]  # fmt: skip


def test_positions_of_a_log_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "exported.parquet"
    exported = [RecordedBatch(stores(0, 1), "agent", 17, 5), RecordedBatch(stores(1, 1), "agent", 23, 6)]
    assert write_parquet(path, exported) == 2
    assert [(each.position, each.source, each.received_us) for each in read_parquet(path)] == [
        (17, "agent", 5), (23, "agent", 6),
    ]  # fmt: skip


def test_damaged_group_is_named_after_the_whole_ones(tmp_path: Path) -> None:
    path = tmp_path / "damaged.parquet"
    with ParquetRecorder(path, group_rows=10) as recorder:
        for sequence in range(4):
            recorder.write(stores(sequence, 10))
    offset = pq.ParquetFile(path).metadata.row_group(2).column(0).dictionary_page_offset
    content = bytearray(path.read_bytes())
    content[offset + 40] ^= 0xFF
    path.write_bytes(content)
    read: list[int] = []
    with pytest.raises(RecordingError, match=r"damaged\.parquet, row group 2 \(positions 3 to 3\) is damaged"):
        read.extend(each.batch.sequence for each in read_parquet(path))
    assert read == [0, 1]


def test_rows_that_were_changed_by_another_program_are_found_by_the_checksum(tmp_path: Path) -> None:
    path = tmp_path / "changed.parquet"
    write_parquet(path, [RecordedBatch(stores(0, 3))])
    table = pq.read_table(path)
    hits = table.schema.get_field_index("hits")
    changed = table.set_column(hits, table.schema.field(hits), pa.array([1, 2, 3], pa.uint32()))
    pq.write_table(changed.replace_schema_metadata(pq.read_metadata(path).metadata), path)
    with pytest.raises(RecordingError, match=r"row group 0 .*its checksum is"):
        list(read_parquet(path))


def test_parquet_of_another_origin_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.parquet"
    pq.write_table(pa.table({"a": [1]}), path)
    assert detect_format(path) == "parquet"
    with pytest.raises(RecordingError, match="is Parquet of another origin"):
        list(read_parquet(path))


def test_unfinished_recording_has_another_name_and_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "killed.parquet"
    recorder = ParquetRecorder(path, group_rows=10)
    for sequence in range(3):
        recorder.write(stores(sequence, 10))
    assert not path.exists()
    with pytest.raises(RecordingError, match=r"killed\.parquet\.part cannot be read .*killed before it wrote"):
        list(read_parquet(part_of(path)))
    recorder.close()
    assert not part_of(path).exists()
    assert [each.batch.sequence for each in read_parquet(path)] == [0, 1, 2]


def test_recording_of_nothing_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "nothing.parquet"
    ParquetRecorder(path).close()
    assert list(read_parquet(path)) == []
    assert pl.read_parquet(path).columns == SCHEMA.names


@pytest.fixture
def file_bytes_max() -> Iterator[int]:
    with file_size_limit(1_000_000):
        yield 1_000_000


def test_full_disk_keeps_the_groups_that_fitted(tmp_path: Path, file_bytes_max: int) -> None:
    path = tmp_path / "full.parquet"
    recorder = ParquetRecorder(path, group_rows=500)
    noise = np.random.default_rng(1)

    def write_much() -> None:
        for sequence in range(1_000):
            recorder.write(Batch(7, 3, sequence, np.frombuffer(noise.bytes(100 * 500), RECORD_DTYPE)))

    with pytest.raises(RecordingError, match=r"full\.parquet holds the first \d+ of \d+ batches .*free") as full:
        write_much()
    recorder.close()
    kept = [each.batch.sequence for each in read_parquet(path)]
    assert kept == list(range(len(kept)))
    assert f"the first {len(kept)} of" in str(full.value)
    assert len(kept) > 3
    assert path.stat().st_size < file_bytes_max


def test_disk_without_room_for_anything_leaves_nothing(tmp_path: Path, file_bytes_max: int) -> None:
    path = tmp_path / "full.parquet"
    recorder = ParquetRecorder(path)
    recorder.write(Batch(7, 3, 0, np.zeros(60_000, RECORD_DTYPE)))
    with pytest.raises(RecordingError, match=r"full\.parquet cannot be written .*free space"):
        recorder.close()
    assert list(tmp_path.iterdir()) == []


def test_large_recording_is_read_group_by_group(tmp_path: Path) -> None:
    path = tmp_path / "large.parquet"
    batch = stores(0, 500)
    with ParquetRecorder(path, group_rows=5_000) as recorder:
        for sequence in range(100):
            recorder.write(Batch(**{**vars(batch), "sequence": sequence}))
    reading = read_parquet(path)
    before = pa.total_allocated_bytes()
    assert sum(len(each.batch.records) for each in reading) == 50_000
    assert pa.total_allocated_bytes() - before < 5_000_000


def test_encoded_batches_come_back(tmp_path: Path, mixed: Path) -> None:
    copied = tmp_path / "copied.parquet"
    write_parquet(copied, read_parquet(mixed))
    assert [encode(each.batch) for each in read_parquet(copied)] == [encode(each.batch) for each in read_parquet(mixed)]
