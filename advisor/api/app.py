"""The admin view as one ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI

from advisor.access.identity import Scope
from advisor.api import problems
from advisor.api.access import needs
from advisor.api.actions import action_routes
from advisor.api.advice import advice_routes
from advisor.api.audit import audit_routes
from advisor.api.blocks import block_routes
from advisor.api.bodies import Bodies
from advisor.api.deletions import deletion_routes
from advisor.api.door import Door
from advisor.api.etags import ETags
from advisor.api.even_timing import EvenTiming
from advisor.api.feed import LiveFeed
from advisor.api.guard import Guard
from advisor.api.idempotency import Idempotency
from advisor.api.identity import identity_routes
from advisor.api.measuring import Measuring
from advisor.api.openapi import DescribedApp, operation_id
from advisor.api.parts import AdminParts
from advisor.api.plan import plan_routes
from advisor.api.policies import policy_change_routes, policy_routes
from advisor.api.prefixes import prefix_routes
from advisor.api.recordings import recording_routes
from advisor.api.remembered_file import RememberedFile
from advisor.api.replays import replay_routes
from advisor.api.routes import api_routes, probe_routes
from advisor.api.stopping import Stop, Stopping
from advisor.api.stream import stream_routes
from advisor.api.usage import usage_routes
from advisor.api.volumes import volume_routes
from advisor.web.pages import Pages
from advisor.web.routes import page_routes, static_files

Part = TypeVar("Part")

DESCRIPTION = (
    "Which KV blocks live where, which are hot, and what is being moved. Times are µs since the epoch, UTC. "
    "Refusals are `application/problem+json`."
)


def create_app(parts: AdminParts) -> FastAPI:
    """Routes, pages and files over `parts`.

    `app.state.feed` is the `LiveFeed` and `app.state.stop` a `Stop`: whoever runs the app closes the one and begins the
    other before waiting for open connections to end (`advisor.api.server.AdminServer` does).
    """
    feed = LiveFeed(parts.reader, plans=parts.plans, volumes=parts.volumes)
    stop = Stop()
    answers = None if parts.answers_file is None else RememberedFile(parts.answers_file)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        noticing = asyncio.create_task(feed.notice())
        yield
        feed.close()
        await noticing
        if parts.close is not None:
            await parts.close()
        if answers is not None:
            answers.close()

    # FastAPI's own /docs loads its scripts from another host; `page_routes` has one that loads ours.
    app = DescribedApp(
        title="kvadvisor", version=version("kvadvisor"), description=DESCRIPTION,
        docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan,
        generate_unique_id_function=operation_id,
    )
    app.needs_login = parts.doorkeeper.anonymous is None
    app.state.feed, app.state.stop = feed, stop
    pages = Pages(parts)
    problems.install(app, pages.problem)

    @app.get("/openapi.json", include_in_schema=False, dependencies=[Depends(needs(Scope.READ))])
    def openapi() -> dict[str, Any]:
        return app.openapi()

    for router in _routers(parts, feed):
        app.include_router(router)
    app.include_router(page_routes(pages, parts, feed))
    app.mount("/static", static_files(), name="static")
    app.add_middleware(ETags)
    app.add_middleware(Idempotency, file=answers)
    app.add_middleware(EvenTiming)
    app.add_middleware(Bodies)
    app.add_middleware(Door, doorkeeper=parts.doorkeeper, secure=parts.api.is_secure)
    app.add_middleware(Stopping, stop=stop)
    app.add_middleware(Guard, hosts=parts.api.hosts, secure=parts.api.is_secure)
    app.add_middleware(Measuring, observe=parts.observe, span=parts.span)
    return app


def _routers(parts: AdminParts, feed: LiveFeed) -> list[APIRouter]:
    reader = parts.reader
    return [
        probe_routes(reader, parts.metrics),
        api_routes(reader),
        stream_routes(reader, feed),
        block_routes(reader, parts.blocks),
        *_of(parts.audit, audit_routes),
        advice_routes(reader),
        policy_routes(reader),
        *_of(parts.actions, action_routes),
        *_of(parts.policies, policy_change_routes),
        *_of(parts.plans, plan_routes),
        *_of(parts.deletions, deletion_routes),
        *_of(parts.volumes, partial(volume_routes, actions=parts.actions)),
        *_of(parts.prefixes, prefix_routes),
        *_of(parts.usage, usage_routes),
        *_of(parts.recordings, recording_routes),
        *_of(parts.replays, replay_routes),
        identity_routes(parts),
    ]


def _of(part: Part | None, routes: Callable[[Part], APIRouter]) -> list[APIRouter]:
    """Those of a part that may be missing."""
    return [] if part is None else [routes(part)]
