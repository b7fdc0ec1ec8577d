"""`/api/v1/policies` and `/shadow`: what is in force, changes of it, and how shadows compare."""

from __future__ import annotations

from typing import Any

import pytest
from direct import Direct
from sample_policies import SamplePolicies
from sample_reader import SampleReader

from advisor.access.doorkeeper import Doorkeeper
from advisor.access.identity import Identity, Scope
from advisor.settings import PolicySettings

PATH = "/api/v1/policies"


def client_of(policies: SamplePolicies, scope: Scope = Scope.ADMIN) -> Direct:
    return Direct(SampleReader(), policies=policies, doorkeeper=Doorkeeper(anonymous=Identity("ann", scope)))


def test_policy_in_force_is_given_whole() -> None:
    answer = Direct(SampleReader()).get("/api/v1/policies")
    assert answer.status_code == 200
    told = answer.json()
    assert told["policy"] == PolicySettings(admission="auto", moves_per_s=20.0).model_dump(mode="json")
    assert (told["policy_version"], told["eviction"]) == ("tiering-5", "value")
    assert "touch-2" in told["admissions"]
    assert told["shadows"] == ["second-touch", "calm"]


def test_comparison_names_the_live_policy_first_and_gives_a_share_for_each_time() -> None:
    told = Direct(SampleReader()).get("/api/v1/policies/shadow").json()
    assert [policy["name"] for policy in told["policies"]] == ["live", "second-touch", "calm"]
    assert {len(policy["found_each"]) for policy in told["policies"]} == {len(told["times_us"])}
    assert told["policies"][1]["last_hour"]["found_share"] == 0.66


def test_without_a_shadow_the_comparison_is_empty() -> None:
    told = Direct(SampleReader.empty()).get("/api/v1/policies/shadow").json()
    assert told == {"began_us": 0, "note": "", "fastest": "", "times_us": [], "policies": []}


def test_routes_say_what_they_do_not_answer() -> None:
    answer = Direct(SampleReader()).request("DELETE", "/api/v1/policies/shadow")
    assert answer.status_code == 405
    assert answer.json()["detail"] == "DELETE is not answered at /api/v1/policies/shadow: use GET"


def test_a_merge_patch_changes_what_it_names_and_says_what_is_not_the_files() -> None:
    policies = SamplePolicies()
    body = {"admission": "touch-2", "moves_per_s": None}
    answer = client_of(policies).request(
        "PATCH", PATH, json=body, headers={"Content-Type": "application/merge-patch+json"}
    )
    assert answer.status_code == 200
    assert answer.json()["changed_here"] == ["admission"]
    assert answer.json()["policy"]["admission"] == "touch-2"
    assert policies.asked == [("ann", {"admission": "touch-2"}, {"moves_per_s"})]


def test_a_change_of_what_was_changed_meanwhile_is_refused() -> None:
    policies = SamplePolicies()
    client = client_of(policies)
    etag = client.get(PATH).headers["etag"]
    stale = client.request("PATCH", PATH, json={"dry_run": True}, headers={"If-Match": '"0123"'})
    assert (stale.status_code, policies.asked) == (412, [])
    assert "the policies were changed meanwhile: GET /api/v1/policies" in stale.json()["detail"]
    fresh = client.request("PATCH", PATH, json={"dry_run": True}, headers={"If-Match": etag})
    assert fresh.status_code == 200
    assert fresh.headers["etag"] != etag


def test_the_etag_is_that_of_the_bytes_so_that_it_is_not_sent_again() -> None:
    client = client_of(SamplePolicies())
    etag = client.get(PATH).headers["etag"]
    assert client.get(PATH, headers={"If-None-Match": etag}).status_code == 304


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"admission": "nobody-knows"}, "admission was 'nobody-knows': admission 'nobody-knows' is not known"),
        ({"moves_open_max": -1}, "moves_open_max was -1: it must be greater than or equal to 0"),
        ({"nothing_such": 1}, "nothing_such is not a parameter of this route"),
    ],
)
def test_a_patch_that_cannot_be_names_the_field_and_changes_nothing(body: dict[str, Any], words: str) -> None:
    policies = SamplePolicies()
    answer = client_of(policies).request("PATCH", PATH, json=body)
    assert (answer.status_code, policies.asked) == (422, [])
    assert words in answer.json()["detail"]


def test_what_was_changed_goes_back_to_the_files() -> None:
    policies = SamplePolicies()
    answer = client_of(policies).request("DELETE", f"{PATH}/changes")
    assert (answer.status_code, answer.json()["changed_here"]) == (200, [])
    assert policies.asked == [("ann", {}, frozenset())]


@pytest.mark.parametrize(("method", "path"), [("PATCH", PATH), ("DELETE", f"{PATH}/changes")])
def test_only_an_admin_changes_policies(method: str, path: str) -> None:
    policies = SamplePolicies()
    answer = client_of(policies, Scope.OPERATE).request(method, path, json={"dry_run": True})
    assert (answer.status_code, policies.asked) == (403, [])
