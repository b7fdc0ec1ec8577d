"""What the settings page says of each setting of the planner. Pure; docs/settings.md says more."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, get_origin

from pydantic.fields import FieldInfo

from advisor.settings import PolicySettings
from advisor.views import PoliciesView
from advisor.web import formats


@dataclass(frozen=True, slots=True)
class Meaning:
    text: str
    unit: str = ""


MEANINGS: dict[str, dict[str, Meaning]] = {
    "What moves": {
        "admission": Meaning("Which blocks come to a faster volume."),
        "eviction": Meaning("Which block leaves first, leaves before their parents; auto: the one of the admission."),
        "dry_run": Meaning("Plans are made and shown, and never carried out."),
        "approve": Meaning("A plan waits until a person approves it."),
        "approve_within_s": Meaning("Not decided for so long, it lapses and the next tick plans anew.", "s"),
    },
    "How much at a time": {
        "promote_moves_max": Meaning("Most promotions of one plan.", "moves"),
        "demote_moves_max": Meaning("Most demotions, drops and deletes of one volume and plan.", "moves"),
        "delete_moves_max": Meaning("Most moves of ordered deletions under way.", "moves"),
        "moves_open_max": Meaning("Most moves under way.", "moves"),
        "moves_bytes_max": Meaning("Most bytes copied by one plan.", "bytes"),
        "bytes_per_s": Meaning("Most bytes copied by all moves, with bursts of 10 s. 0: no limit.", "bytes/s"),
        "moves_per_s": Meaning("Most copies of all volumes, likewise. 0: no limit.", "moves/s"),
        "moves_per_block": Meaning("Promotions for each block seen for the first time. 0: no limit.", "moves"),
    },
    "What is worth a move": {
        "move_cost": Meaning("What a second that volumes spend on a move counts for, in seconds saved.", "s/s"),
        "second_worth": Meaning("What a saved second is worth, beside what volumes cost. 0: not weighed.", "money/s"),
        "hysteresis_s": Meaning("So long after it was dropped, a block needs more use to come back. 0: none.", "s"),
        "hysteresis_gain": Meaning("How much more.", "times"),
        "pressure_ratio": Meaning("Slower than this share of its rate, a volume gets no moves. 0: never.", "share"),
        "prefill_tokens_per_s": Meaning("How fast an engine computes, for advice. 0: not known.", "tokens/s"),
    },
    "Compaction": {
        "compaction": Meaning("Volumes are compacted where that is worth it."),
        "compaction_bytes_per_s": Meaning("Most bytes that it writes to one volume. 0: no limit.", "bytes/s"),
        "compaction_spread": Meaning("Chains in so many times the pieces that they need are joined.", "times"),
        "compaction_dead_share": Meaning("From this share of dead bytes on, they are given back.", "share"),
        "compaction_interval_s": Meaning("Rest of a volume after a round over its chains.", "s"),
    },
    "By volume and tenant": {
        "budgets": Meaning("What moves may write to a volume: bytes_per_s, moves_per_s. As JSON."),
        "quotas": Meaning("The most that moves bring a tenant to hold on a volume: blocks, block_bytes. As JSON."),
    },
}
"""Every field of `PolicySettings`, in groups, in the order of the page."""


RANGES_SAID = 1e6
"""A range that reaches higher is no help to a person."""


@dataclass(frozen=True, slots=True)
class PolicyField:
    """A setting as the page shows it. `value` and `default` as JSON says them, `shown` with its unit.

    `kind`: `choice`, `yes` (true or false), `number`, `json`. `default` is the file's.
    """

    name: str
    meaning: Meaning
    kind: str
    value: str
    shown: str
    default: str
    is_changed: bool
    choices: tuple[str, ...] = ()
    lowest: str = ""
    highest: str = ""
    is_whole: bool = False

    @property
    def range(self) -> str:
        """What it may be, where that is worth saying: `1 to 86 400`."""
        if not self.highest or float(self.highest) >= RANGES_SAID:
            return ""
        return f"{_number_text(float(self.lowest or 0))} to {_number_text(float(self.highest))}"


def policy_fields(view: PoliciesView) -> dict[str, list[PolicyField]]:
    """All settings of the planner, by group."""
    return {group: [_field(name, fields[name], view) for name in fields] for group, fields in MEANINGS.items()}


def _field(name: str, meaning: Meaning, view: PoliciesView) -> PolicyField:
    about = PolicySettings.model_fields[name]
    value, default = _json_of(view.policy, name), _json_of(view.file_policy, name)
    choices = {"admission": view.admissions, "eviction": ["auto", *view.evictions]}.get(name, [])
    return PolicyField(
        name=name,
        meaning=meaning,
        kind="choice" if choices else _kind(about),
        value=_json_text(value),
        shown=shown_value(value, meaning.unit),
        default=shown_value(default, meaning.unit),
        is_changed=name in view.changed_here,
        choices=tuple(dict.fromkeys([*choices, value])) if choices else (),
        lowest=_bound(about, "ge"),
        highest=_bound(about, "le"),
        is_whole=about.annotation is int,
    )


def _json_text(value: Any) -> str:
    """A word as it is, all else as JSON; 600.0 as 600."""
    if isinstance(value, str):
        return value
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)


def _json_of(policy: PolicySettings, name: str) -> Any:
    return policy.model_dump(mode="json", include={name})[name]


def _kind(about: FieldInfo) -> str:
    if about.annotation is bool:
        return "yes"
    return "json" if get_origin(about.annotation) is tuple else "number"


def _bound(about: FieldInfo, name: str) -> str:
    """The least or most that a number may be; empty where there is none."""
    return next((str(getattr(each, name)) for each in about.metadata if hasattr(each, name)), "")


def shown_value(value: Any, unit: str) -> str:
    """`touch-2`, `yes`, `33.6 MB/s`, `64 moves`; a list as JSON, an empty one as `none`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return json.dumps(value) if value else "none"
    if unit.startswith("bytes"):
        return formats.size(value) + unit.removeprefix("bytes")
    return f"{_number_text(value)} {unit}"


def _number_text(value: float) -> str:
    return f"{value:,.6g}".replace(",", formats.NARROW_SPACE)
