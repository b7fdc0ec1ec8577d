"""The event log in memory: for replay, which keeps nothing, and for tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from advisor.entries import LogEntry, LogStat, NewEntry, logged
from advisor.errors import LogError
from advisor.open_reads import OpenReads

NAME = "this log in memory"


class MemoryLog:
    """`advisor.entries.EventLog` in a list. Gone with the process; grows until it is pruned."""

    def __init__(self) -> None:
        self._entries: list[LogEntry] = []
        self._first = 1
        self._batches: dict[tuple[int, int | None, int | None], int] = {}
        self._reads = OpenReads()
        self._term = 0
        self._closed = False

    def append(self, new: Sequence[NewEntry], recorded_us: int) -> int:
        if self._closed:
            raise LogError(f"{NAME} is closed: append before close")
        first = self.last_position() + 1
        batches = self._accepted(new, first)
        self._entries += [logged(position, entry, recorded_us) for position, entry in enumerate(new, first)]
        self._batches |= batches
        return first

    def read(self, from_position: int = 1, to_position: int | None = None) -> Iterator[LogEntry]:
        with self._reads.open(max(from_position, self._first)) as under_way:
            while under_way.position <= self.last_position():
                if to_position is not None and under_way.position > to_position:
                    return
                yield self._entries[under_way.position - self._first]
                under_way.position += 1

    def first_position(self) -> int:
        return self._first

    def last_position(self) -> int:
        return self._first + len(self._entries) - 1

    def prune(self, through: int) -> int:
        """Exactly up to `through`. On the writer's thread alone."""
        count = max(0, self._reads.spare(min(through, self.last_position() - 1)) - self._first + 1)
        for entry in self._entries[:count]:
            if entry.producer is not None:
                del self._batches[entry.producer, entry.epoch, entry.sequence]
        del self._entries[:count]
        self._first += count
        return count

    def stat(self) -> LogStat:
        recorded_us = [entry.recorded_us for entry in self._entries[:1] + self._entries[-1:]] or [0]
        stored_bytes = sum(len(entry.payload) for entry in self._entries)
        return LogStat(self._first, self.last_position(), stored_bytes, recorded_us[0], recorded_us[-1])

    def next_term(self, started_us: int, host: str, pid: int, version: str) -> int:
        if self._closed:
            raise LogError(f"{NAME} is closed: take a term before close")
        self._term += 1
        return self._term

    def close(self) -> None:
        self._closed = True

    def _accepted(self, new: Sequence[NewEntry], first: int) -> dict[tuple[int, int | None, int | None], int]:
        """Where the batches of `new` will lie. Raises `LogError` for one that is there, with nothing changed."""
        accepted: dict[tuple[int, int | None, int | None], int] = {}
        for position, entry in enumerate(new, first):
            if entry.producer is None:
                continue
            key = (entry.producer, entry.epoch, entry.sequence)
            if key in self._batches or key in accepted:
                place = f"already at position {self._batches[key]}" if key in self._batches else "twice in one append"
                raise LogError(
                    f"batch {entry.sequence} of producer {entry.producer:016x}, epoch {entry.epoch}, is {place} of "
                    f"{NAME}: drop duplicates before appending; nothing was written"
                )
            accepted[key] = position
        return accepted
