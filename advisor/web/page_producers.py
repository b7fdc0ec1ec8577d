"""The page of those who publish: what each misses, what to do about it, and how its source is connected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, ConfigDict, Field

from advisor.access.identity import Identity, Scope
from advisor.api.access import needs
from advisor.api.feed import LiveFeed
from advisor.api.parts import AdminParts
from advisor.views import Check, ProducerView
from advisor.web.pages import Pages
from advisor.web.paging import page_of

PATH = "/producers"

_WORST_FIRST = {"partial": 0, "silent": 1, "live": 2}
_CONNECTIONS = ("source ", "agent ", "hook ")

REMEDIES = {
    "partial": "Whole again at its next snapshot, epoch or Clear of everything; a snapshot is asked for if it can be. "
    "An engine that cannot resend: give its source a replay endpoint, or restart it.",
    "silent": "An idle engine sends nothing. If it should be at work: see that it runs, and its source below.",
}


class ProducersQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    state: Literal["", "live", "partial", "silent"] = ""
    name: str = Field("", max_length=128)
    skip: int = Field(0, ge=0, le=1_000_000)


@dataclass(frozen=True, slots=True)
class ProducerFigures:
    """Of all producers, whatever the filter shows."""

    total: int
    states: Counter[str]
    gaps: int
    resends: int
    snapshots: int
    epochs_closed: int


def producer_figures(producers: Sequence[ProducerView]) -> ProducerFigures:
    return ProducerFigures(
        total=len(producers),
        states=Counter(producer.state for producer in producers),
        gaps=sum(producer.gaps for producer in producers),
        resends=sum(producer.resends for producer in producers),
        snapshots=sum(producer.snapshots for producer in producers),
        epochs_closed=sum(producer.epochs_closed for producer in producers),
    )


def matching(producers: Sequence[ProducerView], state: str, name: str) -> list[ProducerView]:
    """Those of that state with `name` in their name or id, those with something amiss first."""
    found = [
        producer
        for producer in producers
        if state in ("", producer.state)
        and (name.casefold() in producer.name.casefold() or name.casefold() in producer.id)
    ]
    return sorted(found, key=lambda producer: (_WORST_FIRST.get(producer.state, 0), producer.name))


def connections(checks: Sequence[Check]) -> list[Check]:
    """What sources, agents and hooks say of their connections, those that fail first."""
    return sorted((check for check in checks if check.name.startswith(_CONNECTIONS)), key=lambda check: check.ok)


def producers_routes(pages: Pages, parts: AdminParts, feed: LiveFeed) -> APIRouter:
    """`feed` is not used: the page asks for itself anew."""
    routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)

    @routes.get(PATH)
    def producers(
        query: Annotated[ProducersQuery, Query()], who: Annotated[Identity, Depends(needs(Scope.READ))]
    ) -> HTMLResponse:
        known = parts.reader.producers()
        page = page_of(
            matching(known, query.state, query.name), query.skip, PATH, {"state": query.state, "name": query.name}
        )
        shown = pages.render(
            "producers.html", who, query=query, figures=producer_figures(known), producers=page, remedies=REMEDIES,
            connections=connections(parts.reader.checks()),
            skipped_records=parts.reader.summary().skipped_records,
        )
        return HTMLResponse(shown)

    return routes
