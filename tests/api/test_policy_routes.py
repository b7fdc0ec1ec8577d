"""`GET /api/v1/policies` and `/shadow`: what is in force, and how shadows compare."""

from __future__ import annotations

from direct import Direct
from sample_reader import SampleReader

from advisor.settings import PolicySettings


def test_policy_in_force_is_given_whole() -> None:
    answer = Direct(SampleReader()).get("/api/v1/policies")
    assert answer.status_code == 200
    told = answer.json()
    assert told["policy"] == PolicySettings(admission="auto", moves_per_s=20.0).model_dump(mode="json")
    assert (told["policy_version"], told["eviction"]) == ("tiering-3", "value")
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
