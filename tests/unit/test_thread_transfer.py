"""Bytes moved by threads: chosen where NIXL does not work, and given up at a deadline without harm."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from storage_agent import thread_transfer, transfer_choice
from storage_agent.errors import TransferError
from storage_agent.file_transfer import Extent, move_plainly
from storage_agent.files import try_lock
from storage_agent.nixl_transfer import NixlTransfer
from storage_agent.thread_transfer import ThreadTransfer
from storage_agent.transfer_choice import nixl_fault, open_transfer

PAGE = 4096


def pages(fd: int, *extents: tuple[int, int, int]) -> list[Extent]:
    """(page of the file, page of staging, pages)"""
    return [(at * PAGE, staged * PAGE, count * PAGE, fd) for at, staged, count in extents]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "file"
    file.write_bytes(bytes(4 * PAGE))
    return file


def test_where_nixl_works_it_is_taken(path: Path) -> None:
    assert nixl_fault() == ""
    with path.open("r+b") as file:
        transfer = open_transfer("v", {file.fileno(): 4 * PAGE}, staging_bytes=PAGE)
        assert (type(transfer), transfer.how) == (NixlTransfer, "")
        transfer.close()


def test_where_nixl_cannot_be_loaded_threads_are_taken_and_the_log_says_why(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> None:
        raise TransferError("NIXL cannot be loaded (nixl_cu12: gone)")

    monkeypatch.setattr(transfer_choice, "_proofs", [])
    monkeypatch.setattr("storage_agent.nixl_transfer.load_nixl", load)
    with path.open("r+b") as file, caplog.at_level(logging.WARNING):
        transfer = open_transfer("volume v", {file.fileno(): 4 * PAGE}, staging_bytes=PAGE)
        assert (type(transfer), transfer.how) == (ThreadTransfer, "threads")
        transfer.close()
    assert "volume v: NIXL cannot move its bytes, plain calls on threads do: NIXL cannot be loaded" in caplog.text


def test_a_device_that_does_not_answer_leaves_the_transfer_in_doubt_and_the_file_held_until_it_does(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def hang(operation: str, fd: int, part: memoryview, file_offset: int) -> str:
        answers.wait()
        return move_plainly(operation, fd, part, file_offset)

    monkeypatch.setattr(thread_transfer, "move_plainly", hang)
    file = os.open(path, os.O_RDWR)
    assert try_lock(file)
    transfer = ThreadTransfer("late", {file: 4 * PAGE}, staging_bytes=PAGE, deadline_s=0.7)
    with transfer.exclusive() as abandoned:
        abandoned[:] = b"a" * PAGE
        with pytest.raises(TransferError, match=r"no answer from the device in 0\.7 s") as caught:
            transfer.write(pages(file, (1, 0, 1)))
        assert caught.value.in_doubt
    with transfer.exclusive() as fresh:
        fresh[:] = b"f" * PAGE
    transfer.close()
    os.close(file)
    other = os.open(path, os.O_RDWR)
    assert not try_lock(other), "the write may still come"
    threads = [thread for thread in threading.enumerate() if thread.name == "file-transfer"]
    answers.set()
    for thread in threads:
        thread.join()
    assert try_lock(other)
    os.close(other)
    assert path.read_bytes()[PAGE : 2 * PAGE] == b"a" * PAGE, "of its own memory, not of the fresh one"


def test_what_fails_to_stage_moves_nothing_more(path: Path) -> None:
    with path.open("r+b") as file:
        transfer = ThreadTransfer("v", {file.fileno(): 4 * PAGE}, staging_bytes=4 * PAGE)

        def stage(first: int, end: int) -> None:
            raise ValueError("no payload")

        with transfer.exclusive(), pytest.raises(ValueError, match="no payload"):
            transfer.write(pages(file.fileno(), (0, 0, 1), (1, 1, 1)), stage=stage)
        with transfer.exclusive() as staging:
            staging[:PAGE] = b"x" * PAGE
            transfer.write(pages(file.fileno(), (3, 0, 1)))
        transfer.close()
    assert path.read_bytes() == bytes(3 * PAGE) + b"x" * PAGE


def test_no_write_makes_a_file_longer_or_goes_past_the_staging_memory(path: Path) -> None:
    with path.open("r+b") as file:
        transfer = ThreadTransfer("v", {file.fileno(): 4 * PAGE}, staging_bytes=2 * PAGE)
        with transfer.exclusive():
            with pytest.raises(TransferError, match="refuses the write: it ends at byte 20480 of 16384"):
                transfer.write(pages(file.fileno(), (4, 0, 1)))
            with pytest.raises(TransferError, match="past the staging memory"):
                transfer.write(pages(file.fileno(), (0, 2, 1)))
        transfer.close()
    assert path.stat().st_size == 4 * PAGE


def test_a_device_that_answers_slowly_but_answers_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each portion starts the deadline anew: the whole takes longer than that, by a clock that each sets forward."""
    turns: list[float] = []

    def take_time(operation: str, fd: int, part: memoryview, file_offset: int) -> str:
        time.sleep(0.02)  # whoever does not wait for it is through meanwhile
        turns.append(20.0)
        return move_plainly(operation, fd, part, file_offset)

    monkeypatch.setattr(thread_transfer, "move_plainly", take_time)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(turns))
    monkeypatch.setattr(thread_transfer, "time", clock)
    with path.open("r+b") as file:
        transfer = ThreadTransfer("slow", {file.fileno(): 4 * PAGE}, staging_bytes=PAGE, deadline_s=60.0)
        with transfer.exclusive() as staging:
            staging[:] = b"s" * PAGE
            transfer.write(pages(file.fileno(), *((number, 0, 1) for number in range(4))), reuse_after=1)
        transfer.close()
    assert sum(turns) == 80.0
    assert path.read_bytes() == b"s" * 4 * PAGE
