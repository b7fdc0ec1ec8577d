"""Replay against the reference figures of an independent simulator, to the integer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from advisor.replay import Trace, as_json, live_blocks, load_trace, replay_capture, replay_trace

TRACE = "traces/mooncake_conversation_trace.jsonl.gz"
FIGURES = ("run_blocks", "run_tokens", "seq_block_hits")


@pytest.fixture(scope="module")
def conversation(shared_data: Path) -> Trace:
    return load_trace(shared_data / TRACE)


@pytest.fixture(scope="module")
def reference(shared_data: Path) -> dict[str, dict[str, int]]:
    content = json.loads((shared_data / "traces/reference.json").read_text())
    return dict(content["conversation"]["rows"])


def test_trace_has_the_counts_of_its_description(conversation: Trace) -> None:
    assert len(conversation.requests) == 12_031
    assert conversation.accesses == 288_500
    assert len({key for _, _, keys in conversation.requests for key in keys}) == 182_790


@pytest.mark.parametrize(("policy", "capacity"), [("lru", 1_000), ("lru", 30_000), ("lfu", 1_000), ("lfu", 5_859)])
def test_hit_figures_equal_the_reference(
    conversation: Trace, reference: dict[str, dict[str, int]], policy: str, capacity: int
) -> None:
    replayed = replay_trace(conversation, policy, capacity)
    row = reference[f"{policy.upper()}|{capacity}"]
    result = as_json(replayed.result())
    assert {name: result[name] for name in FIGURES} == row
    assert len(replayed.fold.index) == capacity
    assert not replayed.fold.skipped


def test_int_capture_ends_with_the_blocks_of_the_engines_own_cache(shared_data: Path) -> None:
    oracle = json.loads((shared_data / "captures/vllm033_int.cap.oracle.json").read_text())
    replayed = replay_capture(shared_data / "captures/vllm033_int.cap")
    assert live_blocks(replayed.fold) == sorted(oracle)
    assert replayed.messages == 800
    assert not any(producer.partial for producer in replayed.fold.producers.values())
    replayed.fold.index.check()


def test_bytes_capture_ends_with_the_blocks_of_the_engines_own_cache(shared_data: Path) -> None:
    oracle = json.loads((shared_data / "captures/vllm033_bytes.cap.oracle.json").read_text())
    replayed = replay_capture(shared_data / "captures/vllm033_bytes.cap")
    assert live_blocks(replayed.fold) == sorted(int(h[-16:], 16) for h in oracle)
