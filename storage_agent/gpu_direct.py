"""GPU-direct storage: whether this process has it, found out once, when its first agent starts.

A listed plugin may not load, and one that loads may not work; so only a backend that moved a page of a GPU's memory to
a file and back counts (`gpu_direct_proof`). Otherwise bytes go through host memory, and the reason is said. The proof
runs in a process of its own, beside the agent's start, which does not wait for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

PROOF_DEADLINE_S = 60.0
"""PyTorch and CUDA alone take seconds to load."""
_DRIVER = Path("/dev/nvidiactl")
_NOT_YET = "being tried"

_log = structlog.get_logger()


class GpuDirect(NamedTuple):
    """`backend`: NIXL's that was proven, or ''. `reason`: why there is none."""

    backend: str
    reason: str = ""

    @property
    def said(self) -> str:
        """For people: the backend, or why there is none."""
        return self.backend or f"not available: {self.reason}"


class _Answer:
    """Of one process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.found: GpuDirect | None = None
        self.is_known = threading.Event()


_answer: _Answer | None = None
_lock = threading.Lock()


def start(folders: Sequence[Path]) -> None:
    """Begin to find out, in the first of `folders` that is there, unless this process did. Never waits."""
    global _answer
    with _lock:
        if _answer is not None and _answer.pid == os.getpid():
            return
        _answer = answer = _Answer()
    if not _DRIVER.exists():
        _settle(answer, GpuDirect("", f"no NVIDIA driver, for there is no {_DRIVER}"))
        return
    threading.Thread(target=lambda: _settle(answer, prove(folders)), name="gpu-direct-proof", daemon=True).start()


def said() -> str:
    """What is known by now, for people: `AgentStat.gpu_direct`."""
    answer = _answer
    if answer is None or answer.pid != os.getpid():
        return "not asked"
    return answer.found.said if answer.found is not None else _NOT_YET


def wait(timeout_s: float = PROOF_DEADLINE_S) -> GpuDirect:
    """The answer. For whoever has a GPU's memory in hand; takes seconds after the start of the first agent."""
    answer = _answer
    if answer is None or answer.pid != os.getpid():
        return GpuDirect("", "no agent was started in this process")
    answer.is_known.wait(timeout_s)
    return answer.found or GpuDirect("", f"{_NOT_YET} for {timeout_s} s")


def prove(
    folders: Sequence[Path], *, deadline_s: float = PROOF_DEADLINE_S, command: Sequence[str] = ()
) -> GpuDirect:
    """Ask NIXL, in a process of its own. `command`: that process, for tests of what a plugin may do."""
    folder = next((each for each in folders if each.is_dir()), None)
    if folder is None:
        return GpuDirect("", "there is no folder to try it in; name one in allowed_roots")
    program = command or (sys.executable, "-m", "storage_agent.gpu_direct_proof", str(folder))
    try:
        ran = subprocess.run(program, capture_output=True, check=False, timeout=deadline_s, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return GpuDirect("", f"NIXL did not end its proof in {deadline_s:g} s")
    except OSError as error:
        return GpuDirect("", f"the proof cannot be started: {error}")
    lines = ran.stdout.splitlines()
    try:
        faults = msgspec.json.decode(lines[-1] if lines else b"", type=dict[str, str])
    except msgspec.DecodeError:
        return GpuDirect("", f"the proof ended with status {ran.returncode} and no answer: {_last_words(ran.stderr)}")
    proven = next((backend for backend, fault in faults.items() if not fault), "")
    return GpuDirect(proven, "" if proven else "; ".join(f"{name}: {fault}" for name, fault in faults.items()))


def _last_words(errors: bytes) -> str:
    lines = errors.decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def _settle(answer: _Answer, found: GpuDirect) -> None:
    answer.found = found
    answer.is_known.set()
    if structlog.is_configured():  # else it would go to standard output, which is not ours
        _log.info("GPU-direct storage", answer=found.said)
