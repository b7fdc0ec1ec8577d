"""The benchmark of pools, with pools so small that only what it measures is checked, not how fast that is."""

from __future__ import annotations

import pytest

from kvbm_core import bench_pool


def test_every_reuse_order_is_measured_beside_plain_dictionaries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, blocks in (("BLOCKS", 128), ("BLOCKS_LARGE", 192), ("MEASURED", 128)):
        monkeypatch.setattr(bench_pool, name, blocks)
    figures = {figure.name: figure for figure in bench_pool.pool_figures(quick=False)}
    assert all(figure.value for name, figure in figures.items() if "commit" not in name)
    for step in bench_pool.STEPS:
        assert figures[f"pool of 128, lru, {step}"].unit == "ns a block"
    for way in ("lru", "fifo", "multi_lru", "lineage", "lru, each block by itself"):
        total, plain, ratio = (
            figures[f"pool of 128, {name}"].value
            for name in (f"{way}, all steps", "plain dictionaries, all steps", f"{way}, against plain dictionaries")
        )
        assert total is not None
        assert plain is not None
        assert ratio == pytest.approx(total / plain)
    assert figures["pool of 192, lru, against 128"].goal == "≤ 1.5"
