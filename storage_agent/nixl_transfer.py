"""Bytes between memory and files by NIXL's POSIX backend.

Each rule below was paid for: strict synchronisation; never release a handle in flight; Linux AIO only; fewer
descriptors in flight than the pool has; a file descriptor that stays open as long as its registration; a deadline of
our own; no use after fork. NIXL never syncs: the caller does.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from storage_agent.errors import TransferError
from storage_agent.fifo_lock import FifoLock
from storage_agent.files import free_bytes
from storage_agent.nixl_loading import keep_for_ever, load_nixl, make_agent

Offsets = npt.NDArray[np.uint64]
Columns = tuple[Offsets, Offsets, Offsets, Offsets]
"""Offsets in the files, offsets in staging, lengths, file descriptors."""
Portion = Callable[[int, int], None]
"""Is told of descriptors, by their number: the first one, and the one after the last."""

DESCRIPTOR_COUNT_MAX = 4096
"""Most descriptors of one transfer. Half of the pool: a transfer that meets its end makes the agent useless."""
_IOS_POOL_SIZE = 2 * DESCRIPTOR_COUNT_MAX
_POLL_S_MIN = 0.000_1
_POLL_S_MAX = 0.000_5
"""Half of a longer sleep would be lost at the end of each transfer: a tenth of one of 16 MiB at 2 ms."""
_EAGER_POLLS = 4
"""Polls before the first sleep: a poll submits 64 descriptors, so small batches are under way at once."""

_PORTION_BYTES_MIN = 2 * 1024 * 1024
_PORTIONS_MAX = 8

_agent_numbers = itertools.count()


def _nothing(first: int, end: int) -> None:
    pass


@dataclass(slots=True)
class _Flight:
    """A transfer that was begun. `state`: PROC while it is under way, DONE, or what failed."""

    handle: Any
    memory_side: Any
    file_side: Any
    state: str = "PROC"

    def advance(self, ask: Callable[[], str], errors: tuple[type[Exception], ...]) -> None:
        try:
            state = ask()
        except errors as error:
            self.state = str(error) or type(error).__name__
        else:
            self.state = state if state in ("PROC", "DONE") else f"NIXL answers {state}"


class NixlTransfer:
    """Transfers between its own staging memory and files, which their owner keeps open.

    Thread-safe by one lock in order of arrival: `with transfer.exclusive() as staging:` gives the staging memory
    (page-aligned, writable, `staging_bytes` long) and the right to call `read` and `write`.

    After a deadline the NIXL agent, the handle and the staging memory are never touched nor freed again, and fresh
    ones take their place.
    """

    def __init__(
        self, name: str, files: Mapping[int, int], *, staging_bytes: int, deadline_s: float = 30.0
    ) -> None:
        """`files`: bytes by file descriptor. Raises `TransferError` where NIXL or its POSIX backend cannot be had."""
        self._name = name
        self._files = dict(files)
        self._staging_bytes = staging_bytes
        self._deadline_s = deadline_s
        self._lock = FifoLock()
        self._pid = os.getpid()
        self._closed = False
        self._nixl = load_nixl()
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

    def write(
        self,
        file_offsets: Offsets,
        staging_offsets: Offsets,
        lengths: Offsets,
        fds: Offsets | None = None,
        *,
        stage: Portion = _nothing,
    ) -> None:
        """Write staging memory to the files; not durable until the caller syncs. Hold `exclusive`.

        Offsets and lengths in bytes, one-dimensional and equally long, as are `fds`, which may be left out where there
        is one file. `stage` is called ahead of each portion to fill the staging memory of its descriptors, while the
        portions before it are under way. Raises `TransferError`, after which the files may hold any part of it.
        """
        self._transfer("WRITE", file_offsets, staging_offsets, lengths, fds, stage, _nothing)

    def read(
        self,
        file_offsets: Offsets,
        staging_offsets: Offsets,
        lengths: Offsets,
        fds: Offsets | None = None,
        *,
        arrived: Portion = _nothing,
    ) -> None:
        """Read the files into staging memory. As `write`; `arrived` is called after each portion, as `stage` before."""
        self._transfer("READ", file_offsets, staging_offsets, lengths, fds, _nothing, arrived)

    def add_file(self, fd: int, file_bytes: int) -> None:
        """Register another file. Hold `exclusive`. Raises `TransferError`."""
        self._files[fd] = file_bytes
        if self._agent is not None:
            self._register_file(self._agent, fd)

    def forget_file(self, fd: int) -> None:
        """Let go of a file, which may be closed then. Hold `exclusive`."""
        del self._files[fd]
        self._agent = None  # with all its registrations; the next one to come makes another

    def resize(self, fd: int, file_bytes: int) -> None:
        """The file has this size from now on. Hold `exclusive`."""
        self._files[fd] = file_bytes
        self._agent = None

    def close(self) -> None:
        """Wait for the transfer under way, then let go of file and memory; the file stays open. Idempotent."""
        with self._lock:
            self._closed = True
            self._agent = None

    def _make_agent(self) -> Any:
        self._agent_name = f"{self._name}-{self._pid}-{next(_agent_numbers)}"
        try:
            agent = make_agent(self._nixl, self._agent_name)
            agent.create_backend("POSIX", {"use_aio": "true", "ios_pool_size": str(_IOS_POOL_SIZE)})
            agent.register_memory([(self._address, self._staging_bytes, 0, "")], "DRAM")
        except self._nixl.errors as error:
            raise TransferError(
                f"{self._name}: NIXL's POSIX backend does not start ({error}); "
                "compare /proc/sys/fs/aio-nr with aio-max-nr"
            ) from error
        for fd in self._files:
            self._register_file(agent, fd)
        return agent

    def _register_file(self, agent: Any, fd: int) -> None:
        try:
            agent.register_memory([(0, self._files[fd], fd, "")], "FILE")
        except self._nixl.errors as error:
            raise TransferError(f"{self._name}: NIXL does not take the file: {error}") from error

    def _map_staging(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        self._memory = mmap.mmap(-1, self._staging_bytes, flags=flags)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def _transfer(
        self,
        operation: str,
        file_offsets: Offsets,
        staging_offsets: Offsets,
        lengths: Offsets,
        fds: Offsets | None,
        before: Portion,
        after: Portion,
    ) -> None:
        if fds is None:
            fds = np.full_like(lengths, next(iter(self._files)))
        columns = (file_offsets, staging_offsets, lengths, fds)
        for start in range(0, len(lengths), DESCRIPTOR_COUNT_MAX):
            end = min(start + DESCRIPTOR_COUNT_MAX, len(lengths))
            self._transfer_together(operation, columns, _portions(lengths, start, end), before, after)

    def _transfer_together(
        self, operation: str, columns: Columns, portions: list[tuple[int, int]], before: Portion, after: Portion
    ) -> None:
        """All portions are under way at once; fewer descriptors than the pool has."""
        if self._agent is None:  # a file was let go of since
            self._agent = self._make_agent()
        agent = self._agent
        deadline = time.monotonic() + self._deadline_s
        flights: list[_Flight] = []
        failed = ""
        is_over = False
        try:
            for first, end in portions:
                before(first, end)
                part = [column[first:end] for column in columns]
                flights.append(self._post(operation, *part, others_fly=bool(flights)))
            for flight, (first, end) in zip(flights, portions, strict=True):
                failed = self._wait(flight, deadline) or failed
                if not failed:
                    after(first, end)
            is_over = True
        finally:
            if not is_over and flights:
                keep_for_ever(agent, flights, self._memory)
                self._map_staging()
                self._agent = None
        if failed:
            # Others of a portion may be under way still. Nothing polls this agent again, and its end waits for
            # the kernel, so afterwards neither file nor memory changes any more.
            del agent, flight, flights
            self._agent = None
            reason = self._probe(operation, *columns)
            raise TransferError(f"{self._name}: {operation.lower()} failed: {reason or failed}")
        for flight in flights:
            flight.handle.release()
            flight.memory_side.release()
            flight.file_side.release()

    def _post(
        self,
        operation: str,
        file_offsets: Offsets,
        staging_offsets: Offsets,
        lengths: Offsets,
        fds: Offsets,
        *,
        others_fly: bool,
    ) -> _Flight:
        """Begin a transfer. Raises `TransferError` where NIXL refuses it, in doubt while others are under way."""
        agent = self._agent
        local = np.empty((len(lengths), 3), dtype=np.uint64)
        local[:, 0] = staging_offsets + np.uint64(self._address)
        local[:, 1] = lengths
        local[:, 2] = 0
        remote = np.empty((len(lengths), 3), dtype=np.uint64)
        remote[:, 0] = file_offsets
        remote[:, 1] = lengths
        remote[:, 2] = fds
        indices = np.arange(len(lengths), dtype=np.int32)
        try:
            memory_side = agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, "DRAM")
            file_side = agent.prep_xfer_dlist(self._agent_name, remote, "FILE")
            handle = agent.make_prepped_xfer(operation, memory_side, indices, file_side, indices)
        except self._nixl.errors as error:
            message = f"{self._name}: NIXL refuses the {operation.lower()}: {error}"
            raise TransferError(message, in_doubt=others_fly) from error
        flight = _Flight(handle, memory_side, file_side)
        flight.advance(lambda: agent.transfer(handle), self._nixl.errors)
        return flight

    def _wait(self, flight: _Flight, deadline: float) -> str:
        """Until a transfer has ended. Empty, or what failed. Raises `TransferError` in doubt at the deadline."""
        agent = self._agent
        pause_s = _POLL_S_MIN
        polls = 0
        while flight.state == "PROC":
            if time.monotonic() >= deadline:
                raise TransferError(
                    f"{self._name}: no answer from the device in {self._deadline_s} s; check it, then register again",
                    in_doubt=True,
                )
            if polls >= _EAGER_POLLS:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _POLL_S_MAX)
            polls += 1
            flight.advance(lambda: agent.check_xfer_state(flight.handle), self._nixl.errors)
        return "" if flight.state == "DONE" else flight.state

    def _probe(
        self, operation: str, file_offsets: Offsets, staging_offsets: Offsets, lengths: Offsets, fds: Offsets
    ) -> str:
        """Say why a transfer failed, which NIXL does not: do it again without NIXL and take the errno."""
        memory = memoryview(self._memory)
        for file_offset, staging_offset, length, fd in zip(
            file_offsets.tolist(), staging_offsets.tolist(), lengths.tolist(), fds.tolist(), strict=True
        ):
            part = memory[staging_offset : staging_offset + length]
            try:
                if operation == "READ":
                    moved = os.preadv(fd, [part], file_offset)
                else:
                    moved = os.pwritev(fd, [part], file_offset)
            except OSError as error:
                return f"{errno.errorcode.get(error.errno or 0, '')} at byte {file_offset}: {error.strerror}"
            if moved < length:
                return f"only {moved} of {length} bytes at byte {file_offset}; {free_bytes(fd)} bytes are free"
        return ""


def _portions(lengths: Offsets, start: int, end: int) -> list[tuple[int, int]]:
    """Descriptors `start` to `end` in a few runs of about equal bytes; one run where there is little to move."""
    total = int(lengths[start:end].sum())
    count = min(_PORTIONS_MAX, end - start, max(1, total // _PORTION_BYTES_MIN))
    edges = [start + (end - start) * number // count for number in range(count + 1)]
    return list(itertools.pairwise(edges))
