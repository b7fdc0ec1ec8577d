"""Bursts of repeated long contexts."""

from __future__ import annotations

from collections.abc import Sequence

from kvbm_core.scenarios.script import Prompts, Request, Scenario, Setup, Step

DOCUMENTS = 10
DOCUMENT_TOKENS = 4_096
QUESTION_TOKENS = 96
BURSTS = 18
BURST_REQUESTS = 5
BURST_PAUSE_S = 0.05
BETWEEN_S = 1.0
SKEW = 0.8
DEVICE_BLOCKS, HOST_BLOCKS, DISK_BLOCKS = 160, 320, 1_024


def steps(seed: int) -> Sequence[Step]:
    """Each burst asks several questions about one document, some documents oftener than others."""
    prompts = Prompts(seed)
    script: list[Step] = []
    at_s = 0.0
    for _ in range(BURSTS):
        at_s += prompts.pause_s(BETWEEN_S)
        document = prompts.some_document(DOCUMENTS, SKEW)
        for place in range(BURST_REQUESTS):
            at_s += prompts.pause_s(BURST_PAUSE_S)
            prompt = prompts.about(document, DOCUMENT_TOKENS, QUESTION_TOKENS)
            script.append(Request(at_s, "first of a burst" if not place else "after it", prompt))
    return script


SCENARIO = Scenario(
    name="long-bursts",
    says="bursts of questions about one long document at a time, of more documents than the host holds",
    limit_ms=300.0,
    setups=(
        Setup(name="device alone", device_blocks=DEVICE_BLOCKS),
        Setup(name="host, lru", device_blocks=DEVICE_BLOCKS, host_blocks=HOST_BLOCKS),
        Setup(name="host, lineage", device_blocks=DEVICE_BLOCKS, host_blocks=HOST_BLOCKS, reuse="lineage"),
        Setup(
            name="host, lineage, and disk",
            device_blocks=DEVICE_BLOCKS,
            host_blocks=HOST_BLOCKS,
            disk_blocks=DISK_BLOCKS,
            reuse="lineage",
        ),
    ),
    steps=steps,
)
