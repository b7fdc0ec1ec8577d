"""`kvadvisor bench vllm`: what the connector and advice are worth to a real vLLM, on one machine and in one run."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from event_plane.figures import Figure
from kvbm_core.bench_vllm_advice import advice_figures, advice_goals
from kvbm_core.bench_vllm_model import BenchModel
from kvbm_core.bench_vllm_processes import PYTHON_VARIABLE, vllm_python
from kvbm_core.bench_vllm_tiers import quick_figures, tier_figures, tier_goals

MODEL = BenchModel(layers=8, hidden=512)
MODEL_QUICK = BenchModel(layers=4, hidden=256)
PROMPT_TOKENS = 2_048
PROMPT_TOKENS_QUICK = 1_024
LEFT_OUT = "left out by --quick"
ABSENT = f"vLLM is not installed: make vllm-env, or name a Python that has it in {PYTHON_VARIABLE}"


def run(quick: bool) -> list[Figure]:
    """Some eight minutes; `quick` half a minute: one engine with a smaller model, without what it is compared with."""
    python = vllm_python()
    if python is None:
        return [replace(figure, note=ABSENT) for figure in (*tier_goals(), *advice_goals())]
    with tempfile.TemporaryDirectory(prefix="kvadvisor-bench-") as made:
        folder = Path(made)
        if quick:
            figures = [*quick_figures(python, folder, MODEL_QUICK, PROMPT_TOKENS_QUICK), *advice_goals()]
            return [replace(each, note=LEFT_OUT) if each.value is None else each for each in figures]
        (folder / "tiers").mkdir()
        (folder / "advice").mkdir()
        return [
            *tier_figures(python, folder / "tiers", MODEL, PROMPT_TOKENS),
            *advice_figures(python, folder / "advice", MODEL),
        ]
