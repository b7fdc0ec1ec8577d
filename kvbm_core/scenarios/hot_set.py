"""A stable hot set beside a one-off scan."""

from __future__ import annotations

from collections.abc import Sequence

from kvbm_core.scenarios.script import Prompts, Request, Scenario, Setup, Step

HOT_DOCUMENTS = 24
HOT_TOKENS = 1_024
SCAN_TOKENS = 2_560
QUESTION_TOKENS = 50
ROUNDS = 4
SCANS_BETWEEN = 1
PAUSE_S = 0.2
DEVICE_BLOCKS, HOST_BLOCKS = 160, 512


def steps(seed: int) -> Sequence[Step]:
    """Each round asks about every hot document, in another order; from the second round on, scans come between."""
    prompts = Prompts(seed)
    script: list[Step] = []
    at_s = 0.0
    for round_number in range(ROUNDS):
        for document in prompts.random.permutation(HOT_DOCUMENTS):
            prompt = prompts.about(int(document), HOT_TOKENS, QUESTION_TOKENS)
            for kind, tokens in [("hot", prompt)] + [
                ("scan", prompts.once(SCAN_TOKENS)) for _ in range(SCANS_BETWEEN if round_number else 0)
            ]:
                at_s += prompts.pause_s(PAUSE_S)
                script.append(Request(at_s, kind, tokens))
    return script


SCENARIO = Scenario(
    name="hot-set",
    says="documents that are asked about again and again, beside prompts that come once and would push them out",
    limit_ms=400.0,
    setups=(
        Setup(name="device alone", device_blocks=DEVICE_BLOCKS),
        Setup(name="host takes all", device_blocks=DEVICE_BLOCKS, host_blocks=HOST_BLOCKS),
        Setup(
            name="host takes all, multi_lru", device_blocks=DEVICE_BLOCKS, host_blocks=HOST_BLOCKS, reuse="multi_lru"
        ),
        Setup(
            name="host takes what is used twice",
            device_blocks=DEVICE_BLOCKS,
            host_blocks=HOST_BLOCKS,
            offload_policy="presence_frequency",
        ),
    ),
    steps=steps,
)
