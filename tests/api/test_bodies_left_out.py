"""A body that is not sent as JSON is told how to; one of a route whose body has no fields may be left out."""

from __future__ import annotations

from pathlib import Path

import pytest
from direct import Direct
from sample_actions import SampleActions
from sample_door import ORIGIN, SampleDoor
from sample_reader import SampleReader

from advisor.access.identity import Scope

CROSS = ({"Origin": "https://elsewhere.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Origin": "null"})


@pytest.fixture
def door(tmp_path: Path) -> SampleDoor:
    return SampleDoor(tmp_path, actions=SampleActions())


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/octet-stream"])
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/api/v1/pause"), ("POST", "/api/v1/moves/cancel"), ("PATCH", "/api/v1/policies"),
     ("POST", "/api/v1/recordings"), ("POST", "/api/v1/advice/load")],
)  # fmt: skip
def test_a_program_that_sends_json_as_something_else_is_told_the_content_type(
    door: SampleDoor, kind: str | None, method: str, path: str
) -> None:
    sent = {"Authorization": f"Bearer {door.token(Scope.ADMIN)}"} | ({} if kind is None else {"Content-Type": kind})
    answer = door.client.request(method, path, content=b"{}", headers=sent)
    assert (answer.status_code, answer.json()["type"]) == (415, "urn:kvadvisor:problem:content-type")
    assert "send Content-Type: application/json" in answer.json()["detail"]
    assert (repr(kind) if kind else "left out") in answer.json()["detail"]


@pytest.mark.parametrize("path", ["/api/v1/moves/cancel", "/api/v1/plan/apply", "/api/v1/volumes/nvme-a/drain",
                                  "/api/v1/volumes/nvme-a/scrub", "/api/v1/recordings/running/stop"])
def test_a_body_without_fields_may_be_left_out(path: str) -> None:
    told = [Direct(SampleReader()).request("POST", path, **sent) for sent in ({}, {"json": {}})]
    assert [answer.status_code for answer in told] != [422, 422]
    assert told[0].status_code == told[1].status_code


def test_a_body_with_fields_may_not(door: SampleDoor) -> None:
    answer = door.ask(door.token(Scope.ADMIN), "/api/v1/volumes", "POST")
    assert answer.status_code == 422
    assert "body was left out" in answer.json()["detail"]


@pytest.mark.parametrize("foreign", CROSS)
def test_another_site_gets_nothing_done_without_a_body(door: SampleDoor, foreign: dict[str, str]) -> None:
    session = door.session(door.token(Scope.OPERATE))
    for headers in (foreign, session | foreign, session):
        answer = door.client.request("POST", "/api/v1/moves/cancel", headers=headers)
        assert answer.status_code in (401, 403)
    own = door.client.request("POST", "/api/v1/moves/cancel", headers=session | {"Origin": ORIGIN})
    assert own.status_code == 200
    open_to_all = Direct(SampleReader())
    assert open_to_all.request("POST", "/api/v1/moves/cancel", headers=foreign).status_code == 403
