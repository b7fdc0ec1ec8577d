"""`kvadvisor bench core`, with little of everything: that each figure is there, and is of what it says."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from event_plane.figures import Figure
from kvbm_core import bench_events, bench_paths
from kvbm_core.bench_paths import LAYER_BYTES
from storage_agent.bench_media import Medium, MediumAbsent

GRID = {"GB/s", "raw GB/s", "× raw", "p50 ms", "p99 ms"}


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_paths, "ROUND_BYTES", 1 << 20)
    monkeypatch.setattr(bench_events, "ROUND_BLOCKS", 256)
    monkeypatch.setattr(bench_events, "POOL_BLOCKS", 256)
    monkeypatch.setattr(bench_events, "ROUNDS_QUICK", 2)


def grid(figures: list[Figure]) -> dict[str, dict[str, Figure]]:
    rows: dict[str, dict[str, Figure]] = {}
    for figure in figures:
        rows.setdefault(figure.row, {})[figure.column] = figure
    return rows


def test_blocks_go_to_the_host_and_back_beside_a_plain_copy(tmp_path: Path) -> None:
    leg = bench_paths.Leg("device to host", "host to device")
    rows = grid(bench_paths.leg_figures(leg, tmp_path, 2 * LAYER_BYTES, 0.0, (1, 2)))
    assert list(rows) == [
        "device to host 64 KiB",
        "host to device 64 KiB",
        "host to device 64 KiB, 1 at once beside compute",
        "host to device 64 KiB, 2 at once beside compute",
    ]
    for row in list(rows.values())[:2]:
        assert {name for name, figure in row.items() if figure.value} == GRID
        assert row["raw by"].note == "one copy"
    for row in list(rows.values())[2:]:
        assert set(row) == {"GB/s", "compute left %"}
        assert row["compute left %"].value is not None


def test_blocks_go_to_a_slab_and_back_beside_raw_io(tmp_path: Path) -> None:
    leg = bench_paths.Leg("host to disk", "disk to device", "disk", bench_paths.slab)
    rows = grid(bench_paths.leg_figures(leg, tmp_path, 2 * LAYER_BYTES, 0.0, (2,)))
    assert list(rows)[:2] == ["host to disk 64 KiB", "disk to device 64 KiB"]
    for row in list(rows.values())[:2]:
        assert {name for name, figure in row.items() if figure.value} == GRID
        assert "thread" in row["raw by"].note


def test_a_medium_that_is_not_there_is_a_row_that_says_so(tmp_path: Path) -> None:
    def absent(folder: Path, block_bytes: int, blocks: int, closing: ExitStack) -> Medium:
        raise MediumAbsent("install something")

    leg = bench_paths.Leg("host to remote", "remote to device", "remote", absent)
    (figure,) = bench_paths.leg_figures(leg, tmp_path, LAYER_BYTES, 0.0, (1,))
    assert (figure.row, figure.value, figure.note) == ("host to remote 32 KiB", None, "install something")


def test_events_are_measured_with_and_without_a_publisher() -> None:
    figures = {figure.name: figure.value for figure in bench_events.event_figures(quick=True)}
    alone = figures["events: all steps without a publisher"]
    telling = figures["events: all steps with one, what the caller pays"]
    assert alone is not None
    assert telling is not None
    assert figures["events: what the caller pays, with against without"] == pytest.approx(telling / alone)
    assert alone > 0
