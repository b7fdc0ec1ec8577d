"""The door: says who each request comes from (`request.state.identity`), which `advisor.api.access` then asks for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
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
"""While an answer streams, its reader's token is looked at again so often."""


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
            send = _until_revoked(send, lambda: self._doorkeeper.is_good(admission))
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


def _until_revoked(send: Send, is_good: Callable[[], bool]) -> Send:
    """Ends an answer that streams when `is_good` says no: the server then tells the app that its reader left."""
    checked_s = time.monotonic()
    has_ended = False

    async def send_while_good(message: Message) -> None:
        nonlocal checked_s, has_ended
        if has_ended:
            return
        if message["type"] == "http.response.body" and message.get("more_body", False):
            now_s = time.monotonic()
            if now_s - checked_s >= RECHECK_S:
                checked_s = now_s
                has_ended = not is_good()
        await send({"type": "http.response.body", "body": b""} if has_ended else message)

    return send_while_good
