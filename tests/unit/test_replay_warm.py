"""What replays compile, `kvadvisor warm --replays` has compiled before them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from advisor.index import cache_kernel
from advisor.index.jit import INTERPRETED
from advisor.replay import TraceReplay
from advisor.replay_warm import warm_served
from advisor.traces import load_trace


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")
def test_a_trace_is_served_by_what_was_warmed(tmp_path: Path) -> None:
    warm_served()
    warmed = list(cache_kernel.serve_request.signatures)  # type: ignore[attr-defined]
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 1_024, "output_length": 1, "hash_ids": [1, 2]}) + "\n")
    replay = TraceReplay("lru", 4)
    assert len(replay.request(load_trace(trace), 0)) == 2
    assert list(cache_kernel.serve_request.signatures) == warmed  # type: ignore[attr-defined]
