"""`kvadvisor bench NAME`: a table of figures measured side by side in one run, and JSON for whoever compares runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import entry_points
from inspect import signature
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from advisor.errors import AdvisorError
from event_plane.console import table_console
from event_plane.figures import Figure

WORKERS_MAX = 16
GROUP = "kvadvisor.benches"
JSON_KEYS = ("name", "value", "unit", "goal", "met")


class BenchError(AdvisorError):
    """A benchmark that cannot be run as asked."""


Bench = Callable[[bool], list[Figure]]
"""Takes `quick`: end within 45 s, leaving out what takes longer."""


def bench(
    name: Annotated[str, typer.Argument(help="Which benchmark, e.g. index.")],
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the figures that have a goal here.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="End within 45 s; smaller, and not all of it.")] = False,
    workers: Annotated[
        str | None, typer.Option("--workers", help="Of core: how many load at once beside compute, e.g. 1,2,4.")
    ] = None,
    shared_data: Annotated[
        Path | None,
        typer.Option(
            "--shared-data", help="Of policies: the folder with traces/ (default: $SHARED_DATA, else shared/data)."
        ),
    ] = None,
) -> None:
    """Measure this machine. The exit status is 0 whatever is met; ratios say more than times on a noisy machine."""
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        raise BenchError(f"there is no benchmark {name!r}: choose one of {', '.join(sorted(found))}")
    run: Bench = found[name].load()
    options = {
        "workers": None if workers is None else _counts(workers),
        "shared_data": None if shared_data is None else _folder(shared_data),
    }
    given = {option: value for option, value in options.items() if value is not None}
    figures = _taking(name, run, given)(quick, **given)
    console = table_console()
    for table in _tables(name, figures):
        console.print(table)
    if json_out is not None:
        rows = [{key: getattr(figure, key) for key in JSON_KEYS} for figure in figures if figure.goal]
        try:
            json_out.write_text(json.dumps(rows, indent=1) + "\n")
        except OSError as fault:
            raise BenchError(f"{json_out} cannot be written ({fault.strerror}): choose another place") from fault


TAKEN_BY = {"workers": "core", "shared_data": "policies"}
"""Which benchmark has an option."""


def _taking(name: str, run: Bench, given: Iterable[str]) -> Callable[..., list[Figure]]:
    for option in given:
        if option not in signature(run).parameters:
            flag = f"--{option.replace('_', '-')}"
            raise BenchError(f"benchmark {name!r} takes no {flag}: leave it out, or choose {TAKEN_BY[option]}")
    return run


def _folder(path: Path) -> Path:
    if not path.is_dir():
        raise BenchError(f"--shared-data {path} is no folder: name the one that holds traces/")
    return path


def _counts(workers: str) -> list[int]:
    try:
        counts = [int(count) for count in workers.split(",")]
    except ValueError:
        counts = []
    if not counts or not all(1 <= count <= WORKERS_MAX for count in counts):
        raise BenchError(f"--workers {workers!r} is no list of counts: give some of 1 to {WORKERS_MAX}, e.g. 1,2,4")
    return counts


def _tables(name: str, figures: list[Figure]) -> Iterator[Table]:
    """A grid of those that have a place in one, and a list of the others."""
    if placed := [figure for figure in figures if figure.row and (figure.value is not None or figure.note)]:
        yield _grid(f"bench {name}", placed)
    if listed := [figure for figure in figures if not figure.row]:
        yield _list(f"bench {name}", listed)


def _grid(title: str, figures: list[Figure]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    columns = list(dict.fromkeys(figure.column for figure in figures))
    for column in columns:
        table.add_column(column, justify="left" if _is_text(column, figures) else "right")
    for row in dict.fromkeys(figure.row for figure in figures):
        cells = {figure.column: figure for figure in figures if figure.row == row}
        table.add_row(row, *(_cell(cells[column]) if column in cells else "" for column in columns))
    return table


def _is_text(column: str, figures: list[Figure]) -> bool:
    return all(figure.value is None for figure in figures if figure.column == column)


def _cell(figure: Figure) -> str:
    return f"{_value(figure)} missed" if figure.met is False else _value(figure)


def _list(title: str, figures: list[Figure]) -> Table:
    table = Table(title=title, title_justify="left")
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
