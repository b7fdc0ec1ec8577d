"""What the connector does not serve ends vLLM's start, with a sentence for each thing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import BLOCK_BYTES, Engine, connected

OURS = connected(host_bytes=20 * BLOCK_BYTES)
BOTH = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"connectors": [OURS, {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}]},
}
SHARING = OURS["kv_connector_extra_config"] | {
    "agent_url": "ipc:///nowhere",
    "disk": {"volumes": ["fast"], "retention_s": 60.0},
}
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "native offload": (
        {"transfer": OURS, "engine": {"kv_offloading_size": 1.0}},
        ["vLLM's own offloading is configured beside"],
    ),
    "LMCache": (
        {"transfer": OURS, "engine": {"kv_offloading_size": 1.0, "kv_offloading_backend": "lmcache"}},
        ["LMCache is configured beside"],
    ),
    "a worker's own process": (
        {"transfer": OURS, "engine": {"distributed_executor_backend": "mp"}},
        ["distributed_executor_backend is 'mp', so the engine's worker is in another process"],
    ),
    "a host without a block": (
        {"transfer": connected(host_bytes=BLOCK_BYTES - 1)},
        [f"host_bytes = {BLOCK_BYTES - 1} holds 0 blocks of {BLOCK_BYTES} bytes"],
    ),
    "a layout of its own": (
        {"transfer": connected(host_bytes=20 * BLOCK_BYTES, core={"device_layout": "layer_separate_block_first"})},
        ["device_layout"],
    ),
    "MultiConnector": ({"transfer": BOTH}, ["MultiConnector is configured beside"]),
    "version, hash root and load failures": (
        {
            "transfer": OURS | {"kv_load_failure_policy": "fail", "kv_connector_extra_config": SHARING},
            "engine": {"prefix_caching_hash_algo": "xxhash"},
            "says_it_is": "0.31.4",
        },
        [
            "vLLM 0.31.4 was not tested with this connector: use 0.32",
            "xxhash hashes have a root of their own in each process: set prefix_caching_hash_algo to",
            "kv_load_failure_policy is 'fail'",
        ],
    ),
}
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def starting(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Engine, Path]]:
    """All engines, beside each other: each loads vLLM for a quarter of a minute."""
    folder = tmp_path_factory.mktemp("refused")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONHASHSEED", raising=False)
        logs = {name: folder / f"{name}.log" for name in REFUSED}
        return {name: (Engine(REFUSED[name][0], log), log) for name, log in logs.items()}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_ends_the_start(starting: dict[str, tuple[Engine, Path]], name: str) -> None:
    engine, log = starting[name]

    assert engine.stop() != 0

    told = log.read_text()
    assert [each for each in REFUSED[name][1] if each not in told] == []
