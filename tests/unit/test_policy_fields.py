"""What the settings page says of the planner's settings."""

from __future__ import annotations

import re
from pathlib import Path

from advisor.settings import PolicySettings
from advisor.views import PoliciesView
from advisor.web.policy_fields import MEANINGS, PolicyField, policy_fields, shown_value

SETTINGS_DOC = Path(__file__).resolve().parents[2] / "docs" / "settings.md"


def view(**changes: object) -> PoliciesView:
    return PoliciesView(
        policy_version="v", policy=PolicySettings(**changes), eviction="lru", admissions=["auto", "touch-2"],  # type: ignore[arg-type]
        evictions=["lru"], shadows=[], changed_here=sorted(changes),
    )  # fmt: skip


def fields(**changes: object) -> dict[str, PolicyField]:
    return {field.name: field for group in policy_fields(view(**changes)).values() for field in group}


def test_every_setting_of_the_planner_is_on_the_page_once_and_in_the_document() -> None:
    named = [name for group in MEANINGS.values() for name in group]
    assert sorted(named) == sorted(PolicySettings.model_fields)
    documented = re.findall(r"^\| `policy\.([a-z_]+)", SETTINGS_DOC.read_text("utf-8"), re.MULTILINE)
    assert set(documented) == set(named)


def test_a_field_says_its_value_the_files_and_what_it_may_be() -> None:
    found = fields(admission="touch-2", moves_per_s=20.0, approve_within_s=90.5)
    admission, rate, within = found["admission"], found["moves_per_s"], found["approve_within_s"]
    assert (admission.kind, admission.value, admission.default) == ("choice", "touch-2", "auto")
    assert admission.is_changed
    assert admission.choices == ("auto", "touch-2")
    assert (rate.value, rate.shown, rate.default, rate.range) == ("20", "20 moves/s", "0 moves/s", "")
    assert (within.value, within.range, within.lowest) == ("90.5", "1 to 86\u202f400", "1")
    assert (found["compaction_dead_share"].range, found["compaction_dead_share"].lowest) == ("0 to 1", "")
    assert (found["dry_run"].kind, found["dry_run"].value, found["dry_run"].is_changed) == ("yes", "false", False)
    assert found["promote_moves_max"].is_whole
    assert (found["budgets"].kind, found["budgets"].value, found["budgets"].shown) == ("json", "[]", "none")


def test_an_admission_of_a_package_that_is_gone_is_still_shown() -> None:
    gone = view().model_copy(update={"policy": PolicySettings.model_construct(admission="bought")})
    (field, *_) = policy_fields(gone)["What moves"]
    assert (field.value, field.choices) == ("bought", ("auto", "touch-2", "bought"))


def test_values_are_said_with_their_units() -> None:
    assert shown_value(33_554_432.0, "bytes/s") == "33.6 MB/s"
    assert shown_value(1 << 30, "bytes") == "1.07 GB"
    assert shown_value(65_536, "moves") == "65\u202f536 moves"
    assert shown_value([{"volume": "a"}], "") == '[{"volume": "a"}]'
    assert (shown_value(True, ""), shown_value(0.25, "share")) == ("yes", "0.25 share")
