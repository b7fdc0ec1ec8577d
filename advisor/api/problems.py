"""What a refused request gets: `application/problem+json` (RFC 9457), naming the value and the remedy."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from advisor.api.errors import TooManyStreamsError

MEDIA_TYPE = "application/problem+json"

_VALUE_SHOWN_CHARACTERS = 80


class Problem(BaseModel):
    """RFC 9457 problem details."""

    type: str
    title: str
    status: int
    detail: str
    """What was wrong, with which value, and what to do."""


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


def problem(status: int, kind: str, title: str, detail: str) -> JSONResponse:
    body = Problem(type=f"urn:kvadvisor:problem:{kind}", title=title, status=status, detail=detail)
    return JSONResponse(body.model_dump(), status_code=status, media_type=MEDIA_TYPE)


def _sentence(error: dict[str, Any]) -> str:
    name = str(error["loc"][-1]) if error["loc"] else "request"
    if error["type"] == "extra_forbidden":
        return f"{name} is not a parameter of this route: leave it out; /docs lists those there are"
    value = repr(error.get("input"))
    if len(value) > _VALUE_SHOWN_CHARACTERS:
        value = f"{value[:_VALUE_SHOWN_CHARACTERS]}…"
    wanted = str(error["msg"]).replace("Input should be", "it must be").replace("Value error, ", "")
    return f"{name} was {value}: {wanted[0].lower()}{wanted[1:]}"


def _bad_parameters(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    detail = "; ".join(_sentence(one) for one in error.errors())
    return problem(422, "bad-parameter", "A parameter cannot be used", detail)


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
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
    return problem(error.status_code, "refused", phrase, str(error.detail))


def _too_many_streams(_: Request, error: Exception) -> Response:
    return problem(503, "too-many-streams", "No stream is free", str(error))


def _unexpected(_: Request, error: Exception) -> Response:
    # The server logs the traceback; the client learns only the class, since a message may carry a path.
    detail = f"the advisor failed with {type(error).__name__}: its log has the traceback; report it with that"
    return problem(500, "internal", "The advisor failed", detail)


def install(app: FastAPI) -> None:
    app.add_exception_handler(RequestValidationError, _bad_parameters)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(TooManyStreamsError, _too_many_streams)
    app.add_exception_handler(Exception, _unexpected)
