"""A recorded stream's figures as one self-contained page: no script, nothing loaded."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from advisor.web import formats
from event_plane.stream_report import TIERS, Rates, Report, tier_name

CHART_WIDTH: Final = 960
CHART_HEIGHT: Final = 200
ROWS_MAX: Final = 20
"""Producers, locations and namespaces shown; the command line and `--json` have all."""
EPOCHS_SHOWN_MAX: Final = 8

_STYLES: Final = {tier: f"g{int(tier)}" if tier else "rc" for tier in TIERS}


@dataclass(frozen=True, slots=True)
class Piece:
    """A coloured part of a bar. Lengths in the chart's units, `style` a class of app.css."""

    x: float
    y: float
    width: float
    height: float
    style: str


@dataclass(frozen=True, slots=True)
class Span:
    """One span of time: its stack of tiers, and what the hover says."""

    pieces: list[Piece]
    title: str


def rate_spans(rates: Rates) -> list[Span]:
    """The bars of the chart of events a second, stacked by tier."""
    highest = max((sum(counts) for counts in rates.events), default=0) or 1
    width = CHART_WIDTH / max(len(rates.events), 1)
    spans = []
    for number, counts in enumerate(rates.events):
        top = float(CHART_HEIGHT)
        pieces = []
        for tier, events in zip(TIERS, counts, strict=True):
            if events:
                height = events / highest * CHART_HEIGHT
                top -= height
                pieces.append(Piece(number * width, top, max(width - 0.5, 0.5), height, _STYLES[tier]))
        at = formats.timestamp(rates.start_us + number * rates.bin_us)
        spans.append(Span(pieces, f"{at}: {formats.rate(sum(counts) / rates.bin_us * 1e6)} events/s"))
    return spans


def _moments(rates: Rates) -> list[tuple[str, str]]:
    """Beneath the chart: time since its begin, and the time itself."""
    whole_us = len(rates.events) * rates.bin_us
    moments = []
    for share in range(5):
        since_us = whole_us * share // 4
        since = formats.seconds(since_us / 1e6) if whole_us >= 10_000_000 else f"{since_us / 1000:.0f} ms"
        moments.append((since, formats.timestamp(rates.start_us + since_us)))
    return moments


def render_stream(report: Report, name: str) -> str:
    """The page. `name` is what was read, for its title."""
    templates = Environment(
        loader=PackageLoader("advisor.web"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters.update(formats.FILTERS)
    rates = report.rates
    return templates.get_template("recording.html").render(
        name=name,
        report=report,
        style=Markup(files("advisor.web").joinpath("static/app.css").read_text("utf-8")),
        spans=rate_spans(rates),
        box=f"0 0 {CHART_WIDTH} {CHART_HEIGHT}",
        peak=max((sum(counts) for counts in rates.events), default=0) / rates.bin_us * 1e6,
        mean=report.events / report.span_s if report.span_s else None,
        moments=_moments(rates),
        legend=[
            (tier_name(tier) if tier else "all or other", _STYLES[tier], sum(counts[n] for counts in rates.events))
            for n, tier in enumerate(TIERS)
        ],
        tiers=[(tier_name(tier), _STYLES[tier]) for tier in TIERS],
        producers=report.producers[:ROWS_MAX],
        epochs_max=EPOCHS_SHOWN_MAX,
        locations=list(report.locations.items())[:ROWS_MAX],
        namespaces=list(report.namespaces.items())[:ROWS_MAX],
    )
