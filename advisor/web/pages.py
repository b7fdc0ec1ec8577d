"""Pages and their live fragments, rendered from pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from fastapi import Request
from jinja2 import Environment, PackageLoader, StrictUndefined

from advisor.access.identity import LOCAL, Identity, Scope
from advisor.api.access import identity_of
from advisor.api.parts import AdminParts
from advisor.api.picture import Picture
from advisor.api.problems import Problem
from advisor.web import formats
from advisor.web.alerts import Alert
from advisor.web.figures import (
    NOT_TOLD,
    SPARK_HEIGHT,
    SPARK_WIDTH,
    activities,
    not_told,
    origin_total,
    reused_share,
    six_figures,
    tier_shares,
)

FRAGMENTS = ("status", "notices", "figures", "origin", "tiers", "volumes", "moves", "producers", "shadow")
"""Parts of the overview that change: the element with this id holds `templates/fragments/NAME.html`."""

ACTIVITIES_SHOWN = 12
ALERTS_SHOWN = 20
PRODUCERS_LISTED = 20

VENDOR = "/static/vendor/"


@dataclass(frozen=True, slots=True)
class NavigationEntry:
    page: str
    """What the page's template sets `page` to."""
    path: str
    label: str
    part: str = ""
    """The field of `AdminParts` that the page stands on: without it the page is not there."""
    tenants: bool = False
    """It is served to who sees one tenant alone, too."""


NAVIGATION = (
    NavigationEntry("overview", "/", "Overview"),
    NavigationEntry("volumes", "/volumes", "Volumes", "volumes"),
    NavigationEntry("prefixes", "/prefixes", "Prefixes", "prefixes", tenants=True),
    NavigationEntry("blocks", "/blocks", "Blocks", tenants=True),
    NavigationEntry("moves", "/moves", "Moves"),
    NavigationEntry("producers", "/producers", "Producers"),
    NavigationEntry("replay", "/replay", "Replay", "replays"),
    NavigationEntry("settings", "/settings", "Settings"),
    NavigationEntry("docs", "/docs", "API"),
)
"""The pages, in order. A page's file adds its line here."""


@cache
def _environment() -> Environment:
    """Of all apps of this process: a template is compiled once."""
    vendored = files("advisor.web").joinpath("static/vendor/integrity.json").read_text("utf-8")
    integrity: dict[str, str] = {name: fact["integrity"] for name, fact in json.loads(vendored).items()}
    made = Environment(
        loader=PackageLoader("advisor.web"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters.update(formats.FILTERS)
    made.globals.update(vendor=VENDOR, integrity=integrity.__getitem__, scope=Scope, local=LOCAL)
    return made


class Pages:
    """Templates, compiled once. Rendering touches nothing but its arguments."""

    def __init__(self, parts: AdminParts) -> None:
        self._templates = _environment()
        self._navigation = [entry for entry in NAVIGATION if not entry.part or getattr(parts, entry.part) is not None]

    def render(self, template: str, who: Identity, **shown: object) -> str:
        """A page's markup; `who` sees it: its templates leave out what their scope does not allow."""
        return self._filled(template, who, **shown)

    def _filled(self, template: str, who: Identity | None, **shown: object) -> str:
        """`who` None: not known, so that nothing leads further."""
        navigation = self._navigation if who is not None else []
        return self._templates.get_template(template).render(who=who, navigation=navigation, **shown)

    def overview(self, picture: Picture, alerts: Sequence[Alert], who: Identity) -> str:
        return self.render("overview.html", who, **self._shown(picture, alerts))

    def fragments(self, picture: Picture, alerts: Sequence[Alert] = ()) -> dict[str, str]:
        """The markup inside each element of `FRAGMENTS`."""
        shown = self._shown(picture, alerts)
        return {name: self._templates.get_template(f"fragments/{name}.html").render(shown) for name in FRAGMENTS}

    def problem(self, request: Request, problem: Problem) -> str:
        """A refusal as a page, with a way back."""
        known = [entry.path for entry in NAVIGATION if request.url.path == entry.path]
        back = known[0] if known and problem.status < 500 else ""
        who = identity_of(request)
        return self._filled("problem.html", who, problem=problem, back=back if who is not None else "")

    def docs(self, who: Identity) -> str:
        return self.render("docs.html", who)

    def login(self, wanted: str, refused: str = "") -> str:
        """The page for whoever is not known yet. `wanted`: where they go after it; `refused`: why it is shown again."""
        return self._templates.get_template("login.html").render(wanted=wanted, refused=refused)

    def _shown(self, picture: Picture, alerts: Sequence[Alert]) -> dict[str, object]:
        return {
            "summary": picture.summary,
            "failing": [check for check in picture.checks if not check.ok],
            "alerts": alerts[:ALERTS_SHOWN],
            "more_alerts": max(0, len(alerts) - ALERTS_SHOWN),
            "tiers": tier_shares(picture),
            "figures": six_figures(picture),
            "spark_box": f"0 0 {SPARK_WIDTH} {SPARK_HEIGHT}",
            "prompt_blocks": origin_total(picture.summary.origin),
            "reused": reused_share(picture.summary.origin),
            "not_told": NOT_TOLD if not_told(picture.summary) else "",
            "volumes": picture.volumes,
            "activities": activities(picture.moves, ACTIVITIES_SHOWN),
            "producers": picture.producers[:PRODUCERS_LISTED],
            "more_producers": picture.producers_total - min(picture.producers_total, PRODUCERS_LISTED),
            "comparison": picture.comparison,
        }
