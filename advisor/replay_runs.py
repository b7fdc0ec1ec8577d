"""One file's requests through all that was asked for, in threads: the kernels let go of Python's lock."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from advisor.caches import RequestTrace, replay_cache
from advisor.progress import progress_of
from advisor.replay import TraceResult, live_blocks, replay_trace
from advisor.replay_report import Drawn, FileReport, Kept, course_of, fingerprint, tier_key
from advisor.replay_tiers import TierResult, replay_all
from advisor.tiers import Costs, Tiering
from advisor.trace_pictures import picture_trace
from advisor.traces import Trace
from event_plane.pacing import Pace

BOUND = "belady-leaf"

_Job = TypeVar("_Job")
_Done = TypeVar("_Done")


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
    lock = threading.Lock()

    def finished(job: Tiering, result: TierResult) -> None:
        with lock:
            done[tier_key(job)] = result
            report.tiers = [done[tier_key(job)] for job in asked.tierings if tier_key(job) in done]
            asked.kept.write([*before, report])

    left = [job for job in asked.tierings if tier_key(job) not in done]
    report.tiers = [done[tier_key(job)] for job in asked.tierings if tier_key(job) in done]
    with progress_of(Path(report.path).name, len(left) * trace.requests) as advance:
        replay_all(
            trace,
            left,
            asked.costs,
            advance,
            counted_from=counted_from,
            by_priority=asked.by_priority,
            finished=finished,
        )


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
    lock = threading.Lock()

    def run(job: tuple[str, int]) -> None:
        policy, blocks = job
        ran = replay_cache(requests, policy, blocks, counted_from=counted_from, whole_blocks=asked.last_half)
        advance(trace.requests)
        with lock:
            done[job] = TraceResult.of(policy, blocks, ran.figures)
            report.results = [done[job] for job in jobs if job in done]
            if asked.keep_live and job == jobs[-1]:
                report.live = trace.low_hashes(requests, ran.present)
            asked.kept.write([*before, report])

    left = [job for job in jobs if job not in done]
    report.results = [done[job] for job in jobs if job in done]
    with progress_of(Path(report.path).name, len(left) * trace.requests) as advance:
        _in_threads(run, left)


def _through_the_fold(report: FileReport, trace: Trace, asked: Asked) -> None:
    def run(job: tuple[str, int]) -> tuple[TraceResult, list[int]]:
        replayed = replay_trace(trace, *job, advance, Pace(asked.speed))
        return replayed.result(), live_blocks(replayed.fold) if asked.keep_live else []

    jobs = [(name, blocks) for name in asked.policies for blocks in asked.capacities]
    with progress_of(Path(report.path).name, len(jobs) * trace.requests) as advance:
        done = _in_threads(run, jobs)
    report.results = [result for result, _ in done]
    report.live = done[-1][1]


def _drawn(report: FileReport, trace: Trace, requests: RequestTrace, asked: Asked, counted_from: int) -> Drawn:
    drawn = Drawn(picture_trace(trace))
    if not report.results:
        return drawn

    def bound(blocks: int) -> tuple[int, float]:
        ran = replay_cache(requests, BOUND, blocks, counted_from=counted_from, whole_blocks=asked.last_half)
        return blocks, report.token_hit_ratio(ran.figures.run_tokens)

    def course(policy: str) -> tuple[str, list[float | None]]:
        ran = replay_cache(requests, policy, drawn.course_blocks, whole_blocks=asked.last_half)
        return policy, course_of(trace, ran.run_tokens)

    capacities = sorted(set(asked.capacities))
    drawn.course_blocks = capacities[len(capacities) // 2]
    drawn.courses = dict(_in_threads(course, asked.policies))
    if BOUND not in asked.policies:
        drawn.bounds = _in_threads(bound, capacities)
    return drawn


def _in_threads(run: Callable[[_Job], _Done], jobs: Iterable[_Job]) -> list[_Done]:
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return list(pool.map(run, jobs))
