"""A directory volume read by others while its owner writes, deletes and compacts."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from storage_agent.agent import StorageAgent
from storage_agent.directory_format import WRITING, segment_name
from storage_agent.errors import VolumeError
from storage_agent.kinds import inspect_volume, prepare
from storage_agent.port import PutBlock, Result
from storage_agent.shards import Shard, ShardSpan
from storage_agent.volume import Volume
from storage_agent.volume_contract import (
    BLOCK_BYTES,
    LAYOUT,
    NAMESPACE,
    VolumeCase,
    block,
    held,
    key,
    keys,
    payload,
    read,
    results,
)


@pytest.fixture
def owner_case(tmp_path: Path) -> VolumeCase:
    return VolumeCase(kind="directory", path=tmp_path / "shared", options={"segment_bytes": 1 << 20})


@pytest.fixture
def owner(owner_case: VolumeCase) -> Iterator[Volume]:
    with owner_case.opened(capacity_blocks=300) as volume:
        yield volume


@contextmanager
def viewed(owner_case: VolumeCase, **options: float) -> Iterator[Volume]:
    case = VolumeCase(kind="directory-view", path=owner_case.path, options={"look_s": 0.0, **options})
    with case.opened(capacity_blocks=300) as view:
        yield view


def test_a_view_sees_what_its_owner_stores_and_deletes(owner: Volume, owner_case: VolumeCase) -> None:
    owner.put([block(1), block(2)])
    with viewed(owner_case) as view:
        assert read(view, 1, 2, 3)[1] == {1: payload(1), 2: payload(2)}
        owner.put([block(n) for n in range(3, 100)])  # over the end of a segment
        assert read(view, *range(1, 100))[1] == {n: payload(n) for n in range(1, 100)}
        owner.delete(keys(*range(1, 90)))
        owner.compact()
        owner.put([block(100)])
        assert read(view, 95, 100)[1] == {95: payload(95), 100: payload(100)}
        assert held(view) == set(range(90, 101))
        assert results(read(view, 5)[0]) == [Result.MISS]
        assert view.retired_total == 89
        facts, mine = view.live_header(key(95)), owner.live_header(key(95))
        assert facts is not None
        assert mine is not None
        assert facts._replace(slot=mine.slot) == mine


def test_a_segment_that_has_its_name_and_not_yet_its_first_page_is_looked_at_later(
    owner: Volume, owner_case: VolumeCase
) -> None:
    owner.put([block(1)])
    beginning = owner_case.path / segment_name(99, WRITING)
    beginning.touch()
    with viewed(owner_case) as view:
        assert read(view, 1)[1] == {1: payload(1)}
        assert view.stat().degraded == ""
    beginning.unlink()


def test_a_view_reads_right_bytes_or_a_miss_at_every_moment_of_its_owners_work(
    owner: Volume, owner_case: VolumeCase
) -> None:
    done = threading.Event()
    wrong: list[object] = []
    hits: list[int] = []

    def watch() -> None:
        with viewed(owner_case) as view:
            while not done.is_set():
                reads, taken = read(view, *range(60))
                wrong.extend(n for n, found in taken.items() if found != payload(n))
                wrong.extend(r for r in results(reads) if r not in (Result.HIT, Result.MISS))
                hits.append(len(taken))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for turn in range(6):
        owner.put([block(n) for n in range(60)])
        owner.delete(keys(*(n for n in range(60) if (n + turn) % 3)))
        owner.compact()
    done.set()
    watcher.join()
    assert wrong == []
    assert sum(hits) > 0


def test_a_view_changes_nothing_and_says_who_may(owner: Volume, owner_case: VolumeCase) -> None:
    owner.put([block(1)])
    with viewed(owner_case) as view:
        for outcome in (*view.put([block(2)]), *view.delete(keys(1))):
            assert outcome.result is Result.FAILED
            assert "only read from here; ask its owner, process" in outcome.reason
        with pytest.raises(VolumeError, match="ask its owner"):
            view.resize(5)
        with pytest.raises(VolumeError, match="ask its owner"):
            view.compact()
        assert (view.scrub().good, view.stat().blocks, view.stat().mode) == (1, 1, "buffered, read only")
    assert held(owner) == {1}


def test_a_view_cuts_slices_for_its_own_number_of_workers(owner: Volume, owner_case: VolumeCase) -> None:
    whole = np.arange(BLOCK_BYTES // 2, dtype=np.uint16).reshape([axis.extent for axis in LAYOUT.axes])
    stored = b"".join(np.ascontiguousarray(part).tobytes() for part in np.split(whole, 4, axis=3))
    span = ShardSpan(BLOCK_BYTES // 4, 0, 4)
    owner.put([block(2), PutBlock(key(1), NAMESPACE, memoryview(stored), span=span, layout=LAYOUT)])
    with viewed(owner_case) as view:
        for index, part in enumerate(np.split(whole, 2, axis=3)):
            assert read(view, 1, wanted=Shard(index, 2))[1] == {1: np.ascontiguousarray(part).tobytes()}
        assert results(read(view, 2, wanted=Shard(0, 2))[0]) == [Result.FAILED]


def test_damage_is_reported_and_left_to_the_owner(owner: Volume, owner_case: VolumeCase) -> None:
    owner.put([block(1), block(2)])
    assert owner_case.path is not None
    (path,) = owner_case.path.glob("*.writing")
    with path.open("r+b") as file:
        file.seek(path.read_bytes().find(payload(1)) + 5)
        file.write(b"damage")
    with viewed(owner_case) as view:
        reads, taken = read(view, 1, 2)
        assert results(reads) == [Result.CORRUPT, Result.HIT]
        assert taken == {2: payload(2)}
        assert view.stat().corrupt_total == 1
    assert held(owner) == {1, 2}


def test_a_view_of_nothing_says_so(owner_case: VolumeCase) -> None:
    assert owner_case.path is not None
    owner_case.path.mkdir()
    with pytest.raises(VolumeError, match="let its owner make it first"), viewed(owner_case):
        pass


def test_an_agent_serves_a_view_and_tells_of_nothing_on_it(owner: Volume, owner_case: VolumeCase) -> None:
    assert owner_case.path is not None
    owner.put([block(1)])
    with StorageAgent("reader", publisher=None, allowed_roots=[owner_case.path.parent]) as agent:
        asked = VolumeCase(kind="directory-view", path=owner_case.path).descriptor(capacity_blocks=300)
        agent.register_volume(asked)
        buffer = bytearray(BLOCK_BYTES)
        (outcome,) = agent.get(keys(1), [memoryview(buffer)])
        assert (outcome.result, bytes(buffer)) == (Result.HIT, payload(1))
        assert agent.stat().volumes == []


def test_another_process_reads_what_this_one_writes(owner: Volume, owner_case: VolumeCase) -> None:
    owner.put([block(7)])
    code = f"""
from pathlib import Path
from tests.unit.test_directory_view import VolumeCase, payload, read, viewed
with viewed(VolumeCase(kind="directory", path=Path({str(owner_case.path)!r}))) as view:
    assert read(view, 7)[1] == {{7: payload(7)}}
"""
    root = Path(__file__).resolve().parents[2]
    ran = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_an_inspection_reports_each_block_and_what_is_free(owner_case: VolumeCase) -> None:
    assert owner_case.path is not None
    asked = owner_case.descriptor(capacity_blocks=5)
    with owner_case.opened(capacity_blocks=5) as volume:
        volume.put([block(n) for n in range(4)])
        volume.delete(keys(2))
        inspection = inspect_volume(asked, [owner_case.path.parent])
        assert not inspection.was_closed_in_order
        inspection.close()
    (path,) = owner_case.path.glob("*.segment")
    with path.open("r+b") as file:
        file.seek(path.read_bytes().find(payload(3)) + 5)
        file.write(b"damage")
    inspection = inspect_volume(asked, [owner_case.path.parent])
    found = sorted((r.state, r.key.sequence_hash >> 64 if r.key else -1) for r in inspection.reports())
    assert inspection.was_closed_in_order
    inspection.close()
    assert found == [("free", -1), ("free", -1), ("live", 0), ("live", 1), ("torn", 3)]


def test_a_kind_of_view_has_a_path(tmp_path: Path) -> None:
    asked = VolumeCase(kind="directory-view").descriptor()
    with pytest.raises(VolumeError, match="no path is given"):
        prepare(asked, [tmp_path])


def test_view_looks_past_a_draft_that_is_about_to_be_renamed(owner: Volume, owner_case: VolumeCase) -> None:
    owner.put([block(1)])
    # As `replace_file` makes one beside the name that it will take.
    (owner_case.path / ".00000003.index.writing").write_bytes(b"half of it")
    with viewed(owner_case) as view:
        _, taken = read(view, 1)
    assert taken == {1: payload(1)}
