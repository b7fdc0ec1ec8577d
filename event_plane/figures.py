"""Measured figures and their goals, as every room's benchmarks return them to `kvadvisor bench`."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure. `goal` is empty where there is none; `met` is None where it was not measured."""

    name: str
    value: float | None
    unit: str
    goal: str = ""
    met: bool | None = None
    note: str = ""
    row: str = ""
    """With `column`: its place in a grid of like figures, where a person reads it there. `name` says all by itself."""
    column: str = ""

    def placed(self, row: str, column: str) -> Figure:
        """The same figure in a grid."""
        return replace(self, row=row, column=column)


def at_least(name: str, value: float | None, unit: str, goal: float, note: str = "") -> Figure:
    """A figure whose goal is a lower bound; `value` None where it could not be measured, `note` says why."""
    return Figure(name, value, unit, f"≥ {goal:g}", None if value is None else value >= goal, note)


def at_most(name: str, value: float | None, unit: str, goal: float, note: str = "") -> Figure:
    """A figure whose goal is an upper bound."""
    return Figure(name, value, unit, f"≤ {goal:g}", None if value is None else value <= goal, note)
