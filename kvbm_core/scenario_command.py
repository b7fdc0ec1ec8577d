"""`kvadvisor scenario`: the hierarchy under eviction, as useful completions and time to first token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from event_plane.console import table_console
from kvbm_core.errors import ScenarioError
from kvbm_core.scenarios.catalogue import SCENARIOS, scenario_named
from kvbm_core.scenarios.machine_model import Source
from kvbm_core.scenarios.report import RequestFigures, ScenarioFigures, figures_of
from kvbm_core.scenarios.script import Scenario
from kvbm_core.scenarios.serving import run_setup


def scenario(
    name: Annotated[str | None, typer.Argument(help="Which scenario; all are listed where none is named.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the workload: the same seed gives the same figures.")] = 0,
    limit_ms: Annotated[
        float | None, typer.Option(min=0.001, help="A first token within this is useful; else the scenario's own.")
    ] = None,
    prefill: Annotated[
        float | None, typer.Option("--prefill-tokens-per-s", min=1.0, help="How fast the machine computes a prompt.")
    ] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
) -> None:
    """Serve a seeded workload with several configurations of the tiers, side by side, in virtual time."""
    if name is None:
        _list_scenarios()
        return
    figures = run_scenario(scenario_named(name), seed, limit_ms, prefill)
    console = table_console()
    for table in _tables(figures):
        console.print(table)
    if json_out is not None:
        try:
            json_out.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")
        except OSError as fault:
            raise ScenarioError(f"{json_out} cannot be written ({fault.strerror}): choose another place") from fault


def run_scenario(
    chosen: Scenario, seed: int, limit_ms: float | None = None, prefill_tokens_per_s: float | None = None
) -> ScenarioFigures:
    """All setups of a scenario, one after another."""
    model = chosen.model
    if prefill_tokens_per_s is not None:
        model = msgspec.structs.replace(model, prefill_tokens_per_s=prefill_tokens_per_s)
    runs = [run_setup(chosen, setup, seed, model) for setup in chosen.setups]
    return figures_of(chosen, seed, chosen.limit_ms if limit_ms is None else limit_ms, model, runs)


def _list_scenarios() -> None:
    table = Table(title="kvadvisor scenario NAME", title_justify="left")
    for column in ("name", "what happens", "with each of"):
        table.add_column(column)
    for each in SCENARIOS.values():
        table.add_row(each.name, each.says, "; ".join(setup.name for setup in each.setups))
    table_console().print(table)


def _tables(figures: ScenarioFigures) -> Iterator[Table]:
    yield _requests_table(figures)
    yield _tiers_table(figures)


def _requests_table(figures: ScenarioFigures) -> Table:
    title = f"scenario {figures.scenario}, seed {figures.seed}: first token within {figures.limit_ms:g} ms is useful"
    table = Table(title=title, title_justify="left")
    table.add_column("setup")
    table.add_column("requests")
    sources = [source for source in Source if any(source in setup.all.found for setup in figures.setups)]
    for column in ("", "useful", "p50 ms", "p90 ms", "p99 ms", "blocks", *sources, "computed", "lost"):
        table.add_column(column, justify="right")
    for setup in figures.setups:
        rows = [*setup.kinds.items()] if len(setup.kinds) == 1 else [*setup.kinds.items(), ("all", setup.all)]
        for number, (kind, row) in enumerate(rows):
            table.add_row(setup.setup if not number else "", kind, *_request_cells(row, sources))
        table.add_section()
    return table


def _request_cells(row: RequestFigures, sources: list[Source]) -> list[str]:
    return [
        f"{row.requests:,}",
        f"{row.useful / row.requests:.0%}",
        *(f"{ms:,.1f}" for ms in (row.ttft_p50_ms, row.ttft_p90_ms, row.ttft_p99_ms)),
        f"{row.blocks:,}",
        *(f"{row.found.get(source, 0):,}" for source in sources),
        f"{row.computed:,}",
        _counts(row.lost),
    ]


def _tiers_table(figures: ScenarioFigures) -> Table:
    table = Table(title="what the tiers did, in the model's bytes", title_justify="left")
    table.add_column("setup")
    paths = list(dict.fromkeys(path for setup in figures.setups for path in setup.moved_bytes))
    for path in paths:
        table.add_column(f"{path.replace('_', ' ')} GB", justify="right")
    pools = list(dict.fromkeys(pool for setup in figures.setups for pool in setup.core.evicted))
    for pool in pools:
        table.add_column(f"{pool}: evicted (unmatched) of allocated", justify="right")
    table.add_column("not offloaded", justify="right")
    table.add_column("refused by volumes", justify="right")
    table.add_column("wrong", justify="right")
    for setup in figures.setups:
        core = setup.core
        table.add_row(
            setup.setup,
            *(f"{setup.moved_bytes.get(path, 0) / 1e9:,.2f}" for path in paths),
            *(
                f"{core.evicted[pool]:,} ({core.evicted_unmatched[pool]:,}) of {core.allocated[pool]:,}"
                if pool in core.allocated
                else "–"
                for pool in pools
            ),
            _counts(core.offload_skipped),
            _counts(core.put_refused),
            f"{setup.wrong_blocks:,}",
        )
    return table


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())) or "–"
