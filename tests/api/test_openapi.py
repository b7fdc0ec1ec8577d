"""What OpenAPI says beside the models: scopes, examples, and what every route may answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest
from direct import Direct
from jsonschema import Draft202012Validator
from sample_parts import sample_parts
from sample_reader import SampleReader

from advisor.access.doorkeeper import Doorkeeper
from advisor.api.app import create_app

About = dict[str, Any]


@pytest.fixture(scope="module")
def document() -> About:
    made: About = Direct(SampleReader()).get("/openapi.json").json()
    return made


def operations(document: About) -> Iterator[tuple[str, str, About]]:
    for path, methods in document["paths"].items():
        for method, about in methods.items():
            yield method.upper(), path, about


def json_schemas(about: About) -> Iterator[About]:
    """Of what is sent, and of what is answered when all is well."""
    contents = [about.get("requestBody", {}).get("content", {})]
    contents += [answer.get("content", {}) for status, answer in about["responses"].items() if status.startswith("2")]
    for content in contents:
        if "application/json" in content:
            yield content["application/json"]["schema"]


def test_every_body_and_answer_has_an_example_that_is_valid(document: About) -> None:
    missing = []
    for method, path, about in operations(document):
        for schema in json_schemas(about):
            name = schema.get("$ref", "").rpartition("/")[2]
            examples = (document["components"]["schemas"][name] if name else schema).get("examples", [])
            if not examples:
                missing.append((method, path, name or schema))
            for example in examples:
                Draft202012Validator({**schema, "components": document["components"]}).validate(example)
    assert not missing, "put an example of each into advisor/api/examples.json"


def test_no_example_is_left_over(document: About) -> None:
    used = {name for name, schema in document["components"]["schemas"].items() if schema.get("examples")}
    titles = {schema["title"] for _, _, about in operations(document) for schema in json_schemas(about)
              if "title" in schema and "examples" in schema}  # fmt: skip
    kept = json.loads(files("advisor.api").joinpath("examples.json").read_text("utf-8"))
    assert kept.keys() == used | (titles & kept.keys())


@pytest.mark.parametrize(
    ("method", "path", "scope", "tenants"),
    [
        ("get", "/api/v1/summary", "read", False),
        ("get", "/api/v1/blocks", "read", True),
        ("post", "/api/v1/moves/{move_id}/cancel", "plan", False),
        ("post", "/api/v1/pause", "operate", False),
        ("patch", "/api/v1/policies", "admin", False),
        ("get", "/api/v1/config", "admin", False),
    ],
)
def test_route_says_its_scope(document: About, method: str, path: str, scope: str, tenants: bool) -> None:
    about = document["paths"][path][method]
    assert (about["x-required-scope"], about["x-serves-tenants"]) == (scope, tenants)
    assert about["security"] == [{"bearer": []}, {"session": []}, {}]
    assert {"401", "403", "default"} <= about["responses"].keys()


def test_open_routes_ask_for_nothing(document: About) -> None:
    open_paths = {path for _, path, about in operations(document) if not about["security"]}
    assert open_paths == {"/healthz", "/readyz"}
    assert set(document["components"]["securitySchemes"]) == {"bearer", "session"}


def test_where_a_login_is_needed_no_route_can_do_without() -> None:
    app = create_app(sample_parts(doorkeeper=Doorkeeper()))
    assert all({} not in about["security"] for _, _, about in operations(app.openapi()))


def test_writes_take_a_key_and_answers_that_stay_an_etag(document: About) -> None:
    headers = {
        (method, path): {p["name"] for p in about.get("parameters", []) if p["in"] == "header"}
        for method, path, about in operations(document)
    }
    for (method, path), names in headers.items():
        assert ("Idempotency-Key" in names) == (method != "GET" and path != "/api/v1/advice/load"), path
    tagged = {path for (_, path), names in headers.items() if "If-None-Match" in names}
    assert tagged == {"/api/v1/policies", "/api/v1/plan", "/api/v1/config", "/api/v1/volumes/{volume_id}"}


def test_operations_have_names_of_their_own(document: About) -> None:
    names = [about["operationId"] for _, _, about in operations(document)]
    assert len(set(names)) == len(names)
    assert {"get_summary", "get_blocks_hash_history", "post_moves_move_id_cancel"} <= set(names)
