"""What NIXL demands of whoever uses it (each was paid for: a crash, a hang, or wrong bytes that were called DONE).

`MUSTS` names the tests that hold each; those that lie nowhere else are here.
"""

from __future__ import annotations

import ast
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from storage_agent import nixl_loading
from storage_agent.endpoints import Endpoint
from storage_agent.errors import TransferError
from storage_agent.file_transfer import DESCRIPTOR_COUNT_MAX
from storage_agent.nixl_loading import load_nixl, require_release
from storage_agent.nixl_transfer import NixlTransfer
from storage_agent.object_bucket import Bucket
from storage_agent.volume_contract import VolumeCase, block
from tests.disk_shim import Recording

HERE = "unit/test_nixl_musts.py"
TRANSFER = "unit/test_nixl_transfer.py"
OBJECTS = "unit/test_nixl_objects.py"
WINDOW = "interop/test_nixl_window.py"
REMOTE = "interop/test_remote_agents.py"
MEMORY = "interop/test_nixl_memory.py"

MUSTS = {
    "1 strict synchronisation": [
        (HERE, "test_four_threads_on_one_agent_each_see_their_own_bytes"),
        (TRANSFER, "test_threads_take_turns_and_see_their_own_bytes"),
    ],
    "2 never release a handle in flight": [
        (HERE, "test_a_handle_in_flight_is_never_released"),
        (TRANSFER, "test_after_a_deadline_the_transfer_is_in_doubt_and_fresh_memory_takes_over"),
        (OBJECTS, "test_after_a_deadline_fresh_memory_takes_the_place_of_what_may_still_be_written"),
    ],
    "3 release 1.5 or later": [
        (HERE, "test_a_release_that_takes_failed_transfers_for_done_is_not_loaded"),
        (TRANSFER, "test_a_failed_read_says_why_and_the_next_one_works"),
        (TRANSFER, "test_a_failed_write_names_the_error_of_the_device"),
    ],
    "4 Linux AIO": [(HERE, "test_bytes_move_by_linux_aio_also_in_the_parent_of_a_fork")],
    "5 fewer descriptors than the pool": [
        (HERE, "test_after_as_many_descriptors_as_go_at_once_the_next_transfer_works"),
        (TRANSFER, "test_more_descriptors_than_one_transfer_takes_are_split"),
    ],
    "6 files of our own": [
        (TRANSFER, "test_files_come_and_go_and_each_gets_its_own_bytes"),
        (HERE, "test_a_volume_writes_to_its_own_file_whatever_has_its_name"),
    ],
    "7 sync ourselves, never deregister twice": [
        (HERE, "test_a_put_ends_with_one_sync_and_nothing_is_written_after_it"),
        (OBJECTS, "test_several_objects_are_put_whole_and_their_ranges_read"),
    ],
    "8 no InfiniBand where there is none": [
        (WINDOW, "test_no_infiniband_is_looked_for_where_there_is_none"),
        (HERE, "test_a_process_with_a_window_ends_in_order"),
    ],
    "9 deadlines of our own, generations in the data": [
        (WINDOW, "test_a_stopped_peer_meets_our_deadline_and_is_pulled_from_again_when_it_goes_on"),
        (WINDOW, "test_a_killed_peer_raises_and_the_window_serves_others"),
        (MEMORY, "test_a_push_to_a_stopped_peer_meets_our_deadline_and_is_in_doubt"),
        (REMOTE, "test_a_borrower_that_comes_late_never_takes_anothers_block_for_its_own"),
    ],
    "10 objects": [
        (HERE, "test_checksums_of_objects_are_asked_for_when_required_only"),
        (OBJECTS, "test_a_missing_object_fails_alone_and_the_others_are_read_whole"),
        (OBJECTS, "test_an_object_shorter_than_asked_is_no_error_but_its_missing_end_is_spoilt"),
        (OBJECTS, "test_an_object_put_again_under_its_name_is_read_as_it_is_now"),
        (OBJECTS, "test_a_dead_endpoint_is_given_up_after_a_few_attempts"),
    ],
    "11 say why, for NIXL does not": [
        (TRANSFER, "test_a_failed_write_names_the_error_of_the_device"),
        (TRANSFER, "test_a_failed_read_says_why_and_the_next_one_works"),
    ],
    "12 not after a fork, not without AIO left": [
        (TRANSFER, "test_a_forked_child_is_refused"),
        (OBJECTS, "test_a_closed_one_and_one_of_another_process_are_refused"),
        (WINDOW, "test_a_closed_window_and_one_of_a_parent_say_so"),
        ("unit/test_thread_transfer.py", "test_where_nixl_cannot_be_loaded_threads_are_taken_and_the_log_says_why"),
    ],
}
PAGE = 4096


@pytest.mark.parametrize("must", MUSTS)
def test_every_must_has_its_tests(must: str) -> None:
    for file, name in MUSTS[must]:
        tree = ast.parse((Path(__file__).parents[1] / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file} lacks {name}"


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(opened, 0, 64 * PAGE)
    yield opened
    os.close(opened)


def run_alone(script: str, *arguments: str, **environment: str) -> None:
    """In a process of its own: what goes wrong ends it."""
    ran = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr


FOUR_THREADS = """
import ctypes, os, sys, threading
import numpy as np
from storage_agent.nixl_loading import load_nixl, make_agent

fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.truncate(fd, 4 << 16)
agent = make_agent(load_nixl(), "shared")
agent.create_backend("POSIX", {"use_aio": "true", "ios_pool_size": "1024"})
memory = bytearray(4 << 16)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
agent.register_memory([(address, len(memory), 0, "")], "DRAM")
agent.register_memory([(0, len(memory), fd, "")], "FILE")
good = []

def work(number):
    at = number << 16
    local = np.array([(address + at + 4096 * n, 4096, 0) for n in range(8)], dtype=np.uint64)
    remote = np.array([(at + 4096 * n, 4096, fd) for n in range(8)], dtype=np.uint64)
    numbers = np.arange(8, dtype=np.int32)
    memory_side = agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, "DRAM")
    file_side = agent.prep_xfer_dlist("shared", remote, "FILE")
    for turn in range(40):
        expected = bytes([1 + number + 4 * turn]) * 32768
        for operation in ("WRITE", "READ"):
            memory[at : at + 32768] = expected if operation == "WRITE" else bytes(32768)
            handle = agent.make_prepped_xfer(operation, memory_side, numbers, file_side, numbers)
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            handle.release()
            if state != "DONE":
                return
        if memory[at : at + 32768] != expected:
            return
    good.append(number)

threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert sorted(good) == [0, 1, 2, 3], good
"""


def test_four_threads_on_one_agent_each_see_their_own_bytes(tmp_path: Path) -> None:
    run_alone(FOUR_THREADS, str(tmp_path / "file"))


def test_a_handle_in_flight_is_never_released(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bindings release what is collected, too. A poll submits 64 descriptors: 400 are under way at the deadline."""
    released: list[int] = []

    class Watched:
        def __init__(self, agent: Any) -> None:
            self._agent = agent

        def __getattr__(self, name: str) -> Any:
            return getattr(self._agent, name)

        def releaseXferReq(self, handle: int) -> None:
            released.append(handle)
            self._agent.releaseXferReq(handle)

    transfer = NixlTransfer("late", {fd: 64 * PAGE}, staging_bytes=PAGE, deadline_s=0.0)
    transfer._agent.agent = Watched(transfer._agent.agent)
    with transfer.exclusive(), pytest.raises(TransferError) as caught:
        transfer.write([(number * 32, 0, 16, fd) for number in range(400)])
    assert caught.value.in_doubt
    del caught
    transfer.close()
    del transfer
    gc.collect()
    assert released == []
    # The watch itself sees what is released.
    good = NixlTransfer("good", {fd: 64 * PAGE}, staging_bytes=PAGE)
    good._agent.agent = Watched(good._agent.agent)
    with good.exclusive():
        good.write([(0, 0, PAGE, fd)])
    assert len(released) == 1
    good.close()


@pytest.mark.parametrize(
    ("release", "is_taken"),
    [("1.5.1", True), ("1.10.0rc1", True), ("2.0", True), ("1.4.9", False), ("0.9.0", False), (None, True)],
)
def test_a_release_that_takes_failed_transfers_for_done_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, release: str | None, is_taken: bool
) -> None:
    def version(name: str) -> str:
        assert name in ("nixl-cu12", "nixl-cu13")
        if release is None:
            raise PackageNotFoundError(name)
        return release

    monkeypatch.setattr(nixl_loading, "version", version)
    if is_taken:
        require_release("nixl_cu12")
        return
    monkeypatch.setattr(nixl_loading, "_loaded", None)
    with pytest.raises(TransferError, match=rf"nixl_cu12: release {release} says of failed .*; install nixl 1.5.1"):
        load_nixl()


LINUX_AIO = """
import os, sys
from storage_agent.nixl_transfer import NixlTransfer

fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.truncate(fd, 4096)
transfer = NixlTransfer("aio", {fd: 4096}, staging_bytes=4096)
threads = len(os.listdir("/proc/self/task"))
for mark in (b"1", b"2"):
    with transfer.exclusive() as staging:
        staging[:] = mark * 4096
        transfer.write([(0, 0, 4096, fd)])
    assert os.pread(fd, 4096, 0) == mark * 4096
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
with open("/proc/self/maps") as maps:
    assert "/[aio]" in maps.read()
files = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
assert not [each for each in files if os.path.islink(each) and "io_uring" in os.readlink(each)]
assert len(os.listdir("/proc/self/task")) <= threads, "the library's AIO has threads of its own"
transfer.close()
"""


def test_bytes_move_by_linux_aio_also_in_the_parent_of_a_fork(tmp_path: Path) -> None:
    """io_uring hangs the parent after a fork, and the POSIX library's AIO fails for good after one error."""
    run_alone(LINUX_AIO, str(tmp_path / "file"))


def test_after_as_many_descriptors_as_go_at_once_the_next_transfer_works(fd: int) -> None:
    transfer = NixlTransfer("many", {fd: 64 * PAGE}, staging_bytes=PAGE)
    extents = [(number * 32, 0, 16, fd) for number in range(DESCRIPTOR_COUNT_MAX)]
    for mark in (b"1", b"2"):
        with transfer.exclusive() as staging:
            staging[:16] = mark * 16
            transfer.write(extents)
        expected = (mark * 16 + bytes(16)) * DESCRIPTOR_COUNT_MAX
        assert os.pread(fd, len(expected), 0) == expected
    transfer.close()


def test_a_volume_writes_to_its_own_file_whatever_has_its_name(tmp_path: Path) -> None:
    case = VolumeCase(kind="slab", path=tmp_path / "v.slab")
    with case.opened() as volume:
        case.path.rename(tmp_path / "away")
        case.path.write_bytes(b"of somebody else" * 100_000)
        assert volume.put([block(1)])[0].result.ok
    assert case.path.read_bytes() == b"of somebody else" * 100_000
    assert bytes(block(1).payload) in (tmp_path / "away").read_bytes()


def test_a_put_ends_with_one_sync_and_nothing_is_written_after_it(tmp_path: Path) -> None:
    case = VolumeCase(kind="slab", path=tmp_path / "v.slab")
    with case.opened() as volume:
        volume.put([block(0)])
        recording = Recording(tmp_path)
        with recording.watching():
            outcomes = volume.put([block(n) for n in range(1, 7)])
        assert all(outcome.result.ok for outcome in outcomes)
        verbs = [change if isinstance(change, str) else change.verb for change in recording.changes]
        assert (verbs[-1], verbs.count("sync"), verbs.count("write") >= 6) == ("sync", 1, True)


def test_a_process_with_a_window_ends_in_order() -> None:
    if Path("/sys/class/infiniband").is_dir() and os.listdir("/sys/class/infiniband"):
        pytest.skip("this machine has InfiniBand")
    script = """
import os
os.environ.pop("UCX_MODULES", None)
from storage_agent.nixl_window import NixlWindow
window = NixlWindow("w", 4096)
with window.exclusive():
    assert window.metadata
assert os.environ["UCX_MODULES"] == "^ib"
window.close()
"""
    run_alone(script, UCX_TLS="tcp")


def test_checksums_of_objects_are_asked_for_when_required_only() -> None:
    assert Bucket("v", Endpoint(url="http://127.0.0.1:1"), "b").nixl_parameters["req_checksum"] == "required"
