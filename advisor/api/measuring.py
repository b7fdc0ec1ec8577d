"""Counts and times every request by its route, never by its path: a path holds hashes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

Observe = Callable[[str, str, int, float], None]
"""Told a request's route, method, status and seconds to its answer's first byte."""

OTHER = "other"
"""The route of what no route answers."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Measuring:
    """ASGI middleware, the outermost but one: what it measures includes the other doors."""

    def __init__(
        self, app: ASGIApp, observe: Observe, span: Callable[..., AbstractContextManager[Any]]
    ) -> None:
        """`span`: see `advisor.tracing.Span`."""
        self._app = app
        self._observe = observe
        self._span = span

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.perf_counter()
        method = scope["method"] if scope["method"] in _METHODS else OTHER

        async def send_measured(message: Message) -> None:
            if message["type"] == "http.response.start":
                status = int(message["status"])
                self._observe(route_of(scope), method, status, time.perf_counter() - started_s)
            await send(message)

        with self._span("request", method=method) as span:
            await self._app(scope, receive, send_measured)
            span.set("route", route_of(scope))


def route_of(scope: Scope) -> str:
    """`/api/v1/volumes/{volume_id}`; a mount by its folder."""
    route = scope.get("route")
    if route is not None:
        return str(route.path)
    mounted = scope.get("root_path", "")
    return mounted if mounted == "/static" else OTHER
