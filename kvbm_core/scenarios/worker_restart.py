"""A worker restart: device and host memory are gone, volumes are recovered."""

from __future__ import annotations

from collections.abc import Sequence

from kvbm_core.scenarios.script import Prompts, Request, Restart, Scenario, Setup, Step

DOCUMENTS = 16
DOCUMENT_TOKENS = 2_048
QUESTION_TOKENS = 64
REQUESTS = 32
"""As many before the restart as after it."""
SKEW = 0.6
PAUSE_S = 0.25
RESTART_S = 5.0
DEVICE_BLOCKS, HOST_BLOCKS, DISK_BLOCKS = 160, 320, 1_024


def steps(seed: int) -> Sequence[Step]:
    prompts = Prompts(seed)
    script: list[Step] = []
    at_s = 0.0
    for kind in ("before", "after"):
        for _ in range(REQUESTS):
            at_s += prompts.pause_s(PAUSE_S)
            document = prompts.some_document(DOCUMENTS, SKEW)
            script.append(Request(at_s, kind, prompts.about(document, DOCUMENT_TOKENS, QUESTION_TOKENS)))
        if kind == "before":
            script.append(Restart(at_s, RESTART_S))
            at_s += RESTART_S
    return script


SCENARIO = Scenario(
    name="restart",
    says="a worker dies and comes back with empty memory; what its volume holds is recovered, or there is none",
    limit_ms=300.0,
    setups=(
        Setup(name="host alone", device_blocks=DEVICE_BLOCKS, host_blocks=HOST_BLOCKS),
        Setup(
            name="disk takes what is used twice",
            device_blocks=DEVICE_BLOCKS,
            host_blocks=HOST_BLOCKS,
            disk_blocks=DISK_BLOCKS,
            offload_policy="presence_frequency",
        ),
        Setup(name="disk takes all", device_blocks=DEVICE_BLOCKS, host_blocks=HOST_BLOCKS, disk_blocks=DISK_BLOCKS),
        Setup(
            name="disk takes all, no restart",
            device_blocks=DEVICE_BLOCKS,
            host_blocks=HOST_BLOCKS,
            disk_blocks=DISK_BLOCKS,
            spared=True,
        ),
    ),
    steps=steps,
)
