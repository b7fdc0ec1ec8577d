"""`kvadvisor bench core`: what a block costs, what telling of it costs, and how fast blocks go between tiers."""

from __future__ import annotations

from collections.abc import Sequence

from event_plane.figures import Figure
from kvbm_core.bench_events import event_figures
from kvbm_core.bench_paths import path_figures
from kvbm_core.bench_pool import pool_figures


def run(quick: bool, workers: Sequence[int] = ()) -> list[Figure]:
    """Five minutes; `quick` 45 s, with fewer blocks, one size of them, and no object store.

    `workers`: how many load at once beside compute, each measured.
    """
    return [*pool_figures(quick), *event_figures(quick), *path_figures(quick, workers)]
