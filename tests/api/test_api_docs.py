"""docs/api.md and OpenAPI say what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from direct import Direct
from sample_reader import SampleReader

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "api.md"
OTHER_ANSWERS = {
    "/metrics": "text/plain",
    "/api/v1/stream": "text/event-stream",
    "/api/v1/recordings/{name}/file": "application/octet-stream",
    "/api/v1/replays/{replay_id}/report": "text/html",
}
"""All others are JSON."""

OF_MANY_ROUTES = {"Idempotency-Key", "If-None-Match"}
"""Told of once, below the table."""


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    document: dict[str, Any] = Direct(SampleReader()).get("/openapi.json").json()
    return document


def documented_routes() -> dict[tuple[str, str], set[str]]:
    row = r"^\| `(GET|POST|PATCH|PUT|DELETE) (/[^`…]*)…?` \|.*\|([^|]*)\|$"
    rows = re.findall(row, DOCUMENT.read_text("utf-8"), re.MULTILINE)
    return {(method, path): set(re.findall(r"`([A-Za-z_-]+)`", parameters)) for method, path, parameters in rows}


def test_every_route_and_parameter_is_documented_and_nothing_else(schema: dict[str, Any]) -> None:
    pages = {("GET", path) for path in ("/", "/login", "/docs", "/openapi.json", "/live", "/static/")}
    routes = {
        (method.upper(), path): {p["name"] for p in about.get("parameters", [])} - OF_MANY_ROUTES | body(schema, about)
        for path, methods in schema["paths"].items()
        for method, about in methods.items()
    }
    documented = documented_routes()
    assert {route: documented[route] for route in documented.keys() - pages} == routes
    assert pages <= documented.keys()


def body(schema: dict[str, Any], about: dict[str, Any]) -> set[str]:
    """Fields of a route's JSON body; a file has none."""
    sent = about.get("requestBody", {}).get("content", {}).get("application/json")
    if sent is None:
        return set()
    name = sent["schema"]["$ref"].rpartition("/")[2]
    return set(schema["components"]["schemas"][name]["properties"])


def test_the_pages_documented_are_those_served() -> None:
    client = Direct(SampleReader())
    for path in ("/", "/docs", "/openapi.json", "/static/vendor/integrity.json"):
        assert client.get(path).status_code == 200


def test_openapi_types_every_answer(schema: dict[str, Any]) -> None:
    for path, methods in schema["paths"].items():
        for about in methods.values():
            answers = about["responses"]
            (kind,) = answers[min(status for status in answers if status.startswith("2"))]["content"]
            assert kind == OTHER_ANSWERS.get(path, "application/json"), path
            for status, answer in answers.items():
                if status.startswith("4"):
                    assert "Problem" in str(answer["content"]["application/problem+json"]), (path, status)
    assert "HTTPValidationError" not in schema["components"]["schemas"]
