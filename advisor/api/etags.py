"""ETags: an answer that has not changed is not sent again."""

from __future__ import annotations

import hashlib
import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_BYTES_MAX = 1 << 20
"""A longer answer is sent as it comes, without an ETag."""

TAGGED = re.compile(r"/openapi\.json|/api/v1/(policies|plan|config|volumes/[^/]+)")
"""Paths whose GET answers change seldom. Files under `/static` have an ETag of their own."""


def etag_of(body: bytes) -> str:
    """The strong ETag of an answer's exact bytes, in its quotes."""
    return f'"{hashlib.sha256(body).hexdigest()[:32]}"'


def names_etag(header: str, etag: str) -> bool:
    """Whether an `If-None-Match` or `If-Match` header names `etag`. A weak one is compared by its value."""
    named = [part.strip().removeprefix("W/") for part in header.split(",")]
    return "*" in named or etag in named


class ETags:
    """ASGI middleware: GET answers of `TAGGED` carry an ETag; one that the client has already is 304 without a body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "GET" or not TAGGED.fullmatch(scope["path"]):
            await self._app(scope, receive, send)
            return
        await self._app(scope, receive, _Tagging(send, Headers(scope=scope).get("if-none-match", "")))


class _Tagging:
    """Holds an answer back until it is whole, or longer than `BODY_BYTES_MAX`."""

    def __init__(self, send: Send, wanted: str) -> None:
        self._send = send
        self._wanted = wanted
        self._start: Message | None = None
        self._body = bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200:
            self._start = message
            return
        if self._start is None or message["type"] != "http.response.body":
            await self._send(message)
            return
        self._body += message.get("body", b"")
        more = bool(message.get("more_body", False))
        if more and len(self._body) <= BODY_BYTES_MAX:
            return
        start, self._start = self._start, None
        body = bytes(self._body)
        if not more and len(body) <= BODY_BYTES_MAX:
            start, body = self._tagged(start, body)
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    def _tagged(self, start: Message, body: bytes) -> tuple[Message, bytes]:
        etag = etag_of(body)
        headers = MutableHeaders(scope=start)
        headers["ETag"] = etag
        if not names_etag(self._wanted, etag):
            return start, body
        del headers["Content-Length"]
        del headers["Content-Type"]
        return {**start, "status": 304}, b""
