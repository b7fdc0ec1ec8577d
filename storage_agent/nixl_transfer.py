"""Bytes between memory and one file by NIXL's POSIX backend. The only file that touches NIXL.

Each rule below was paid for: strict synchronisation; never release a handle in flight; Linux AIO only; fewer
descriptors in flight than the pool has; a file descriptor that stays open as long as its registration; a deadline of
our own; no use after fork. NIXL never syncs: the caller does.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import itertools
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from storage_agent.errors import TransferError
from storage_agent.fifo_lock import FifoLock

Offsets = npt.NDArray[np.uint64]

DESCRIPTOR_COUNT_MAX = 4096
"""Most descriptors of one transfer. Half of the pool: a transfer that meets its end makes the agent useless."""
_IOS_POOL_SIZE = 2 * DESCRIPTOR_COUNT_MAX
_POLL_S_MIN = 0.000_2
_POLL_S_MAX = 0.002
_EAGER_POLLS = 4
"""Polls before the first sleep: a poll submits 64 descriptors, so small batches are under way at once."""

_agent_numbers = itertools.count()
_nixl_module: ModuleType | None = None
_nixl_errors: tuple[type[Exception], ...] = ()


def _load_nixl() -> ModuleType:
    """NIXL's bindings, without the package `nixl`, which imports torch. Raises `TransferError` where there are none."""
    global _nixl_module, _nixl_errors
    if _nixl_module is None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")  # it prints to stdout otherwise
        reasons = []
        for name in ("nixl_cu12", "nixl_cu13"):
            try:
                module = importlib.import_module(name)
            except ImportError as error:
                reasons.append(f"{name}: {error}")
                continue
            bindings = vars(module._api.nixlBind).values()
            _nixl_errors = tuple(b for b in bindings if isinstance(b, type) and issubclass(b, Exception))
            _nixl_module = module
            break
        else:
            raise TransferError(f"NIXL cannot be loaded ({'; '.join(reasons)}); install nixl 1.5.1 or later")
    return _nixl_module


class NixlTransfer:
    """Transfers between its own staging memory and one file, which its owner keeps open.

    Thread-safe by one lock in order of arrival: `with transfer.exclusive() as staging:` gives the staging memory
    (page-aligned, writable, `staging_bytes` long) and the right to call `read` and `write`.

    After a deadline the NIXL agent, the handle and the staging memory are never touched nor freed again, and fresh
    ones take their place.
    """

    def __init__(self, name: str, fd: int, file_bytes: int, *, staging_bytes: int, deadline_s: float = 30.0) -> None:
        """Raises `TransferError` where NIXL or its POSIX backend cannot be had."""
        self._name = name
        self._fd = fd
        self._file_bytes = file_bytes
        self._staging_bytes = staging_bytes
        self._deadline_s = deadline_s
        self._lock = FifoLock()
        self._pid = os.getpid()
        self._closed = False
        self._nixl = _load_nixl()
        self._memory: mmap.mmap
        self._address: int
        self._map_staging()
        self._agent: Any = self._make_agent()

    @contextmanager
    def exclusive(self) -> Iterator[memoryview]:
        """The staging memory, for one thread at a time. Raises `TransferError` when closed or in a forked child."""
        with self._lock:
            if self._closed:
                raise TransferError(f"{self._name} is closed; register the volume again")
            if os.getpid() != self._pid:
                raise TransferError(f"{self._name} was opened by process {self._pid}; NIXL cannot be used after a fork")
            if self._agent is None:
                self._agent = self._make_agent()
            yield memoryview(self._memory)

    def write(self, file_offsets: Offsets, staging_offsets: Offsets, lengths: Offsets) -> None:
        """Write staging memory to the file; not durable until the caller syncs. Hold `exclusive`.

        Offsets and lengths in bytes, one-dimensional and equally long. Raises `TransferError`, after which the file
        may hold any part of it.
        """
        self._transfer("WRITE", file_offsets, staging_offsets, lengths)

    def read(self, file_offsets: Offsets, staging_offsets: Offsets, lengths: Offsets) -> None:
        """Read the file into staging memory. As `write`."""
        self._transfer("READ", file_offsets, staging_offsets, lengths)

    def resize(self, file_bytes: int) -> None:
        """The file has this size from now on. Hold `exclusive`."""
        self._file_bytes = file_bytes
        self._agent = None  # its registration is of the old size; the next one to come makes another

    def close(self) -> None:
        """Wait for the transfer under way, then let go of file and memory; the file stays open. Idempotent."""
        with self._lock:
            self._closed = True
            self._agent = None

    def _make_agent(self) -> Any:
        nixl = self._nixl
        self._agent_name = f"{self._name}-{self._pid}-{next(_agent_numbers)}"
        settings = nixl.nixl_agent_config(
            enable_prog_thread=False, backends=[], sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        try:
            agent = nixl.nixl_agent(self._agent_name, settings)
            agent.create_backend("POSIX", {"use_aio": "true", "ios_pool_size": str(_IOS_POOL_SIZE)})
            agent.register_memory([(self._address, self._staging_bytes, 0, "")], "DRAM")
            agent.register_memory([(0, self._file_bytes, self._fd, "")], "FILE")
        except _nixl_errors as error:
            raise TransferError(
                f"{self._name}: NIXL's POSIX backend does not start ({error}); "
                "compare /proc/sys/fs/aio-nr with aio-max-nr"
            ) from error
        return agent

    def _map_staging(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        self._memory = mmap.mmap(-1, self._staging_bytes, flags=flags)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def _transfer(self, operation: str, file_offsets: Offsets, staging_offsets: Offsets, lengths: Offsets) -> None:
        for start in range(0, len(lengths), DESCRIPTOR_COUNT_MAX):
            part = slice(start, start + DESCRIPTOR_COUNT_MAX)
            self._transfer_part(operation, file_offsets[part], staging_offsets[part], lengths[part])

    def _transfer_part(self, operation: str, file_offsets: Offsets, staging_offsets: Offsets, lengths: Offsets) -> None:
        agent = self._agent
        local = np.empty((len(lengths), 3), dtype=np.uint64)
        local[:, 0] = staging_offsets + np.uint64(self._address)
        local[:, 1] = lengths
        local[:, 2] = 0
        remote = np.empty((len(lengths), 3), dtype=np.uint64)
        remote[:, 0] = file_offsets
        remote[:, 1] = lengths
        remote[:, 2] = self._fd
        indices = np.arange(len(lengths), dtype=np.int32)
        try:
            memory_side = agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, "DRAM")
            file_side = agent.prep_xfer_dlist(self._agent_name, remote, "FILE")
            handle = agent.make_prepped_xfer(operation, memory_side, indices, file_side, indices)
        except _nixl_errors as error:
            raise TransferError(f"{self._name}: NIXL refuses the {operation.lower()}: {error}") from error
        finished = False
        failed = ""
        try:
            failed = self._run(handle)
            finished = True
        except _nixl_errors as error:
            failed = str(error) or type(error).__name__
            finished = True
        finally:
            if not finished:
                self._quarantine(agent, handle, memory_side, file_side)
        if failed:
            # Others of the batch may be under way still. Nothing polls this agent again, and its end waits for
            # the kernel, so afterwards neither file nor memory changes any more.
            del agent, handle, memory_side, file_side
            self._agent = None
            reason = self._probe(operation, file_offsets, staging_offsets, lengths)
            raise TransferError(f"{self._name}: {operation.lower()} failed: {reason or failed}")
        handle.release()
        memory_side.release()
        file_side.release()

    def _run(self, handle: Any) -> str:
        """Wait for the transfer to end. Empty, or what failed. Raises `TransferError` in doubt on the deadline."""
        deadline = time.monotonic() + self._deadline_s
        pause_s = _POLL_S_MIN
        polls = 0
        state = self._agent.transfer(handle)
        while state == "PROC":
            if time.monotonic() >= deadline:
                raise TransferError(
                    f"{self._name}: no answer from the device in {self._deadline_s} s; check it, then register again",
                    in_doubt=True,
                )
            if polls >= _EAGER_POLLS:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _POLL_S_MAX)
            polls += 1
            state = self._agent.check_xfer_state(handle)
        return "" if state == "DONE" else f"NIXL answers {state}"

    def _quarantine(self, *in_flight: Any) -> None:
        """Keep what the kernel may still write to until the process ends, past the interpreter's own clean-up."""
        for kept in (*in_flight, self._memory):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        self._map_staging()
        self._agent = None

    def _probe(self, operation: str, file_offsets: Offsets, staging_offsets: Offsets, lengths: Offsets) -> str:
        """Say why a transfer failed, which NIXL does not: do it again without NIXL and take the errno."""
        memory = memoryview(self._memory)
        for file_offset, staging_offset, length in zip(
            file_offsets.tolist(), staging_offsets.tolist(), lengths.tolist(), strict=True
        ):
            part = memory[staging_offset : staging_offset + length]
            try:
                if operation == "READ":
                    moved = os.preadv(self._fd, [part], file_offset)
                else:
                    moved = os.pwritev(self._fd, [part], file_offset)
            except OSError as error:
                return f"{errno.errorcode.get(error.errno or 0, '')} at byte {file_offset}: {error.strerror}"
            if moved < length:
                free_bytes = os.fstatvfs(self._fd).f_bavail * os.fstatvfs(self._fd).f_frsize
                return f"only {moved} of {length} bytes at byte {file_offset}; {free_bytes} bytes are free"
        return ""
