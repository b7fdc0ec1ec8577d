"""The pages' routes: HTML, the stream of HTML fragments, and files. None is part of the API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.resources import files
from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.staticfiles import StaticFiles

from advisor.access.identity import Identity, Scope
from advisor.api.access import needs
from advisor.api.feed import LiveFeed
from advisor.api.parts import AdminParts
from advisor.api.stream_route import StreamRoute, stream_place
from advisor.web.page_blocks import blocks_routes
from advisor.web.page_login import login_routes
from advisor.web.page_moves import moves_routes
from advisor.web.page_prefixes import prefixes_routes
from advisor.web.page_producers import producers_routes
from advisor.web.page_replay import replay_routes
from advisor.web.page_settings import settings_routes
from advisor.web.page_volumes import volumes_routes
from advisor.web.pages import Pages

Reader = Annotated[Identity, Depends(needs(Scope.READ))]


def static_files() -> StaticFiles:
    return StaticFiles(directory=str(files("advisor.web").joinpath("static")))


def page_routes(pages: Pages, parts: AdminParts, feed: LiveFeed) -> APIRouter:
    routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)

    @routes.get("/")
    async def overview(who: Annotated[Identity, Depends(needs(Scope.READ, tenants=True))]) -> Response:
        if who.tenant:
            return RedirectResponse("/blocks", status_code=303)
        return HTMLResponse(pages.overview(await feed.current(), feed.alerts, who))

    @routes.get("/docs")
    def docs(who: Reader) -> HTMLResponse:
        return HTMLResponse(pages.docs(who))

    routes.include_router(login_routes(pages, parts))
    routes.include_router(blocks_routes(pages, parts, feed))
    routes.include_router(volumes_routes(pages, parts, feed))
    routes.include_router(moves_routes(pages, parts, feed))
    routes.include_router(prefixes_routes(pages, parts, feed))
    routes.include_router(producers_routes(pages, parts, feed))
    routes.include_router(replay_routes(pages, parts, feed))
    routes.include_router(settings_routes(pages, parts, feed))

    streams = APIRouter(route_class=StreamRoute)

    @streams.get(
        "/live",
        response_class=EventSourceResponse,
        dependencies=[Depends(needs(Scope.READ)), Depends(stream_place(feed))],
    )
    async def live() -> AsyncIterator[ServerSentEvent]:
        """Fragments that changed, as htmx partials in one message; then the sample for the charts as event `sample`."""
        sent: dict[str, str] = {}
        async for picture in feed.pictures():
            now = pages.fragments(picture, feed.alerts)
            changed = [
                f'<hx-partial hx-target="#{name}" hx-swap="innerMorph">{markup}</hx-partial>'
                for name, markup in now.items()
                if sent.get(name) != markup
            ]
            sent = now
            position = str(picture.summary.position)
            if changed:
                yield ServerSentEvent(raw_data="\n".join(changed), id=position)
            sample = picture.samples[-1].model_dump_json() if picture.samples else "null"
            yield ServerSentEvent(event="sample", raw_data=sample, id=position)

    routes.include_router(streams)
    return routes
