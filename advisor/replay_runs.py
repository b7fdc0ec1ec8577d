"""One file's requests through all that was asked for."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from advisor.caches import RequestTrace, replay_cache
from advisor.progress import progress_of
from advisor.replay import TraceResult, live_blocks, replay_trace
from advisor.replay_processes import spread
from advisor.replay_report import Drawn, FileReport, Kept, course_of, fingerprint, tier_key
from advisor.replay_tiers import found_over_time, replay_each
from advisor.tiers import Costs, Tiering
from advisor.trace_pictures import picture_trace
from advisor.traces import Trace
from event_plane.pacing import Pace

BOUND = "belady-leaf"

_ACCESS_S = 1e-7
"""Processor time of a block access in one tier, as far as is known before it runs."""
_Job = tuple[str, int]
"""A policy, and blocks that its cache holds."""


@dataclass(slots=True)
class Asked:
    """What every file is run through: tierings where there are any, else policies at capacities.

    `speed`: times as fast as recorded, through the fold; None at once. `by_priority`: what learns, learns of each
    priority of requests by itself. `draw`: prepare what only a page shows.
    """

    policies: list[str]
    capacities: list[int]
    tierings: list[Tiering]
    costs: Costs
    last_half: bool = False
    speed: float | None = None
    by_priority: bool = False
    keep_live: bool = False
    draw: bool = False
    kept: Kept = field(default_factory=lambda: Kept(None))


def run_requests(path: Path, trace: Trace, asked: Asked, before: list[FileReport]) -> FileReport:
    """`before`: reports of the files before, which are written again with each result where results are kept."""
    counted_from = trace.requests // 2 if asked.last_half else 0
    report = FileReport.of(path, trace, counted_from)
    requests = trace.as_requests()
    report.blocks = requests.blocks
    report.fingerprint = fingerprint(trace, _settings(asked))
    if asked.tierings:
        _two_tiers(report, trace, asked, counted_from, before)
    elif asked.speed is None:
        _one_tier(report, trace, requests, asked, counted_from, before)
    else:
        _through_the_fold(report, trace, asked)
    if asked.draw and trace.requests:
        report.drawn = _drawn(report, trace, requests, asked, counted_from)
    return report


def _settings(asked: Asked) -> dict[str, Any]:
    """All that a result depends on and does not say itself."""
    settings: dict[str, Any] = {"last_half": asked.last_half, "speed": asked.speed is not None}
    if asked.tierings:
        settings |= {"costs": asdict(asked.costs), "save_moves": asked.tierings[0].save_moves}
        settings["by_priority"] = asked.by_priority
    return settings


def _two_tiers(
    report: FileReport, trace: Trace, asked: Asked, counted_from: int, before: list[FileReport]
) -> None:
    done = asked.kept.two_tier(report.fingerprint)
    left = [job for job in asked.tierings if tier_key(job) not in done]
    report.tiers = [done[tier_key(job)] for job in asked.tierings if tier_key(job) in done]
    with progress_of(Path(report.path).name, len(left) * trace.requests) as advance:
        replayed = replay_each(
            trace, left, asked.costs, counted_from=counted_from, by_priority=asked.by_priority
        )
        for job, result in replayed:
            done[tier_key(job)] = result
            report.tiers = [done[tier_key(job)] for job in asked.tierings if tier_key(job) in done]
            asked.kept.write([*before, report])
            advance(trace.requests)


@dataclass(frozen=True, slots=True)
class _OneTier:
    """What replays of one trace through one tier share."""

    requests: RequestTrace
    counted_from: int
    whole_blocks: bool


def _replayed(shared: _OneTier, job: _Job) -> TraceResult:
    policy, blocks = job
    ran = replay_cache(
        shared.requests, policy, blocks, counted_from=shared.counted_from, whole_blocks=shared.whole_blocks
    )
    return TraceResult.of(policy, blocks, ran.figures)


def _one_tier(
    report: FileReport,
    trace: Trace,
    requests: RequestTrace,
    asked: Asked,
    counted_from: int,
    before: list[FileReport],
) -> None:
    jobs = [(name, blocks) for name in asked.policies for blocks in asked.capacities]
    done = asked.kept.one_tier(report.fingerprint)
    left = [job for job in jobs if job not in done]
    report.results = [done[job] for job in jobs if job in done]
    shared = _OneTier(requests, counted_from, asked.last_half)
    with progress_of(Path(report.path).name, len(left) * trace.requests) as advance:
        for job, result in spread(_replayed, shared, left, len(left) * trace.accesses * _ACCESS_S):
            done[job] = result
            report.results = [done[job] for job in jobs if job in done]
            asked.kept.write([*before, report])
            advance(trace.requests)
    if asked.keep_live:
        report.live = trace.low_hashes(requests, replay_cache(requests, *jobs[-1]).present)


def _through_the_fold(report: FileReport, trace: Trace, asked: Asked) -> None:
    """In threads: a replay at a pace waits most of the time."""

    def run(job: _Job) -> tuple[TraceResult, list[int]]:
        replayed = replay_trace(trace, *job, advance, Pace(asked.speed))
        return replayed.result(), live_blocks(replayed.fold) if asked.keep_live else []

    jobs = [(name, blocks) for name in asked.policies for blocks in asked.capacities]
    with (
        progress_of(Path(report.path).name, len(jobs) * trace.requests) as advance,
        ThreadPoolExecutor(os.cpu_count() or 1) as pool,
    ):
        done = list(pool.map(run, jobs))
    report.results = [result for result, _ in done]
    report.live = done[-1][1]


def _drawn(report: FileReport, trace: Trace, requests: RequestTrace, asked: Asked, counted_from: int) -> Drawn:
    drawn = Drawn(picture_trace(trace))
    if not (report.results or report.tiers):
        return drawn
    capacities = sorted({job.fast_blocks for job in asked.tierings} or set(asked.capacities))
    drawn.course_blocks = capacities[len(capacities) // 2]
    for policy in [BOUND] if report.tiers else dict.fromkeys((*asked.policies, BOUND)):
        ran = replay_cache(requests, policy, drawn.course_blocks, whole_blocks=asked.last_half)
        drawn.courses[policy] = course_of(trace, ran.run_tokens)
    if report.tiers:
        _draw_two_tiers(drawn, trace, asked)
    elif BOUND not in asked.policies:
        shared = _OneTier(requests, counted_from, asked.last_half)
        drawn.bounds = [
            (blocks, report.token_hit_ratio(_replayed(shared, (BOUND, blocks)).run_tokens)) for blocks in capacities
        ]
    return drawn


def _draw_two_tiers(drawn: Drawn, trace: Trace, asked: Asked) -> None:
    """At the middle size, and of the budgets the middle one."""
    budgets = sorted({job.budget for job in asked.tierings}, key=lambda budget: (budget is None, budget))
    drawn.course_budget = budgets[len(budgets) // 2]
    shown = [
        job
        for job in asked.tierings
        if (job.fast_blocks, job.budget) == (drawn.course_blocks, drawn.course_budget)
    ]
    with progress_of("curves over time", None):
        for job, found in found_over_time(trace, shown, by_priority=asked.by_priority).items():
            drawn.courses[f"{job.admission}, {job.eviction}"] = course_of(trace, found)
