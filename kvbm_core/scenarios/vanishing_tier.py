"""An optional tier that vanishes and returns."""

from __future__ import annotations

from collections.abc import Sequence

from kvbm_core.scenarios.script import Prompts, Request, Scenario, Setup, Step, TierReturns, TierVanishes

DOCUMENTS = 16
DOCUMENT_TOKENS = 2_048
QUESTION_TOKENS = 64
REQUESTS = 25
"""In each of the three times."""
SKEW = 0.6
PAUSE_S = 0.25
DEVICE_BLOCKS, HOST_BLOCKS, REMOTE_BLOCKS = 160, 192, 1_024


def steps(seed: int) -> Sequence[Step]:
    prompts = Prompts(seed)
    script: list[Step] = []
    at_s = 0.0
    for kind in ("before", "while it is gone", "after"):
        for _ in range(REQUESTS):
            at_s += prompts.pause_s(PAUSE_S)
            document = prompts.some_document(DOCUMENTS, SKEW)
            script.append(Request(at_s, kind, prompts.about(document, DOCUMENT_TOKENS, QUESTION_TOKENS)))
        if kind == "before":
            script.append(TierVanishes(at_s))
        elif kind == "while it is gone":
            script.append(TierReturns(at_s))
    return script


SCENARIO = Scenario(
    name="vanishing-tier",
    says="a remote tier fails every read and write for a while; requests go on without it",
    limit_ms=300.0,
    setups=(
        Setup(name="no remote tier", device_blocks=DEVICE_BLOCKS, host_blocks=HOST_BLOCKS),
        Setup(
            name="it vanishes and returns",
            device_blocks=DEVICE_BLOCKS,
            host_blocks=HOST_BLOCKS,
            remote_blocks=REMOTE_BLOCKS,
        ),
        Setup(
            name="it stays",
            device_blocks=DEVICE_BLOCKS,
            host_blocks=HOST_BLOCKS,
            remote_blocks=REMOTE_BLOCKS,
            spared=True,
        ),
    ),
    steps=steps,
)
