"""A scenario's figures: requests first, then what they found, then what the tiers did. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from kvbm_core.scenarios.machine_model import MachineModel, Source
from kvbm_core.scenarios.script import Scenario
from kvbm_core.scenarios.serving import Run, Served
from kvbm_core.scenarios.worker import CoreTally


class RequestFigures(msgspec.Struct, frozen=True):
    """Requests of one kind. `useful`: those whose first token came within the scenario's limit."""

    requests: int
    useful: int
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    blocks: int
    """Of their prompts: `found`, by tier, and `computed`."""
    found: dict[Source, int]
    computed: int
    lost: dict[str, int]
    """Blocks that a tier has and that could not be had, by reason."""


class SetupFigures(msgspec.Struct, frozen=True):
    """One setup. `kinds` has a row for each kind of request; `all` sums them up."""

    setup: str
    all: RequestFigures
    kinds: dict[str, RequestFigures]
    core: CoreTally
    moved_bytes: dict[str, int]
    """Of the model's blocks, by path."""
    wrong_blocks: int


class ScenarioFigures(msgspec.Struct, frozen=True):
    """What `kvadvisor scenario NAME --json` writes. Times are virtual milliseconds of `model`."""

    scenario: str
    says: str
    seed: int
    limit_ms: float
    model: MachineModel
    setups: list[SetupFigures]


def figures_of(
    scenario: Scenario, seed: int, limit_ms: float, model: MachineModel, runs: Sequence[Run]
) -> ScenarioFigures:
    """All setups, side by side."""
    setups = [_setup_figures(run, limit_ms, model) for run in runs]
    return ScenarioFigures(scenario.name, scenario.says, seed, limit_ms, model, setups)


def _setup_figures(run: Run, limit_ms: float, model: MachineModel) -> SetupFigures:
    by_kind: dict[str, list[Served]] = {}
    for each in run.served:
        by_kind.setdefault(each.kind, []).append(each)
    return SetupFigures(
        setup=run.setup.name,
        all=_request_figures(run.served, limit_ms),
        kinds={kind: _request_figures(served, limit_ms) for kind, served in by_kind.items()},
        core=run.tally,
        moved_bytes={path: blocks * model.block_bytes for path, blocks in run.tally.moved.items()},
        wrong_blocks=run.wrong_blocks,
    )


def _request_figures(served: Sequence[Served], limit_ms: float) -> RequestFigures:
    ttft_ms = np.array([each.ttft_s * 1e3 for each in served])
    p50_ms, p90_ms, p99_ms = (float(np.quantile(ttft_ms, share, method="higher")) for share in (0.5, 0.9, 0.99))
    found: Counter[Source] = Counter()
    lost: Counter[str] = Counter()
    for each in served:
        found.update(each.found)
        lost.update(each.lost)
    computed = sum(each.computed for each in served)
    return RequestFigures(
        requests=len(served),
        useful=int((ttft_ms <= limit_ms).sum()),
        ttft_p50_ms=round(p50_ms, 3),
        ttft_p90_ms=round(p90_ms, 3),
        ttft_p99_ms=round(p99_ms, 3),
        blocks=found.total() + computed,
        found=dict(found),
        computed=computed,
        lost=dict(lost),
    )
