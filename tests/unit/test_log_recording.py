"""A recording follows a log: all of its batches from a position on, and it says what went before it came."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from advisor.entries import EntryKind, NewEntry, Tick, control_entry
from advisor.log import SqlLog
from advisor.log_recording import LogRecording
from advisor.recording_shelf import NoRoom
from event_plane.parquet import ParquetRecorder, read_parquet
from event_plane.part_file import part_of
from event_plane.schema import Batch, BatchTables, EventRecord, EventType, Namespace, to_records
from event_plane.wire import encode
from tests.disks import file_size_limit

LLAMA = Namespace(tenant="blue", model="llama", block_tokens=16)
EVENTS_A_BATCH = 3


def batch_of(sequence: int) -> NewEntry:
    blocks = range(sequence * 100 + 1, sequence * 100 + 1 + EVENTS_A_BATCH)
    tables = BatchTables()
    records = to_records([EventRecord(EventType.STORE, 3, block, LLAMA, "nvme0") for block in blocks], tables, 1)
    batch = Batch(7, 3, sequence, records, namespaces=tuple(tables.namespaces), locations=tuple(tables.locations))
    return NewEntry(EntryKind.BATCH, encode(batch), producer=7, epoch=3, sequence=sequence, source="core")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[SqlLog]:
    """Positions 1 to 20: batches at the even ones, ticks between."""
    opened = SqlLog(tmp_path / "log.db")
    for pair in range(10):
        opened.append([control_entry(Tick(pair)), batch_of(pair)], recorded_us=1_000 + pair)
    yield opened
    opened.close()


def ended(recording: LogRecording) -> LogRecording:
    recording.start()
    recording.join(60)
    assert not recording.is_alive()
    return recording


def test_batches_from_its_position_on_are_recorded_until_it_is_stopped(log: SqlLog, tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    recording = LogRecording(log, ParquetRecorder(out), 5)
    recording.start()
    log.append([batch_of(10), control_entry(Tick(11))], recorded_us=2_000)
    recording.stopping.set()
    recording.join(60)
    recorded = list(read_parquet(out))
    assert [each.position for each in recorded] == [6, 8, 10, 12, 14, 16, 18, 20, 21]
    assert [each.batch.sequence for each in recorded] == [2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert (recorded[0].source, recorded[0].received_us) == ("core", 1_002)
    assert (recording.fault, recording.missed_entries, recording.events) == ("", 0, 9 * EVENTS_A_BATCH)
    assert recording.to_position == 21


def test_events_enough_end_it_with_the_batch_that_has_them(log: SqlLog, tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    recording = ended(LogRecording(log, ParquetRecorder(out), 1, events=2 * EVENTS_A_BATCH + 1))
    assert [each.position for each in read_parquet(out)] == [2, 4, 6]
    assert recording.fault == ""


def test_seconds_end_it(log: SqlLog, tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    assert ended(LogRecording(log, ParquetRecorder(out), 17, seconds=0.0)).fault == ""
    assert [each.position for each in read_parquet(out)] == [18, 20]


def test_what_retention_dropped_first_is_counted_and_the_rest_recorded(log: SqlLog, tmp_path: Path) -> None:
    log.prune(13)
    out = tmp_path / "r.parquet"
    recording = ended(LogRecording(log, ParquetRecorder(out), 5, seconds=0.0))
    assert [each.position for each in read_parquet(out)] == [14, 16, 18, 20]
    assert (recording.missed_entries, recording.fault) == (9, "")


def test_a_full_disk_ends_it_with_a_sentence_and_the_log_goes_on(log: SqlLog, tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    recorder = ParquetRecorder(out)
    with file_size_limit(1_024):
        recording = ended(LogRecording(log, recorder, 1, seconds=0.0))
    assert recording.fault == "r.parquet cannot be written (File too large): free space, or choose another place"
    assert not out.exists()
    assert not part_of(out).exists()
    assert log.append([control_entry(Tick(99))], recorded_us=1) == 21


def test_little_room_left_ends_it_with_what_there_is(log: SqlLog, tmp_path: Path) -> None:
    def no_room() -> None:
        raise NoRoom("the disk has 5 bytes left")

    out = tmp_path / "r.parquet"
    assert ended(LogRecording(log, ParquetRecorder(out), 1, require_room=no_room)).fault == "the disk has 5 bytes left"
    assert list(read_parquet(out)) == []
