"""Settings of the planner that an operator changed while the service ran, over those of the file. Pure.

Changes are a mapping: a field of `policy`, or `shadow`, to its value as JSON types. They are logged with every
`SettingsEntry`, so they outlive a restart; a start whose file has other planner settings than the last one's drops
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from advisor.entries import SettingsEntry
from advisor.errors import SettingsError
from advisor.settings import PlanningSettings

SHADOW = "shadow"
BACK = "DELETE /api/v1/policies/changes"

Changes = Mapping[str, Any]


class Kept(NamedTuple):
    """Changes that a start goes on with, and a sentence about them; empty where there were none."""

    changes: Changes
    note: str


def with_changes(file: PlanningSettings, changes: Changes) -> PlanningSettings:
    """Raises `SettingsError`, a sentence for each change that cannot be used."""
    fields = {name: value for name, value in changes.items() if name != SHADOW}
    whole = file.for_fold()
    try:
        return PlanningSettings.model_validate(
            {"policy": {**whole["policy"], **fields}, SHADOW: changes.get(SHADOW, whole.get(SHADOW, ()))}
        )
    except ValidationError as error:
        raise SettingsError([_sentence(detail) for detail in error.errors(include_url=False)]) from error


def as_changes(file: PlanningSettings, wanted: Changes) -> Changes:
    """`wanted` without what the file says too. Raises `SettingsError`."""
    told, said = _flat(with_changes(file, wanted)), _flat(file)
    return {name: told[name] for name in sorted(wanted) if told[name] != said[name]}


def difference(before: PlanningSettings, after: PlanningSettings) -> str:
    """What a change comes to, for the log; empty for nothing."""
    old, new = _flat(before), _flat(after)
    return "; ".join(f"{name} {_shown(name, old)} → {_shown(name, new)}" for name in old if old[name] != new[name])


def changes_kept(file: PlanningSettings, file_before: Mapping[str, Any], changes: Changes) -> Kept:
    """What a start does about changes, where the last one read `file_before`.

    Raises `SettingsError` where they cannot be used any more: an admission whose package is gone.
    """
    if not changes:
        return Kept({}, "")
    names = ", ".join(sorted(changes))
    if _read(file_before) != file:
        dropped = "the settings of [policy] or [[shadow]] changed since the last start: what an operator had changed"
        return Kept({}, f"{dropped} while it ran, {names}, is the file's again")
    with_changes(file, changes)
    return Kept(changes, f"as an operator changed it while it ran, not as the file says: {names}; {BACK} goes back")


def settings_entry(file: PlanningSettings, changes: Changes, term: int) -> SettingsEntry:
    """Raises `SettingsError`."""
    planning = with_changes(file, changes)
    return SettingsEntry(planning.for_fold(), planning.policy_version, term, file.for_fold(), dict(changes))


def _read(settings: Mapping[str, Any]) -> PlanningSettings | None:
    """None for settings that this version or installation cannot read."""
    try:
        return PlanningSettings.model_validate(settings)
    except ValidationError:
        return None


def _flat(planning: PlanningSettings) -> dict[str, Any]:
    whole = planning.for_fold()
    return {**whole["policy"], SHADOW: whole.get(SHADOW, [])}


def _shown(name: str, settings: Mapping[str, Any]) -> str:
    value = settings[name]
    if name == SHADOW:
        return ", ".join(each["name"] for each in value) or "none"
    if isinstance(value, list):
        return f"{len(value)} rows"
    return str(value).lower() if isinstance(value, bool) else f"{value}"


def _sentence(detail: Any) -> str:
    """One of pydantic's error details."""
    path = ".".join(str(part) for part in detail["loc"])
    return (
        f"{path} = {detail['input']!r}, as an operator changed it while the service ran, cannot be used: "
        f"{detail['msg'].removeprefix('Value error, ')}; or change [policy] in the file, which drops such changes"
    )
