"""Only requests for hosts that are ours get in, and every answer carries the browser's safety headers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from advisor.api.problems import problem
from advisor.api.safety_headers import add_safety_headers

# A page of another site must not reach the API by pointing its own name at our address (DNS rebinding): the Host header
# gives such a request away.
_LOCAL_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.ASCII | re.IGNORECASE)
_PORT = re.compile(r":[0-9]{1,5}\Z", re.ASCII)

class Guard:
    """ASGI middleware: refuses Host headers that name neither this machine nor one of `hosts` with 421.

    `secure`: browsers come over TLS.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str] = (), *, secure: bool = False) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)
        self._secure = secure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                add_safety_headers(MutableHeaders(scope=message), secure=self._secure)
            await send(message)

        hosts = Headers(scope=scope).getlist("host")
        host = hosts[0] if len(hosts) == 1 else ""
        if _LOCAL_HOST.fullmatch(host) or _PORT.sub("", host.lower()) in self._hosts:
            await self._app(scope, receive, send_guarded)
            return
        detail = (
            f"the request was for host {host[:80]!r}: open the page as 127.0.0.1, [::1] or localhost with its port, or"
            " name the host in api.hosts"
        )
        await problem(421, "foreign-host", "This host name is not served", detail)(scope, receive, send_guarded)
