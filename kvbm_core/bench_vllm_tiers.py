"""Of `kvadvisor bench vllm`: time to first token of a long prompt by where its blocks are, and throughput without hits.

Recomputing, vLLM's ExampleConnector and ours take turns, prompt by prompt, so that what else the machine does hits all
alike. Each prompt is asked alone, in an engine whose own cache is empty.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

from event_plane.figures import Figure, at_least
from kvbm_core.bench_vllm_model import BLOCK_TOKENS, BenchModel, loadable_tokens, random_prompt
from kvbm_core.bench_vllm_processes import EngineProcess, VolumePlan, agent, connected, engine, engine_command
from kvbm_core.errors import BenchError
from storage_agent.client import AgentClient
from storage_agent.port import BlockKey

SLOW_CALL_S = 0.05
"""What each call to the slow volume's medium takes longer, as the first byte of an object store does; and each file of
ExampleConnector's, one a layer, where it is compared on a medium that is as slow."""
ROUNDS = 7
ROUNDS_QUICK = 3
PROMPTS = 3
GOAL_OF_RECOMPUTING = 3.0
GOAL_THROUGHPUT = 0.97
BATCH_PROMPTS = 8
BATCH_PROMPT_TOKENS = 512
BATCH_ANSWER_TOKENS = 16
BATCH_ROUNDS = 8
RECOMPUTED = "recomputed"
EXAMPLE = "ExampleConnector, page cache"
EXAMPLE_COLD = "ExampleConnector, disk"
EXAMPLE_SLOW = "ExampleConnector, slow medium"
WARM, HOST, FAST, SLOW = "the engine's own cache", "host", "fast volume", "slow volume"
BESIDE = {HOST: EXAMPLE, FAST: EXAMPLE_COLD, SLOW: EXAMPLE_SLOW}
"""What each tier must beat: ExampleConnector with its files in memory, on the same disk, on as slow a medium."""
NO_HITS = "throughput without hits, connector on / off"

Seconds = dict[str, list[float]]


def tier_goals() -> list[Figure]:
    """The goals of `tier_figures`, not measured."""
    return [*tier_ratios({}), at_least(NO_HITS, None, "ratio", GOAL_THROUGHPUT)]


def tier_figures(python: Path, folder: Path, model: BenchModel, tokens: int) -> list[Figure]:
    """About three minutes. `tokens`: of a prompt."""
    seconds: Seconds = {}
    example_folder = folder / "example"
    example: dict[str, Any] = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(example_folder)},
    }
    prompts = _prompts(tokens)
    plan = _plan(model, tokens)
    with ExitStack() as stack:
        stack.enter_context(agent(folder, plan))
        bare, theirs, ours = (
            stack.enter_context(engine(_command(python, model, tokens, transfer), folder / f"{name}.log"))
            for name, transfer in (("bare", None), ("example", example), ("ours", _transfer(model, folder, plan)))
        )
        for each in (bare, theirs, ours):
            each.wait_until_ready()
        for each in (bare, theirs, ours):
            _first_time(each, prompts)
        for prompt in prompts * ROUNDS:
            _time(seconds, RECOMPUTED, bare, prompt, cached=0)
            _forget_cached(example_folder)
            _time(seconds, EXAMPLE_COLD, theirs, prompt)
            _time(seconds, FAST, ours, prompt, volume="fast")
            _time(seconds, EXAMPLE, theirs, prompt)
            _time(seconds, HOST, ours, prompt, volume="")
            _time(seconds, WARM, ours, prompt, is_reset=False)
        _move_all(ours, folder, prompts)
        theirs.ask("delay_files", seconds=SLOW_CALL_S)
        for prompt in prompts * ROUNDS:
            _time(seconds, EXAMPLE_SLOW, theirs, prompt)
            _time(seconds, SLOW, ours, prompt, volume="slow")
        throughput = _throughput(bare, ours)
    return [*_tiers(seconds), *tier_ratios(seconds), at_least(NO_HITS, throughput, "ratio", GOAL_THROUGHPUT)]


def quick_figures(python: Path, folder: Path, model: BenchModel, tokens: int) -> list[Figure]:
    """Half a minute: one engine, recomputing against the host and the fast volume."""
    seconds: Seconds = {}
    plan = _plan(model, tokens)
    with ExitStack() as stack:
        stack.enter_context(agent(folder, plan))
        command = _command(python, model, tokens, _transfer(model, folder, plan))
        ours = stack.enter_context(engine(command, folder / "ours.log"))
        ours.wait_until_ready()
        _first_time(ours, _prompts(tokens, seed=1))
        for prompt in _prompts(tokens, ROUNDS_QUICK):
            _time(seconds, RECOMPUTED, ours, prompt, cached=0)
            _time(seconds, FAST, ours, prompt, volume="fast")
            _time(seconds, HOST, ours, prompt, volume="")
    return [*_tiers(seconds), *tier_ratios(seconds), at_least(NO_HITS, None, "ratio", GOAL_THROUGHPUT)]


def tier_ratios(seconds: Seconds) -> list[Figure]:
    """Each tier against recomputing and against ExampleConnector."""
    figures = []
    for tier, beside in BESIDE.items():
        for other, goal in ((RECOMPUTED, GOAL_OF_RECOMPUTING), (beside, 1.0)):
            measured = tier in seconds and other in seconds
            ratio = statistics.median(seconds[other]) / statistics.median(seconds[tier]) if measured else None
            figures.append(at_least(f"first token, {other} / {tier}", ratio, "ratio", goal))
    return figures


def _prompts(tokens: int, count: int = PROMPTS, seed: int = 0) -> list[list[int]]:
    chosen = Random(seed)
    return [random_prompt(chosen, tokens) for _ in range(count)]


def _plan(model: BenchModel, tokens: int) -> VolumePlan:
    """Room on either volume for all that is ever put."""
    blocks = (PROMPTS + 1) * tokens // BLOCK_TOKENS
    batches = (BATCH_ROUNDS + 1) * BATCH_PROMPTS * (BATCH_PROMPT_TOKENS + BATCH_ANSWER_TOKENS) // BLOCK_TOKENS
    return VolumePlan(model.block_bytes, blocks + batches, blocks, SLOW_CALL_S)


def _transfer(model: BenchModel, folder: Path, plan: VolumePlan) -> dict[str, Any]:
    return connected(model, folder, host_blocks=plan.slow_blocks, volumes=["fast"])


def _command(python: Path, model: BenchModel, tokens: int, transfer: dict[str, Any] | None) -> list[str]:
    blocks = (PROMPTS + 1) * tokens // BLOCK_TOKENS
    return engine_command(python, model, blocks=blocks, length=tokens + BLOCK_TOKENS, transfer=transfer)


def _first_time(served: EngineProcess, prompts: Sequence[list[int]]) -> None:
    """Everything is computed and, with a connector, kept; and what is made at first use is made."""
    for prompt in prompts:
        served.ask("first_token", prompt=prompt)


def _time(
    seconds: Seconds,
    way: str,
    served: EngineProcess,
    prompt: list[int],
    *,
    cached: int | None = None,
    is_reset: bool = True,
    volume: str | None = None,
) -> None:
    """One prompt's time to its first token. `volume`: where our connector must have its blocks from; empty: the host.

    Raises `BenchError` unless it had as many tokens as it should, and from there.
    """
    if volume:
        served.ask("settle")
    if is_reset and not served.ask("reset", connector=bool(volume)):
        raise BenchError(f"{way}: the engine could not empty its cache, blocks of it are in use")
    before = served.ask("loaded") if volume is not None else {}
    answer = served.ask("first_token", prompt=prompt)
    expected = loadable_tokens(prompt) if cached is None else cached
    if answer["cached"] != expected:
        raise BenchError(f"{way}: {answer['cached']} tokens were not computed, {expected} should not have been")
    if volume is not None:
        after = served.ask("loaded")
        came = {name: after[name] - before.get(name, 0) for name in ("fast", "slow") if name in after}
        if {name for name, blocks in came.items() if blocks} != ({volume} if volume else set()):
            raise BenchError(f"{way}: blocks came from volumes as {came}, not from {volume or 'none'}")
    seconds.setdefault(way, []).append(answer["seconds"])


def _forget_cached(folder: Path) -> None:
    """No file of it is in the page cache."""
    for path in folder.rglob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _move_all(ours: EngineProcess, folder: Path, prompts: Sequence[list[int]]) -> None:
    """Every block of the prompts from the fast volume to the slow one."""
    ours.ask("reset", connector=False)
    _first_time(ours, prompts)
    keys = [BlockKey(*key) for key in ours.ask("keys")]
    with AgentClient(f"ipc://{folder}/commands", 60.0) as moving:
        moving.move("bench", keys, "fast", "slow", keep=False)


def _throughput(bare: EngineProcess, ours: EngineProcess) -> float:
    """How many times as many tokens a second as without it; of prompts that share nothing, in pairs of batches."""
    chosen = Random(2)
    ratios = []
    for number in range(BATCH_ROUNDS + 1):
        taken: dict[EngineProcess, float] = {}
        for served in (bare, ours) if number % 2 else (ours, bare):
            prompts = [random_prompt(chosen, BATCH_PROMPT_TOKENS) for _ in range(BATCH_PROMPTS)]
            taken[served] = served.ask("serve", prompts=prompts, tokens=BATCH_ANSWER_TOKENS)
        ratios.append(taken[bare] / taken[ours])
    return statistics.median(ratios[1:])  # the first pair also makes what is made at first use


def _tiers(seconds: Seconds) -> list[Figure]:
    return [
        figure
        for way, taken in seconds.items()
        for figure in (
            Figure(f"first token, {way}", statistics.median(taken) * 1e3, "ms").placed(f"first token, {way}", "ms"),
            Figure(f"first token, {way}, slowest", max(taken) * 1e3, "ms").placed(f"first token, {way}", "slowest"),
        )
    ]
