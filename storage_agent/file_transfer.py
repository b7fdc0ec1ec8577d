"""Bytes between staging memory and files: what the two ways to move them have in common.

`nixl_transfer` moves them by NIXL's POSIX backend. Where that cannot be had, which `transfer_choice` finds out,
`thread_transfer` does by plain calls on threads.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from storage_agent.errors import TransferError
from storage_agent.fifo_lock import FifoLock
from storage_agent.files import free_bytes, huge_pages

Extent = tuple[int, int, int, int]
"""Offset in the file, offset in staging, length, all in bytes; file descriptor."""
Portion = Callable[[int, int], None]
"""Is told of extents, by their number: the first one, and the one after the last."""

DESCRIPTOR_COUNT_MAX = 4096
"""Most extents of one transfer. Half of NIXL's pool: a transfer that meets its end makes the agent useless."""
_PORTIONS_TARGET = 8
_PORTION_BYTES_MIN = 512 * 1024
_PORTION_BYTES_MAX = 2 * 1024 * 1024
_PORTIONS_IN_REUSE = 4
"""Where memory is used again: so many portions of it at least, for some to be under way while others are filled."""


def _nothing(first: int, end: int) -> None:
    pass


class Portions(NamedTuple):
    """Extents in runs of about equal bytes, each under way as a whole.

    `bounds`: of each run its first extent and the one behind its last.
    """

    bounds: list[tuple[int, int]]
    reuse_after: int

    @classmethod
    def of(cls, extents: Sequence[Extent], start: int, end: int, reuse_after: int) -> Portions:
        """Extents `start` to `end`; one run where there is little to move."""
        total = sum([length for _, _, length, _ in extents[start:end]])
        portion_bytes = min(max(_PORTION_BYTES_MIN, total // _PORTIONS_TARGET), _PORTION_BYTES_MAX)
        count = max(1, total // portion_bytes)
        if end - start > reuse_after:
            count = max(count, -(-_PORTIONS_IN_REUSE * (end - start) // reuse_after))
        count = min(count, end - start)
        edges = [start + (end - start) * number // count for number in range(count + 1)]
        return cls(list(itertools.pairwise(edges)), reuse_after)

    def steps(self) -> Iterator[tuple[bool, int]]:
        """(True, n): run n may begin, (False, n): wait for run n. Every run begins and is waited for once, in order.

        Before a run begins, all have ended whose memory it may use.
        """
        waiting = 0
        for number, (_, end) in enumerate(self.bounds):
            while self.bounds[waiting][0] < end - self.reuse_after:
                yield False, waiting
                waiting += 1
            yield True, number
        for number in range(waiting, len(self.bounds)):
            yield False, number


class FileTransfer(ABC):
    """Transfers between its own staging memory and files, which their owner keeps open.

    Thread-safe by one lock in order of arrival: `with transfer.exclusive() as staging:` gives the staging memory
    (page-aligned, writable, `staging_bytes` long) and the right to call `read` and `write`.

    After a deadline the staging memory and what moves the bytes are never touched again; fresh ones take their place.
    """

    how = ""
    """For people: what of the way that bytes move is out of the ordinary."""

    def __init__(
        self, name: str, files: Mapping[int, int], *, staging_bytes: int, deadline_s: float = 30.0
    ) -> None:
        """`files`: bytes by file descriptor."""
        self._name = name
        self._files = dict(files)
        self._staging_bytes = staging_bytes
        self._deadline_s = deadline_s
        self._lock = FifoLock()
        self._pid = os.getpid()
        self._closed = False
        self._memory: memoryview
        self._address: int
        self._map_staging()

    @contextmanager
    def exclusive(self) -> Iterator[memoryview]:
        """The staging memory, for one thread at a time. Raises `TransferError` when closed or in a forked child."""
        with self._lock:
            if self._closed:
                raise TransferError(f"{self._name} is closed; register the volume again")
            if os.getpid() != self._pid:
                raise TransferError(f"{self._name} was opened by process {self._pid}; it cannot be used after a fork")
            self._make_ready()
            yield self._memory

    def write(
        self,
        extents: Sequence[Extent],
        *,
        stage: Portion = _nothing,
        reuse_after: int = DESCRIPTOR_COUNT_MAX,
    ) -> None:
        """Write staging memory to the files; not durable until the caller syncs. Hold `exclusive`.

        `stage` is called ahead of each portion to fill the staging memory of its extents, while the portions before it
        are under way; an extent's memory may be that of the one `reuse_after` before it, which has been moved by then.
        Raises `TransferError`, after which the files may hold any part of it.
        """
        self._transfer("WRITE", extents, stage, _nothing, reuse_after)

    def read(
        self,
        extents: Sequence[Extent],
        *,
        arrived: Portion = _nothing,
        reuse_after: int = DESCRIPTOR_COUNT_MAX,
    ) -> None:
        """Read the files into staging memory. As `write`; `arrived` is called after each portion, as `stage` before."""
        self._transfer("READ", extents, _nothing, arrived, reuse_after)

    def add_file(self, fd: int, file_bytes: int) -> None:
        """Take another file. Hold `exclusive`. Raises `TransferError`."""
        self._files[fd] = file_bytes

    def forget_file(self, fd: int) -> None:
        """Let go of a file, which may be closed then. Hold `exclusive`."""
        del self._files[fd]
        self._let_go()

    def resize(self, fd: int, file_bytes: int) -> None:
        """The file has this size from now on. Hold `exclusive`."""
        self._files[fd] = file_bytes
        self._let_go()

    def close(self) -> None:
        """Wait for the transfer under way, then let go of file and memory; the file stays open. Idempotent."""
        with self._lock:
            self._closed = True
            self._let_go()

    @abstractmethod
    def _make_ready(self) -> None:
        """Have ready what `_transfer_together` needs. Raises `TransferError`."""

    @abstractmethod
    def _let_go(self) -> None:
        """Let go of what holds the files; `_make_ready` is called before it is needed again."""

    @abstractmethod
    def _transfer_together(
        self, operation: str, extents: Sequence[Extent], portions: Portions, before: Portion, after: Portion
    ) -> None:
        """READ or WRITE `extents` in the steps of `portions`: `before` each begins, and `after` each has ended."""

    def _map_staging(self) -> None:
        self._memory = huge_pages(self._staging_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def _transfer(
        self,
        operation: str,
        extents: Sequence[Extent],
        before: Portion,
        after: Portion,
        reuse_after: int,
    ) -> None:
        for start in range(0, len(extents), DESCRIPTOR_COUNT_MAX):
            end = min(start + DESCRIPTOR_COUNT_MAX, len(extents))
            portions = Portions.of(extents, start, end, reuse_after)
            self._transfer_together(operation, extents, portions, before, after)


def move_plainly(operation: str, fd: int, part: memoryview, file_offset: int) -> str:
    """READ or WRITE by one plain call. Empty, or why not all of `part` was moved."""
    try:
        moved = os.preadv(fd, [part], file_offset) if operation == "READ" else os.pwritev(fd, [part], file_offset)
    except OSError as error:
        return f"{errno.errorcode.get(error.errno or 0, '')} at byte {file_offset}: {error.strerror}"
    if moved < len(part):
        return f"only {moved} of {len(part)} bytes at byte {file_offset}; {free_bytes(fd)} bytes are free"
    return ""
