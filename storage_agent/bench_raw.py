"""What `kvadvisor bench agent` measures beside: blocks by `pwritev` and `preadv`, on the file that a volume lies on."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

Mode = Literal["O_DIRECT", "buffered"]
Memory = Callable[[int], memoryview]
"""So many bytes at a page boundary, as O_DIRECT wants them."""


class RawFile:
    """Blocks of one size at given offsets of one file, by one thread or by several at once. Close it."""

    def __init__(self, path: Path, mode: Mode, offsets: Sequence[int], block_bytes: int, memory: Memory) -> None:
        """`offsets` and `block_bytes` are whole pages; `memory` makes what they are moved from and to.

        Raises `OSError` where the file does not take the mode.
        """
        direct = os.O_DIRECT if mode == "O_DIRECT" else 0
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | direct)
        self._is_buffered = mode == "buffered"
        self._offsets = offsets
        # Each block has memory of its own: what a batch moves does not stay in the processor's cache.
        view = memory(len(offsets) * block_bytes)
        view[:] = os.urandom(block_bytes) * len(offsets)
        self._blocks = [view[n * block_bytes : (n + 1) * block_bytes] for n in range(len(offsets))]
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1)

    def write(self, threads: int) -> None:
        """All blocks, then one fdatasync. Raises `OSError`."""
        self._each(lambda n: os.pwritev(self._fd, [self._blocks[n]], self._offsets[n]), threads)
        os.fdatasync(self._fd)

    def read(self, threads: int) -> None:
        """All blocks. Raises `OSError`."""
        self._each(lambda n: os.preadv(self._fd, [self._blocks[n]], self._offsets[n]), threads)

    def forget_cached(self) -> None:
        """The next read comes from the device, as far as that can be had."""
        if self._is_buffered:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._fd)

    def _each(self, move: Callable[[int], int], threads: int) -> None:
        count = len(self._offsets)
        if threads == 1:
            for number in range(count):
                move(number)
            return

        def part(first: int) -> None:
            for number in range(first, count, threads):
                move(number)

        list(self._pool.map(part, range(threads)))
