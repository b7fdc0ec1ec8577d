"""Each medium of `kvadvisor bench agent` can be measured, or says in a line what it lacks."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

from storage_agent import bench_agent
from storage_agent.bench_media import MEDIA, S3_VARIABLE
from storage_agent.bench_seaweed import ACCESS_KEY, BUCKET, SECRET_KEY, SeaweedServer

COLUMNS = ["put GB/s", "put p50 ms", "put p99 ms", "get GB/s", "get p50 ms", "get p99 ms", "CPU %", "mode"]
RAW_COLUMNS = ["raw put GB/s", "raw put by", "put ×", "raw get GB/s", "raw get by", "get ×"]


@pytest.mark.parametrize("name", ["slab", "directory", "memory", "remote"])
def test_a_cell_of_a_medium_is_one_row_of_figures(name: str, tmp_path: Path) -> None:
    figures = bench_agent._cell(tmp_path, name, 65536, 2, budget_s=0.0)
    assert {figure.row for figure in figures} == {f"{name} 64 KiB depth 2"}
    beside = [] if name in ("memory", "remote") else RAW_COLUMNS
    columns = [figure.column for figure in figures]
    assert set(columns) >= {*COLUMNS, *beside}
    assert len(set(columns)) == len(columns)
    assert all((figure.value or 0) > 0 for figure in figures if not figure.note), figures
    assert list(tmp_path.iterdir()) == [], "what was made for the measurement is gone"


def test_a_bucket_is_left_as_it_was(seaweed: SeaweedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(S3_VARIABLE, f"{seaweed.endpoint.url}/{BUCKET}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    figures = bench_agent._cell(tmp_path, "object", 65536, 2, budget_s=0.0)
    assert sorted(figure.column for figure in figures) == sorted(COLUMNS + RAW_COLUMNS)
    store = S3Store(
        BUCKET,
        endpoint=seaweed.endpoint.url,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )
    assert [each for listed in obstore.list(store, prefix="kvadvisor-bench-") for each in listed] == []


def test_what_cannot_be_measured_says_so_and_keeps_its_goals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage_agent.bench_media.os.geteuid", lambda: 1000)
    figures = bench_agent._cell(tmp_path, "block device", 65536, 16, budget_s=0.0)
    assert [(figure.value, figure.note) for figure in figures] == [
        (None, "a loop device needs root"), (None, ""), (None, ""),
    ]  # fmt: skip
    assert [(figure.goal, figure.met) for figure in figures[1:]] == [("≥ 0.95", None)] * 2


def test_quick_leaves_out_cells_but_no_goal_and_no_medium() -> None:
    cells = product(MEDIA, bench_agent.SIZES, bench_agent.DEPTHS)
    quick = [cell for cell in cells if bench_agent._is_quick(*cell)]
    assert {name for name, _, _ in quick} == set(MEDIA)
    cells = product(bench_agent.WITH_GOAL, bench_agent.SIZES, bench_agent.DEPTHS)
    goals = [figure for cell in cells for figure in bench_agent._goals(*cell)]
    assert len({figure.name for figure in goals}) == len(goals) == 2 * 4 * 2 * 2
