"""The door: says who each request comes from (`request.state.identity`), which `advisor.api.access` then asks for."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from advisor.access.doorkeeper import Doorkeeper


class Door:
    """ASGI middleware. A request that did not come by it has no identity, and is refused wherever one is needed."""

    def __init__(self, app: ASGIApp, doorkeeper: Doorkeeper) -> None:
        self._app = app
        self._doorkeeper = doorkeeper

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope.setdefault("state", {})["identity"] = self._doorkeeper.anonymous
        await self._app(scope, receive, send)
