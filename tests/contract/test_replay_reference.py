"""Replay against the reference figures of an independent simulator, to the integer."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from advisor.caches import POLICIES, RequestTrace, replay_cache
from advisor.fold import Fold
from advisor.replay import (
    NAMESPACE_ID,
    TraceReplay,
    as_json,
    live_blocks,
    replay_recording,
    replay_trace,
)
from advisor.traces import Trace, load_trace
from event_plane.dialects.vllm import VllmDialect
from event_plane.recording import read_capture
from event_plane.schema import Namespace, RecordFlag

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
    assert conversation.requests == 12_031
    assert conversation.accesses == 288_500
    assert len(np.unique(conversation.hashes, axis=0)) == 182_790
    assert sum(conversation.input_tokens) == 144_793_823


def our_name(name: str) -> str:
    return "length-aware" if name == "LengthAware" else name.lower()


@pytest.fixture(scope="module")
def requests(conversation: Trace) -> RequestTrace:
    return conversation.as_requests()


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"arc-leaf"}))
def test_each_policys_figures_equal_the_reference(
    requests: RequestTrace, reference: dict[str, dict[str, int]], policy: str
) -> None:
    rows = {int(key.split("|")[1]): row for key, row in reference.items() if our_name(key.split("|")[0]) == policy}
    assert len(rows) == 6
    assert {blocks: asdict(replay_cache(requests, policy, blocks).figures) for blocks in rows} == rows


def test_arc_of_leaves_comes_within_a_hundredth_of_the_reference(
    requests: RequestTrace, reference: dict[str, dict[str, int]]
) -> None:
    for key, row in reference.items():
        name, blocks = key.split("|")
        if name == "ARC-leaf":
            figures = asdict(replay_cache(requests, "arc-leaf", int(blocks)).figures)
            assert figures == {figure: pytest.approx(value, rel=0.01) for figure, value in row.items()}


def test_the_last_half_of_ragpulse_equals_the_reference(shared_data: Path) -> None:
    requests = load_trace(shared_data / "traces/ragpulse_0_trace.jsonl.gz").as_requests()
    rows = json.loads((shared_data / "traces/reference.json").read_text())["ragpulse_last_half"]["rows"]
    tokens = {}
    for key in rows:
        name, blocks = key.split("|")
        half = requests.requests // 2
        done = replay_cache(requests, our_name(name), int(blocks), counted_from=half, whole_blocks=True)
        tokens[key] = done.figures.run_tokens
    assert tokens == rows


@pytest.mark.parametrize(("policy", "capacity"), [("lru", 30_000), ("lfu", 50_000)])
def test_hit_figures_of_the_fold_equal_the_reference(
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
    replayed = replay_recording(shared_data / "captures/vllm033_int.cap")
    assert live_blocks(replayed.fold) == sorted(oracle)
    assert replayed.messages == 800
    assert not any(producer.partial for producer in replayed.fold.producers.values())
    replayed.fold.index.check()


def test_bytes_capture_ends_with_the_blocks_of_the_engines_own_cache(shared_data: Path) -> None:
    oracle = json.loads((shared_data / "captures/vllm033_bytes.cap.oracle.json").read_text())
    replayed = replay_recording(shared_data / "captures/vllm033_bytes.cap")
    assert live_blocks(replayed.fold) == sorted(int(h[-16:], 16) for h in oracle)


def test_capture_of_dynamos_relay_ends_with_the_blocks_of_the_engine_behind_it(shared_data: Path) -> None:
    oracle = json.loads((shared_data / "captures/vllm033_int.cap.oracle.json").read_text())
    replayed = replay_recording(shared_data / "captures/dynamo161_nats.cap")
    assert live_blocks(replayed.fold) == sorted(oracle)
    assert replayed.messages == 797


def test_capture_of_sglang_is_replayed_whole(shared_data: Path) -> None:
    replayed = replay_recording(shared_data / "captures/sglang0523.cap")
    assert (replayed.messages, replayed.fold.events_total, replayed.refused) == (400, 25_359, {})


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_events_of_a_replay_fold_to_the_same_state_one_batch_at_a_time(conversation: Trace, policy: str) -> None:
    replay, fold = TraceReplay(policy, 500), TraceReplay(policy, 500).fold
    for number in range(400):
        events = replay.request(conversation, number)
        if replay.fold.position != fold.position:
            fold.tick(replay.fold.now_us, replay.fold.position)
            fold.position = replay.fold.position
        fold.apply_records(1, [NAMESPACE_ID], ["cache"], events)
    assert fold.index.totals() == replay.fold.index.totals()
    assert fold.digest() == replay.fold.digest()



@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["vllm033_int", "vllm033_bytes"])
def test_captures_end_the_same_however_their_events_are_grouped_into_batches(
    shared_data: Path, name: str, seed: int
) -> None:
    oracle = json.loads((shared_data / f"captures/{name}.cap.oracle.json").read_text())
    dialect = VllmDialect(namespace=Namespace())
    locations: list[str] = []
    parts = []
    namespaces: tuple[int, ...] = ()
    for frames in read_capture(shared_data / f"captures/{name}.cap"):
        batch, _ = dialect.decode(frames[2], producer=1, epoch=1, sequence=int.from_bytes(frames[1], "big"))
        records = batch.records.copy()
        for number, location in enumerate(batch.locations):
            locations += [] if location in locations else [location]
            records["storage_location"][batch.records["storage_location"] == number] = locations.index(location)
        parts.append(records)
        namespaces = batch.namespace_ids or namespaces
    stream = np.concatenate(parts)
    # An event stays in one batch, as the contract says.
    begins = np.flatnonzero(stream["flags"] & RecordFlag.FIRST)
    cuts = np.sort(np.random.default_rng(seed).choice(begins[1:], (1, 40, 700, len(begins) - 1)[seed], replace=False))
    fold = Fold()
    for group in np.split(stream, cuts):
        fold.apply_records(1, namespaces, locations, group)
    expected = oracle if name == "vllm033_int" else [int(h[-16:], 16) for h in oracle]
    assert live_blocks(fold) == sorted(expected)
    fold.index.check()
