"""What a refused request gets: `application/problem+json` (RFC 9457), naming the value and the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, Response

from advisor.api.errors import TooManyStreamsError
from advisor.api.safety_headers import add_safety_headers
from advisor.errors import FieldRefused

MEDIA_TYPE = "application/problem+json"

HIDDEN = "(not shown)"
"""Stands for a value that may be a secret."""

_DETAIL_CHARACTERS = 2_000
"""A sentence may quote what was sent."""
_VALUE_SHOWN_CHARACTERS = 80
_ERRORS_SHOWN = 20
_NOT_PARSED = "There was an error parsing the body"
"""What FastAPI says with 400 of a body that is no JSON for another reason than its syntax."""
_SECRET = re.compile(r"authorization|cookie|credential|key_file|passwd|password|secret|token(?!s)", re.IGNORECASE)


class FieldFault(BaseModel):
    """What is wrong with one field of a request."""

    field: str
    """Dotted path in the query, the path or the body; a list's items by number."""
    value: str
    """As it was sent, cut; empty where it was left out, `(not shown)` where it may be a secret."""
    remedy: str


class Problem(BaseModel):
    """RFC 9457 problem details."""

    type: str
    title: str
    status: int
    detail: str
    """What was wrong, with which value, and what to do."""
    errors: list[FieldFault] | None = None
    """Of 422: each field that cannot be used."""


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI entries of the problems a route may answer with."""
    schema = {"$ref": "#/components/schemas/Problem"}
    return {
        status: {
            "description": HTTPStatus(status).phrase,
            "model": Problem,
            "content": {MEDIA_TYPE: {"schema": schema}},
        }
        for status in statuses
    }


def problem(
    status: int, kind: str, title: str, detail: str, errors: list[FieldFault] | None = None
) -> JSONResponse:
    said = _cut(detail, _DETAIL_CHARACTERS)
    told = None if errors is None else [each.model_copy(update={"field": _named(each.field)}) for each in errors]
    body = Problem(type=f"urn:kvadvisor:problem:{kind}", title=title, status=status, detail=said, errors=told)
    return JSONResponse(body.model_dump(exclude_none=True), status_code=status, media_type=MEDIA_TYPE)


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[:characters]}…"


def _named(field: str) -> str:
    """As it was sent, if it was no field of ours: of any length, and of what no answer can say."""
    return _cut(field, _VALUE_SHOWN_CHARACTERS).encode(errors="backslashreplace").decode()


def _fault(error: dict[str, Any]) -> FieldFault:
    # The first part says where it stood (query, path, body); a header's or a whole body's fault has no other.
    path = [str(part) for part in error["loc"]]
    field = ".".join(path[1:] or path) or "request"
    if error["type"] == "json_invalid":
        return FieldFault(field="body", value="", remedy=f"send JSON: {error['ctx']['error']} at character {path[-1]}")
    if error["type"] == "extra_forbidden":
        value, remedy = _shown(field, error.get("input")), "leave it out; /docs lists those there are"
    elif error["type"] == "missing":
        value, remedy = "", "it is required: give it"
    else:
        wanted = str(error["msg"]).replace("Input should be", "it must be").replace("Value error, ", "")
        value, remedy = _shown(field, error.get("input")), f"{wanted[0].lower()}{wanted[1:]}"
    return FieldFault(field=field, value=value, remedy=remedy)


def _shown(field: str, value: object) -> str:
    """A value as a sentence shows it: cut, and not at all where it, or what is in it, may be a secret."""
    text = repr(value)
    # What is nested is looked through by its names: a body is shown whole where a field of it is of the wrong kind.
    if _SECRET.search(field) or (isinstance(value, (dict, list)) and _SECRET.search(text)):
        return HIDDEN
    return _cut(text, _VALUE_SHOWN_CHARACTERS)


def _sentence(error: dict[str, Any], fault: FieldFault) -> str:
    name = fault.field.rpartition(".")[2]
    if error["type"] == "extra_forbidden":
        return f"{name} is not a parameter of this route: {fault.remedy}"
    if error["type"] == "missing":
        return f"{name} was left out: {fault.remedy}"
    if error["type"] == "json_invalid":
        return f"the body is no JSON: {fault.remedy}"
    return f"{name} was {fault.value}: {fault.remedy}"


def _bad_parameters(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    # What was not sent as JSON comes here as it is, and JSON makes no bytes.
    if any(each["loc"] == ("body",) and isinstance(each.get("input"), bytes) for each in error.errors()):
        return _no_json(request)
    told = list(error.errors())[:_ERRORS_SHOWN]
    faults = [_fault(one) for one in told]
    detail = "; ".join(_sentence(one, fault) for one, fault in zip(told, faults, strict=True))
    return problem(422, "bad-parameter", "A parameter cannot be used", detail, faults)


def _no_json(request: Request) -> Response:
    kind = request.headers.get("content-type", "")
    was = f"the content type was {kind[:_VALUE_SHOWN_CHARACTERS]!r}" if kind else "the content type was left out"
    detail = f"{was}: send Content-Type: application/json"
    return problem(415, "content-type", "The content type is refused", detail)


def _unparsed(cause: BaseException | None) -> Response:
    """As of bad syntax, which FastAPI tells apart."""
    if isinstance(cause, RecursionError):
        remedy = "send JSON that nests less deep: no route takes more than a few levels"
    elif isinstance(cause, UnicodeDecodeError):
        remedy = f"send JSON in UTF-8: byte {cause.object[cause.start]:#04x} at {cause.start} is none there"
    else:
        remedy = "send JSON with numbers that a route takes: one has thousands of digits"
    fault = FieldFault(field="body", value="", remedy=remedy)
    return problem(422, "bad-parameter", "A parameter cannot be used", f"the body is no JSON: {remedy}", [fault])


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.detail == _NOT_PARSED:
        return _unparsed(error.__cause__)
    if error.status_code == HTTPStatus.NOT_FOUND and error.detail != HTTPStatus.NOT_FOUND.phrase:
        return problem(404, "not-found", "There is nothing of that name", str(error.detail))
    if error.status_code == HTTPStatus.NOT_FOUND:
        detail = f"nothing is at {request.url.path[:_VALUE_SHOWN_CHARACTERS]}: /docs lists the routes there are"
        return problem(404, "not-found", "There is no such page", detail)
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "GET")
        detail = f"{request.method} is not answered at {request.url.path}: use {allowed}"
        answer = problem(405, "method-not-allowed", "The method is not answered here", detail)
        answer.headers["Allow"] = allowed
        return answer
    phrase = HTTPStatus(error.status_code).phrase
    refusal = problem(error.status_code, "refused", phrase, str(error.detail))
    refusal.headers.update(error.headers or {})
    return refusal


def _field_refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, FieldRefused)
    fault = FieldFault(field=error.field, value=error.value, remedy=error.remedy)
    return problem(422, "bad-parameter", "A parameter cannot be used", str(error), [fault])


def _too_many_streams(_: Request, error: Exception) -> Response:
    return problem(503, "too-many-streams", "No stream is free", str(error))


def _unexpected(_: Request, error: Exception) -> Response:
    # The server logs the traceback; the client learns only the class, since a message may carry a path.
    detail = f"the advisor failed with {type(error).__name__}: its log has the traceback; report it with that"
    answer = problem(500, "internal", "The advisor failed", detail)
    # Made outside of all middleware, `advisor.api.guard` too.
    add_safety_headers(answer.headers)
    return answer


PageOf = Callable[[Request, Problem], str]
"""A problem as a page, for whoever asked for one."""

_Handler = Callable[[Request, Exception], Response]


def _asks_for_a_page(request: Request) -> bool:
    """A browser that goes to an address; scripts and programs ask for JSON or for anything."""
    is_api = request.url.path.startswith("/api/")
    return request.method == "GET" and not is_api and "text/html" in request.headers.get("accept", "")


def _paged(handler: _Handler, page_of: PageOf) -> _Handler:
    def handle(request: Request, error: Exception) -> Response:
        answer = handler(request, error)
        if not _asks_for_a_page(request):
            return answer
        kept = {name: value for name, value in answer.headers.items() if name not in ("content-length", "content-type")}
        page = page_of(request, Problem.model_validate_json(bytes(answer.body)))
        return HTMLResponse(page, status_code=answer.status_code, headers=kept)

    return handle


def install(app: FastAPI, page_of: PageOf) -> None:
    """Every refusal as a problem; to a browser that goes to an address, as a page that says the same."""
    handlers: dict[type[Exception], _Handler] = {
        RequestValidationError: _bad_parameters,
        HTTPException: _http_error,
        FieldRefused: _field_refused,
        TooManyStreamsError: _too_many_streams,
        Exception: _unexpected,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, _paged(handler, page_of))
