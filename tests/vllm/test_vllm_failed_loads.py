"""Greedy tokens are what they are without a connector when promised blocks do not come, and when vLLM preempts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import BLOCK_BYTES, WORDS, Engine, agent, connected, prompts_of

PROMPTS = prompts_of(seed=7, count=200)
ALONE = [[random.Random(n).choice(WORDS) for _ in range(96 + n)] for n in range(40)]
"""Prompts that share nothing: an engine that never saw them loads only what it once computed, and lost."""
LONG = 80
"""Tokens to generate: they take more blocks than the prompts, so that requests are preempted."""
GPU_BLOCKS = 40
SMALL_STEPS = {"max_num_batched_tokens": 256, "max_num_seqs": 32, "disable_log_stats": False}
SERVED: dict[str, dict[str, Any]] = {
    "async": {"load": "async", "host_bytes": 4_096 * BLOCK_BYTES},
    "layerwise": {"load": "layerwise", "host_bytes": 4_096 * BLOCK_BYTES},
    "small host": {"load": "async", "host_bytes": 48 * BLOCK_BYTES},
}
pytestmark = pytest.mark.timeout(1_500)


class Engines:
    """One for each way to load, all started at once, and what each prompt gives without a connector."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        volumes = stack.enter_context(agent(folder))
        bare = Engine({"blocks": 400, "engine": {"enable_prefix_caching": False}}, folder / "bare.log")
        self.served = {}
        for name, extra in SERVED.items():
            stores = {"agent_url": volumes.url, "disk": {"volumes": ["fast"], "retention_s": 60.0}, "tenant": name}
            config = {"blocks": GPU_BLOCKS, "engine": SMALL_STEPS, "transfer": connected(**extra, **stores)}
            self.served[name] = Engine(config, folder / f"{name}.log")
            stack.callback(self.served[name].kill)
        self.expected, _ = bare.ready().generate(PROMPTS)
        self.expected_alone, _ = bare.generate(ALONE, LONG)
        bare.kill()
        for engine in self.served.values():
            engine.ready()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with ExitStack() as stack:
        yield Engines(tmp_path_factory.mktemp("vllm"), stack)


def wrong(found: list[list[int]], expected: list[list[int]]) -> list[int]:
    return [number for number, tokens in enumerate(found) if tokens != expected[number]]


@pytest.mark.parametrize("name", SERVED)
def test_what_was_preempted_comes_back_from_the_host_or_a_volume(engines: Engines, name: str) -> None:
    served = engines.served[name]

    tokens, _ = served.generate(ALONE, LONG)

    assert wrong(tokens, engines.expected_alone) == []
    preempted, loaded = served.ask("preemptions"), served.ask("cache")["loaded_blocks"]
    assert preempted > 0
    assert loaded > 0
    served.ask("settle")
    served.ask("reset")

    tokens, _ = served.generate(ALONE, LONG)

    assert wrong(tokens, engines.expected_alone) == []
    assert served.ask("preemptions") > preempted
    counts = served.ask("cache")
    assert counts["loaded_blocks"] > loaded
    assert name != "small host" or counts["from_volumes_blocks"] > 0


@pytest.mark.parametrize("name", ["async", "layerwise"])
def test_a_promise_that_is_taken_back_costs_blocks_and_no_tokens(engines: Engines, name: str) -> None:
    served = engines.served[name]
    assert wrong(served.generate(PROMPTS)[0], engines.expected) == []
    for seed in range(4):
        served.ask("reset")
        before = served.ask("cache")
        served.ask("fail_loads", seed=seed, share=0.1)

        tokens, _ = served.generate(PROMPTS)

        assert wrong(tokens, engines.expected) == []
        after = served.ask("cache")
        assert after["load_failed_blocks"] > before.get("load_failed_blocks", 0) + 50
        assert after["loaded_blocks"] > before["loaded_blocks"] + 500
        assert after["saved_blocks"] > before["saved_blocks"]


@pytest.mark.parametrize("name", ["async", "layerwise"])
def test_requests_whose_blocks_failed_are_preempted_and_right(engines: Engines, name: str) -> None:
    served = engines.served[name]
    for seed in range(3):
        served.ask("reset")
        before, preempted = served.ask("cache"), served.ask("preemptions")
        served.ask("fail_loads", seed=seed, share=0.2)

        tokens, _ = served.generate(ALONE, LONG)

        assert wrong(tokens, engines.expected_alone) == []
        assert served.ask("preemptions") > preempted
        assert served.ask("cache")["load_failed_blocks"] > before.get("load_failed_blocks", 0)


@pytest.mark.parametrize("name", ["async", "layerwise"])
def test_requests_that_are_given_up_while_blocks_come_leave_nothing_behind(engines: Engines, name: str) -> None:
    served = engines.served[name]
    for steps in (1, 2, 3):
        served.ask("reset")
        served.ask("fail_loads", seed=steps, share=0.3)
        served.ask("give_up", prompts=PROMPTS[:50], steps=steps)
        served.ask("fail_loads", seed=0, share=0.0)

        tokens, _ = served.generate(PROMPTS[:50])

        assert wrong(tokens, engines.expected[:50]) == []
    served.ask("settle")
    assert served.ask("reset", connector=True)
