"""Which reads of a log are under way, so that nothing is dropped in front of one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from advisor.errors import LogError


@dataclass(slots=True, eq=False)
class OpenRead:
    """Entries from `position` on are still wanted; its reader moves it."""

    position: int


class OpenReads:
    """The reads of one log in this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reads: set[OpenRead] = set()

    @contextmanager
    def open(self, position: int) -> Iterator[OpenRead]:
        read = OpenRead(position)
        with self._lock:
            self._reads.add(read)
        try:
            yield read
        finally:
            with self._lock:
                self._reads.discard(read)

    def spare(self, through: int) -> int:
        """`through`, or as far below it as the reads under way let entries go."""
        with self._lock:
            return min([through, *(read.position - 1 for read in self._reads)])


def pruned_under_reader(place: object, wanted: int, first: int) -> LogError:
    """What a read ends with whose next entry is gone; reads of one process hold theirs, so another one pruned."""
    gone = f"entries {wanted}–{first - 1} of {place}"
    return LogError(f"{gone} were dropped while they were read: read again from {first}")
