"""`kvadvisor bench NAME`: a table of figures measured side by side in one run, and JSON for whoever compares runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from advisor.errors import AdvisorError
from event_plane.figures import Figure

GROUP = "kvadvisor.benches"


class BenchError(AdvisorError):
    """A benchmark that cannot be run as asked."""


Bench = Callable[[bool], list[Figure]]
"""Takes `quick`: end within 45 s, leaving out what takes longer."""


def bench(
    name: Annotated[str, typer.Argument(help="Which benchmark, e.g. index.")],
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the figures that have a goal here.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="End within 45 s; smaller, and not all of it.")] = False,
) -> None:
    """Measure this machine. The exit status is 0 whatever is met; ratios say more than times on a noisy machine."""
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        raise BenchError(f"there is no benchmark {name!r}: choose one of {', '.join(sorted(found))}")
    run: Bench = found[name].load()
    figures = run(quick)
    Console().print(_table(name, figures))
    if json_out is not None:
        rows = [{k: v for k, v in asdict(figure).items() if k != "note"} for figure in figures if figure.goal]
        try:
            json_out.write_text(json.dumps(rows, indent=1) + "\n")
        except OSError as fault:
            raise BenchError(f"{json_out} cannot be written ({fault.strerror}): choose another place") from fault


def _table(name: str, figures: list[Figure]) -> Table:
    table = Table(title=f"bench {name}", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("unit")
    table.add_column("goal")
    table.add_column("met")
    for figure in figures:
        met = {None: "", True: "yes", False: "no"}[figure.met]
        table.add_row(figure.name, _value(figure), figure.unit, figure.goal, met)
    return table


def _value(figure: Figure) -> str:
    if figure.value is None:
        return figure.note or "–"
    return f"{figure.value:,.3g}" if abs(figure.value) < 1_000 else f"{figure.value:,.0f}"
