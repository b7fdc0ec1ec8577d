"""Page `/login`: a token for a session. And `/logout`."""

from __future__ import annotations

import math
from typing import Annotated
from urllib.parse import parse_qs

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.responses import Response

from advisor.access.errors import NotAdmitted
from advisor.access.identity import Identity, Scope
from advisor.access.tokens import TOKEN_CHARACTERS_MAX
from advisor.api.access import identity_of, needs
from advisor.api.door import address_of, cookie_name
from advisor.api.parts import AdminParts
from advisor.web.pages import Pages

HOME = "/"
_FORM_BYTES_MAX = 3 * TOKEN_CHARACTERS_MAX
_NEXT_CHARACTERS_MAX = 2_048


def local_path(wanted: str) -> str:
    """`wanted` where it is a path of ours, else the first page: nobody is sent to another site after a login.

    Browsers take a backslash for a slash and drop control characters, so that none of these is let through.
    """
    is_plain = wanted.isascii() and wanted.isprintable() and not set(wanted) & set('\\ "<>')
    is_path = wanted.startswith("/") and not wanted.startswith("//") and len(wanted) <= _NEXT_CHARACTERS_MAX
    is_ours = not wanted.startswith(("/login", "/logout"))
    return wanted if is_plain and is_path and is_ours else HOME


def login_routes(pages: Pages, parts: AdminParts) -> APIRouter:
    routes = APIRouter()
    doorkeeper, secure = parts.doorkeeper, parts.api.is_secure
    cookie = cookie_name(secure)

    def _shown_again(wanted: str, error: NotAdmitted, wait_s: float) -> Response:
        if not wait_s:
            return HTMLResponse(pages.login(wanted, f"{str(error).capitalize()}."), 401)
        seconds = math.ceil(wait_s)
        told = f"Too many failed attempts: wait {seconds} s, then try again."
        return HTMLResponse(pages.login(wanted, told), 429, {"Retry-After": str(seconds)})

    @routes.get("/login")
    def login(request: Request, next: Annotated[str, Query()] = HOME) -> Response:
        wanted = local_path(next)
        if identity_of(request) is not None:
            return RedirectResponse(wanted, status_code=303)
        return HTMLResponse(pages.login(wanted))

    @routes.post("/login")
    async def log_in(request: Request) -> Response:
        fields = await _fields(request)
        wanted = local_path(fields.get("next", HOME))
        try:
            admission = await doorkeeper.admitted(fields.get("token", "").strip())
        except NotAdmitted as error:
            return _shown_again(wanted, error, doorkeeper.refused(address_of(request), "login", error))
        session_id = doorkeeper.log_in(admission, address_of(request), request.cookies.get(cookie))
        answer = RedirectResponse(wanted, status_code=303)
        answer.set_cookie(cookie, session_id, path="/", secure=secure, httponly=True, samesite="strict")
        return answer

    @routes.post("/logout")
    async def log_out(request: Request, _: Annotated[Identity, Depends(needs(Scope.READ, tenants=True))]) -> Response:
        doorkeeper.log_out(request.cookies.get(cookie, ""), address_of(request))
        answer = RedirectResponse("/login", status_code=303)
        answer.delete_cookie(cookie, path="/", secure=secure, httponly=True, samesite="strict")
        # Whatever this browser keeps of what it was shown goes too.
        answer.headers["Clear-Site-Data"] = '"cache"'
        return answer

    return routes


async def _fields(request: Request) -> dict[str, str]:
    """The form's fields; none where it is longer than any of ours, or no form."""
    content = b""
    async for chunk in request.stream():
        content += chunk
        if len(content) > _FORM_BYTES_MAX:
            return {}
    try:
        fields = parse_qs(content.decode("latin-1"), max_num_fields=8)
    except ValueError:
        return {}
    return {name: values[0] for name, values in fields.items()}
