"""Requests to an app without a socket, for answers that do not stream."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import httpx
from fastapi import FastAPI
from sample_parts import sample_parts

from advisor.api.app import create_app
from advisor.api.feed import LiveFeed
from advisor.api.parts import NOBODY, AdminParts
from advisor.views import AdvisorReader

SWAPPED = (
    "reader", "doorkeeper", "actions", "plans", "policies", "deletions", "prefixes", "volumes", "usage", "blocks",
    "audit", "recordings", "replays",
)  # fmt: skip
"""Parts that an app only calls: one app stands for all that differ in nothing else."""


class StandIn:
    """Is, to the app, whatever the one who asks has under this name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.parts: AdminParts | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self.parts, self._name), name)


class SharedApp:
    """Routes, which take a third of a second to make, over parts that are exchanged."""

    def __init__(self, anonymous: bool) -> None:
        self._stand_ins = {name: StandIn(name) for name in SWAPPED}
        self._show(sample_parts() if anonymous else sample_parts(doorkeeper=NOBODY))
        self.app = create_app(sample_parts(**self._stand_ins))

    def _show(self, parts: AdminParts) -> None:
        for stand_in in self._stand_ins.values():
            stand_in.parts = parts

    def lend(self, parts: AdminParts, feed: LiveFeed, layers: Any) -> FastAPI:
        """The app over `parts`, with what it has looked at and answered so far."""
        self._show(parts)
        vars(self.app.state.feed).update(vars(feed))
        self.app.middleware_stack = layers
        return self.app


@cache
def shared_app(anonymous: bool) -> SharedApp:
    """One that lets in whoever has no token describes itself in another way."""
    return SharedApp(anonymous)


class Direct:
    """The admin view over `reader` and `parts`. `raises` lets a fault of the app through instead of answering 500;
    `alone` makes an app of its own, as a start of the service does."""

    def __init__(self, reader: AdvisorReader, *, raises: bool = True, alone: bool = False, **parts: Any) -> None:
        self._raises = raises
        self._parts = sample_parts(reader=reader, **parts)
        is_shared = not alone and parts.keys() <= set(SWAPPED) and None not in parts.values()
        self._own = None if is_shared else create_app(self._parts)
        self._feed = LiveFeed(reader, plans=self._parts.plans, volumes=self._parts.volumes)
        self._layers: Any = None

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def ask(app: FastAPI) -> httpx.Response:
            transport = httpx.ASGITransport(app, raise_app_exceptions=self._raises)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8470") as client:
                return await client.request(method, path, **options)

        if self._own is not None:
            return asyncio.run(ask(self._own))
        shared = shared_app(self._parts.doorkeeper.anonymous is not None)
        app = shared.lend(self._parts, self._feed, self._layers)
        try:
            return asyncio.run(ask(app))
        finally:
            self._layers = app.middleware_stack
            vars(self._feed).update(vars(app.state.feed))
