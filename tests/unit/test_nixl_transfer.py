"""Real transfers between memory and a real file: NIXL's, and those on threads that take their place."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_agent import nixl_transfer
from storage_agent.errors import TransferError
from storage_agent.file_transfer import DESCRIPTOR_COUNT_MAX, Extent, FileTransfer, Portions
from storage_agent.files import HUGE_PAGE_BYTES, huge_pages
from storage_agent.nixl_transfer import NixlTransfer, runs_of
from storage_agent.thread_transfer import ThreadTransfer

PAGE = 4096
FILE_BYTES = 64 * PAGE


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(opened, 0, FILE_BYTES)
    yield opened
    os.close(opened)


@pytest.fixture(params=[NixlTransfer, ThreadTransfer])
def transfer(request: pytest.FixtureRequest, fd: int) -> Iterator[FileTransfer]:
    made: FileTransfer = request.param("test", {fd: FILE_BYTES}, staging_bytes=16 * PAGE)
    yield made
    made.close()


def pages(fd: int, *extents: tuple[int, int, int]) -> list[Extent]:
    """(page of the file, page of staging, pages)"""
    return [(at * PAGE, staged * PAGE, count * PAGE, fd) for at, staged, count in extents]


def test_scattered_pages_are_written_and_read_back(transfer: FileTransfer, fd: int) -> None:
    with transfer.exclusive() as staging:
        for number in range(3):
            staging[number * PAGE : (number + 1) * PAGE] = bytes([number + 1]) * PAGE
        transfer.write(pages(fd, (9, 0, 1), (2, 1, 1), (40, 2, 1)))
    assert [os.pread(fd, 1, page * PAGE) for page in (9, 2, 40, 3)] == [b"\1", b"\2", b"\3", b"\0"]
    with transfer.exclusive() as staging:
        transfer.read(pages(fd, (40, 4, 1), (9, 6, 2)))
        assert bytes(staging[4 * PAGE : 5 * PAGE]) == b"\3" * PAGE
        assert bytes(staging[6 * PAGE : 8 * PAGE]) == b"\1" * PAGE + b"\0" * PAGE


def test_more_descriptors_than_one_transfer_takes_are_split(transfer: FileTransfer, fd: int) -> None:
    count = DESCRIPTOR_COUNT_MAX + 8
    with transfer.exclusive() as staging:
        staging[:PAGE] = b"x" * PAGE
        transfer.write([(number * 16, 0, 16, fd) for number in range(count)])
    assert os.pread(fd, count * 16 + 1, 0) == b"x" * count * 16 + b"\0"


def test_a_place_outside_the_file_is_refused_and_later_transfers_work(transfer: FileTransfer, fd: int) -> None:
    with transfer.exclusive() as staging:
        with pytest.raises(TransferError, match="refuses the read"):
            transfer.read(pages(fd, (64, 0, 1)))
        staging[:PAGE] = b"y" * PAGE
        transfer.write(pages(fd, (1, 0, 1)))
        transfer.read(pages(fd, (1, 5, 1)))
        assert bytes(staging[5 * PAGE : 6 * PAGE]) == b"y" * PAGE


def test_a_failed_read_says_why_and_the_next_one_works(transfer: FileTransfer, fd: int) -> None:
    os.ftruncate(fd, 8 * PAGE)
    with transfer.exclusive() as staging:
        with pytest.raises(TransferError, match="only 0 of 4096 bytes at byte 40960") as caught:
            transfer.read(pages(fd, (0, 0, 1), (10, 1, 1)))
        assert not caught.value.in_doubt
    os.pwrite(fd, b"z" * PAGE, 3 * PAGE)
    with transfer.exclusive() as staging:
        transfer.read(pages(fd, (3, 2, 1)))
        assert bytes(staging[2 * PAGE : 3 * PAGE]) == b"z" * PAGE


@pytest.mark.parametrize("kind", [NixlTransfer, ThreadTransfer])
def test_a_failed_write_names_the_error_of_the_device(kind: type[FileTransfer]) -> None:
    """/dev/full is a device that is always full."""
    device = os.open("/dev/full", os.O_RDWR)
    try:
        transfer = kind("full", {device: FILE_BYTES}, staging_bytes=PAGE)
        with transfer.exclusive(), pytest.raises(TransferError, match="ENOSPC at byte 0: No space left on device"):
            transfer.write(pages(device, (0, 0, 1)))
        transfer.close()
    finally:
        os.close(device)


def test_after_a_deadline_the_transfer_is_in_doubt_and_fresh_memory_takes_over(fd: int) -> None:
    """A poll submits 64 descriptors, so 400 are not done when a deadline of no time at all is looked at."""
    transfer = NixlTransfer("late", {fd: FILE_BYTES}, staging_bytes=PAGE, deadline_s=0.0)
    with transfer.exclusive() as abandoned:
        abandoned[:] = b"a" * PAGE
        with pytest.raises(TransferError, match=r"no answer from the device in 0.0 s") as caught:
            transfer.write([(number * 16, 0, 16, fd) for number in range(400)])
        assert caught.value.in_doubt
    with transfer.exclusive() as fresh:
        fresh[:] = b"f" * PAGE
        assert bytes(abandoned[:4]) == b"aaaa"
    transfer.close()


def test_a_closed_transfer_says_so(transfer: FileTransfer) -> None:
    transfer.close()
    with pytest.raises(TransferError, match="closed"), transfer.exclusive():
        pass


def test_threads_take_turns_and_see_their_own_bytes(transfer: FileTransfer, fd: int) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            with transfer.exclusive() as staging:
                staging[:PAGE] = bytes([number]) * PAGE
                transfer.write(pages(fd, (number, 0, 1)))
            with transfer.exclusive() as staging:
                transfer.read(pages(fd, (number, 1, 1)))
                if staging[PAGE] != number:
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_loading_nixl_loads_no_torch_and_prints_nothing(tmp_path: Path) -> None:
    script = """
import os, sys
from storage_agent.nixl_transfer import NixlTransfer, runs_of
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 4096)
NixlTransfer("quiet", {fd: 4096}, staging_bytes=4096).close()
assert "torch" not in sys.modules
"""
    ran = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "file"], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_a_forked_child_is_refused(transfer: FileTransfer) -> None:
    child = os.fork()
    if child == 0:
        try:
            with transfer.exclusive():
                os._exit(1)
        except TransferError as error:
            os._exit(0 if "cannot be used after a fork" in str(error) else 2)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_files_come_and_go_and_each_gets_its_own_bytes(transfer: FileTransfer, fd: int, tmp_path: Path) -> None:
    second = os.open(tmp_path / "second", os.O_RDWR | os.O_CREAT)
    os.ftruncate(second, FILE_BYTES)
    with transfer.exclusive() as staging:
        transfer.add_file(second, FILE_BYTES)
        staging[: 2 * PAGE] = b"\1" * PAGE + b"\2" * PAGE
        transfer.write([*pages(fd, (5, 0, 1)), *pages(second, (5, 1, 1))])
    assert [os.pread(each, 1, 5 * PAGE) for each in (fd, second)] == [b"\1", b"\2"]
    with transfer.exclusive():
        transfer.forget_file(second)
    os.close(second)
    # The number may belong to another file now: nothing may be written there.
    third = os.open(tmp_path / "third", os.O_RDWR | os.O_CREAT)
    os.ftruncate(third, FILE_BYTES)
    with transfer.exclusive():
        with pytest.raises(TransferError):
            transfer.write(pages(second, (5, 0, 1)))
        transfer.write(pages(fd, (6, 0, 1)))
    assert os.pread(third, FILE_BYTES, 0) == bytes(FILE_BYTES)
    assert os.pread(fd, 1, 6 * PAGE) == b"\1"
    os.close(third)


def test_what_cannot_be_taken_leaves_nothing_under_way_and_the_next_transfer_uses_the_same_memory(
    fd: int, transfer: FileTransfer
) -> None:
    os.pwrite(fd, b"q" * PAGE, 7 * PAGE)

    def refuse(first: int, end: int) -> None:
        raise ValueError("no room")

    with transfer.exclusive() as staging:
        with pytest.raises(ValueError, match="no room"):
            transfer.read(pages(fd, (0, 0, 1), (1, 1, 1), (2, 2, 1)), arrived=refuse)
        transfer.read(pages(fd, (7, 3, 1)))
        assert bytes(staging[3 * PAGE : 4 * PAGE]) == b"q" * PAGE
    with transfer.exclusive() as again:
        assert again is staging


def test_neighbours_in_file_and_memory_are_moved_as_one() -> None:
    places = [(0, 0, 8), (8, 8, 8), (20, 16, 4), (24, 64, 4), (28, 68, 4), (40, 72, 4)]
    extents = [(*place, 9) for place in places]
    local, remote = runs_of([*extents, (44, 76, 8, 7)], 1000)
    assert remote == [[0, 16, 9], [20, 4, 9], [24, 8, 9], [40, 4, 9], [44, 8, 7]]
    assert local == [[1000, 16, 0], [1016, 4, 0], [1064, 8, 0], [1072, 4, 0], [1076, 8, 0]]


def test_staging_memory_is_zeroed_whole_and_at_a_page_boundary() -> None:
    for size in (PAGE, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + PAGE):
        memory = huge_pages(size)
        assert memory.nbytes == size
        assert not any(memory[::997])
        boundary = HUGE_PAGE_BYTES if size >= HUGE_PAGE_BYTES else PAGE
        assert np.frombuffer(memory, dtype=np.uint8).ctypes.data % boundary == 0
        memory[-1] = 1


def test_a_forked_child_has_no_staging_memory_and_the_parent_reads_on(transfer: FileTransfer, fd: int) -> None:
    os.pwrite(fd, b"p" * PAGE, 0)
    reading, writing = os.pipe()
    with transfer.exclusive() as staging:
        address = np.frombuffer(staging, dtype=np.uint8).ctypes.data
        child = os.fork()
        if child == 0:
            os.read(reading, 1)
            os._exit(0)
        mapped = Path(f"/proc/{child}/maps").read_text()
        ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in mapped.splitlines()]
        transfer.read(pages(fd, (0, 0, 1)))
        read = bytes(staging[:PAGE])
    os.write(writing, b"!")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(reading)
    os.close(writing)
    assert read == b"p" * PAGE
    assert not any(first <= address < end for first, end in ranges)


@given(count=st.integers(1, 200), length=st.sampled_from([1, 4096, 1 << 20, 9 << 20]), reuse_after=st.integers(1, 220))
def test_no_portion_begins_before_those_whose_memory_it_uses_have_ended(
    count: int, length: int, reuse_after: int
) -> None:
    portions = Portions.of([(0, 0, length, 0)] * count, 0, count, reuse_after)
    assert [number for first, end in portions.bounds for number in range(first, end)] == list(range(count))
    begun, ended = 0, 0
    for begins, number in portions.steps():
        first, end = portions.bounds[number]
        if begins:
            assert (first, ended >= end - reuse_after) == (begun, True)
            begun = end
        else:
            assert (first, end <= begun) == (ended, True)
            ended = end
    assert (begun, ended) == (count, count)


@pytest.mark.parametrize("pages_staged", [1, 3, 8])
def test_more_is_moved_than_memory_holds_by_using_it_again(transfer: FileTransfer, fd: int, pages_staged: int) -> None:
    extents = pages(fd, *((number, number % pages_staged, 1) for number in range(48)))
    with transfer.exclusive() as staging:

        def stage(first: int, end: int) -> None:
            for number in range(first, end):
                at = number % pages_staged * PAGE
                staging[at : at + PAGE] = bytes([number]) * PAGE

        transfer.write(extents, stage=stage, reuse_after=pages_staged)
        assert os.pread(fd, 48 * PAGE, 0) == b"".join(bytes([number]) * PAGE for number in range(48))
        seen: list[bytes] = []

        def arrived(first: int, end: int) -> None:
            seen.extend(bytes(staging[n % pages_staged * PAGE :][:PAGE]) for n in range(first, end))

        transfer.read(extents, arrived=arrived, reuse_after=pages_staged)
        assert seen == [bytes([number]) * PAGE for number in range(48)]


def test_a_reader_may_take_longer_over_a_portion_than_the_device_has_for_one(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = NixlTransfer("slow reader", {fd: FILE_BYTES}, staging_bytes=PAGE, deadline_s=60.0)
    taken: list[int] = []
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 80.0 * len(taken), sleep=time.sleep)
    monkeypatch.setattr(nixl_transfer, "time", clock)

    def arrived(first: int, end: int) -> None:
        taken.append(first)

    with transfer.exclusive():
        transfer.read(pages(fd, (0, 0, 1), (1, 0, 1)), arrived=arrived, reuse_after=1)
    assert taken == [0, 1]
    transfer.close()
