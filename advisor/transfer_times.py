"""How long a volume's transfers took lately: quantiles of what its agent counts since its start. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from storage_agent.port import VolumeStat
from storage_agent.transfers import TRANSFER_BOUNDS_S

WINDOW_S: Final = 300.0
MARK_S: Final = 10.0
"""Totals are kept so far apart, to be taken from later ones."""

Totals = tuple[int, ...]
Marks = deque[tuple[float, Totals]]


class RecentTransfers:
    """By agent, volume and operation. Mutated by `note` alone; not thread-safe."""

    def __init__(self) -> None:
        self._marks: dict[str, dict[tuple[str, str], Marks]] = {}
        """Oldest first; the last is what was said last."""

    def note(self, agent: str, volumes: Iterable[VolumeStat], now_s: float) -> None:
        """Take in what an agent says of its volumes; those that it does not name are forgotten."""
        before = self._marks.get(agent, {})
        self._marks[agent] = {
            (volume.descriptor.id, operation): _marked(before.get((volume.descriptor.id, operation)), totals, now_s)
            for volume in volumes
            for operation, totals in (("read", tuple(volume.read_times)), ("write", tuple(volume.write_times)))
        }

    def counts(self, agent: str, volume: str, operation: str) -> list[int]:
        """Transfers of the last `WINDOW_S`, by `TRANSFER_BOUNDS_S`; empty where nothing is known."""
        marks = self._marks.get(agent, {}).get((volume, operation))
        return [] if not marks else [now - then for now, then in zip(marks[-1][1], marks[0][1], strict=True)]


def _marked(marks: Marks | None, totals: Totals, now_s: float) -> Marks:
    if marks is None or len(marks[-1][1]) != len(totals) or any(
        now < then for now, then in zip(totals, marks[-1][1], strict=True)
    ):
        # The first word of an agent's life: what came before it is of no known time.
        return deque([(now_s, totals)])
    if len(marks) > 1 and marks[-1][0] - marks[-2][0] < MARK_S:
        marks.pop()
    marks.append((now_s, totals))
    while len(marks) > 2 and marks[1][0] <= now_s - WINDOW_S:
        marks.popleft()
    return marks


def quantile_s(counts: Sequence[int], share: float) -> float | None:
    """The time that `share` of the transfers did not take longer than, even within a bound and the one before it.

    None where there was none. Of those after the last bound no more is known than that bound.
    """
    wanted, seen, low = share * sum(counts), 0, 0.0
    if not any(counts):
        return None
    for bound, count in zip(TRANSFER_BOUNDS_S, counts, strict=False):
        if count and seen + count >= wanted:
            return low + (bound - low) * (wanted - seen) / count
        seen, low = seen + count, bound
    return TRANSFER_BOUNDS_S[-1]
