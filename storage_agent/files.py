"""What more than one kind of volume does with files: whole pages, locks, names that last."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from storage_agent.block_header import PAGE_BYTES

HUGE_PAGE_BYTES = 2 * 1024 * 1024


def try_lock(fd: int) -> bool:
    """Whether the file is ours alone now, until it is closed. Raises `OSError` where the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def free_bytes(fd: int) -> int:
    """Free on the file's file system."""
    status = os.fstatvfs(fd)
    return status.f_bavail * status.f_frsize


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable. Raises `OSError`."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, parts: Sequence[bytes | memoryview], *, permissions: int = 0o600) -> None:
    """Give `path` this content, whole and durable; it is never seen half-written. Raises `OSError`."""
    draft = path.with_name(f".{path.name}.writing")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, permissions)
    try:
        for part in parts:
            rest = memoryview(part).cast("B")
            while rest:
                rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
        os.rename(draft, path)
    except OSError:
        os.unlink(draft)
        raise
    finally:
        os.close(fd)
    sync_folder(path.parent)


def read_page(fd: int, offset: int) -> bytes:
    """Raises `OSError`."""
    view = whole_pages(PAGE_BYTES)
    read_into(fd, view, offset)
    return bytes(view)


def whole_pages(size_bytes: int) -> memoryview:
    """Memory at a page boundary, as O_DIRECT wants it: at least one page, at least `size_bytes`."""
    return memoryview(mmap.mmap(-1, max(size_bytes, PAGE_BYTES)))


def huge_pages(size_bytes: int) -> memoryview:
    """Zeroed memory, present, at a page boundary; in huge pages where the system has them.

    For bytes that a device moves: it is given each contiguous run of memory, so that in pages of 4 KiB a transfer of 1
    MiB is 256 runs and several requests, in huge pages one. O_DIRECT was twice as fast.

    A forked child does not have it: shared with one, huge pages are torn at the next write, and kernels before 5.19 may
    leave a device writing into the child's.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if size_bytes < HUGE_PAGE_BYTES:
        small = mmap.mmap(-1, size_bytes, flags=flags | mmap.MAP_POPULATE)
        small.madvise(mmap.MADV_DONTFORK)
        return memoryview(small)
    whole_bytes = -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    mapped = mmap.mmap(-1, whole_bytes + HUGE_PAGE_BYTES, flags=flags)
    mapped.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # a kernel without them
        mapped.madvise(mmap.MADV_HUGEPAGE)
    everything = np.frombuffer(mapped, dtype=np.uint8)
    aligned = everything[-everything.ctypes.data % HUGE_PAGE_BYTES :][:whole_bytes]
    aligned[::PAGE_BYTES] = 0  # populated only now, after the advice
    return aligned[:size_bytes].data


def read_into(fd: int, view: memoryview, offset: int) -> None:
    """Fill `view`. Raises `OSError`, EIO where the file ends before."""
    done = os.preadv(fd, [view], offset)
    if done != len(view):
        raise OSError(errno.EIO, f"{done} of {len(view)} bytes at byte {offset}")


def write_page(fd: int, offset: int, page: bytes) -> None:
    """Raises `OSError`."""
    view = whole_pages(PAGE_BYTES)
    view[:] = page
    done = os.pwritev(fd, [view], offset)
    if done != PAGE_BYTES:
        raise OSError(errno.EIO, f"{done} of {PAGE_BYTES} bytes at byte {offset}")
