"""A table of transitions as a picture for the documentation."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

State = TypeVar("State", bound=StrEnum)
Trigger = TypeVar("Trigger", bound=StrEnum)


def state_diagram(first: State, transitions: Mapping[State, Mapping[Trigger, State]]) -> str:
    """A Mermaid state diagram, fenced."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first}"]
    ends: dict[State, None] = {}
    for state, edges in transitions.items():
        for trigger, target in edges.items():
            lines.append(f"    {state} --> {target}: {trigger}")
            if target not in transitions:
                ends[target] = None
    return "\n".join([*lines, *(f"    {end} --> [*]" for end in ends), "```", ""])
