"""No route without a scope, and nobody comes in where no door was built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from direct import Direct
from fastapi.dependencies.models import Dependant
from sample_parts import sample_parts
from sample_reader import SampleReader
from starlette.routing import Mount

from advisor.access.doorkeeper import Doorkeeper
from advisor.access.identity import Identity, Scope
from advisor.api.access import Needs
from advisor.api.app import create_app

OPEN = {"/healthz", "/readyz", "/static", "/login"}
"""What anybody may ask for."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A route: its methods, and what it asks of whoever calls it."""

    path: str
    methods: set[str]
    needs: list[Needs]


def routes() -> Iterator[Asked]:
    for route in create_app(sample_parts()).routes:
        if isinstance(route, Mount):
            yield Asked(route.path, {"GET"}, [])
            continue
        # An included router resolves its routes, with the dependencies that it adds, when they are asked for.
        for each in route.effective_route_contexts() if hasattr(route, "effective_route_contexts") else [route]:
            yield Asked(each.path, set(each.methods), list(needs_of(each.dependant)))


def needs_of(dependant: Dependant) -> Iterator[Needs]:
    if isinstance(dependant.call, Needs):
        yield dependant.call
    for each in dependant.dependencies:
        yield from needs_of(each)


def test_every_route_says_the_scope_it_needs() -> None:
    seen = list(routes())
    assert {"/", "/live", "/metrics", "/openapi.json", "/api/v1/pause"} <= {route.path for route in seen}
    assert {route.path for route in seen if not route.needs} <= OPEN


def test_what_changes_something_needs_more_than_to_read() -> None:
    reading = {"/api/v1/advice/load", "/logout"}
    for route in routes():
        if route.methods - {"GET", "HEAD"} and route.path not in OPEN | reading:
            assert max(each.scope for each in route.needs) >= Scope.PLAN, route.path


@pytest.mark.parametrize("path", ["/", "/docs", "/openapi.json", "/metrics", "/api/v1/summary", "/api/v1/stream"])
def test_without_a_door_nobody_comes_in(path: str) -> None:
    answer = Direct(SampleReader(), doorkeeper=Doorkeeper()).get(path)
    assert answer.status_code == 401
    assert answer.headers["content-type"] == "application/problem+json"


def test_who_may_not_read_learns_of_readiness_alone() -> None:
    reader = SampleReader()
    told = Direct(reader, doorkeeper=Doorkeeper()).get("/readyz").json()
    assert {check["text"] for check in told["checks"]} == {""}
    assert [check["name"] for check in told["checks"]] == [check.name for check in reader.checks()]
    within = Doorkeeper(anonymous=Identity("ann", Scope.READ))
    assert all(check["text"] for check in Direct(reader, doorkeeper=within).get("/readyz").json()["checks"])


@pytest.mark.parametrize(
    ("scope", "allowed"),
    [(Scope.READ, 0), (Scope.PLAN, 1), (Scope.OPERATE, 2), (Scope.ADMIN, 3)],
)
def test_a_scope_opens_what_it_names_and_what_is_below(scope: Scope, allowed: int) -> None:
    client = Direct(SampleReader(), doorkeeper=Doorkeeper(anonymous=Identity("ann", scope)))
    asked_for = [("/api/v1/moves/7-0/cancel", {}), ("/api/v1/pause", {}), ("/api/v1/deletions", {"tenant": "acme"})]
    statuses = [client.request("POST", path, json=body).status_code for path, body in asked_for]
    assert statuses == [200, 200, 202][:allowed] + [403] * (3 - allowed)


def test_one_that_sees_a_tenant_alone_is_kept_from_what_is_of_all() -> None:
    client = Direct(SampleReader(), doorkeeper=Doorkeeper(anonymous=Identity("ann", Scope.ADMIN, "acme")))
    for path in ("/volumes", "/metrics", "/api/v1/summary", "/api/v1/volumes", "/openapi.json"):
        answer = client.get(path)
        assert answer.status_code == 403
        assert answer.json()["detail"] == "ann sees tenant acme alone, this is of all tenants"
