"""A second owner of blocks beside the connector ends vLLM's start with a sentence."""

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
pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"transfer": OURS, "engine": {"kv_offloading_size": 1.0}}, "vLLM's own offloading is configured beside"),
        (
            {"transfer": OURS, "engine": {"kv_offloading_size": 1.0, "kv_offloading_backend": "lmcache"}},
            "LMCache is configured beside",
        ),
        ({"transfer": BOTH}, "MultiConnector is configured beside"),
        ({"transfer": OURS | {"kv_load_failure_policy": "fail"}}, "kv_load_failure_policy is 'fail'"),
    ],
    ids=["native offload", "LMCache", "MultiConnector", "load failures end requests"],
)
def test_what_is_not_served_ends_the_start(tmp_path: Path, config: dict[str, Any], told: str) -> None:
    log = tmp_path / "engine.log"

    status = Engine(config, log).stop()

    assert status != 0
    assert told in log.read_text()
