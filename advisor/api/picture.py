"""One look at the whole service: what a page or a stream shows at one moment."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from advisor.errors import NothingSuch
from advisor.plan_views import AdvisorPlans
from advisor.views import (
    AdvisorReader,
    Check,
    ComparisonView,
    MovesView,
    ProducerView,
    Sample,
    Summary,
    VolumeView,
)
from advisor.volume_views import AdvisorVolumes, ScrubView
from advisor.web.alerts import Alert, alerts_of

MOVES_READ = 256
PRODUCERS_SHOWN = 100
VOLUMES_SHOWN = 100
SPARK_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Picture:
    """`samples` are the last two minutes, oldest first. Lists are cut to what a page works with."""

    summary: Summary
    volumes: list[VolumeView]
    moves: MovesView
    producers: list[ProducerView]
    samples: list[Sample]
    checks: list[Check]
    comparison: ComparisonView
    producers_total: int
    alerts: list[Alert]
    """Of all volumes and producers."""


def take_picture(
    reader: AdvisorReader, plans: AdvisorPlans | None = None, desk: AdvisorVolumes | None = None
) -> Picture:
    """Each part is consistent in itself; two parts may be a tick apart. Blocks: call it off the event loop.

    `plans` and `desk` add alerts of a plan that waits and of scrubs.
    """
    summary, checks, volumes, producers = reader.summary(), reader.checks(), reader.volumes(), reader.producers()
    pending = None if plans is None else plans.pending()
    scrubs = [] if desk is None else _scrubs(desk, volumes)
    return Picture(
        summary=summary,
        volumes=volumes[:VOLUMES_SHOWN],
        moves=reader.moves(limit=MOVES_READ),
        producers=producers[:PRODUCERS_SHOWN],
        samples=reader.samples(seconds=SPARK_SECONDS),
        checks=checks,
        comparison=reader.comparison(),
        producers_total=len(producers),
        alerts=alerts_of(summary, checks, volumes, producers, pending, scrubs),
    )


def _scrubs(desk: AdvisorVolumes, volumes: Sequence[VolumeView]) -> list[ScrubView]:
    scrubs = []
    for volume in volumes:
        with suppress(NothingSuch):  # it was not scrubbed yet
            scrubs.append(desk.scrub_of(volume.id))
    return scrubs
