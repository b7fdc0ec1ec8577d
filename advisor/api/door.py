"""The door: says who each request comes from (`request.state.identity`), which `advisor.api.access` then asks for."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from starlette.requests import HTTPConnection
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from advisor.access.doorkeeper import Doorkeeper
from advisor.access.errors import NotAdmitted
from advisor.access.sessions import Admission
from advisor.api.problems import problem

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/login"})
OPEN_FOLDER = "/static/"
FORM_PATHS = frozenset({"/login", "/logout"})
"""What a form of ours is sent to; all else takes what no form can send."""
FORM_TYPES = frozenset({"", "application/x-www-form-urlencoded", "multipart/form-data", "text/plain"})
"""What a page of another site can have a browser send without asking the server first (CORS)."""
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
RECHECK_S = 1.0
"""While an answer streams, or a body comes, the token of who sent it is looked at again so often."""


class Door:
    """ASGI middleware. A request that did not come by it has no identity, and is refused wherever one is needed.

    `secure`: browsers come over TLS.
    """

    def __init__(self, app: ASGIApp, doorkeeper: Doorkeeper, *, secure: bool = False) -> None:
        self._app = app
        self._doorkeeper = doorkeeper
        self._secure = secure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = HTTPConnection(scope)
        try:
            admission, by_bearer = await self._admitted(request)
        except NotAdmitted as error:
            wait_s = self._doorkeeper.refused(address_of(request), "bearer", error)
            await _refusal(error, wait_s)(scope, receive, send)
            return
        if admission is None and not _is_open(request.url.path):
            answer: Response | None = _asked_to_log_in(request)
        else:
            answer = None if by_bearer else self._forged(request, admission)
        if answer is not None:
            await answer(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["identity"] = admission.identity if admission is not None else None
        state["admission"] = admission
        if admission is not None and (admission.token_id or admission.expires_us):
            ways = _WhileGood(state, receive, send, lambda: self._doorkeeper.is_good(admission))
            receive, send = ways.receive, ways.send
        await self._app(scope, receive, send)

    async def _admitted(self, request: HTTPConnection) -> tuple[Admission | None, bool]:
        """Who it is, and whether it showed a token, which no other site can have a browser do."""
        shown = request.headers.getlist("authorization")
        if shown:
            kind, _, text = shown[0].partition(" ")
            if len(shown) > 1 or kind.lower() != "bearer":
                raise NotAdmitted("what was shown is no bearer token")
            return await self._doorkeeper.admitted(text.strip()), True
        session_id = request.cookies.get(cookie_name(self._secure))
        admission = self._doorkeeper.by_session(session_id) if session_id else None
        if admission is None and self._doorkeeper.anonymous is not None:
            admission = Admission(self._doorkeeper.anonymous)
        return admission, False

    def _forged(self, request: HTTPConnection, admission: Admission | None) -> Response | None:
        """The refusal of what another site may have had the browser send; None: it is of this very origin."""
        method = request.scope["method"]
        if method in SAFE_METHODS:
            return None
        site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
        own = f"{'https' if self._secure else 'http'}://{request.headers.get('host', '')}"
        # No browser leaves both out of what another site sends; without a login, programs come without a token too.
        is_bare = site is None and origin is None and self._doorkeeper.anonymous is None
        if is_bare or site not in (None, "same-origin") or (origin or own).lower() != own.lower():
            sender = (origin or site or "no origin")[:80]
            detail = f"the request came from {sender!r}, not from {own[:80]}: send it from a page there or with a token"
            return problem(403, "cross-site", "Requests of other sites are refused", detail)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        has_body = "transfer-encoding" in request.headers or request.headers.get("content-length", "0") != "0"
        if (has_body or kind) and kind in FORM_TYPES and request.url.path not in FORM_PATHS:
            detail = f"the content type was {kind[:80]!r}, which a form of any site can send: send application/json"
            return problem(415, "content-type", "The content type is refused", detail)
        return None


def cookie_name(secure: bool) -> str:
    """The prefix has browsers refuse one that was set without TLS, or for other hosts."""
    return "__Host-kvadvisor" if secure else "kvadvisor"


def address_of(request: HTTPConnection) -> str:
    return request.client.host if request.client is not None else ""


def _refusal(error: NotAdmitted, wait_s: float) -> Response:
    """401, or 429 where it was one too many."""
    if wait_s:
        seconds = math.ceil(wait_s)
        answer = problem(429, "too-many-attempts", "Too many failed attempts", f"wait {seconds} s, then try again")
        answer.headers["Retry-After"] = str(seconds)
        return answer
    answer = problem(401, "not-admitted", "This opens nothing", str(error))
    answer.headers["WWW-Authenticate"] = 'Bearer realm="kvadvisor", error="invalid_token"'
    return answer


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


def _asked_to_log_in(request: HTTPConnection) -> Response:
    path = request.url.path
    if path == "/logout":
        return RedirectResponse("/login", status_code=303)
    is_page = request.scope["method"] == "GET" and "text/html" in request.headers.get("accept", "")
    if is_page and not path.startswith("/api/") and "hx-request" not in request.headers:
        wanted = f"{path}?{request.url.query}" if request.url.query else path
        return RedirectResponse(f"/login?next={quote(wanted, safe='')}", status_code=303)
    detail = "this needs a token: send Authorization: Bearer TOKEN, or log in at /login"
    answer = problem(401, "not-admitted", "Who asks is not known", detail)
    answer.headers["WWW-Authenticate"] = 'Bearer realm="kvadvisor"'
    return answer


class _WhileGood:
    """What comes in and goes out of one request while its token is good.

    When it is no more, an answer that streams ends, and no more of a body is read: to the app its sender has left, and
    is nobody whom the door knows (`state`).
    """

    def __init__(self, state: dict[str, Any], receive: Receive, send: Send, is_good: Callable[[], bool]) -> None:
        self._state = state
        self._receive = receive
        self._send = send
        self._is_good = is_good
        self._checked_s = time.monotonic()
        self._has_ended = False
        self._has_started = False
        """The answer: from then on it is what ends."""
        self._has_sent_end = False

    async def receive(self) -> Message:
        while not self._has_started:
            if self._ends_by_now():
                return {"type": "http.disconnect"}
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RECHECK_S):
                    return await self._receive()
        return await self._receive()

    async def send(self, message: Message) -> None:
        self._has_started = True
        if message["type"] == "http.response.body" and message.get("more_body", False) and self._ends_by_now():
            if self._has_sent_end:
                return
            self._has_sent_end = True
            message = {"type": "http.response.body", "body": b""}
        await self._send(message)

    def _ends_by_now(self) -> bool:
        now_s = time.monotonic()
        if not self._has_ended and now_s - self._checked_s >= RECHECK_S:
            self._checked_s = now_s
            self._has_ended = not self._is_good()
            if self._has_ended:
                self._state["identity"] = None
        return self._has_ended
