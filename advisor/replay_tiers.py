"""`kvadvisor replay --fast`: a trace through two tiers, for every admission, eviction, size and budget asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group
from rich.table import Table

from advisor.caches import replay_cache
from advisor.caches.requests import RequestTrace
from advisor.errors import AdvisorError
from advisor.replay import Progress
from advisor.tiers import (
    Costs,
    Spread,
    TierFigures,
    Tiering,
    own_eviction,
    replay_tiers,
    scan_survival,
    timed,
)
from advisor.traces import Trace

DEFAULT_ADMISSIONS = ("auto",)
_MONTH_S = 30 * 86_400.0


class CostError(AdvisorError):
    """A rate or price that cannot be."""


@dataclass(frozen=True, slots=True)
class TierResult:
    """One tiering on one trace; see `tiers.TierFigures`. `budget` None: unlimited.

    `belady_fhit`: what a fast tier of this size would find that knew the future, moves unlimited. `cost_dollars`: of
    the whole trace, None where no price was given.
    """

    admission: str
    eviction: str
    fast_blocks: int
    budget: float | None
    fhit: float
    moves: int
    moves_per_block: float
    bytes_moved: int
    precision: float
    write_amplification: float
    ping_pong: float
    full: float
    scan_survival: float
    belady_fhit: float
    first_token_s: Spread
    first_token_s_always_load: Spread
    cost_dollars: float | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def tierings(
    fast: list[int], admissions: list[str], evictions: list[str], budgets: list[float], *, save_moves: bool = False
) -> list[Tiering]:
    """All of them, in the order given. Raises `UnknownTiering`."""
    unlimited: list[float | None] = [None]
    return [
        Tiering(admission, eviction, blocks, budget, save_moves)
        for blocks in fast
        for admission in admissions
        for eviction in (evictions or [own_eviction(admission)])
        for budget in (budgets or unlimited)
    ]


def require_costs(costs: Costs) -> Costs:
    """Raises `CostError`: what divides must be positive, no price negative."""
    for name in ("token_bytes", "fast_bytes_per_s", "slow_bytes_per_s", "prefill_tokens_per_s"):
        if not getattr(costs, name) > 0:
            raise CostError(f"{name} of {getattr(costs, name)} is not possible: give more than 0")
    for name in ("fast_dollars_per_gb_month", "moved_dollars_per_gb", "recompute_dollars_per_hour"):
        if not getattr(costs, name) >= 0:
            raise CostError(f"{name} of {getattr(costs, name)} is not possible: give 0 or more")
    return costs


def replay_all(
    trace: Trace,
    jobs: list[Tiering],
    costs: Costs,
    progress: Progress,
    *,
    counted_from: int = 0,
    by_priority: bool = False,
    finished: Callable[[Tiering, TierResult], None] = lambda _job, _result: None,
) -> list[TierResult]:
    """In threads: the kernels let go of Python's lock. `progress` is told of requests, each job's once.

    `by_priority`: what learns, learns of each priority by itself. `finished` is called in the threads, with each
    result as it comes.
    """
    requests = trace.as_requests()
    priorities = trace.priorities if by_priority and trace.priorities else None
    two_tier = timed(requests, [ms / 1000.0 for ms in trace.timestamps_ms], priorities)
    duration_s = float(two_tier.arrivals_s[-1] - two_tier.arrivals_s[0]) if trace.requests else 0.0
    bounds = {blocks: _belady(requests, blocks, counted_from) for blocks in {job.fast_blocks for job in jobs}}
    block_bytes = costs.token_bytes * (trace.block_tokens[0] if trace.requests else 0)

    def run(job: Tiering) -> TierResult:
        figures = replay_tiers(two_tier, job, costs, counted_from=counted_from)
        survival = scan_survival(two_tier, job, costs)
        progress(trace.requests)
        result = _result(job, figures, survival, bounds[job.fast_blocks], block_bytes, costs, duration_s)
        finished(job, result)
        return result

    with ThreadPoolExecutor(max(1, min(len(jobs), os.cpu_count() or 1))) as pool:
        return list(pool.map(run, jobs))


def _belady(requests: RequestTrace, blocks: int, counted_from: int) -> float:
    tokens = int(requests.input_tokens[counted_from:].sum())
    found = replay_cache(requests, "belady-leaf", blocks, counted_from=counted_from).figures.run_tokens
    return found / tokens if tokens else 0.0


def _result(
    job: Tiering,
    figures: TierFigures,
    survival: float,
    belady_fhit: float,
    block_bytes: int,
    costs: Costs,
    duration_s: float,
) -> TierResult:
    return TierResult(
        job.admission,
        job.eviction,
        job.fast_blocks,
        job.budget,
        figures.fhit,
        figures.moves,
        figures.moves_per_block,
        figures.moves * block_bytes,
        figures.precision,
        figures.write_amplification,
        figures.ping_pong,
        figures.full,
        survival,
        belady_fhit,
        figures.first_token_s,
        figures.first_token_s_always_load,
        _dollars(job, figures, block_bytes, costs, duration_s) if costs.priced else None,
    )


def _dollars(job: Tiering, figures: TierFigures, block_bytes: int, costs: Costs, duration_s: float) -> float:
    """Keeping the fast tier for the trace's time, writing what moved, computing what was not loaded."""
    gigabyte = block_bytes / 1e9
    kept = job.fast_blocks * gigabyte * costs.fast_dollars_per_gb_month * duration_s / _MONTH_S
    moved = figures.moves * gigabyte * costs.moved_dollars_per_gb
    computed_s = figures.recomputed_tokens / costs.prefill_tokens_per_s
    return kept + moved + computed_s / 3600.0 * costs.recompute_dollars_per_hour


_Columns = list[tuple[str, Callable[[TierResult], str]]]


def tier_tables(results: list[TierResult]) -> Group:
    """What was found and moved, and what that did to the first token: each fits a narrow terminal."""
    named: _Columns = [
        ("admission", lambda r: r.admission),
        ("eviction", lambda r: r.eviction),
        ("budget", lambda r: "none" if r.budget is None else f"{r.budget:g}"),
    ]
    if len({result.fast_blocks for result in results}) > 1:
        named.append(("fast", lambda r: f"{r.fast_blocks:,}"))
    found: _Columns = [
        ("fhit", lambda r: f"{r.fhit:.3f}"),
        ("moves", lambda r: f"{r.moves_per_block:.3f}"),
        ("precision", lambda r: f"{r.precision:.2f}"),
        ("full", lambda r: f"{r.full:.2f}"),
        ("scan", lambda r: f"{r.scan_survival:.2f}"),
    ]
    first_token: _Columns = [
        ("first token", lambda r: f"{r.first_token_s.mean:.2f}"),
        ("p50", lambda r: f"{r.first_token_s.p50:.2f}"),
        ("p90", lambda r: f"{r.first_token_s.p90:.2f}"),
        ("p99", lambda r: f"{r.first_token_s.p99:.2f}"),
        ("always load", lambda r: f"{r.first_token_s_always_load.mean:.2f}"),
        ("Belady's fhit", lambda r: f"{r.belady_fhit:.3f}"),
    ]
    if any(result.cost_dollars is not None for result in results):
        first_token.append(("$", lambda r: f"{r.cost_dollars:,.2f}"))
    return Group(_table(named, found, results), _table(named, first_token, results))


def _table(named: _Columns, figures: _Columns, results: list[TierResult]) -> Table:
    table = Table()
    for name, _ in named:
        table.add_column(name)
    for name, _ in figures:
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(*(cell(result) for _, cell in (*named, *figures)))
    return table
