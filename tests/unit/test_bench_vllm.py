from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvbm_core import bench_vllm
from kvbm_core.bench_vllm_advice import DOCUMENTS, QUESTIONS, asked_about
from kvbm_core.bench_vllm_model import BenchModel, loadable_tokens
from kvbm_core.bench_vllm_processes import PYTHON_VARIABLE, vllm_python
from kvbm_core.bench_vllm_tiers import BESIDE, FAST, HOST, RECOMPUTED, SLOW, tier_ratios
from kvbm_core.errors import BenchError


def test_without_vllm_every_goal_has_a_row_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_vllm, "vllm_python", lambda: None)

    figures = bench_vllm.run(quick=False)

    assert len({figure.name for figure in figures}) == len(figures) == 9
    assert all(figure.goal and figure.met is None and "make vllm-env" in figure.note for figure in figures)


@pytest.mark.parametrize(("named", "told"), [("nowhere", "cannot be run"), (sys.executable, "has no vLLM")])
def test_a_python_without_vllm_is_refused(named: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, named)

    with pytest.raises(BenchError, match=told):
        vllm_python()


def test_the_python_that_is_named_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 0\n")  # it finds everything
    python.chmod(0o755)
    monkeypatch.setenv(PYTHON_VARIABLE, str(python))

    assert vllm_python() == python


def test_a_tier_is_held_to_recomputing_and_to_the_example_that_it_stands_beside() -> None:
    seconds = {RECOMPUTED: [2.0, 3.0, 9.0], HOST: [0.1], FAST: [0.5], SLOW: [2.0]}
    seconds |= {way: [0.4] for way in BESIDE.values()}

    ratios = {figure.name: (figure.value, figure.met) for figure in tier_ratios(seconds)}

    assert [(round(value or 0, 3), met) for value, met in ratios.values()] == [
        (30, True), (4, True), (6, True), (0.8, False), (1.5, False), (0.2, False),
    ]  # fmt: skip


def test_other_documents_are_asked_about_most_in_the_second_half() -> None:
    asked = asked_about()

    halves = asked[: QUESTIONS // 2], asked[QUESTIONS // 2 :]
    most = [max(range(DOCUMENTS), key=half.count) for half in halves]
    assert most[0] != most[1]
    assert all(half.count(document) > len(half) / 6 for half, document in zip(halves, most, strict=True))


def test_a_block_is_as_large_as_its_layers_keys_and_values() -> None:
    assert BenchModel(layers=8, hidden=512).block_bytes == 8 * 2 * 4 * 64 * 4 * 32


@pytest.mark.parametrize(("tokens", "loadable"), [(1, 0), (32, 0), (33, 32), (64, 32), (65, 64)])
def test_the_last_token_is_always_computed(tokens: int, loadable: int) -> None:
    assert loadable_tokens([3] * tokens) == loadable
