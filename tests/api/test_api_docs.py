"""docs/api.md and OpenAPI say what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from direct import Direct
from sample_reader import SampleReader

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "api.md"


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    document: dict[str, Any] = Direct(SampleReader()).get("/openapi.json").json()
    return document


def documented_routes() -> dict[str, set[str]]:
    rows = re.findall(r"^\| `GET (/[^`…]*)…?` \|.*\|([^|]*)\|$", DOCUMENT.read_text("utf-8"), re.MULTILINE)
    return {path: set(re.findall(r"`([a-z_]+)`", parameters)) for path, parameters in rows}


def test_every_route_and_parameter_is_documented_and_nothing_else(schema: dict[str, Any]) -> None:
    pages = {"/", "/docs", "/openapi.json", "/live", "/static/"}
    routes = {
        path: {parameter["name"] for parameter in methods["get"].get("parameters", [])}
        for path, methods in schema["paths"].items()
    }
    documented = documented_routes()
    assert {path: documented[path] for path in documented.keys() - pages} == routes
    assert pages <= documented.keys()


def test_the_pages_documented_are_those_served() -> None:
    client = Direct(SampleReader())
    for path in ("/", "/docs", "/openapi.json", "/static/vendor/integrity.json"):
        assert client.get(path).status_code == 200


def test_openapi_types_every_answer(schema: dict[str, Any]) -> None:
    for path, methods in schema["paths"].items():
        assert set(methods) == {"get"}, path
        answers = methods["get"]["responses"]
        (kind,) = answers["200"]["content"]
        expected = {"/metrics": "text/plain", "/api/v1/stream": "text/event-stream"}.get(path, "application/json")
        assert kind == expected, path
        for status, answer in answers.items():
            if status.startswith("4"):
                assert "Problem" in str(answer["content"]["application/problem+json"]), (path, status)
    assert "HTTPValidationError" not in schema["components"]["schemas"]
