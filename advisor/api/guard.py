"""The door: only requests that name this machine get in, and every answer carries the browser's safety headers."""

from __future__ import annotations

import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from advisor.api.problems import problem

# While there is no login, a page of another site must not reach the API by pointing its own name at 127.0.0.1
# (DNS rebinding): the Host header gives such a request away.
_LOCAL_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.ASCII | re.IGNORECASE)

SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Guard:
    """ASGI middleware: refuses foreign Host headers with 421, adds `SECURITY_HEADERS` to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers[name] = value
                # A figure kept by a cache is a wrong figure; files are asked for again with their ETag.
                headers.setdefault("Cache-Control", "no-cache")
            await send(message)

        host = Headers(scope=scope).get("host", "")
        if _LOCAL_HOST.fullmatch(host):
            await self._app(scope, receive, send_guarded)
            return
        detail = f"the request was for host {host[:80]!r}: open the page as 127.0.0.1, [::1] or localhost with its port"
        await problem(421, "foreign-host", "This host name is not served", detail)(scope, receive, send_guarded)
