"""The pages of moves: what waits for a person, what is under way, what has ended, and a plan made now."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, HTTPException, Query
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, ConfigDict, Field

from advisor.access.identity import Identity, Scope
from advisor.api.access import needs
from advisor.api.feed import LiveFeed
from advisor.api.parts import AdminParts
from advisor.deletion_views import DeletionView
from advisor.moves import CANCELLED_IN
from advisor.views import CompactionView, MovesView
from advisor.web.pages import Pages
from advisor.web.paging import address

PATH = "/moves"
PLAN_PATH = "/moves/plan"

MOVES_SHOWN = 50
PLANNED_SHOWN = 100
REWRITES_READ = 64
DELETIONS_READ = 100

Reader = Annotated[Identity, Depends(needs(Scope.READ))]


class MovesPageQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    state: Literal["", "open", "planned", "copying", "verified", "switched", "kept", "freed", "aborted", "dry"] = ""
    kind: Literal["", "promote", "demote", "drop", "delete"] = ""
    volume: str = Field("", max_length=64)
    tenant: str = Field("", max_length=256)
    after: str = Field("", max_length=512)


STATES = {
    "": "all", "open": "open", "kept": "kept", "freed": "freed", "aborted": "aborted", "dry": "planned in a dry run",
    "planned": "planned", "copying": "copying", "verified": "verified", "switched": "switched",
}
"""What can be filtered by, and how it is said."""


def open_compactions(parts: AdminParts) -> list[CompactionView]:
    rewrites = parts.reader.compactions(limit=REWRITES_READ).compactions
    return [each for each in rewrites if each.state in ("planned", "running")]


def open_deletions(parts: AdminParts) -> list[DeletionView]:
    if parts.deletions is None:
        return []
    deletions = parts.deletions.page(limit=DELETIONS_READ).deletions
    return [each for each in deletions if each.state not in ("done", "failed")]


def _moves(parts: AdminParts, query: MovesPageQuery) -> MovesView:
    try:
        return parts.reader.moves(
            limit=MOVES_SHOWN, after=query.after or None, state=query.state or None, kind=query.kind or None,
            volume=query.volume or None, tenant=query.tenant or None,
        )  # fmt: skip
    except ValueError as error:
        raise HTTPException(400, f"after was {query.after!r}: {error}; begin at {PATH}") from error


def moves_routes(pages: Pages, parts: AdminParts, feed: LiveFeed) -> APIRouter:
    """`feed` is not used: the page asks for itself anew."""
    routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)

    @routes.get(PATH)
    def moves(query: Annotated[MovesPageQuery, Query()], who: Reader) -> HTMLResponse:
        found = _moves(parts, query)
        filters = query.model_dump(exclude={"after"})
        shown = pages.render(
            "moves.html", who, query=query, summary=parts.reader.summary(), moves=found.moves, refusals=found.refusals,
            pending=None if parts.plans is None else parts.plans.pending(), planned_shown=PLANNED_SHOWN,
            plans=parts.plans is not None, policy=parts.reader.policies().policy, states=STATES,
            volumes=[volume.id for volume in parts.reader.volumes()], cancelled_in=CANCELLED_IN,
            compactions=open_compactions(parts), deletions=open_deletions(parts),
            first=address(PATH, filters) if query.after else "",
            next=address(PATH, {**filters, "after": found.next_cursor}) if found.next_cursor else "",
        )  # fmt: skip
        return HTMLResponse(shown)

    plans = parts.plans
    if plans is not None:

        @routes.get(PLAN_PATH)
        def plan(who: Reader) -> HTMLResponse:
            return HTMLResponse(pages.render("plan.html", who, plan=plans.plan(), planned_shown=PLANNED_SHOWN))

    return routes
