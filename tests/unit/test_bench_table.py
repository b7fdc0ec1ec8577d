"""What `kvadvisor bench` prints and writes, of made-up figures."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from advisor import bench_command
from event_plane.figures import Figure, at_least, at_most

CELLS = [
    Figure("slab 1 MiB, put", 1.234, "GB/s").placed("slab 1 MiB", "put GB/s"),
    at_least("slab 1 MiB, put against raw", 0.7, "×", 0.95).placed("slab 1 MiB", "put ×"),
    at_least("slab 4 MiB, put against raw", None, "×", 0.95).placed("slab 4 MiB", "put ×"),
    Figure("object", None, "", note="no server is installed").placed("object", "mode"),
]
FIGURES = [*CELLS, at_most("a figure with a name that is long enough to be broken in eighty columns", 3.0, "µs", 5)]


class _EntryPoint:
    name = "made-up"

    def load(self) -> bench_command.Bench:
        return lambda quick: FIGURES


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[str, list[dict[str, object]]]:
    monkeypatch.setattr(bench_command, "entry_points", lambda group: [_EntryPoint()])
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    bench_command.bench("made-up", tmp_path / "figures.json", quick=True)
    return out.getvalue(), json.loads((tmp_path / "figures.json").read_text())


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.rstrip()[1:-1].split("│")]


def test_cells_of_a_grid_are_one_line_each_and_unmeasured_ones_none(
    printed: tuple[str, list[dict[str, object]]],
) -> None:
    rows = [cells(line) for line in printed[0].splitlines() if line.startswith("│")]
    assert rows[0] == ["slab 1 MiB", "1.23", "0.7 missed", ""]
    assert rows[1] == ["object", "", "", "no server is installed"]
    assert "slab 4 MiB" not in printed[0]


def test_no_line_is_broken_where_nobody_looks_at_a_terminal(printed: tuple[str, list[dict[str, object]]]) -> None:
    assert cells(printed[0].splitlines()[-2]) == [FIGURES[-1].name, "3", "µs", "≤ 5", "yes"]


def test_json_has_every_goal_and_what_was_not_measured_as_null(
    printed: tuple[str, list[dict[str, object]]],
) -> None:
    assert printed[1] == [
        {"name": "slab 1 MiB, put against raw", "value": 0.7, "unit": "×", "goal": "≥ 0.95", "met": False},
        {"name": "slab 4 MiB, put against raw", "value": None, "unit": "×", "goal": "≥ 0.95", "met": None},
        {"name": FIGURES[-1].name, "value": 3.0, "unit": "µs", "goal": "≤ 5", "met": True},
    ]
