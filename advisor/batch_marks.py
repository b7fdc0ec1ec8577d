"""How far each producer's life is in a log that keeps no index of batches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from advisor.entries import LogEntry, NewEntry
from advisor.errors import LogError

LIVES_MAX = 65_536
"""Lives (producer and epoch) that are remembered; of the one silent for longest nothing is known any more."""


class BatchMarks:
    """The highest sequence of each life, and where it is. The intake's gate keeps sequences rising; this checks it."""

    def __init__(self, place: object) -> None:
        self._place = place
        self._marks: OrderedDict[tuple[int, int | None], tuple[int, int]] = OrderedDict()

    def check(self, new: Iterable[NewEntry], first: int) -> dict[tuple[int, int | None], tuple[int, int]]:
        """The marks that `new` will leave at positions from `first` on. Raises `LogError` for a batch not above its."""
        marks: dict[tuple[int, int | None], tuple[int, int]] = {}
        for position, entry in enumerate(new, first):
            if entry.producer is None or entry.sequence is None:
                continue
            life = (entry.producer, entry.epoch)
            for known in (self._marks, marks):
                if life in known and entry.sequence <= known[life][0]:
                    raise LogError(self._conflict(entry, *known[life], within=known is marks))
            marks[life] = (entry.sequence, position)
        return marks

    def take(self, marks: dict[tuple[int, int | None], tuple[int, int]]) -> None:
        """What `check` gave, once it is durable."""
        for life, mark in marks.items():
            self._marks[life] = mark
            self._marks.move_to_end(life)
        while len(self._marks) > LIVES_MAX:
            self._marks.popitem(last=False)

    def restore(self, entry: LogEntry) -> None:
        """An entry that is in the log already."""
        if entry.producer is not None and entry.sequence is not None:
            self.take({(entry.producer, entry.epoch): (entry.sequence, entry.position)})

    def _conflict(self, entry: NewEntry, sequence: int, position: int, *, within: bool) -> str:
        batch = f"batch {entry.sequence} of producer {entry.producer:016x}, epoch {entry.epoch},"
        if sequence != entry.sequence:
            return (
                f"{batch} comes after batch {sequence}, at position {position} of {self._place}: append a producer's"
                " batches in their order; nothing was written"
            )
        place = "twice in one append" if within else f"already at position {position}"
        return f"{batch} is {place} of {self._place}: drop duplicates before appending; nothing was written"
