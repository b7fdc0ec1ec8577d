"""Who may still write into a slot: a lock on one byte for each slot and shard, far behind the end of the slab.

The kernel drops such a lock when the process ends, but not before the last of its writes that are in flight: they hold
the open file that the lock belongs to. So a slot whose lock is gone is written by nobody, whatever became of the
process. Locks of open files (`F_OFD_SETLK`), so that two clients in one process are two; a forked child keeps its
parent's.
"""

from __future__ import annotations

import fcntl
import struct

from storage_agent.descriptor import CAPACITY_BLOCKS_MAX
from storage_agent.shards import SHARD_COUNT_MAX

_BASE = 1 << 62
"""No file is as long, so these bytes are never data."""
_END = _BASE + (CAPACITY_BLOCKS_MAX + 1) * SHARD_COUNT_MAX
_FLOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, pid


def lock_shard(fd: int, slot: int, shard: int) -> bool:
    """Whether the shard is this open file's to write, until `unlock_shard` or its close. Raises `OSError`."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _request(fcntl.F_WRLCK, _byte(slot, shard), 1))
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, as POSIX leaves open
        return False
    return True


def unlock_shard(fd: int, slot: int, shard: int) -> None:
    """Raises `OSError`."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK, _byte(slot, shard), 1))


def locks_work(fd: int) -> bool:
    """Whether clients can lock here: not where the owner's lock of the file is of the same sort, as over NFS."""
    probe = _byte(CAPACITY_BLOCKS_MAX, 0)  # of no slot; shared, so that clients may probe at once
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _request(fcntl.F_RDLCK, probe, 1))
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK, probe, 1))
    except OSError:
        return False
    return True


def shard_is_locked(fd: int, slot: int, shard: int) -> bool:
    """By another open file than `fd`. Raises `OSError`."""
    return _locked(fd, _byte(slot, shard), 1) is not None


def locked_shards(fd: int) -> list[tuple[int, int]]:
    """(slot, shard) of every shard that another open file may write, in order. Raises `OSError`."""
    found: list[tuple[int, int]] = []
    unseen = [(_BASE, _END)]
    while unseen:
        start, end = unseen.pop()
        if start == end:
            continue
        held = _locked(fd, start, end - start)
        if held is not None:  # any one of those in the range, not the first
            first, after = max(start, held[0]), min(end, held[0] + held[1])
            found += [divmod(byte - _BASE, SHARD_COUNT_MAX) for byte in range(first, after)]
            unseen += [(start, first), (after, end)]
    return sorted(found)


def _byte(slot: int, shard: int) -> int:
    return _BASE + slot * SHARD_COUNT_MAX + shard


def _request(kind: int, start: int, length: int) -> bytes:
    return _FLOCK.pack(kind, 0, start, length, 0)


def _locked(fd: int, start: int, length: int) -> tuple[int, int] | None:
    """A lock of others that touches the range, as (start, length)."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _request(fcntl.F_WRLCK, start, length))
    kind, _, first, found, _ = _FLOCK.unpack(answer)
    return None if kind == fcntl.F_UNLCK else (first, found)
