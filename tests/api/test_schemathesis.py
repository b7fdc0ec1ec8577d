"""Every route is asked with what OpenAPI allows and what it does not, by each scope: it answers as OpenAPI says."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sample_parts import sample_parts
from schemathesis import Case, GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)
from schemathesis.transport.requests import REQUESTS_TRANSPORT

from advisor.access.doorkeeper import Doorkeeper
from advisor.access.identity import Identity, Scope
from advisor.api import even_timing
from advisor.api.app import create_app
from tests.examples import LONG

EXAMPLES_A_ROUTE = 2
"""Allowed or not; the first is sent by all of `WHO`, what follows by whoever may do everything, or in a long run by
all."""
WHO = [None, Identity("acme-ops", Scope.ADMIN, "agents"), *(Identity("ann", scope) for scope in Scope)]
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
STREAM = "/api/v1/stream"
"""Never ends: see test_stream.py."""
ORIGIN = "http://127.0.0.1:8470"


class App:
    """One app, asked as different identities."""

    def __init__(self) -> None:
        self._doorkeeper = Doorkeeper()
        app = create_app(sample_parts(doorkeeper=self._doorkeeper))
        self.document = app.openapi()
        self._client = httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False))
        self._loop = asyncio.Runner()

    def answer(self, who: Identity | None, case: Case) -> httpx.Response:
        self._doorkeeper.anonymous = who
        asked: dict[str, Any] = REQUESTS_TRANSPORT.serialize_case(case, base_url=ORIGIN)
        headers = {n: v for n, v in asked["headers"].items() if n.lower() not in ("authorization", "cookie")}
        body = {"content" if name == "data" else name: asked[name] for name in ("data", "json") if name in asked}
        options = {"params": asked["params"], "headers": headers, **body}
        request = self._client.build_request(asked["method"], asked["url"], **options)
        return self._loop.run(self._client.send(request))

    def close(self) -> None:
        self._loop.run(self._client.aclose())
        self._loop.close()


def ask_all(app: App, operation: Any) -> None:
    cases = st.one_of(operation.as_strategy(generation_mode=mode) for mode in GenerationMode)
    waiting = list(WHO)

    @settings(
        max_examples=EXAMPLES_A_ROUTE, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def ask(case: Case) -> None:
        for who in waiting or WHO[-1:]:
            case.validate_response(app.answer(who, case), checks=CHECKS)
        if not LONG:
            waiting.clear()

    ask()


def test_no_route_fails_and_all_answer_as_openapi_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(even_timing, "wait_s", lambda _: 0.0)
    app = App()
    asked = set()
    for found in schemathesis.openapi.from_dict(app.document).get_all_operations():
        operation = found.ok()
        if operation.path != STREAM:
            ask_all(app, operation)
            asked.add((operation.method.upper(), operation.path))
    app.close()
    assert len(asked) == sum(len(methods) for methods in app.document["paths"].values()) - 1
