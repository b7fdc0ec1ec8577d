"""Plans that wait for a person, and moves tried again, over the API."""

from __future__ import annotations

from typing import Any

import pytest
from direct import Direct
from sample_plans import SamplePlans
from sample_reader import SampleReader

from advisor.access.doorkeeper import Doorkeeper
from advisor.access.identity import Identity, Scope
from advisor.plan_views import PlanDecisionView, PlanView
from advisor.views import MovesView


@pytest.fixture
def plans() -> SamplePlans:
    return SamplePlans()


def client_of(plans: SamplePlans, scope: Scope = Scope.PLAN) -> Direct:
    return Direct(SampleReader(), plans=plans, doorkeeper=Doorkeeper(anonymous=Identity("ann", scope)))


def test_the_plan_that_would_be_made_and_the_one_that_waits_are_asked_without_a_change(plans: SamplePlans) -> None:
    answer = client_of(plans, Scope.READ).get("/api/v1/plan")
    assert PlanView.model_validate_json(answer.content) == plans.plan()
    assert (answer.json()["approve"], answer.json()["pending"]["id"]) == (True, "40")
    assert plans.asked == []


def test_a_plan_is_approved_once_by_who_asks(plans: SamplePlans) -> None:
    client = client_of(plans)
    told = PlanDecisionView.model_validate_json(client.request("POST", "/api/v1/plan/40/approve", json={}).content)
    assert (told.state, told.actor, told.moves, told.left_out) == ("approved", "ann", ["40-0"], 1)
    assert told.refusals[0].reason == "drop: it holds no copy"
    assert client.get("/api/v1/plan").json()["pending"] is None
    again = client.request("POST", "/api/v1/plan/40/approve", json={})
    assert (again.status_code, again.headers["content-type"]) == (409, "application/problem+json")
    assert plans.asked == [("approve", "ann", "40")]


def test_reject_apply_and_retry_say_what_was_done(plans: SamplePlans) -> None:
    client = client_of(plans)
    assert client.request("POST", "/api/v1/plan/40/reject", json={}).json()["state"] == "rejected"
    assert client.request("POST", "/api/v1/plan/apply", json={}).json()["moves"] == ["41-0"]
    assert client.request("POST", "/api/v1/moves/7-2/retry", json={}).json()["reason"].startswith("retried by ann; ")
    assert plans.asked == [("reject", "ann", "40"), ("apply", "ann", "41"), ("retry", "ann", "7-2")]


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("plan/39/approve", 409, "plan 39 is not known"),
        ("plan/39/reject", 409, "plan 39 is not known"),
        ("moves/9-9/retry", 404, "move '9-9' is not open, and not kept: GET /api/v1/moves"),
        ("moves/7-0/retry", 409, "only an aborted one is retried"),
    ],
)
def test_what_cannot_be_done_is_a_problem_that_names_it(
    plans: SamplePlans, path: str, status: int, words: str
) -> None:
    answer = client_of(plans).request("POST", f"/api/v1/{path}", json={})
    assert answer.status_code == status
    assert words in answer.json()["detail"]


@pytest.mark.parametrize("path", ["plan/apply", "plan/40/approve", "plan/40/reject", "moves/7-2/retry"])
def test_who_may_only_read_decides_nothing(plans: SamplePlans, path: str) -> None:
    answer = client_of(plans, Scope.READ).request("POST", f"/api/v1/{path}", json={})
    assert answer.status_code == 403
    assert plans.asked == []


def test_moves_are_filtered_and_paged(plans: SamplePlans) -> None:
    client = client_of(plans)
    whole = MovesView.model_validate_json(client.get("/api/v1/moves", params={"limit": 1000}).content)
    found, params = [], {"limit": "3"}
    while True:
        page = MovesView.model_validate_json(client.get("/api/v1/moves", params=params).content)
        found += page.moves
        assert bool(page.refusals) == ("after" not in params), "refusals are on the first page"
        if page.next_cursor is None:
            break
        params["after"] = page.next_cursor
    assert (found, len(found) > 6) == (whole.moves, True)
    volume = whole.moves[0].target
    for name, value in (("state", whole.moves[0].state), ("kind", "promote"), ("volume", volume), ("tenant", "agents")):
        shown = MovesView.model_validate_json(client.get("/api/v1/moves", params={name: value}).content).moves
        expected = [
            m for m in whole.moves if value in {"state": [m.state], "kind": [m.kind], "tenant": [m.tenant]}.get(
                name, [m.source, m.target]
            )
        ]  # fmt: skip
        assert shown == expected[:50]


@pytest.mark.parametrize(
    ("params", "status", "words"),
    [
        ({"after": "xyz"}, 400, "after was 'xyz'"),
        ({"state": "flying"}, 422, "state was 'flying'"),
        ({"kind": "teleport"}, 422, "kind was 'teleport'"),
    ],
)
def test_a_filter_that_is_none_is_named(plans: SamplePlans, params: dict[str, Any], status: int, words: str) -> None:
    answer = client_of(plans).get("/api/v1/moves", params=params)
    assert answer.status_code == status
    assert words in answer.json()["detail"]
