"""Replays: routes of the REST API."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Response
from starlette.responses import FileResponse

from advisor.access.identity import Scope
from advisor.api.access import needs
from advisor.api.actions import NoOrder, Planner, done
from advisor.api.problems import documented
from advisor.api.queries import ListQuery
from advisor.api.recordings import kept
from advisor.api.routes import first_rows
from advisor.replay_orders import ReplayOrder
from advisor.replay_views import AdvisorReplays, ReplayDetailView, ReplayView

ReplayId = Annotated[str, Path(pattern=r"^r-[0-9a-f]{12}$")]

REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
"""A report is one file with its script in it. In the sandbox it is of no origin: it sees no cookie, and asks nothing of
us or anybody."""


def replay_routes(replays: AdvisorReplays) -> APIRouter:
    """`/api/v1/replays`."""
    routes = APIRouter(prefix="/api/v1", tags=["replays"], dependencies=[Depends(needs(Scope.READ))])

    @routes.get("/replays", summary="Replays, newest first", responses=documented(422))
    def index(query: Annotated[ListQuery, Query()], response: Response) -> list[ReplayView]:
        return first_rows(replays.list(), query.limit, response)

    @routes.post(
        "/replays", summary="Run a recording through policies", responses=documented(404, 409, 422, 507)
    )
    def start(order: ReplayOrder, who: Planner) -> ReplayView:
        """In a process of its own, one at a time; up to 8 wait. The last 50 are kept."""
        return kept(lambda: replays.start(who.name, order))

    @routes.get("/replays/{replay_id}", summary="One replay, with its results so far", responses=documented(404, 422))
    def one(replay_id: ReplayId) -> ReplayDetailView:
        return done(lambda: replays.get(replay_id))

    @routes.get(
        "/replays/{replay_id}/report",
        summary="Curves and pictures of a replay, as a page of its own",
        response_class=FileResponse,
        responses={200: {"content": {"text/html": {"schema": {"type": "string"}}}}, **documented(404, 422)},
    )
    def report(replay_id: ReplayId) -> FileResponse:
        path = done(lambda: replays.report(replay_id))
        return FileResponse(path, media_type="text/html", headers={"Content-Security-Policy": REPORT_POLICY})

    @routes.post("/replays/{replay_id}/cancel", summary="End an open replay", responses=documented(404, 409, 422))
    def cancel(replay_id: ReplayId, _: NoOrder, who: Planner) -> ReplayView:
        return done(lambda: replays.cancel(who.name, replay_id))

    @routes.delete(
        "/replays/{replay_id}", summary="End a replay if it is open, and delete it", responses=documented(404, 422)
    )
    def delete(replay_id: ReplayId, who: Planner) -> ReplayView:
        """Answers with what was deleted."""
        return done(lambda: replays.delete(who.name, replay_id))

    return routes
