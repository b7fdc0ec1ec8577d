"""What all streams of server-sent events have in common: a place of the feed, and watchers that leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import anyio
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

from advisor.api.access import identity_of
from advisor.api.feed import LiveFeed


class StreamRoute(APIRoute):
    """A stream whose watcher may leave while an event waits to be sent."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """FastAPI closes the reading end of its own queue before it ends who writes there: that is no fault."""
        try:
            await super().handle(scope, receive, send)
        except* anyio.BrokenResourceError:
            pass


def stream_place(feed: LiveFeed) -> Callable[[Request], Iterator[None]]:
    """A dependency that holds one of the feed's places while a stream is open."""

    def hold(request: Request) -> Iterator[None]:
        who = identity_of(request)
        with feed.admitted("" if who is None else who.name):
            yield

    return hold
