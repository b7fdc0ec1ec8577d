"""A saved index is whole or refused by name; what was there before a failed save stays."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from advisor.index import saved_index
from advisor.index.array_index import ArrayIndex
from advisor.index.errors import IndexDamaged, IndexFull
from advisor.index.layout import IndexSize
from event_plane.schema import RECORD_DTYPE, EventType
from tests.examples import examples

SIZE = IndexSize.for_blocks(2000)


def filled(count: int = 50, size: IndexSize = SIZE) -> ArrayIndex:
    index = ArrayIndex(size)
    store(index, 1, count)
    return index


def store(index: ArrayIndex, first: int, count: int, kind: EventType = EventType.STORE) -> None:
    records = np.zeros(count, RECORD_DTYPE)
    records["event_type"], records["tier"] = kind, 3
    records["sequence_hash_hi"] = np.arange(first, first + count)
    records["parent_hash_hi"] = np.arange(first, first + count) // 2
    index.apply(records, producer=1, namespace_ids=(5,), locations=("disk",), now_us=1_000_000)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("saved") / "index"
    filled().save(path, b"cursors")
    return path.read_bytes()


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_byte_or_cut_is_noticed(saved: bytes, tmp_path: Path, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(saved) - 1))
    damaged = bytearray(saved)
    if data.draw(st.booleans()):
        del damaged[at:]
    else:
        damaged[at] ^= data.draw(st.integers(1, 255))
    path = tmp_path / "index"
    path.write_bytes(damaged)
    with pytest.raises(IndexDamaged):
        ArrayIndex.load(path, SIZE)


def test_loaded_index_is_equal_and_goes_on(tmp_path: Path) -> None:
    index = filled()
    disk = 0
    index.set_order(disk, "lfu")
    store(index, 3, 4, EventType.ACCESS)
    index.save(tmp_path / "index", b"cursors")
    loaded, extra = ArrayIndex.load(tmp_path / "index", SIZE)
    loaded.check()
    assert extra == b"cursors"
    assert loaded.coldest(disk, 100) == index.coldest(disk, 100)
    assert loaded.totals() == index.totals()
    assert loaded.page()[0] == index.page()[0]
    assert loaded.hottest(10) == index.hottest(10)
    for each in (index, loaded):
        store(each, 20, 400)
        store(each, 1, 30, EventType.REMOVE)
    loaded.check()
    assert loaded.page(limit=1000)[0] == index.page(limit=1000)[0]


def test_index_larger_than_its_limit_is_refused(tmp_path: Path) -> None:
    filled(100).save(tmp_path / "index")
    with pytest.raises(IndexFull, match="raise the index's memory limit"):
        ArrayIndex.load(tmp_path / "index", IndexSize.for_blocks(40))


def test_failed_save_leaves_the_file_of_before_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = filled()
    path = tmp_path / "index"
    index.save(path)
    before = path.read_bytes()
    store(index, 100, 5)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(saved_index.os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            index.save(path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["index"]
    index.save(path)
    assert len(ArrayIndex.load(path, SIZE)[0]) == 55


def test_one_save_at_a_time() -> None:
    index = filled()
    with index.begin_save(), pytest.raises(ValueError, match="wait for that save"):
        index.begin_save()
    index.begin_save().close()


def test_save_beside_ingest_is_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch stores as many blocks as it removes, so each moment between two batches has one count."""
    monkeypatch.setattr(saved_index, "CHUNK_BYTES", 4096)
    index = ArrayIndex(IndexSize.for_blocks(20_000))
    store(index, 1, 4000)
    stop = threading.Event()

    def ingest() -> None:
        first = 1
        while not stop.is_set():
            records = np.zeros(40, RECORD_DTYPE)
            records["event_type"], records["tier"] = [2] * 20 + [1] * 20, 3
            records["sequence_hash_hi"] = [*range(first, first + 20), *range(first + 4000, first + 4020)]
            index.apply(records, producer=1, namespace_ids=(5,), locations=("disk",), now_us=2_000_000)
            first += 20

    writer = threading.Thread(target=ingest)
    writer.start()
    try:
        for _ in range(3):
            index.save(tmp_path / "index")
            loaded, _ = ArrayIndex.load(tmp_path / "index", IndexSize.for_blocks(20_000))
            loaded.check()
            assert len(loaded) == 4000
    finally:
        stop.set()
        writer.join()
    index.check()
