"""A directory volume on a real folder: segments, crashes, owners, and what a file system may lack."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from storage_agent import directory_owner, directory_segments
from storage_agent.block_header import PAGE_BYTES
from storage_agent.errors import VolumeError
from storage_agent.port import PutBlock, Result
from storage_agent.volume import Volume
from storage_agent.volume_contract import (
    BLOCK_BYTES,
    NAMESPACE,
    VolumeCase,
    assert_exact,
    block,
    held,
    key,
    keys,
    payload,
    read,
    results,
)

SEGMENT_BYTES = 1 << 20
BLOCK_PAGES = 1 + -(-BLOCK_BYTES // PAGE_BYTES)
A_SEGMENT = (SEGMENT_BYTES // PAGE_BYTES - 1) // BLOCK_PAGES
"""Blocks that fill a segment."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "shared"


@contextmanager
def opened(folder: Path, **fields: Any) -> Iterator[Volume]:
    case = VolumeCase(kind="directory", path=folder, options={"segment_bytes": SEGMENT_BYTES})
    with case.opened(**{"capacity_blocks": 500, **fields}) as volume:
        yield volume


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def crashed(volume: Volume, folder: Path) -> Path:
    """The folder as a crash at this moment would leave it."""
    left = folder.with_name(f"{folder.name}-left")
    shutil.rmtree(left, ignore_errors=True)
    shutil.copytree(folder, left)
    return left


def chain(first: int, count: int) -> list[PutBlock]:
    """Blocks of one prompt, parents first."""
    return [
        PutBlock(key(n), NAMESPACE, memoryview(payload(n)), 0 if n == first else key(n - 1).sequence_hash, n - first)
        for n in range(first, first + count)
    ]


def test_blocks_are_packed_into_segments_that_are_sealed_when_full_and_at_the_end(folder: Path) -> None:
    with opened(folder) as volume:
        assert results(volume.put([block(n) for n in range(2 * A_SEGMENT + 3)])) == [Result.STORED] * (
            2 * A_SEGMENT + 3
        )
        assert names(folder)[:5] == [
            "00000001.index", "00000001.segment", "00000002.index", "00000002.segment", "00000003.writing",
        ]  # fmt: skip
    assert names(folder) == [
        "00000001.index", "00000001.segment", "00000002.index", "00000002.segment", "00000003.index",
        "00000003.segment", "deleted", "owner", "volume",
    ]  # fmt: skip
    assert (folder / "00000003.segment").stat().st_size == (1 + 3 * BLOCK_PAGES) * PAGE_BYTES


def test_a_crash_loses_nothing_that_was_stored_and_brings_nothing_back(folder: Path) -> None:
    with opened(folder) as volume:
        volume.put([block(n) for n in range(A_SEGMENT + 10)])
        volume.delete(keys(3, A_SEGMENT + 2))
        left = crashed(volume, folder)
        before = held(volume)
    with opened(left) as volume:
        assert held(volume) == before
        assert read(volume, *before)[1] == {n: payload(n) for n in before}
        assert not list(left.glob("*.writing"))
        assert_exact(volume)


@pytest.mark.parametrize("place", [100, PAGE_BYTES + 50])
def test_a_block_torn_by_a_crash_is_not_served_and_those_before_it_are(folder: Path, place: int) -> None:
    with opened(folder) as volume:
        volume.put([block(n) for n in range(5)])
        left = crashed(volume, folder)
    with (left / "00000001.writing").open("r+b") as file:
        file.seek((1 + 4 * BLOCK_PAGES) * PAGE_BYTES + place)
        file.write(b"torn")
    with opened(left) as volume:
        assert held(volume) == {0, 1, 2, 3}
        assert results(volume.put([block(4)])) == [Result.STORED]
        assert read(volume, 4)[1] == {4: payload(4)}


@pytest.mark.parametrize("damage", ["gone", "flipped", "short"])
def test_without_its_index_a_segment_is_walked(folder: Path, damage: str) -> None:
    with opened(folder) as volume:
        volume.put([block(n) for n in range(4)])
        volume.delete(keys(1))
    index = folder / "00000001.index"
    content = bytearray(index.read_bytes())
    if damage == "gone":
        index.unlink()
    elif damage == "flipped":
        content[70] ^= 1
        index.write_bytes(content)
    else:
        index.write_bytes(content[:-1])
    with opened(folder) as volume:
        assert read(volume, 0, 1, 2, 3)[1] == {n: payload(n) for n in (0, 2, 3)}


def test_what_a_crash_left_half_made_is_swept_away(folder: Path) -> None:
    with opened(folder) as volume:
        volume.put([block(1)])
    for name, content in {
        ".volume.writing": b"half", ".00000009.index.writing": b"", ".probe-1": b"", "00000007.index": b"of nothing",
        "00000008.writing": bytes(PAGE_BYTES),
    }.items():  # fmt: skip
        (folder / name).write_bytes(content)
    (folder / "deleted").write_bytes((folder / "deleted").read_bytes() + b"half a page")
    with opened(folder) as volume:
        assert held(volume) == {1}
        volume.delete(keys(1))
    assert names(folder) == ["deleted", "owner", "volume"]
    with opened(folder) as volume:
        assert held(volume) == set()


def test_compaction_gives_back_what_is_dead_and_keeps_chains_together(folder: Path) -> None:
    depth = 25
    with opened(folder) as volume:
        prompts = [chain(1000 * prompt, depth) for prompt in range(5)]
        volume.put([b for row in zip(*prompts, strict=True) for b in row])  # block by block, as they are decoded
        volume.delete([b.key for prompt in prompts[2:] for b in prompt])
        assert volume.compact() > SEGMENT_BYTES // 2
        kept = [*range(depth), *range(1000, 1000 + depth)]
        assert read(volume, *kept)[1] == {n: payload(n) for n in kept}
        assert_exact(volume)
    with opened(folder) as volume:
        assert held(volume) == set(kept)
    (last,) = folder.glob("*.segment")
    content = last.read_bytes()
    moved = [n for n in kept if n % 1000 < A_SEGMENT // 5]
    places = [content.find(payload(n)) for n in moved]
    assert places == sorted(places), "each chain in one piece, parents first"


def test_a_crash_between_copy_and_removal_leaves_each_block_once(folder: Path) -> None:
    with opened(folder) as volume:
        volume.put([block(n) for n in range(A_SEGMENT + 1)])
        volume.delete(keys(*range(5, A_SEGMENT)))
        old = {path.name: path.read_bytes() for path in folder.glob("00000001.*")}
        volume.compact()
        assert not list(folder.glob("00000001.*"))
        left = crashed(volume, folder)
    for name, content in old.items():
        (left / name).write_bytes(content)
    for _ in range(2):
        with opened(left) as volume:
            assert held(volume) == {*range(5), A_SEGMENT}
            assert read(volume, *range(5))[1] == {n: payload(n) for n in range(5)}
            assert_exact(volume)
            left = crashed(volume, left)


def test_what_is_mostly_dead_is_compacted_without_being_asked(folder: Path) -> None:
    with opened(folder) as volume:
        for start in range(0, 6 * A_SEGMENT, A_SEGMENT):
            volume.put([block(n) for n in range(start, start + A_SEGMENT)])
            volume.delete(keys(*(n for n in range(start, start + A_SEGMENT) if n % 10)))
        kept = {n for n in range(6 * A_SEGMENT) if n % 10 == 0}
        assert held(volume) == kept
        on_disk = sum(path.stat().st_size for path in folder.iterdir())
        assert on_disk < 4 * SEGMENT_BYTES
        assert read(volume, *kept)[1] == {n: payload(n) for n in kept}


def test_a_number_is_not_used_again_while_a_deleted_place_names_it(folder: Path) -> None:
    with opened(folder) as volume:
        volume.put([block(n) for n in range(3)])
        volume.delete(keys(0, 1, 2))
    with opened(folder) as volume:
        volume.put([block(n) for n in range(3)])
    with opened(folder) as volume:
        assert held(volume) == {0, 1, 2}


def test_a_damaged_block_met_by_compaction_is_reported_to_its_reader(folder: Path) -> None:
    with opened(folder) as volume:
        volume.put([block(n) for n in range(A_SEGMENT + 1)])
        volume.delete(keys(*range(5, A_SEGMENT)))
        with (folder / "00000001.segment").open("r+b") as file:
            file.seek((2 + 2 * BLOCK_PAGES) * PAGE_BYTES)
            file.write(b"damage")
        volume.compact()
        reads, taken = read(volume, *range(5))
        assert results(reads) == [Result.HIT, Result.HIT, Result.CORRUPT, Result.HIT, Result.HIT]
        assert taken == {n: payload(n) for n in (0, 1, 3, 4)}
        assert_exact(volume)


# Owners


def test_a_second_owner_is_told_who_the_first_is(folder: Path) -> None:
    with opened(folder) as volume:
        volume.put([block(1)])
        code = f"""
from pathlib import Path
from storage_agent.directory_owner import DirectoryOwner
DirectoryOwner("v", Path({str(folder)!r}))
"""
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert ran.returncode == 1
        assert f"is owned by process {os.getpid()} on {socket.gethostname()}" in ran.stderr
        assert read(volume, 1)[1] == {1: payload(1)}


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> bool:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(directory_owner, "try_lock", refuse)


def test_where_there_are_no_locks_a_file_says_who_owns_it(no_locks: None, folder: Path) -> None:
    with opened(folder) as volume:
        volume.put([block(1)])
        assert volume.stat().mode.endswith("no locks")
        with pytest.raises(VolumeError, match=f"is owned by process {os.getpid()}"), opened(folder):
            pass
    assert "owner.held" not in names(folder)
    with opened(folder) as volume:
        assert held(volume) == {1}


def test_where_there_are_no_locks_a_dead_owner_of_this_host_is_followed_and_another_host_is_not(
    no_locks: None, folder: Path
) -> None:
    with opened(folder):
        pass
    ended = subprocess.Popen(["true"])
    ended.wait()
    (folder / "owner.held").write_text(f"process {ended.pid} on {socket.gethostname()}")
    with opened(folder):
        pass
    (folder / "owner.held").write_text("process 12 on far-away")
    said = "owned by process 12 on far-away; if that host is gone, remove"
    with pytest.raises(VolumeError, match=said), opened(folder):
        pass


@pytest.mark.parametrize("fields", [{"id": "other"}, {"block_bytes_max": BLOCK_BYTES + 1}])
def test_a_folder_of_another_volume_or_block_size_is_refused(folder: Path, fields: dict[str, Any]) -> None:
    with opened(folder) as volume:
        volume.put([block(1)])
    with pytest.raises(VolumeError, match=r"was made as 'contract' for blocks of 6144 bytes, asked for are"), opened(
        folder, **fields
    ):
        pass
    with opened(folder) as volume:
        assert held(volume) == {1}


def test_a_segment_of_another_volume_is_left_alone(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    for place in (folder, other):
        with opened(place) as volume:
            volume.put([block(1)])
    shutil.copy(other / "00000001.segment", folder / "00000009.segment")
    with pytest.raises(VolumeError, match=r"00000009.segment is no segment of it .* move it away"), opened(folder):
        pass
    (folder / "00000009.segment").unlink()
    (folder / "volume").unlink()
    with pytest.raises(VolumeError, match="has segments but no label"), opened(folder):
        pass


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"block_bytes_max": SEGMENT_BYTES}, "takes no block of 1048576; set a larger segment_bytes"),
        ({"capacity_blocks": 1 << 20}, "make more than 256 segments"),
    ],
)
def test_segments_too_small_for_the_volume_are_refused(folder: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(VolumeError, match=said), opened(folder, **fields):
        pass
    assert not folder.exists()


# What a file system may lack, and faults


@pytest.mark.parametrize("lacking", ["O_DIRECT", "fallocate", "both"])
def test_without_o_direct_or_fallocate_it_works_and_says_so(
    folder: Path, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacking in ("O_DIRECT", "both"):
        monkeypatch.setattr(directory_segments, "make_direct", lambda fd: False)
    if lacking in ("fallocate", "both"):

        def refuse(fd: int, offset: int, size: int) -> None:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")

        monkeypatch.setattr(os, "posix_fallocate", refuse)
    with opened(folder) as volume:
        assert ("buffered" in volume.stat().mode) == (lacking != "fallocate")
        assert ("no fallocate" in volume.stat().mode) == (lacking != "O_DIRECT")
        assert results(volume.put([block(n) for n in range(5)], read_back=True)) == [Result.STORED] * 5
        left = crashed(volume, folder)
    with opened(left) as volume:
        assert read(volume, *range(5))[1] == {n: payload(n) for n in range(5)}


@contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_fails_its_blocks_and_those_before_and_after_are_served(folder: Path) -> None:
    with opened(folder) as volume:
        volume.put([block(1), block(2)])
        with file_size_limit((1 + 3 * BLOCK_PAGES) * PAGE_BYTES):
            outcomes = volume.put([block(3), block(4)])
        assert Result.FAILED in results(outcomes)
        assert volume.stat().degraded
        good = {1, 2} | {3 + n for n, o in enumerate(outcomes) if o.result is Result.STORED}
        assert results(volume.put([block(5)])) == [Result.STORED]
        assert read(volume, 1, 2, 3, 4, 5)[1] == {n: payload(n) for n in good | {5}}
        left = crashed(volume, folder)
    with opened(left) as volume:
        assert held(volume) == good | {5}
        assert_exact(volume)
