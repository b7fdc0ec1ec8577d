"""Requests that are still being sent when the service stops: cut, and answered 503, so that nobody waits for them."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from advisor.api.problems import problem

REFUSED_FROM = 400


class Stop:
    """Whether the service stops, and who waits for more of a request until then. Lives on one event loop."""

    def __init__(self) -> None:
        self._has_begun = False
        self._waiting: set[asyncio.Timeout] = set()

    def begin(self) -> None:
        """From now on nobody waits for what has not come. Idempotent."""
        if self._has_begun:
            return
        self._has_begun = True
        for waiting in self._waiting:
            waiting.reschedule(asyncio.get_running_loop().time())

    async def next_of(self, receive: Receive) -> Message | None:
        """What comes next, None where the service stops before it does."""
        limit = asyncio.timeout(0 if self._has_begun else None)
        try:
            async with limit:
                self._waiting.add(limit)
                return await receive()
        except TimeoutError:
            if not limit.expired():
                raise
            return None
        finally:
            self._waiting.discard(limit)


class Stopping:
    """ASGI middleware: a request that is waited for when the service stops looks as if its sender had left. Unless it
    was carried out all the same, its sender is answered 503."""

    def __init__(self, app: ASGIApp, stop: Stop) -> None:
        self._app = app
        self._stop = stop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        ways = _Cut(self._stop, receive, send)
        await self._app(scope, ways.receive, ways.send)
        if ways.is_unanswered:
            detail = "the advisor stops, and had not received all of it: nothing of it is kept; send it again"
            await problem(503, "stopping", "The advisor stops", detail)(scope, receive, send)


class _Cut:
    """The two ways of one request. An answer that has begun goes on as it is."""

    def __init__(self, stop: Stop, receive: Receive, send: Send) -> None:
        self._stop, self._receive, self._send = stop, receive, send
        self._is_cut = False
        self._is_answered = False

    @property
    def is_unanswered(self) -> bool:
        """It was cut, and no answer was let through."""
        return self._is_cut and not self._is_answered

    async def receive(self) -> Message:
        if self._is_answered:
            return await self._receive()
        message = None if self._is_cut else await self._stop.next_of(self._receive)
        if message is None:
            self._is_cut = True
            return {"type": "http.disconnect"}
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and not (self._is_cut and message["status"] >= REFUSED_FROM):
            self._is_answered = True
        if self._is_answered:
            await self._send(message)
