"""GPU-direct storage: asked once, believed only when proven, never in the way of an agent's start.

No GPU is here: the proof itself runs on host memory and NIXL's POSIX backend, by the same code.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from storage_agent import gpu_direct, gpu_direct_proof
from storage_agent.agent import StorageAgent
from storage_agent.client import AgentClient
from storage_agent.errors import TransferError
from storage_agent.gpu_direct import GpuDirect, prove
from storage_agent.gpu_direct_proof import fault_of
from storage_agent.nixl_loading import binding_names
from storage_agent.nixl_memory import MemoryPlace, MemoryRegion
from storage_agent.nixl_spans import POSIX, SPANS_MAX, NixlSpans
from storage_agent.service import AgentService

PAGE = 4096
CPU = torch.device("cpu")
no_driver = pytest.mark.skipif(gpu_direct._DRIVER.exists(), reason="this machine has an NVIDIA driver")


@pytest.fixture
def not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has started no agent."""
    monkeypatch.setattr(gpu_direct, "_answer", None)


def says(text: str) -> tuple[str, ...]:
    return sys.executable, "-c", text


# Asking


@no_driver
@pytest.mark.usefixtures("not_asked")
def test_an_agent_without_a_gpu_says_why_in_its_stat_also_from_afar(tmp_path: Path) -> None:
    said = "not available: no NVIDIA driver, for there is no /dev/nvidiactl"
    assert gpu_direct.said() == "not asked"
    assert gpu_direct.wait() == GpuDirect("", "no agent was started in this process")
    with (
        StorageAgent("a", publisher=None, allowed_roots=[tmp_path]) as agent,
        AgentService(agent, f"ipc://{tmp_path}/c") as service,
        AgentClient(service.command_url) as client,
    ):
        assert (agent.stat().gpu_direct, client.stat().gpu_direct) == (said, said)
        assert gpu_direct.wait(0.0).said == said


@pytest.mark.usefixtures("not_asked")
def test_a_start_does_not_wait_for_the_proof_and_it_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "driver").touch()
    monkeypatch.setattr(gpu_direct, "_DRIVER", tmp_path / "driver")
    go_on, asked = threading.Event(), []

    def proving(folders: list[Path]) -> GpuDirect:
        asked.append(folders)
        assert go_on.wait(30)
        return GpuDirect("GDS_MT")

    monkeypatch.setattr(gpu_direct, "prove", proving)
    for _ in range(2):
        with StorageAgent("a", publisher=None, allowed_roots=[tmp_path]) as agent:
            assert agent.stat().gpu_direct == "being tried"
    assert gpu_direct.wait(0.0).said == "not available: being tried for 0.0 s"
    go_on.set()
    assert gpu_direct.wait(30) == GpuDirect("GDS_MT")
    assert (gpu_direct.said(), asked) == ("GDS_MT", [(tmp_path,)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_proof_as_it_is_run_ends_without_a_gpu(tmp_path: Path) -> None:
    assert prove([tmp_path / "absent", tmp_path]).said == (
        "not available: GDS_MT: PyTorch finds no GPU; GDS: PyTorch finds no GPU"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import os; os.write(2, b'no luck\\n\\n'); os.abort()", "with status -6 and no answer: no luck"),
        ("import time; time.sleep(60)", "NIXL did not end its proof in 0.5 s"),
        ("print('not what was asked')", "with status 0 and no answer: it said nothing"),
        ("print('{\"GDS_MT\": \"no driver\", \"GDS\": \"wrong bytes\"}')", "GDS_MT: no driver; GDS: wrong bytes"),
    ],
    ids=["aborts", "hangs", "talks", "finds none"],
)
def test_a_plugin_that_aborts_hangs_or_talks_ends_its_own_process_alone(
    tmp_path: Path, program: str, said: str
) -> None:
    found = prove([tmp_path], deadline_s=0.5 if "sleep" in program else 30, command=says(program))
    assert found.backend == ""
    assert said in found.said


def test_what_a_plugin_prints_before_the_answer_is_stepped_over(tmp_path: Path) -> None:
    program = says("print('cuFile 1.9'); print('{\"GDS_MT\": \"no\", \"GDS\": \"\"}')")
    assert prove([tmp_path], command=program) == GpuDirect("GDS")


def test_without_a_folder_or_a_program_it_is_not_available(tmp_path: Path) -> None:
    assert prove([tmp_path / "absent"]).said.endswith("no folder to try it in; name one in allowed_roots")
    assert "cannot be started" in prove([tmp_path], command=(str(tmp_path / "absent"),)).said


def test_the_bindings_of_the_processs_own_cuda_are_tried_first() -> None:
    assert binding_names("13.0") == ["nixl_cu13", "nixl_cu12"]
    assert binding_names("12.8") == binding_names("") == ["nixl_cu12", "nixl_cu13"]


# The proof


def test_a_backend_that_moves_a_page_there_and_back_is_proven(tmp_path: Path) -> None:
    assert fault_of("POSIX", POSIX, CPU, tmp_path) == ""
    assert list(tmp_path.iterdir()) == [], "the file had no name"


@no_driver
@pytest.mark.parametrize("backend", gpu_direct_proof.BACKENDS)
def test_a_listed_backend_that_does_not_load_is_not_proven(tmp_path: Path, backend: str) -> None:
    assert fault_of(backend, {}, CPU, tmp_path).startswith(f"proof: NIXL's {backend} backend does not serve DRAM: ")


@pytest.mark.parametrize(("call", "said"), [("write", "what it wrote is not"), ("read", "what it read is not")])
def test_a_backend_that_says_done_and_moved_nothing_is_not_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, said: str
) -> None:
    monkeypatch.setattr(NixlSpans, call, lambda self, spans, offsets: None)
    assert said in fault_of("POSIX", POSIX, CPU, tmp_path)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert fault_of("POSIX", POSIX, CPU, tmp_path / "absent").startswith(f"no file to try it on in {tmp_path}/absent")


# Bytes between somebody else's memory and a file


@pytest.fixture
def memory() -> np.ndarray:
    """16 pages at a page boundary."""
    made = np.zeros(17 * PAGE, dtype=np.uint8)
    return made[-made.ctypes.data % PAGE :][: 16 * PAGE]


@pytest.fixture
def spans(memory: np.ndarray, tmp_path: Path) -> Iterator[NixlSpans]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 32 * PAGE)
    made = NixlSpans("spans", "POSIX", POSIX, [region(memory, 0, 16)], fd, 32 * PAGE)
    yield made
    made.close()
    os.close(fd)


def region(memory: np.ndarray, page: int, pages: int) -> MemoryRegion:
    return MemoryRegion(memory.ctypes.data + page * PAGE, pages * PAGE)


def test_spans_of_the_callers_memory_go_to_their_offsets_and_come_back(
    spans: NixlSpans, memory: np.ndarray, tmp_path: Path
) -> None:
    memory[:] = np.repeat(np.arange(16, dtype=np.uint8), PAGE)
    spans.write([region(memory, 3, 2), region(memory, 9, 1)], [20 * PAGE, 5 * PAGE])
    stored = (tmp_path / "file").read_bytes()
    assert (stored[20 * PAGE], stored[21 * PAGE], stored[5 * PAGE], stored[6 * PAGE]) == (3, 4, 9, 0)
    spans.read([region(memory, 0, 2), region(memory, 15, 1)], [20 * PAGE, 5 * PAGE])
    assert memory[::PAGE].tolist() == [3, 4, *range(2, 15), 9]


def test_what_is_not_the_memorys_or_the_files_is_refused_and_the_next_goes(
    spans: NixlSpans, memory: np.ndarray
) -> None:
    there = region(memory, 0, 1)
    for refused, offsets in (
        ([region(memory, 16, 1)], [0]),
        ([there], [32 * PAGE]),
        ([there._replace(place=MemoryPlace("VRAM", 0))], [0]),
        ([there], [0, PAGE]),
        ([], []),
        ([there] * (SPANS_MAX + 1), [0] * (SPANS_MAX + 1)),
    ):
        with pytest.raises(TransferError, match="refuses the read"):
            spans.read(refused, offsets)
    spans.read([there], [0])


def test_regions_on_two_places_are_refused(memory: np.ndarray) -> None:
    two = [region(memory, 0, 1), region(memory, 1, 1)._replace(place=MemoryPlace("VRAM", 0))]
    with pytest.raises(TransferError, match="the regions lie on 2 places; give one place"):
        NixlSpans("spans", "POSIX", POSIX, two, 0, PAGE)


def test_after_a_failure_nothing_goes_any_more_for_bytes_may_still_come(
    spans: NixlSpans, memory: np.ndarray, tmp_path: Path
) -> None:
    os.truncate(tmp_path / "file", PAGE)
    with pytest.raises(TransferError, match="read: it failed") as caught:
        spans.read([region(memory, 0, 1)], [5 * PAGE])
    assert caught.value.in_doubt
    with pytest.raises(TransferError, match="closed, or a deadline passed"):
        spans.read([region(memory, 0, 1)], [0])


def test_a_deadline_of_no_time_leaves_the_transfer_in_doubt(tmp_path: Path) -> None:
    memory = np.zeros(SPANS_MAX * 16, dtype=np.uint8)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, len(memory))
    every = MemoryRegion(memory.ctypes.data, len(memory))
    late = NixlSpans("late", "POSIX", POSIX, [every], fd, len(memory), deadline_s=0.0)
    parts = [MemoryRegion(memory.ctypes.data + 16 * n, 16) for n in range(400)]
    with pytest.raises(TransferError, match=r"no answer from the device in 0\.0 s") as caught:
        late.write(parts, [32 * n for n in range(400)])
    assert caught.value.in_doubt
    kept_for_ever.append((memory, fd))


kept_for_ever: list[object] = []


def test_a_forked_child_is_refused(spans: NixlSpans, memory: np.ndarray) -> None:
    child = os.fork()
    if child == 0:
        try:
            spans.read([region(memory, 0, 1)], [0])
        except TransferError as error:
            os._exit(0 if "cannot be used after a fork" in str(error) else 2)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
