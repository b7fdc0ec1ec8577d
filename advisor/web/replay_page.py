"""A replay's figures as one self-contained page: curves of every policy, and pictures of what was replayed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from typing import Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from advisor.trace_pictures import Part, TracePictures
from advisor.web import formats

Unit = Literal["share", "rate", "count", "bytes", "seconds"]
PREFIX_WIDTH, PREFIX_ROW_HEIGHT = 1000, 18


@dataclass(frozen=True, slots=True)
class Line:
    """One series: `values` at the x of the same place. A bound is what no policy can pass; a quiet one is the rest."""

    name: str
    x: list[float]
    values: list[float | None]
    bound: bool = False
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """What `static/replay.js` draws. `stacked`: the lines are areas on top of one another."""

    id: str
    title: str
    says: str
    x_name: str
    x_unit: Unit
    y_unit: Unit
    lines: list[Line]
    logarithmic: bool = False
    stacked: bool = False
    points: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """A table of all figures: heads, and cells as text."""

    heads: list[str]
    cells: list[list[str]]


@dataclass(slots=True)
class FilePage:
    """One file's part of the page."""

    name: str
    figures: list[tuple[str, str, str]]
    """Name, value, and what else there is to say of it."""
    charts: list[Chart] = field(default_factory=list)
    rows: Rows | None = None
    pictures: TracePictures | None = None


@dataclass(frozen=True, slots=True)
class PrefixBox:
    """A part of the tree of prefixes as drawn; lengths in the drawing's units."""

    x: float
    y: float
    width: float
    height: float
    style: str
    title: str


def render_replay(pages: Sequence[FilePage]) -> str:
    """The whole page. Nothing in it is fetched."""
    templates = Environment(
        loader=PackageLoader("advisor.web"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters.update(formats.FILTERS)
    charts = {f"{number}-{chart.id}": asdict(chart) for number, page in enumerate(pages) for chart in page.charts}
    return templates.get_template("replay.html").render(
        pages=pages,
        style=_static("app.css"),
        plot_style=_static("vendor/uplot/uPlot.min.css"),
        plot_script=_static("vendor/uplot/uPlot.iife.min.js"),
        script=_static("replay.js"),
        charts=script_json(charts),
        zip=zip,
        prefix_boxes=prefix_boxes,
        prefix_width=PREFIX_WIDTH,
        prefix_row_height=PREFIX_ROW_HEIGHT,
    )


def script_json(content: Any) -> Markup:
    """JSON inside a script element: nothing in it ends the element."""
    return Markup(json.dumps(content, separators=(",", ":")).replace("<", "\\u003c"))


def prefix_boxes(parts: Sequence[Part]) -> list[PrefixBox]:
    boxes = []
    for part in parts:
        if part.others:
            title = f"{part.others:,} narrower prefixes, used by {part.requests:,} requests in all"
        else:
            last = part.first_block + part.blocks
            title = f"blocks {part.first_block + 1:,} to {last:,}, shared by {part.requests:,} requests"
        boxes.append(
            PrefixBox(
                part.left * PREFIX_WIDTH,
                part.row * PREFIX_ROW_HEIGHT,
                max(part.width * PREFIX_WIDTH - 0.6, 0.6),
                PREFIX_ROW_HEIGHT - 1,
                "others" if part.others else f"depth{part.row % 4}",
                title,
            )
        )
    return boxes


def _static(name: str) -> Markup:
    return Markup(files("advisor.web").joinpath(f"static/{name}").read_text("utf-8"))
