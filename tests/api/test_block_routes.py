"""Blocks, one block, its history, and the audit by REST: filtered, paged, and each tenant's alone."""

from __future__ import annotations

import pytest
from direct import Direct
from sample_audit import SampleAudit
from sample_blocks import history_of
from sample_reader import SampleReader, block_hash

from advisor.access.doorkeeper import Doorkeeper
from advisor.access.identity import Identity, Scope
from advisor.audit_views import AuditPage, AuditView
from advisor.block_views import BlockStep, HistoryPage
from advisor.views import BlockPage

UNKNOWN = "ab" * 16
NAMESPACE = "00000000000000f1"


@pytest.fixture
def client() -> Direct:
    return Direct(SampleReader())


def seen_by(scope: Scope, tenant: str = "") -> Direct:
    return Direct(SampleReader(), doorkeeper=Doorkeeper(anonymous=Identity("ann", scope, tenant)))


def numbers(client: Direct, **filters: object) -> list[int]:
    page = client.get("/api/v1/blocks", params={"limit": 1000, **filters})
    assert page.status_code == 200
    return [block["depth"] for block in page.json()["blocks"]]


def test_blocks_are_filtered_by_age_heat_and_namespace(client: Direct) -> None:
    assert numbers(client, touches_min=11, touches_max=13) == [10, 11, 12]
    assert numbers(client, older_than_s=0.000_247) == [247, 248, 249]
    assert numbers(client, newer_than_s=0.000_001) == [0, 1]
    assert numbers(client, older_than_s=0.000_01, newer_than_s=0.000_02, touches_min=20) == [19, 20]
    assert numbers(client, namespace_id=NAMESPACE, tenant="agents", touches_max=4) == [1, 3]
    assert numbers(client, namespace_id="00000000000000f2") == []


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("older_than_s=9&newer_than_s=3", "older_than_s 9.0 is more than newer_than_s 3.0, and no block is both"),
        ("touches_min=9&touches_max=3", "touches_min 9 is more than touches_max 3, and no block is both: change one"),
        ("namespace_id=f1", "namespace_id was 'f1'"),
        ("older_than_s=-1", "older_than_s was '-1'"),
        ("hot=yes", "hot"),
    ],
)
def test_a_filter_that_cannot_be_is_refused_by_its_name(client: Direct, query: str, said: str) -> None:
    answer = client.get(f"/api/v1/blocks?{query}")
    assert answer.status_code == 422
    assert said in answer.json()["detail"]


def test_a_page_that_only_so_much_was_looked_at_for_says_so_and_goes_on() -> None:
    reader = SampleReader()
    reader.scans_short = True
    page = BlockPage.model_validate_json(Direct(reader).get("/api/v1/blocks").content)
    assert (len(page.blocks), page.scanned_all, page.next_cursor) == (1, False, "after-1")


def test_a_block_is_found_by_its_whole_hash_with_parent_and_children(client: Direct) -> None:
    (detail,) = client.get(f"/api/v1/blocks/{block_hash(7)}").json()
    assert detail["block"]["hash"] == block_hash(7)
    assert detail["block"]["parent_hash"] == block_hash(6)
    assert detail["children"] == [block_hash(8)]
    assert client.get(f"/api/v1/blocks/{block_hash(7)}?namespace_id={NAMESPACE}").json() == [detail]


def test_a_hash_that_nobody_has_is_404_and_one_that_is_none_422(client: Direct) -> None:
    unknown = client.get(f"/api/v1/blocks/{UNKNOWN}")
    assert unknown.status_code == 404
    assert f"no block {UNKNOWN} is placed anywhere" in unknown.json()["detail"]
    assert client.get(f"/api/v1/blocks/{block_hash(7)}?namespace_id={'0' * 15}1").status_code == 404
    for wrong in ("ab", "AB" * 16, "zz" * 16):
        assert client.get(f"/api/v1/blocks/{wrong}").status_code == 422


def steps_of(client: Direct, path: str) -> list[BlockStep]:
    found: list[BlockStep] = []
    before: str | None = None
    while True:
        page = HistoryPage.model_validate_json(client.get(path, params={"before": before} if before else {}).content)
        found += page.steps
        before = page.next_before
        if page.complete:
            assert before is None
            return found


def test_pages_of_a_history_join_to_the_whole(client: Direct) -> None:
    expected = history_of(SampleReader().block_views[7])
    assert steps_of(client, f"/api/v1/blocks/{block_hash(7)}/history") == expected
    assert steps_of(client, f"/api/v1/blocks/{UNKNOWN}/history") == []
    refused = client.get(f"/api/v1/blocks/{block_hash(7)}/history?before=yesterday")
    assert (refused.status_code, "before was 'yesterday'" in refused.json()["detail"]) == (400, True)


def test_a_tenant_sees_its_own_blocks_and_anothers_as_unknown_ones() -> None:
    client = seen_by(Scope.READ, "agents")
    assert numbers(client, touches_max=6) == [1, 3, 5]
    assert numbers(client, tenant="support-bot") == numbers(client, tenant="nobody") == []
    own, other = block_hash(7), block_hash(8)
    assert client.get(f"/api/v1/blocks/{own}").status_code == 200
    for path in ("", "/history"):
        answers = [client.get(f"/api/v1/blocks/{each}{path}") for each in (other, UNKNOWN)]
        told = [answer.text.replace(each, "HASH") for answer, each in zip(answers, (other, UNKNOWN), strict=True)]
        assert told[0] == told[1]
        assert answers[0].status_code == answers[1].status_code
    steps = steps_of(client, f"/api/v1/blocks/{own}/history")
    assert len(steps) == 11
    assert {step.position for step in steps} == {None}


def test_a_tenants_cursors_tell_no_row_and_no_position_and_are_of_no_other_list() -> None:
    client = seen_by(Scope.READ, "agents")
    cursor = client.get("/api/v1/blocks?limit=2").json()["next_cursor"]
    before = client.get(f"/api/v1/blocks/{block_hash(7)}/history").json()["next_before"]
    assert len(cursor) > 60
    assert len(before) > 60
    assert numbers(client, after=cursor)[0] == 5
    for path in (f"blocks?after={before}", "blocks?after=after-2", f"blocks/{block_hash(9)}/history?before={before}"):
        assert client.get(f"/api/v1/{path}").status_code == 400


def test_events_are_filtered_by_producer_source_and_end(client: Direct) -> None:
    def positions(**query: object) -> list[int]:
        return [event["position"] for event in client.get("/api/v1/events", params=query).json()["events"]]

    assert positions(from_position=1, until_position=6, source="vllm") == [1, 2, 3, 4, 6]
    assert positions(until_position=9, limit=2) == [8, 9]
    assert positions(producer="00000000a11ce003", limit=1) == [300]
    assert positions(producer="00000000a11ce004") == []
    assert client.get("/api/v1/events?limit=2").json()["earlier_until"] == 298
    assert client.get("/api/v1/events?producer=vllm").status_code == 422


def audit_of(client: Direct, **query: object) -> list[AuditView]:
    found: list[AuditView] = []
    before: int | None = None
    while True:
        params = {**query, **({"before": before} if before else {})}
        page = AuditPage.model_validate_json(client.get("/api/v1/audit", params=params).content)
        found += page.entries
        before = page.next_before
        if page.complete:
            return found


def test_the_audit_is_paged_and_filtered() -> None:
    client = seen_by(Scope.ADMIN)
    entries = SampleAudit().entries
    assert audit_of(client) == entries
    assert audit_of(client, limit=3) == entries
    assert {entry.actor for entry in audit_of(client, actor="ann")} == {"ann"}
    assert [entry.what for entry in audit_of(client, action="pause")] == ["nvme-a"]
    assert client.get("/api/v1/audit?before=0").status_code == 422


def test_the_audit_is_an_admins_alone_and_of_all_tenants() -> None:
    assert seen_by(Scope.OPERATE).get("/api/v1/audit").status_code == 403
    assert seen_by(Scope.ADMIN, "agents").get("/api/v1/audit").status_code == 403
    assert seen_by(Scope.READ, "agents").get("/api/v1/events").status_code == 403
