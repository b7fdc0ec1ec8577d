"""First paints: measured in a browser on every page there is, and what is said where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from sample_reader import SampleReader
from served import serving

from advisor.bench_api_pages import NO_CHROMIUM, PAINT_MS_MAX, Paints, chromium_path, first_paints, paint_rows
from advisor.web.pages import NAVIGATION

pytestmark = pytest.mark.browser


@contextmanager
def nobody_publishes(seconds: float) -> Iterator[None]:
    yield


@pytest.mark.skipif(chromium_path() is None, reason=NO_CHROMIUM)
def test_every_page_is_visited() -> None:
    with serving(SampleReader()) as served:
        paints = first_paints(urlsplit(served.url).netloc, nobody_publishes, 2.0, volume="nvme-a")
    assert paints.note == ""
    assert {entry.label for entry in NAVIGATION} < set(paints.by_page_ms)
    assert all(ms > 0 for visits in paints.by_page_ms.values() for ms in visits)


def test_where_there_is_no_chromium_the_goal_is_neither_met_nor_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVADVISOR_CHROMIUM", raising=False)
    monkeypatch.setenv("PATH", "")
    (goal,) = paint_rows("1 M", first_paints("127.0.0.1:1", nobody_publishes, 1.0, volume="slow"))
    assert (goal.value, goal.met, goal.note) == (None, None, NO_CHROMIUM)


def test_the_slowest_pages_median_has_the_goal() -> None:
    *rows, goal = paint_rows("1 M", Paints({"Blocks": [100.0, 200.0, 5_000.0], "Moves": [1_100.0]}))
    assert (goal.value, goal.met) == (1_100.0, False)
    assert goal.goal == f"≤ {PAINT_MS_MAX:g}"
    assert [row.value for row in rows] == [200.0, 5_000.0, 3, 1_100.0, 1_100.0, 1]
