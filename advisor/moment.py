"""The state's counters at one moment, for rates and charts."""

from __future__ import annotations

from dataclasses import dataclass

from advisor.fold import Fold, VolumeState
from advisor.moves import MoveState


@dataclass(frozen=True, slots=True)
class Moment:
    """Counts since the log began, but for the last four, which are as they are now."""

    events: int
    reads_fast: int
    reads_all: int
    moves_done: int
    recomputed: int
    hits_by_tier: tuple[int, int, int, int]
    blocks: int
    behind_s: float
    queue_entries: int
    position: int = 0

    @classmethod
    def of(cls, fold: Fold, behind_s: float, queue_entries: int) -> Moment:
        """The caller holds the fold's lock."""
        volumes = by_speed(fold)
        reads = [fold.index.place_figures(volume.place).reads for volume in volumes]
        return cls(
            events=fold.events_total,
            reads_fast=reads[0] if reads else 0,
            reads_all=sum(reads),
            moves_done=sum(n for (_, state), n in fold.moves.counts.items() if state is not MoveState.ABORTED),
            recomputed=fold.recomputed,
            hits_by_tier=(fold.hits_by_tier[1], fold.hits_by_tier[2], fold.hits_by_tier[3], fold.hits_by_tier[4]),
            blocks=len(fold.index),
            behind_s=behind_s,
            queue_entries=queue_entries,
            position=fold.position,
        )


def by_speed(fold: Fold) -> list[VolumeState]:
    """Registered volumes, fastest first."""
    return sorted(fold.volumes.values(), key=lambda v: (int(v.descriptor["speed_rank"]), v.volume_id))
