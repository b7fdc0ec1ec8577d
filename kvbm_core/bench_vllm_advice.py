"""Of `kvadvisor bench vllm`: a fast volume that holds a quarter of what is asked for, with advice and without.

Two engines serve the same prompts in turn, each with an agent and volumes of its own; one of the agents has an advisor.
Documents are asked about again and again, some far more often than others, and which ones changes halfway. Both engines
put blocks to the fast volume until it is full, and to the slow one from then on: without advice they stay there.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from random import Random

from event_plane.figures import Figure, at_least
from kvbm_core.bench_vllm_model import BLOCK_TOKENS, BenchModel, random_prompt
from kvbm_core.bench_vllm_processes import (
    EngineProcess,
    VolumePlan,
    advisor,
    agent,
    connected,
    engine,
    engine_command,
)
from kvbm_core.bench_vllm_tiers import SLOW_CALL_S

DOCUMENTS = 32
DOCUMENT_TOKENS = 1_024
QUESTION_TOKENS = 32
QUESTIONS = 600
SKEW = 1.1
"""Of the Zipf law by which documents are chosen."""
FAST_SHARE = 0.25
TICK_S = 1.0
GOAL_HITS = 1.25
GOAL_FIRST_TOKEN = 1.1
HITS = "blocks that the fast volume had, advice on / off"
FIRST_TOKEN = "mean time to first token, advice off / on"


@dataclass(slots=True)
class _Arm:
    """One engine, its agent's volumes, and what its questions took."""

    served: EngineProcess
    seconds: list[float] = field(default_factory=list)
    loaded: dict[str, int] = field(default_factory=dict)
    """Blocks by volume."""

    def mean_ms(self) -> float:
        return statistics.fmean(self.seconds) * 1e3

    def fast_share(self) -> float:
        """Of all blocks that came from a volume."""
        volumes = [self.loaded.get(name, 0) for name in ("fast", "slow")]
        return volumes[0] / max(1, sum(volumes))


def advice_goals() -> list[Figure]:
    """The goals of `advice_figures`, not measured."""
    return _goals(None, None)


def advice_figures(python: Path, folder: Path, model: BenchModel) -> list[Figure]:
    """About five minutes."""
    blocks = DOCUMENTS * DOCUMENT_TOKENS // BLOCK_TOKENS
    all_blocks = blocks + QUESTIONS * (QUESTION_TOKENS // BLOCK_TOKENS + 1)
    plan = VolumePlan(model.block_bytes, int(blocks * FAST_SHARE), 2 * all_blocks, SLOW_CALL_S)
    with ExitStack() as stack:
        off, on = (stack.enter_context(_opened(python, folder / name, model, plan)) for name in ("off", "on"))
        stack.enter_context(advisor(folder / "on", TICK_S))
        arms = {"off": _Arm(off), "on": _Arm(on)}
        for arm in arms.values():
            arm.served.wait_until_ready()
        _serve(list(arms.values()))
    figures = []
    for name, arm in arms.items():
        row = f"advice {name}"
        share, mean = arm.fast_share(), arm.mean_ms()
        figures += [
            Figure(f"{row}, blocks that the fast volume had", share * 100, "%").placed(row, "from fast, %"),
            Figure(f"{row}, mean time to first token", mean, "ms").placed(row, "mean first token, ms"),
        ]
    hits = arms["on"].fast_share() / max(arms["off"].fast_share(), 1e-9)
    return [*figures, *_goals(hits, arms["off"].mean_ms() / arms["on"].mean_ms())]


def asked_about() -> list[int]:
    """Of each question, its document."""
    chosen = Random(4)
    shares = list(accumulate(1 / (rank + 1) ** SKEW for rank in range(DOCUMENTS)))
    asked: list[int] = []
    for _ in range(2):
        by_rank = chosen.sample(range(DOCUMENTS), DOCUMENTS)
        asked += chosen.choices(by_rank, cum_weights=shares, k=QUESTIONS // 2)
    return asked


@contextmanager
def _opened(python: Path, folder: Path, model: BenchModel, plan: VolumePlan) -> Iterator[EngineProcess]:
    """An engine, not ready yet, whose GPU and host hold little more than one prompt each, and its agent."""
    folder.mkdir()
    blocks = 3 * (DOCUMENT_TOKENS + QUESTION_TOKENS) // BLOCK_TOKENS // 2
    length = DOCUMENT_TOKENS + QUESTION_TOKENS + BLOCK_TOKENS
    transfer = connected(model, folder, host_blocks=blocks, volumes=["fast", "slow"])
    command = engine_command(python, model, blocks=blocks, length=length, transfer=transfer)
    with agent(folder, plan), engine(command, folder / "engine.log") as opened:
        yield opened


def _serve(arms: Sequence[_Arm]) -> None:
    """Each document once, then questions about them; only the latter are measured."""
    chosen = Random(3)
    documents = [random_prompt(chosen, DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
    for document in documents:
        for arm in arms:
            arm.served.ask("first_token", prompt=document)
    before = []
    for arm in arms:
        arm.served.ask("settle")
        before.append(arm.served.ask("loaded"))
    for number, about in enumerate(asked_about()):
        prompt = documents[about] + random_prompt(chosen, QUESTION_TOKENS)
        for arm in arms if number % 2 else reversed(arms):
            arm.seconds.append(arm.served.ask("first_token", prompt=prompt)["seconds"])
    for arm, had in zip(arms, before, strict=True):
        arm.loaded = {name: blocks - had.get(name, 0) for name, blocks in arm.served.ask("loaded").items()}


def _goals(hits: float | None, first_token: float | None) -> list[Figure]:
    return [
        at_least(HITS, hits, "ratio", GOAL_HITS),
        at_least(FIRST_TOKEN, first_token, "ratio", GOAL_FIRST_TOKEN),
    ]
