"""What changed in an agent's volumes since the last look, as entries for the log. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from advisor.entries import Control, Measurement, VolumeEntry
from advisor.fold import VolumeState
from storage_agent.port import AgentStat, VolumeStat

ABSENT = "absent"
"""`VolumeStat.mode` of a volume whose medium cannot be used."""


def volume_changes(
    agent: str,
    known: Iterable[VolumeState],
    stat: AgentStat | None,
    totals: dict[tuple[str, str], tuple[int, float]],
    away: str,
    let_go: str = "",
) -> list[Control]:
    """Volumes that came, changed, went or are away, and transfers since `totals`, which is brought up to now.

    `stat` None: the agent is unreachable, all of its volumes are away, and `away` says why. An optional volume that it
    does not know any more is away too; another one was unregistered, and so was `let_go`, a volume that a person took.
    """
    left = {volume.volume_id: volume for volume in known}
    if stat is None:
        return [
            VolumeEntry(volume.descriptor, agent, volume.producer, away=away)
            for volume in left.values()
            if not volume.away
        ]
    changes: list[Control] = []
    for volume in stat.volumes:
        descriptor = dict(msgspec.to_builtins(volume.descriptor))
        why = volume.degraded or "its medium is absent" if volume.mode == ABSENT else ""
        before = left.pop(volume.descriptor.id, None)
        if before is None or (before.descriptor, before.producer, before.away) != (descriptor, stat.producer, why):
            changes.append(VolumeEntry(descriptor, agent, stat.producer, away=why))
    for gone in left.values():
        if not gone.optional or gone.volume_id == let_go:
            changes.append(VolumeEntry(gone.descriptor, agent, gone.producer, registered=False))
        elif not gone.away:
            changes.append(
                VolumeEntry(gone.descriptor, agent, gone.producer, away=f"agent {agent} has no such volume now")
            )
    for volume in stat.volumes:
        changes += _measurements(volume, totals)
    return changes


def _measurements(volume: VolumeStat, totals: dict[tuple[str, str], tuple[int, float]]) -> Iterable[Measurement]:
    for operation, total_bytes, total_seconds in (
        ("read", volume.read_bytes_total, volume.read_seconds_total),
        ("write", volume.write_bytes_total, volume.write_seconds_total),
    ):
        key = (volume.descriptor.id, operation)
        seen_bytes, seen_seconds = totals.get(key, (0, 0.0))
        totals[key] = (total_bytes, total_seconds)
        moved, seconds = total_bytes - seen_bytes, total_seconds - seen_seconds
        if moved > 0 and seconds > 0:
            yield Measurement(volume.descriptor.id, operation, moved, seconds)
