"""Bodies of requests: bounded in bytes and in time before anything reads them."""

from __future__ import annotations

import asyncio
import re
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from advisor.api.problems import problem

BODY_BYTES_MAX = 2 << 20
"""More than the longest list of hashes that advice takes."""
BODY_S_MAX = 30.0
"""From a request's head to the end of its body."""

UPLOADS = re.compile(r"/api/v1/recordings/[^/]+")
"""PUTs with bounds of their own."""


class Bodies:
    """ASGI middleware: reads a body whole, and answers 413 or 408 where it is too long or too slow."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._seconds_max = BODY_S_MAX

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_upload = scope["type"] == "http" and scope["method"] == "PUT" and UPLOADS.fullmatch(scope["path"])
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD") or is_upload:
            await self._app(scope, receive, send)
            return
        body = bytearray()
        until_s = time.monotonic() + self._seconds_max
        more = True
        while more:
            try:
                message = await asyncio.wait_for(receive(), max(0.0, until_s - time.monotonic()))
            except TimeoutError:
                detail = f"the body was not whole after {self._seconds_max:g} s: send it again, faster"
                await problem(408, "slow-body", "The body came too slowly", detail)(scope, receive, send)
                return
            if message["type"] != "http.request":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > BODY_BYTES_MAX:
                detail = f"the body is longer than {BODY_BYTES_MAX} bytes: send less at a time"
                await problem(413, "long-body", "The body is too long", detail)(scope, receive, send)
                return
        await self._app(scope, again(bytes(body), receive), send)


def again(body: bytes, receive: Receive) -> Receive:
    """The body that was read, then whatever comes."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def read() -> Message:
        return messages.pop() if messages else await receive()

    return read
