"""What a segment log does beyond the contract of every log."""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from backports import zstd

from advisor.entries import EntryKind, NewEntry, SettingsEntry, Tick, control_entry
from advisor.errors import LogError
from advisor.segment_catalogue import Catalogue
from advisor.segment_files import READ_BYTES, SegmentDamaged
from advisor.segment_format import HEAD, META
from advisor.segment_keeper import Keeper
from advisor.segment_log import SegmentLog
from advisor.segment_shelf import Segment, Shelf, raw_path
from tests.disks import disk_of, file_size_limit

SEGMENT_BYTES = 8_192


def batch(sequence: int, payload: bytes | None = None) -> NewEntry:
    payload = os.urandom(500) if payload is None else payload
    return NewEntry(kind=EntryKind.BATCH, payload=payload, producer=1, epoch=1, sequence=sequence, source="core")


def opened(folder: Path, *, read_only: bool = False) -> SegmentLog:
    return SegmentLog(folder, read_only=read_only, segment_bytes=SEGMENT_BYTES)


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def fill(log: SegmentLog, count: int, first: int = 0) -> None:
    for sequence in range(first, first + count):
        log.append([batch(sequence)], 1_000 + sequence)


def raw(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.seg"))


def sealed(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kvz"))


def test_full_segments_are_sealed_and_read_as_before(tmp_path: Path) -> None:
    log = opened(tmp_path)
    fill(log, 60)
    before = [entry.payload for entry in log.read()]
    eventually(lambda: len(sealed(tmp_path)) == 4 and len(raw(tmp_path)) == 1, "four sealed segments, one to write to")
    assert [entry.payload for entry in log.read()] == before
    assert [entry.position for entry in log.read(20, 40)] == list(range(20, 41))
    log.close()
    again = opened(tmp_path)
    assert [entry.payload for entry in again.read()] == before
    again.close()


def test_sealed_segment_unpacks_to_the_segment(tmp_path: Path) -> None:
    log = opened(tmp_path)
    fill(log, 20)
    eventually(lambda: len(sealed(tmp_path)) == 1, "a sealed segment")
    log.close()
    content = zstd.ZstdFile(sealed(tmp_path)[0]).read()
    assert content[: len(b"KVF1")] == b"KVF1"
    frame_bytes = HEAD.size + META.size + len("core") + 500
    assert len(content) == frame_bytes * (SEGMENT_BYTES // frame_bytes)


def test_entries_of_one_kind_are_found_among_many(tmp_path: Path) -> None:
    log = opened(tmp_path)
    ticks = []
    for sequence in range(80):
        ticks += [log.append([control_entry(Tick(sequence))], sequence)] if sequence % 9 == 0 else []
        fill(log, 1, sequence)
    assert [entry.position for entry in log.read(kind=EntryKind.TICK)] == ticks
    assert [entry.position for entry in log.newest(3, EntryKind.TICK)] == ticks[-3:]
    assert [entry.position for entry in log.newest(1_000, EntryKind.TICK)] == ticks
    assert log.newest(5, EntryKind.VOLUME) == []
    assert [entry.position for entry in log.newest(30, None)] == list(range(60, 90))
    log.close()


def test_append_larger_than_a_segment_is_one_segment(tmp_path: Path) -> None:
    log = opened(tmp_path)
    fill(log, 2)
    large = [batch(10 + i, os.urandom(SEGMENT_BYTES)) for i in range(3)]
    assert log.append(large, 5) == 3
    fill(log, 2, 20)
    eventually(lambda: len(sealed(tmp_path)) == 2, "what came before, and the large one")
    assert [entry.payload for entry in log.read(3, 5)] == [entry.payload for entry in large]
    log.close()
    opened(tmp_path).close()
    assert [entry.position for entry in opened(tmp_path, read_only=True).read()] == list(range(1, 8))


def test_append_is_larger_than_one_call_takes(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path)
    assert log.append([batch(i, b"%d" % i) for i in range(3_000)], 5) == 1
    assert [entry.payload for entry in log.read()] == [b"%d" % i for i in range(3_000)]
    log.close()


def test_entry_larger_than_a_read_comes_back(tmp_path: Path) -> None:
    log = opened(tmp_path)
    payloads = [os.urandom(READ_BYTES + 1), b"", os.urandom(READ_BYTES * 2)]
    log.append([batch(i, payload) for i, payload in enumerate(payloads)], 5)
    assert [entry.payload for entry in log.read()] == payloads
    log.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed log of twelve entries in one segment; the last append holds three."""
    folder = tmp_path_factory.mktemp("whole")
    log = opened(folder)
    fill(log, 9)
    log.append([batch(9), control_entry(Tick(3)), batch(10)], 77)
    log.close()
    return folder


def copy_of(whole: Path, folder: Path) -> Path:
    shutil.copytree(whole, folder)
    return raw(folder)[0]


def test_last_segment_cut_at_any_byte_keeps_all_whole_appends(whole: Path, tmp_path: Path) -> None:
    size = raw(whole)[0].stat().st_size
    frame = HEAD.size + META.size + len("core") + 500
    last_append = size - 2 * frame - HEAD.size - META.size - len(control_entry(Tick(3)).payload)
    places = sorted({*range(last_append, size, 97), last_append + 1, last_append + HEAD.size, size - 1})
    for number, place in enumerate(places):
        path = copy_of(whole, tmp_path / str(number))
        os.truncate(path, place)
        log = opened(path.parent)
        assert [entry.position for entry in log.read()] == list(range(1, 10)), place
        assert log.append([batch(20)], 1) == 10
        log.close()
        assert [entry.position for entry in opened(path.parent, read_only=True).read()] == list(range(1, 11))


def test_torn_tail_is_cut_whatever_was_written_of_it(whole: Path, tmp_path: Path) -> None:
    content = raw(whole)[0].read_bytes()
    last_frame = content.rindex(b"KVF1")
    for number, damaged in enumerate(
        [
            content[:last_frame] + bytes(len(content) - last_frame),
            content[: last_frame + 200] + bytes(len(content) - last_frame - 200),
            content[: last_frame + 10] + bytes(HEAD.size) + content[last_frame + 10 + HEAD.size :],
            content[:-1] + bytes([content[-1] ^ 1]) + os.urandom(300),
        ]
    ):
        path = copy_of(whole, tmp_path / str(number))
        path.write_bytes(damaged)
        assert opened(path.parent, read_only=True).last_position() == 9
        assert path.read_bytes() == damaged, "a reader changes nothing"
        log = opened(path.parent)
        assert log.last_position() == 9
        log.close()


def test_damage_before_acknowledged_entries_is_no_torn_tail(whole: Path, tmp_path: Path) -> None:
    path = copy_of(whole, tmp_path / "damaged")
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    for read_only in (False, True):
        with pytest.raises(SegmentDamaged, match=r"\.seg is damaged at byte \d+, where position 4 should be"):
            opened(path.parent, read_only=read_only).last_position()
    assert path.read_bytes() == content


@pytest.mark.parametrize("suffix", ["*.kvz", "*.seg"])
def test_damage_in_the_middle_is_named_where_it_is_read(tmp_path: Path, suffix: str) -> None:
    log = opened(tmp_path)
    fill(log, 60)
    eventually(lambda: len(sealed(tmp_path)) == 4, "sealed segments")
    log.close()
    path = sorted(tmp_path.glob(suffix))[-1]
    content = bytearray(path.read_bytes())
    content[700] ^= 0xFF
    path.write_bytes(content)
    read: list[int] = []
    with pytest.raises(LogError, match=rf"{path.name} is damaged at byte \d+, where position \d+ should be"):
        read.extend(entry.position for entry in opened(tmp_path, read_only=True).read())
    assert read == list(range(1, len(read) + 1))


def test_missing_segment_is_named(tmp_path: Path) -> None:
    log = opened(tmp_path)
    fill(log, 60)
    eventually(lambda: len(sealed(tmp_path)) == 4, "sealed segments")
    log.close()
    sealed(tmp_path)[2].unlink()
    with pytest.raises(LogError, match=r"where position 29 should be \(the segment ends there"):
        list(opened(tmp_path, read_only=True).read())


def test_what_a_killed_keeper_left_is_cleared(tmp_path: Path) -> None:
    log = opened(tmp_path)
    fill(log, 30)
    eventually(lambda: len(sealed(tmp_path)) == 2, "sealed segments")
    log.close()
    done = sealed(tmp_path)[0]
    done.with_suffix(".seg").write_bytes(b"the raw form, not yet unlinked")
    (tmp_path / "prepared.tmp").write_bytes(b"")
    done.with_name(done.name + ".tmp").write_bytes(b"half")
    assert [entry.position for entry in opened(tmp_path, read_only=True).read()] == list(range(1, 31))
    again = opened(tmp_path)
    assert [entry.position for entry in again.read()] == list(range(1, 31))
    again.close()
    assert list(tmp_path.glob("*.tmp")) == []
    assert not done.with_suffix(".seg").exists()


def rows(folder: Path) -> list[tuple[int, int]]:
    connection = sqlite3.connect(folder / "catalogue.db")
    try:
        return connection.execute("SELECT first_position, last_position FROM segments ORDER BY 1").fetchall()
    finally:
        connection.close()


@pytest.mark.parametrize("damage", ["gone", "no database"])
def test_catalogue_is_made_again_from_the_files(tmp_path: Path, damage: str) -> None:
    log = opened(tmp_path)
    for _ in range(3):
        term = log.next_term(1, "host", 2, "0")
    log.append([control_entry(SettingsEntry({}, "policy", term))], 5)
    fill(log, 60)
    eventually(lambda: len(rows(tmp_path)) == 4, "four rows")
    before = rows(tmp_path)
    log.close()
    for path in tmp_path.glob("catalogue.db*"):
        path.unlink()
    if damage == "no database":
        (tmp_path / "catalogue.db").write_bytes(b"no database at all, but long enough to be looked at " * 50)
    again = opened(tmp_path)
    assert rows(tmp_path) == before == [(1, 14), (15, 28), (29, 42), (43, 56)]
    assert again.next_term(1, "host", 2, "0") == 4, "an agent refuses a term that it has seen"
    again.close()


def test_pruned_segments_are_gone_from_folder_and_catalogue(tmp_path: Path) -> None:
    log = opened(tmp_path)
    fill(log, 60)
    eventually(lambda: len(rows(tmp_path)) == 4, "four rows")
    assert log.prune(41) == 28
    assert [path.stem for path in sealed(tmp_path)] == [f"{29:020d}", f"{43:020d}"]
    assert rows(tmp_path) == [(29, 42), (43, 56)]
    log.close()


def test_reader_of_another_process_is_told_that_entries_went(tmp_path: Path) -> None:
    log = opened(tmp_path)
    fill(log, 60)
    reading = opened(tmp_path, read_only=True).read()
    assert next(reading).position == 1
    log.prune(42)
    with pytest.raises(LogError, match=r"entries 15–42 of .* were dropped while they were read: read again from 43"):
        list(reading)
    log.close()


def test_segment_dropped_while_it_is_sealed_leaves_neither_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw_path(tmp_path, 1).write_bytes(b"raw")
    raw_path(tmp_path, 5).write_bytes(b"raw")
    temporary = tmp_path / "sealing"
    temporary.write_bytes(b"sealed")
    shelf = Shelf(tmp_path)
    shelf.relist()
    left: list[list[str]] = []

    def drop_before_the_raw_form_is_unlinked(folder: Path) -> None:
        monkeypatch.undo()
        shelf.drop(4)
        left.append([path.name for path in folder.iterdir()])

    monkeypatch.setattr("advisor.segment_shelf.sync_folder", drop_before_the_raw_form_is_unlinked)

    assert shelf.seal(shelf.segments()[0], temporary)

    assert left == [[raw_path(tmp_path, 5).name]]


def test_segment_sealed_between_the_look_at_its_name_and_its_size_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first in (1, 5):
        raw_path(tmp_path, first).write_bytes(b"raw")

    def seal_meanwhile(first: int, path: Path, last: int | None) -> Segment:
        monkeypatch.undo()
        path.rename(path.with_suffix(".kvz"))
        return Segment(first, path, last)

    monkeypatch.setattr("advisor.segment_shelf.Segment", seal_meanwhile)
    shelf = Shelf(tmp_path)

    shelf.relist()

    assert [(s.first, s.last, s.path.suffix) for s in shelf.segments()] == [(1, 4, ".kvz"), (5, None, ".seg")]


def test_reader_of_another_process_goes_on_over_segments_sealed_meanwhile(tmp_path: Path) -> None:
    log = opened(tmp_path)
    fill(log, 30)
    eventually(lambda: len(sealed(tmp_path)) == 2, "sealed segments")
    log.close()
    # As they were before they were sealed.
    for path in sealed(tmp_path):
        path.with_suffix(".seg").write_bytes(zstd.ZstdFile(path).read())
        path.rename(path.with_suffix(".later"))
    reading = opened(tmp_path, read_only=True).read()
    assert next(reading).position == 1
    for path in tmp_path.glob("*.later"):
        path.with_suffix(".seg").unlink()
        path.rename(path.with_suffix(".kvz"))
    assert [entry.position for entry in reading] == list(range(2, 31))


def test_reader_follows_when_the_newest_segment_is_sealed_before_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = opened(tmp_path)
    fill(log, 3)
    reader = opened(tmp_path, read_only=True)
    open_segment, sealed_meanwhile = Shelf.open, list[Segment]()

    def open_after_it_went(shelf: Shelf, segment: Segment) -> tuple[Path, int]:
        monkeypatch.undo()
        fill(log, 30, first=3)
        eventually(lambda: not segment.path.exists(), "the first one sealed")
        sealed_meanwhile.append(segment)
        return open_segment(shelf, segment)

    monkeypatch.setattr(Shelf, "open", open_after_it_went)

    assert reader.last_position() == log.last_position()

    assert len(sealed_meanwhile) == 1
    log.close()


def test_write_that_is_cut_short_leaves_nothing_of_the_append(tmp_path: Path) -> None:
    log = opened(tmp_path)
    fill(log, 3)
    with file_size_limit(SEGMENT_BYTES), pytest.raises(LogError, match=r"^cannot append to .*: a file may not grow"):
        log.append([batch(3), batch(4, os.urandom(SEGMENT_BYTES))], 1)
    assert log.last_position() == 3
    assert log.append([batch(3)], 1) == 4
    log.close()
    assert [entry.sequence for entry in opened(tmp_path, read_only=True).read()] == [0, 1, 2, 3]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disk_of(tmp_path / "disk", 2) as disk:
        yield disk


def test_full_disk_refuses_the_append_keeps_what_was_acknowledged_and_goes_on_with_room(small_disk: Path) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(1_000_000))
    log = SegmentLog(small_disk / "log", segment_bytes=100_000)
    positions = (log.append([batch(sequence, os.urandom(30_000))], 1) for sequence in range(100))
    appended: list[int] = []
    with pytest.raises(LogError, match=r"^cannot append to .*: the disk is full"):
        appended.extend(positions)
    acknowledged = len(appended)
    assert acknowledged > 5
    assert [entry.sequence for entry in log.read()] == list(range(acknowledged))
    filler.unlink()
    assert log.append([batch(acknowledged)], 1) == acknowledged + 1
    log.close()
    again = SegmentLog(small_disk / "log", segment_bytes=100_000)
    assert [entry.sequence for entry in again.read()] == list(range(acknowledged + 1))
    again.close()


def test_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LogError, match=r"there is no log at .*absent: check the directory"):
        SegmentLog(tmp_path / "absent", read_only=True)


def test_batches_out_of_order_are_refused(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.append([batch(5)], 1)
    with pytest.raises(LogError, match="batch 3 of producer 0000000000000001, epoch 1, comes after batch 5, at pos"):
        log.append([batch(6), batch(3)], 1)
    assert log.last_position() == 1
    log.close()


def test_read_of_the_segment_that_is_written_to_starts_near_its_entry(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path)
    for sequence in range(70):
        log.append([batch(2 * sequence, os.urandom(50_000)), batch(2 * sequence + 1, b"second")], sequence)
    for opening in ("written", "recovered"):
        (segment,) = log._shelf.segments()
        assert [position for position, _ in segment.landmarks] == [43, 85, 127], opening
        for position in (1, 2, 42, 43, 44, 84, 85, 86, 140):
            assert [(e.position, e.sequence) for e in log.read(position, position)] == [(position, position - 1)]
        assert [entry.position for entry in log.read(42)] == list(range(42, 141))
        log.close()
        log = SegmentLog(tmp_path)
    log.close()


def test_stat_counts_each_file_once(tmp_path: Path) -> None:
    log = opened(tmp_path)
    fill(log, 28)
    log.append([batch(28)], 1_028)
    eventually(lambda: len(sealed(tmp_path)) == 2, "sealed segments")
    log.close()
    raw(tmp_path)[0].unlink()
    figures = opened(tmp_path, read_only=True).stat()
    assert (figures.first_position, figures.last_position) == (1, 28)
    assert (figures.first_recorded_us, figures.last_recorded_us) == (1_000, 1_027)
    assert figures.stored_bytes == sum(path.stat().st_size for path in sealed(tmp_path))
    again = opened(tmp_path)
    assert again.append([batch(30)], 2_000) == 29
    assert again.stat().last_recorded_us == 2_000
    again.close()


def test_writer_killed_before_its_first_segment_leaves_an_empty_log(tmp_path: Path) -> None:
    opened(tmp_path).close()
    for path in raw(tmp_path):
        path.unlink()
    reader = opened(tmp_path, read_only=True)
    assert (reader.stat().first_position, reader.stat().last_position) == (1, 0)
    assert list(reader.read()) == list(reader.read(0, 0)) == []
    log = opened(tmp_path)
    assert log.append([batch(0)], 1) == 1
    log.close()
    assert reader.last_position() == 1


def test_log_that_grows_fast_is_sealed_once_it_is_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As if no segment were full slowly enough, whatever the machine.
    monkeypatch.setattr("advisor.segment_keeper.SEALED_BYTES_PER_S_MAX", 1)
    with closing(SegmentLog(tmp_path, segment_bytes=4_096)) as log:
        fill(log, 40)
        assert len(raw(tmp_path)) > 2
        assert sealed(tmp_path) == []
    monkeypatch.undo()
    with closing(SegmentLog(tmp_path, segment_bytes=4_096)) as log:
        eventually(lambda: len(raw(tmp_path)) == 1, "all sealed but the one to write to")
        assert [entry.position for entry in log.read()] == list(range(1, log.last_position() + 1))


def test_file_that_was_taken_is_left_alone_while_the_next_is_made(tmp_path: Path) -> None:
    with closing(Catalogue(tmp_path, [])) as catalogue:
        keeper = Keeper(Shelf(tmp_path), catalogue, SEGMENT_BYTES)
        taken = keeper.take_prepared()
        taken.write_bytes(b"the writer's")
        assert keeper.take_prepared() != taken
        assert taken.read_bytes() == b"the writer's"
