"""Planner settings that an operator changed: over the file's, kept by a start, dropped where the file changed."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from advisor.changed_settings import as_changes, changes_kept, difference, settings_entry, with_changes
from advisor.entries import control_entry, decode_control
from advisor.errors import SettingsError
from advisor.policy_views import PolicyPatch
from advisor.settings import PlanningSettings, PolicySettings, QuotaSettings, ShadowSettings

FILE = PlanningSettings(policy=PolicySettings(admission="touch-2", moves_per_s=20.0))
CALM = ShadowSettings(name="calm", policy=PolicySettings(admission="touch-3"))


def test_changes_lie_over_the_file_and_lists_are_whole() -> None:
    quota = QuotaSettings(tenant="acme", volume="fast", blocks=7)
    changes = {"admission": "ghost", "quotas": [quota.model_dump()], "shadow": [CALM.model_dump(mode="json")]}
    changed = with_changes(FILE, changes)
    assert changed.policy == FILE.policy.model_copy(update={"admission": "ghost", "quotas": (quota,)})
    assert changed.shadow == (CALM,)
    assert difference(FILE, changed) == "admission touch-2 → ghost; quotas 0 rows → 1 rows; shadow none → calm"
    assert difference(changed, changed) == ""


def test_what_the_file_says_too_is_no_change() -> None:
    assert as_changes(FILE, {"moves_per_s": 20, "admission": "touch-2", "dry_run": True}) == {"dry_run": True}


def test_changes_are_logged_with_the_settings_and_kept_by_a_start_of_the_same_file() -> None:
    entry = settings_entry(FILE, {"dry_run": True, "bytes_per_s": 5}, 3)
    logged: Any = decode_control(control_entry(entry).payload)
    assert (logged.settings["policy"]["dry_run"], logged.file["policy"]["dry_run"]) == (True, False)
    kept = changes_kept(FILE, logged.file, logged.changed)
    assert kept.changes == {"dry_run": True, "bytes_per_s": 5}
    assert "not as the file says: bytes_per_s, dry_run; DELETE /api/v1/policies/changes goes back" in kept.note


def test_a_field_that_the_program_did_not_know_at_the_last_start_is_no_change_of_the_file() -> None:
    before = FILE.for_fold()
    del before["policy"]["approve"]
    assert changes_kept(FILE, before, {"dry_run": True}).changes == {"dry_run": True}


@pytest.mark.parametrize(
    "before",
    [
        PlanningSettings(policy=PolicySettings(admission="touch-3")).for_fold(),
        PlanningSettings(policy=FILE.policy, shadow=(CALM,)).for_fold(),
        {"policy": {"admission": "of-a-package-that-is-gone"}},
        {"policy": {"a_setting_of_a_later_version": 1}},
    ],
)
def test_a_start_whose_file_changed_drops_them_and_says_so(before: dict[str, Any]) -> None:
    kept = changes_kept(FILE, before, {"dry_run": True})
    assert kept.changes == {}
    assert kept.note.endswith("what an operator had changed while it ran, dry_run, is the file's again")
    assert changes_kept(FILE, before, {}) == ({}, "")


def test_a_change_to_a_policy_whose_package_is_gone_is_named_with_the_ways_out() -> None:
    with pytest.raises(SettingsError) as refused:
        changes_kept(FILE, FILE.for_fold(), {"admission": "of-a-package"})
    said = str(refused.value)
    assert said.startswith("policy.admission = 'of-a-package', as an operator changed it while the service ran,")
    assert "install the package that names it under kvadvisor.policies" in said
    assert "or change [policy] in the file" in said


def test_a_patch_tells_what_is_set_what_goes_back_and_what_is_left_alone() -> None:
    patch = PolicyPatch.model_validate({"admission": "ghost", "moves_per_s": None, "shadow": None})
    assert (patch.changes, patch.back_to_file) == ({"admission": "ghost"}, {"moves_per_s", "shadow"})
    assert PolicyPatch().changes == {}


@pytest.mark.parametrize(
    ("patch", "field", "words"),
    [
        ({"admission": "nobody-knows"}, "admission", "'nobody-knows' is not known: choose one of always, auto,"),
        ({"moves_open_max": -1}, "moves_open_max", "greater than or equal to 0"),
        ({"moves_open_max": 1.5}, "moves_open_max", "valid integer"),
        ({"nothing_such": None}, "nothing_such", "Extra inputs are not permitted"),
        ({"shadow": [{"name": "live"}]}, "name", "choose another name"),
        ({"shadow": [{"name": "a"}, {"name": "a"}]}, "shadow", "'a' is given twice"),
    ],
)
def test_a_patch_that_cannot_be_names_the_field(patch: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        PolicyPatch.model_validate(patch)
    (error,) = refused.value.errors()
    assert error["loc"][-1] == field
    assert words in error["msg"]


def test_no_field_of_a_patch_has_a_default_in_its_schema() -> None:
    properties = PolicyPatch.model_json_schema()["properties"]
    assert set(properties) == {*PolicySettings.model_fields, "shadow"}
    assert all("default" not in str(about) and {"type": "null"} in about["anyOf"] for about in properties.values())
