"""`kvadvisor replay --fast`: a trace through two tiers, for every admission, eviction, size and budget asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Group
from rich.table import Table

from advisor.caches import replay_cache
from advisor.caches.requests import RequestTrace
from advisor.errors import AdvisorError
from advisor.replay_processes import spread
from advisor.tiers import (
    Costs,
    Spread,
    TierFigures,
    Tiering,
    TimedTrace,
    found_by_request,
    own_eviction,
    replay_tiers,
    scan_survival,
    timed,
)
from advisor.traces import Trace

DEFAULT_ADMISSIONS = ("auto",)
_MONTH_S = 30 * 86_400.0
_LEARNING = ("hazard", "duel", "auto")
_ACCESS_S = {True: 2e-5, False: 4e-7}
"""Processor time of a replay by whether the admission learns, with its scan, as far as is known before it runs."""


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


@dataclass(frozen=True, slots=True)
class _TwoTiers:
    """What replays of one trace through two tiers share. `bounds`: Belady's fhit by size of the fast tier."""

    trace: TimedTrace
    costs: Costs
    counted_from: int
    bounds: dict[int, float]
    block_bytes: int
    duration_s: float


def timed_of(trace: Trace, *, by_priority: bool) -> TimedTrace:
    """`by_priority`: what learns, learns of each priority by itself, where the trace tells them."""
    priorities = trace.priorities if by_priority and trace.priorities else None
    return timed(trace.as_requests(), [ms / 1000.0 for ms in trace.timestamps_ms], priorities)


def replay_each(
    trace: Trace, jobs: Sequence[Tiering], costs: Costs, *, counted_from: int = 0, by_priority: bool = False
) -> Iterator[tuple[Tiering, TierResult]]:
    """Each as it ends, in no order; in processes where it is worth them. Raises `ProcessError`."""
    requests = trace.as_requests()
    shared = _TwoTiers(
        timed_of(trace, by_priority=by_priority),
        costs,
        counted_from,
        {blocks: _belady(requests, blocks, counted_from) for blocks in {job.fast_blocks for job in jobs}},
        costs.token_bytes * (trace.block_tokens[0] if trace.requests else 0),
        (trace.timestamps_ms[-1] - trace.timestamps_ms[0]) / 1000.0 if trace.requests else 0.0,
    )
    return spread(_replayed, shared, jobs, about_s(trace.accesses, jobs))


def found_over_time(
    trace: Trace, jobs: Sequence[Tiering], *, by_priority: bool = False
) -> dict[Tiering, npt.NDArray[np.int64]]:
    """Tokens that each request found in the fast tier. Raises `ProcessError`."""
    shared = timed_of(trace, by_priority=by_priority)
    found = dict(spread(found_by_request, shared, jobs, about_s(trace.accesses, jobs)))
    return {job: found[job] for job in jobs}


def about_s(accesses: int, jobs: Sequence[Tiering]) -> float:
    return accesses * sum(_ACCESS_S[job.admission in _LEARNING] for job in jobs)


def _replayed(shared: _TwoTiers, job: Tiering) -> TierResult:
    figures = replay_tiers(shared.trace, job, shared.costs, counted_from=shared.counted_from)
    return _result(job, figures, scan_survival(shared.trace, job, shared.costs), shared)


def _belady(requests: RequestTrace, blocks: int, counted_from: int) -> float:
    tokens = int(requests.input_tokens[counted_from:].sum())
    found = replay_cache(requests, "belady-leaf", blocks, counted_from=counted_from).figures.run_tokens
    return found / tokens if tokens else 0.0


def _result(job: Tiering, figures: TierFigures, survival: float, shared: _TwoTiers) -> TierResult:
    return TierResult(
        job.admission,
        job.eviction,
        job.fast_blocks,
        job.budget,
        figures.fhit,
        figures.moves,
        figures.moves_per_block,
        figures.moves * shared.block_bytes,
        figures.precision,
        figures.write_amplification,
        figures.ping_pong,
        figures.full,
        survival,
        shared.bounds[job.fast_blocks],
        figures.first_token_s,
        figures.first_token_s_always_load,
        _dollars(job, figures, shared) if shared.costs.priced else None,
    )


def _dollars(job: Tiering, figures: TierFigures, shared: _TwoTiers) -> float:
    """Keeping the fast tier for the trace's time, writing what moved, computing what was not loaded."""
    costs, gigabyte = shared.costs, shared.block_bytes / 1e9
    kept = job.fast_blocks * gigabyte * costs.fast_dollars_per_gb_month * shared.duration_s / _MONTH_S
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
