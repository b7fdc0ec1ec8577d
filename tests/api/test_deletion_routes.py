"""Routes of deletions."""

from __future__ import annotations

from typing import Any

import pytest
from direct import Direct
from sample_deletions import SampleDeletions
from sample_reader import SampleReader

from advisor.access.doorkeeper import Doorkeeper
from advisor.access.identity import Identity
from advisor.access.identity import Scope as AccessScope
from advisor.deletion_views import DeletionPage, DeletionView
from advisor.deletions import Scope

NAMESPACE, PREFIX = f"{0xAB:016x}", f"{7 << 100:032x}"


@pytest.fixture
def deletions() -> SampleDeletions:
    return SampleDeletions()


@pytest.fixture
def client(deletions: SampleDeletions) -> Direct:
    ann = Doorkeeper(anonymous=Identity("ann", AccessScope.ADMIN))
    return Direct(SampleReader(), deletions=deletions, doorkeeper=ann)


@pytest.mark.parametrize(
    ("body", "scope"),
    [
        ({"tenant": "acme"}, Scope(tenant="acme")),
        ({"namespace_id": NAMESPACE}, Scope(namespace_id=0xAB)),
        ({"namespace_id": NAMESPACE, "prefix": PREFIX}, Scope(namespace_id=0xAB, prefix=7 << 100)),
    ],
)
def test_an_order_is_accepted_with_its_scope_and_actor(
    client: Direct, deletions: SampleDeletions, body: dict[str, str], scope: Scope
) -> None:
    answer = client.request("POST", "/api/v1/deletions", json=body)
    view = DeletionView.model_validate_json(answer.content)
    assert (answer.status_code, view.id, view.state) == (202, "d-3", "requested")
    assert (view.tenant, view.namespace_id, view.prefix) == tuple(
        body.get(name, "") for name in ("tenant", "namespace_id", "prefix")
    )
    assert deletions.asked == [(scope, "ann")]


def test_an_order_of_what_is_being_deleted_answers_with_that_deletion(
    client: Direct, deletions: SampleDeletions
) -> None:
    answer = client.request("POST", "/api/v1/deletions", json={"tenant": "agents"})
    assert (answer.status_code, answer.json()["id"], deletions.asked) == (200, "d-2", [])


def test_pages_give_each_deletion_once_and_the_refused_tenants(client: Direct) -> None:
    first = DeletionPage.model_validate_json(client.get("/api/v1/deletions?limit=1").content)
    second = DeletionPage.model_validate_json(client.get(f"/api/v1/deletions?after={first.next_cursor}").content)
    assert [each.id for each in (*first.deletions, *second.deletions)] == ["d-2", "d-1"]
    assert second.next_cursor is None
    assert [(each.tenant, each.returned_blocks) for each in first.refused] == [("agents", 0), ("chat", 3)]
    assert client.get("/api/v1/deletions/d-1").json() == second.deletions[0].model_dump()


def test_abandon_and_enable_name_who_asks_and_what_is_left(client: Direct) -> None:
    abandoned = client.request("POST", "/api/v1/deletions/d-2/abandon", json={})
    assert (abandoned.json()["state"], abandoned.json()["note"]) == ("failed", "given up by ann")
    enabled = client.request("POST", "/api/v1/tenants/chat/enable", json={})
    assert [each["tenant"] for each in enabled.json()] == ["agents"]
    assert "'team/a' is not refused" in client.request("POST", "/api/v1/tenants/team%2Fa/enable", json={}).text


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/api/v1/deletions", {}, 422, "give a tenant or a namespace_id"),
        ("/api/v1/deletions", {"tenant": "a", "namespace_id": NAMESPACE}, 422, "give a tenant or a namespace_id"),
        ("/api/v1/deletions", {"tenant": "a", "prefix": PREFIX}, 422, "give its namespace_id with it"),
        ("/api/v1/deletions", {"tenant": "a", "namespace_id": "0" * 16}, 422, "names nothing"),
        ("/api/v1/deletions", {"namespace_id": "12"}, 422, "namespace_id was '12'"),
        ("/api/v1/deletions", {"tenant": "a", "volume": "x"}, 422, "volume is not a parameter of this route"),
        ("/api/v1/deletions", {"tenant": "one-too-many"}, 409, "64 deletions are open"),
        ("/api/v1/deletions/d-9/abandon", {}, 404, "there is no deletion 'd-9'"),
        ("/api/v1/deletions/d-1/abandon", {}, 404, "has ended"),
        ("/api/v1/tenants/acme/enable", {}, 404, "'acme' is not refused"),
        ("/api/v1/tenants/agents/enable", {}, 409, "deletion d-2 of tenant agents is deleting"),
    ],
)
def test_what_cannot_be_done_is_a_problem_that_names_it(
    client: Direct, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    answer = client.request("POST", path, json=body)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    assert words in answer.json()["detail"]


def test_an_unknown_deletion_and_a_bad_cursor_are_said(client: Direct) -> None:
    assert client.get("/api/v1/deletions/d-9").status_code == 404
    answer = client.get("/api/v1/deletions?after=d-9")
    assert (answer.status_code, "no deletion 'd-9' is kept" in answer.json()["detail"]) == (400, True)
