"""The event log in memory: for replay, which keeps nothing, and for tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from advisor.entries import LogEntry, NewEntry, logged
from advisor.errors import LogError


class MemoryLog:
    """`advisor.entries.EventLog` in a list. Gone with the process; grows without bound."""

    def __init__(self) -> None:
        self._entries: list[LogEntry] = []
        self._batches: dict[tuple[int, int | None, int | None], int] = {}
        self._term = 0
        self._closed = False

    def append(self, new: Sequence[NewEntry], recorded_us: int) -> int:
        if self._closed:
            raise LogError("this log in memory is closed: append before close")
        first = len(self._entries) + 1
        batches = self._accepted(new, first)
        self._entries += [
            logged(position, entry, recorded_us)
            for position, entry in enumerate(new, first)
        ]
        self._batches |= batches
        return first

    def read(self, from_position: int = 1, to_position: int | None = None) -> Iterator[LogEntry]:
        position = max(from_position, 1)
        while position <= min(len(self._entries), to_position if to_position is not None else len(self._entries)):
            yield self._entries[position - 1]
            position += 1

    def last_position(self) -> int:
        return len(self._entries)

    def next_term(self, started_us: int, host: str, pid: int, version: str) -> int:
        if self._closed:
            raise LogError("this log in memory is closed: take a term before close")
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
                    "this log in memory: drop duplicates before appending; nothing was written"
                )
            accepted[key] = position
        return accepted
