"""`kvadvisor replay`: recordings and traces through the live fold, as tables and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.table import Table

from advisor.caches import POLICIES, require_policy
from advisor.index import ORDERS
from advisor.outputs import require_writable, write_json, write_text
from advisor.progress import progress_of
from advisor.recorded import is_log
from advisor.recorded_requests import requests_of
from advisor.replay import RecordingReplay, ReplayError, TraceReplay, live_blocks, replay_log, replay_recording
from advisor.replay_pages import page_of
from advisor.replay_report import FileReport, Kept, all_as_json, as_csv
from advisor.replay_runs import Asked, run_requests
from advisor.replay_tiers import DEFAULT_ADMISSIONS, require_costs, tier_tables, tierings
from advisor.tiers import ADMISSIONS, EVICTIONS, Costs, Tiering
from advisor.web.replay_page import render_replay
from event_plane.pacing import Pace
from event_plane.recording import detect_format

DEFAULT_POLICIES = ("lru", "lfu")
DEFAULT_CAPACITIES = (1_000, 5_859, 10_000, 30_000, 50_000, 100_000)


def replay(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Traces of requests (.jsonl, .jsonl.gz), captures (.cap), recordings (.parquet), and an advisor's log"
            " (its folder, or log.db)."
        ),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            help=f"Eviction policy for requests, of {', '.join(sorted(POLICIES))}; repeatable"
            f" (default: {', '.join(DEFAULT_POLICIES)}).",
        ),
    ] = None,
    capacity: Annotated[
        list[int] | None,
        typer.Option(
            "--capacity",
            help="Capacity in blocks, for requests; repeatable"
            f" (default: {', '.join(str(blocks) for blocks in DEFAULT_CAPACITIES)}).",
        ),
    ] = None,
    speed: Annotated[
        float | None,
        typer.Option(
            "--speed",
            help="Times as fast as recorded (default: as fast as it can). Traces then go through the live service's"
            f" fold, which has {' and '.join(ORDERS)}.",
        ),
    ] = None,
    last_half: Annotated[
        bool,
        typer.Option(
            "--last-half",
            help="Count only the last half of the requests, and a last block as many tokens as the others.",
        ),
    ] = False,
    fast: Annotated[
        list[int] | None,
        typer.Option("--fast", help="Run requests through two tiers, the fast one of so many blocks; repeatable."),
    ] = None,
    budget: Annotated[
        list[float] | None,
        typer.Option(
            "--budget", help="With --fast: moves for each different block; repeatable (default: unlimited)."
        ),
    ] = None,
    admission: Annotated[
        list[str] | None,
        typer.Option(
            "--admission",
            help=f"With --fast: of {', '.join(ADMISSIONS)}; repeatable (default: {', '.join(DEFAULT_ADMISSIONS)}).",
        ),
    ] = None,
    eviction: Annotated[
        list[str] | None,
        typer.Option(
            "--eviction",
            help=f"With --fast: of {', '.join(EVICTIONS)}; repeatable (default: the admission's own).",
        ),
    ] = None,
    save_moves: Annotated[
        bool,
        typer.Option("--save-moves", help="With --fast: auto and hazard move only what gains an eighth of a hit soon."),
    ] = False,
    by_priority: Annotated[
        bool,
        typer.Option("--by-priority", help="With --fast: auto and hazard learn of each priority by itself."),
    ] = False,
    token_bytes: Annotated[
        int, typer.Option("--token-bytes", help="With --fast: KV bytes of a token, all layers.")
    ] = Costs.token_bytes,
    fast_gb_s: Annotated[
        float, typer.Option("--fast-gb-s", help="With --fast: the fast tier's reads.")
    ] = Costs.fast_bytes_per_s / 1e9,
    slow_gb_s: Annotated[
        float, typer.Option("--slow-gb-s", help="With --fast: the slow tier's reads.")
    ] = Costs.slow_bytes_per_s / 1e9,
    prefill_tokens_s: Annotated[
        float, typer.Option("--prefill-tokens-s", help="With --fast: how fast the engine computes.")
    ] = Costs.prefill_tokens_per_s,
    fast_price: Annotated[
        float, typer.Option("--fast-price", help="With --fast: dollars for a GB-month of the fast tier.")
    ] = 0.0,
    move_price: Annotated[float, typer.Option("--move-price", help="With --fast: dollars for a GB moved.")] = 0.0,
    prefill_price: Annotated[
        float, typer.Option("--prefill-price", help="With --fast: dollars for an hour of computing.")
    ] = 0.0,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
    state_out: Annotated[
        Path | None, typer.Option("--state", help="Write the live blocks' low 64 hash bits here, sorted.")
    ] = None,
    csv_out: Annotated[Path | None, typer.Option("--csv", help="Write the results here, one a row.")] = None,
    html_out: Annotated[
        Path | None, typer.Option("--html", help="Write curves and pictures here, as a page of its own.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Write to the --json file after each result, and go on from the results that are in it."
        ),
    ] = False,
) -> None:
    """Replay recorded KV events and request traces through the advisor's own fold and policies."""
    policies = list(policy or DEFAULT_POLICIES)
    capacities = list(capacity or DEFAULT_CAPACITIES)
    for name in policies:
        for blocks in capacities:
            require_policy(name, blocks)
    _pace(speed)
    if speed is not None:
        if last_half:
            raise ReplayError("--last-half counts what is replayed at once: leave out --speed")
        for name in policies:
            TraceReplay(name, capacities[0])
    jobs = _tier_jobs(
        fast,
        admission,
        eviction,
        budget,
        save_moves=save_moves,
        by_priority=by_priority,
        conflict="--speed" if speed is not None else "",
    )
    costs = require_costs(
        Costs(
            token_bytes,
            fast_gb_s * 1e9,
            slow_gb_s * 1e9,
            prefill_tokens_s,
            fast_price,
            move_price,
            prefill_price,
        )
    )
    if jobs and state_out is not None:
        raise ReplayError("--state lists the blocks of one tier: leave out --fast")
    _require_resumable(json_out, resume=resume, conflict=speed is not None or state_out is not None)
    for out in (json_out, state_out, csv_out, html_out):
        if out is not None:
            require_writable(out)
    asked = Asked(
        policies,
        capacities,
        jobs,
        costs,
        last_half,
        speed,
        by_priority=by_priority,
        keep_live=state_out is not None,
        draw=html_out is not None,
        kept=Kept(json_out if resume else None),
    )
    # A recording's events are folded, and only for policies, or what shows them, taken for requests.
    as_requests = speed is None and bool(jobs or policy or capacity or csv_out or html_out)
    formats = ["log" if is_log(path) else detect_format(path) for path in files]
    console = Console(markup=False)
    reports: list[FileReport] = []
    for path, kind in zip(files, formats, strict=True):
        if kind != "trace" and not as_requests:
            reports.append(_recording_report(path, kind, speed))
            continue
        trace, refused = requests_of(path)
        report = run_requests(path, trace, asked, reports)
        report.format, report.refused = kind, refused
        reports.append(report)
    for report in reports:
        console.print(_title(report), soft_wrap=True)
        console.print(_table(report))
        for reason, count in report.refused.items():
            console.print(f"not used: {count:,} × {reason}", soft_wrap=True)
    if json_out is not None:
        write_json(json_out, all_as_json(reports))
    if csv_out is not None:
        write_text(csv_out, as_csv(reports))
    if html_out is not None:
        write_text(html_out, render_replay([page_of(report) for report in reports]))
    if state_out is not None:
        write_json(state_out, sorted({block for report in reports for block in report.live}))


def _pace(speed: float | None) -> Pace:
    try:
        return Pace(speed)
    except ValueError as error:
        raise ReplayError(str(error)) from error


def _require_resumable(json_out: Path | None, *, resume: bool, conflict: bool) -> None:
    if resume and json_out is None:
        raise ReplayError("--resume goes on from a file of results: give --json FILE as well")
    if resume and conflict:
        raise ReplayError("--resume takes results over, not blocks nor a pace: leave out --speed and --state")


def _recording_report(path: Path, kind: str, speed: float | None) -> FileReport:
    with progress_of(path.name, None) as advance:
        run = replay_log if kind == "log" else replay_recording
        replayed: RecordingReplay = run(path, advance, _pace(speed))
    return FileReport(
        str(path),
        kind,
        events=replayed.fold.events_total,
        live=live_blocks(replayed.fold),
        refused=replayed.refused,
    )


def _tier_jobs(
    fast: list[int] | None,
    admissions: list[str] | None,
    evictions: list[str] | None,
    budgets: list[float] | None,
    *,
    save_moves: bool,
    by_priority: bool,
    conflict: str,
) -> list[Tiering]:
    if fast:
        if conflict:
            raise ReplayError(f"--fast replays at once: leave out {conflict}")
        return tierings(
            fast,
            list(admissions or DEFAULT_ADMISSIONS),
            list(evictions or ()),
            list(budgets or ()),
            save_moves=save_moves,
        )
    of_two_tiers = {
        "--admission": admissions,
        "--eviction": evictions,
        "--budget": budgets,
        "--save-moves": save_moves,
        "--by-priority": by_priority,
    }
    for name, given in of_two_tiers.items():
        if given:
            raise ReplayError(f"{name} is of two tiers: give --fast BLOCKS as well, the size of the fast one")
    return []


def _title(report: FileReport) -> str:
    if not (report.results or report.tiers):
        return f"{report.path}: {report.format}"
    behind = "" if report.format == "trace" else f" behind the events of a {report.format}"
    return f"{report.path}: {report.requests:,} requests{behind}, {report.events:,} block accesses"


def _table(report: FileReport) -> RenderableType:
    if report.tiers:
        return tier_tables(report.tiers)
    table = Table()
    if not report.results:
        table.add_column("events", justify="right")
        table.add_column("live blocks at the end", justify="right")
        table.add_row(f"{report.events:,}", f"{len(report.live):,}")
        return table
    for column in ("policy", "capacity, blocks", "run blocks", "run tokens", "block hits", "hit ratio"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for r in report.results:
        hit_ratio = f"{r.seq_block_hits / report.events:.4f}" if report.events else "–"
        figures = (r.capacity_blocks, r.run_blocks, r.run_tokens, r.seq_block_hits)
        table.add_row(r.policy, *(f"{figure:,}" for figure in figures), hit_ratio)
    return table
