"""The REST API. Reads are plain functions, which FastAPI runs off the event loop; the log alone is read in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from advisor.access.identity import Scope
from advisor.api.access import identity_of, needs
from advisor.api.problems import documented
from advisor.api.queries import CompactionsQuery, EventsQuery, ListQuery, MovesQuery, SamplesQuery
from advisor.views import (
    AdvisorReader,
    Check,
    CompactionsView,
    EventsPage,
    MovesView,
    ProducerView,
    Sample,
    Summary,
    VolumeView,
)

Row = TypeVar("Row")

TOTAL_HEADER = "X-Total-Count"


class Health(BaseModel):
    status: str


class Readiness(BaseModel):
    ready: bool
    checks: list[Check]
    """Those that fail where `ready` is false, else all. Whoever may not read gets their names alone."""


def probe_routes(reader: AdvisorReader, metrics: Callable[[], bytes]) -> APIRouter:
    """`/healthz`, `/readyz` and `/metrics`."""
    routes = APIRouter(tags=["probes"])

    @routes.get("/healthz", summary="Whether the process answers")
    def healthz() -> Health:
        return Health(status="ok")

    @routes.get(
        "/readyz",
        summary="Whether the service does its job",
        responses={503: {"model": Readiness, "description": "Not ready; `checks` are those that fail"}},
    )
    def readyz(request: Request, response: Response) -> Readiness:
        checks = reader.checks()
        who = identity_of(request)
        if who is None or who.tenant:
            checks = [Check(name=check.name, ok=check.ok, text="") for check in checks]
        failing = [check for check in checks if not check.ok]
        if failing:
            response.status_code = 503
        return Readiness(ready=not failing, checks=failing or checks)

    @routes.get("/metrics", summary="Metrics for Prometheus", response_class=Response,
                dependencies=[Depends(needs(Scope.READ))],
                responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
    def prometheus() -> Response:
        return Response(metrics(), media_type=CONTENT_TYPE_LATEST)

    return routes


def api_routes(reader: AdvisorReader) -> APIRouter:
    """Everything under `/api/v1`."""
    routes = APIRouter(prefix="/api/v1", tags=["advisor"], dependencies=[Depends(needs(Scope.READ))])

    @routes.get("/summary", summary="The service in one answer")
    def summary() -> Summary:
        return reader.summary()

    @routes.get("/volumes", summary="Registered volumes", responses=documented(422))
    def volumes(query: Annotated[ListQuery, Query()], response: Response) -> list[VolumeView]:
        return first_rows(reader.volumes(), query.limit, response)

    @routes.get("/moves", summary="Moves and refusals, newest first", responses=documented(400, 422))
    def moves(query: Annotated[MovesQuery, Query()]) -> MovesView:
        try:
            return reader.moves(
                limit=query.limit, after=query.after, state=query.state, kind=query.kind, volume=query.volume,
                tenant=query.tenant,
            )
        except ValueError as error:
            raise HTTPException(400, f"after was {query.after!r}: {error}") from error

    @routes.get("/compactions", summary="Rewrites on volumes, and how their blocks lie", responses=documented(422))
    def compactions(query: Annotated[CompactionsQuery, Query()]) -> CompactionsView:
        return reader.compactions(limit=query.limit)

    @routes.get("/producers", summary="Who publishes, and whether anything is missing", responses=documented(422))
    def producers(query: Annotated[ListQuery, Query()], response: Response) -> list[ProducerView]:
        return first_rows(reader.producers(), query.limit, response)

    @routes.get("/events", summary="Entries of the event log", responses=documented(422))
    async def events(query: Annotated[EventsQuery, Query()]) -> EventsPage:
        kind = None if query.kind is None else query.kind.value
        producer = None if query.producer is None else int(query.producer, 16)
        return await reader.events(
            from_position=query.from_position, limit=query.limit, kind=kind, producer=producer, source=query.source,
            until_position=query.until_position,
        )

    @routes.get("/samples", summary="One sample a second, oldest first", responses=documented(422))
    def samples(query: Annotated[SamplesQuery, Query()]) -> list[Sample]:
        return reader.samples(seconds=query.seconds)

    return routes


def first_rows(rows: Sequence[Row], limit: int, response: Response) -> list[Row]:
    """At most `limit` rows; a header says how many there are."""
    response.headers[TOTAL_HEADER] = str(len(rows))
    return list(rows[:limit])
