"""Routes that have the service do something."""

from __future__ import annotations

import pytest
from direct import Direct
from sample_actions import SampleActions
from sample_reader import SampleReader

from advisor.access.doorkeeper import Doorkeeper
from advisor.access.identity import Identity, Scope


@pytest.fixture
def actions() -> SampleActions:
    return SampleActions()


@pytest.fixture
def client(actions: SampleActions) -> Direct:
    return Direct(SampleReader(), actions=actions, doorkeeper=Doorkeeper(anonymous=Identity("ann", Scope.OPERATE)))


def test_pause_and_resume_of_one_volume_and_of_all_say_what_is_paused(client: Direct, actions: SampleActions) -> None:
    assert client.request("POST", "/api/v1/pause", json={"volume": "nvme-a"}).json() == {
        "paused": False, "volumes": ["nvme-a"],
    }  # fmt: skip
    assert client.request("POST", "/api/v1/pause", json={}).json() == {"paused": True, "volumes": ["nvme-a"]}
    assert client.request("POST", "/api/v1/resume", json={}).json() == {"paused": False, "volumes": ["nvme-a"]}
    assert actions.asked == [("pause", "ann", "nvme-a"), ("pause", "ann", ""), ("resume", "ann", "")]


def test_cancel_names_what_was_cancelled_and_what_was_too_late(client: Direct, actions: SampleActions) -> None:
    one = client.request("POST", "/api/v1/moves/7-0/cancel", json={})
    assert one.json() == {"cancelled": ["7-0"], "still_open": []}
    every = client.request("POST", "/api/v1/moves/cancel", json={})
    assert every.json() == {"cancelled": ["7-0"], "still_open": ["7-1"]}
    assert actions.asked == [("cancel", "ann", "7-0"), ("cancel", "ann", "")]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/api/v1/pause", {"volume": "tape"}, 404, "volume 'tape' is not registered: name one of nvme-a"),
        ("/api/v1/moves/9-9/cancel", {}, 404, "move '9-9' is not open: GET /api/v1/moves"),
        ("/api/v1/moves/7-1/cancel", {}, 409, "past its switch"),
        ("/api/v1/compactions/7/cancel", {}, 404, "compaction '7' is not open: GET /api/v1/compactions"),
        ("/api/v1/resume", {"volum": "x"}, 422, "volum is not a parameter of this route"),
        ("/api/v1/moves/cancel", {"actor": "bo"}, 422, "actor is not a parameter of this route"),
    ],
)
def test_what_cannot_be_done_is_a_problem_that_names_it(
    client: Direct, path: str, body: dict[str, str], status: int, words: str
) -> None:
    answer = client.request("POST", path, json=body)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    assert words in answer.json()["detail"]


def test_a_form_of_another_site_changes_nothing(client: Direct, actions: SampleActions) -> None:
    answer = client.request("POST", "/api/v1/pause", content="{}", headers={"Content-Type": "text/plain"})
    assert (answer.status_code, actions.asked) == (415, [])
