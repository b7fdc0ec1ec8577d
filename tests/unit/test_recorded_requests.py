"""Requests put together again from events: as they were, where the events tell; by the documented rule, where not."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.caches import replay_cache
from advisor.cli import main
from advisor.recorded import Reading
from advisor.recorded_requests import RequestsOfEvents, trace_of_recording
from advisor.simulation import SimulatedRequest
from advisor.simulation.engine import SimulatedEngine
from advisor.simulation.workload import TenantLoad, Workload
from advisor.simulation.writing import write_simulation
from advisor.traces import Trace, load_trace
from event_plane.parquet_rows import RecordedBatch
from event_plane.schema import (
    Batch,
    BatchKind,
    BatchTables,
    EventRecord,
    EventType,
    Namespace,
    RecordFlag,
    Tier,
    to_records,
)
from tests.examples import examples

STORE, ACCESS, REMOVE = EventType.STORE, EventType.ACCESS, EventType.REMOVE
MODEL = Namespace(model="m", block_tokens=16)


def event(kind: EventType, block: int, parent: int = 0, *, tier: int = Tier.G1, at_s: float = 1.0, hits: int = 1,
          flags: int = 0, tokens: int = 16) -> EventRecord:  # fmt: skip
    return EventRecord(
        kind, tier, block, MODEL, "gpu", parent_hash=parent, flags=flags, block_tokens=tokens,
        timestamp_us=int(at_s * 1e6), hits=hits,
    )  # fmt: skip


def batch(events: Sequence[EventRecord], *, producer: int = 1, epoch: int = 1,
          kind: BatchKind = BatchKind.EVENTS) -> RecordedBatch:  # fmt: skip
    tables = BatchTables()
    records = to_records(list(events), tables, 0)
    return RecordedBatch(Batch(producer, epoch, 0, records, kind, namespaces=tuple(tables.namespaces)), "s", 1)


def trace_of(*batches: RecordedBatch) -> Trace:
    requests = RequestsOfEvents()
    for each in batches:
        requests.add(each)
    return requests.trace()


def paths(trace: Trace) -> list[list[int]]:
    """Of each request, its blocks by the number in which they first came."""
    ids = trace.as_requests().ids
    return [ids[first:end].tolist() for first, end in zip([0, *trace.ends], trace.ends, strict=False)]


def test_stores_of_a_chain_are_one_request() -> None:
    trace = trace_of(batch([event(STORE, 1), event(STORE, 2, 1), event(STORE, 3, 2, tokens=5)]))
    assert paths(trace) == [[0, 1, 2]]
    assert (trace.input_tokens, trace.block_tokens, trace.timestamps_ms) == ([37], [16], [1000.0])


def test_a_store_below_a_known_block_used_its_ancestors() -> None:
    """vLLM and SGLang tell of Stores alone: a hit shows by where the new blocks hang."""
    trace = trace_of(
        batch([event(STORE, 1), event(STORE, 2, 1), event(STORE, 3, 2)]), batch([event(STORE, 4, 2, at_s=60)])
    )
    assert paths(trace) == [[0, 1, 2], [0, 1, 3]]


def test_what_follows_soon_is_the_same_request_and_later_is_not() -> None:
    trace = trace_of(
        batch([event(STORE, 1)]), batch([event(STORE, 2, 1, at_s=2.5)]), batch([event(STORE, 3, 2, at_s=5)])
    )
    assert paths(trace) == [[0, 1], [0, 1, 2]]


def test_requests_whose_stores_are_interleaved_are_told_apart() -> None:
    trace = trace_of(batch([event(STORE, 1), event(STORE, 8), event(STORE, 2, 1), event(STORE, 9, 8)]))
    assert paths(trace) == [[0, 1], [2, 3]]


def test_copies_are_no_use() -> None:
    first = [event(STORE, 1), event(STORE, 2, 1)]
    offloaded = [event(STORE, 1, tier=Tier.G2, at_s=9), event(STORE, 2, 1, tier=Tier.G2, at_s=9)]
    flagged = [event(STORE, 1, tier=Tier.G3, at_s=9, flags=RecordFlag.COPY)]
    assert paths(trace_of(batch(first), batch(offloaded), batch(flagged, producer=2))) == [[0, 1]]


def test_a_block_that_comes_back_is_used_again() -> None:
    stored = batch([event(STORE, 1), event(STORE, 1, tier=Tier.G2)])
    gone = batch([event(REMOVE, 1)])
    onboarded = batch([event(STORE, 1, at_s=60)])
    assert paths(trace_of(stored, gone, onboarded)) == [[0], [0]]


def test_a_producer_that_began_again_holds_nothing() -> None:
    assert paths(trace_of(batch([event(STORE, 1)]), batch([event(STORE, 1, tier=Tier.G2, at_s=60)], epoch=2))) == [
        [0], [0],
    ]  # fmt: skip


def test_a_snapshot_is_no_use_but_tells_the_chains() -> None:
    listed = [event(STORE, 1), event(STORE, 2, 1)]
    trace = trace_of(batch(listed, kind=BatchKind.SNAPSHOT_CHUNK), batch([event(STORE, 3, 2)]))
    assert paths(trace) == [[0, 1, 2]]


def test_hits_of_one_record_are_as_many_requests() -> None:
    folded = [event(ACCESS, 1, hits=4), event(ACCESS, 2, 1, hits=3), event(ACCESS, 3, 2, hits=1), event(ACCESS, 4, 2)]
    found = sorted(paths(trace_of(batch(folded))))
    assert found == sorted([[0, 1, 2], [0, 1, 3], [0, 1], [0]])


def test_a_chain_that_bites_its_tail_ends() -> None:
    assert paths(trace_of(batch([event(STORE, 1, 2), event(STORE, 2, 1), event(STORE, 1, 1, at_s=9)])))


def test_blocks_of_two_namespaces_are_different() -> None:
    other = event(STORE, 1)
    other.namespace = Namespace(model="other", block_tokens=16)
    assert paths(trace_of(batch([event(STORE, 1), other]))) == [[0], [1]]


def test_a_block_without_a_size_has_its_namespaces() -> None:
    assert trace_of(batch([event(STORE, 1, tokens=0)])).input_tokens == [16]


def test_an_empty_recording_is_an_empty_trace() -> None:
    trace = trace_of()
    assert (trace.requests, trace.accesses) == (0, 0)
    assert replay_cache(trace.as_requests(), "lru", 5).figures.run_blocks == 0


@st.composite
def workloads(draw: st.DrawFn) -> list[SimulatedRequest]:
    """Requests along the paths of a tree in which block b hangs below b // 2."""
    ends = draw(st.lists(st.integers(1, 40), min_size=1, max_size=30))
    return [
        SimulatedRequest(number * 3000, 512 * end.bit_length(), 1, [end >> up for up in range(end.bit_length())][::-1],
                         "s", "t", 0)
        for number, end in enumerate(ends)
    ]  # fmt: skip


@given(workloads(), st.integers(1, 20))
@settings(max_examples=examples(60), deadline=None)
def test_requests_come_back_from_the_events_of_an_engine(requests: list[SimulatedRequest], cache_blocks: int) -> None:
    batches: Iterable[Batch] = SimulatedEngine(cache_blocks).batches(requests)
    trace = trace_of(*(RecordedBatch(each, "s", 1) for each in batches))
    renumbered: dict[int, int] = {}
    expected = [[renumbered.setdefault(block, len(renumbered)) for block in r.block_ids] for r in requests]
    assert paths(trace) == expected
    assert trace.input_tokens == [r.input_tokens for r in requests]


@pytest.mark.parametrize("suffix", ["cap", "parquet"])
def test_a_recording_is_replayed_like_the_trace_that_it_came_from(tmp_path: Path, suffix: str) -> None:
    chats = TenantLoad(
        name="a", sessions_per_minute=40, system_tokens=900, own_tokens=1500, turns_mean=3, think_s=9
    )
    workload = Workload(minutes=4, tenants=(chats,))
    figures = []
    for name in (f"t.{suffix}", "t.jsonl"):
        write_simulation(tmp_path / name, workload, 1, engine_blocks=60)
        trace = load_trace(tmp_path / name) if name == "t.jsonl" else trace_of_recording(tmp_path / name, Reading())
        figures.append([replay_cache(trace.as_requests(), policy, 100).figures for policy in ("lru", "lru-leaf")])
        assert np.all(np.diff(trace.timestamps_ms) >= 0)
    assert figures[0] == figures[1]
    assert figures[0][0].run_blocks > 100


def test_replay_runs_policies_on_a_recording_where_one_is_named(tmp_path: Path) -> None:
    chats = TenantLoad(name="a", sessions_per_minute=60, own_tokens=1500, turns_mean=2, think_s=9)
    for name in ("t.cap", "t.jsonl"):
        write_simulation(tmp_path / name, Workload(minutes=1, tenants=(chats,)), 1, engine_blocks=60)
    reports = {}
    for name, named in (("t.cap", ("--policy", "lru")), ("t.jsonl", ("--policy", "lru")), ("t.cap", ())):
        with pytest.raises(SystemExit) as ended:
            main(["replay", str(tmp_path / name), *named, "--json", str(tmp_path / "out.json")])
        assert ended.value.code in (0, None)
        reports[name, bool(named)] = json.loads((tmp_path / "out.json").read_text())["files"][0]
    recording, trace = reports["t.cap", True], reports["t.jsonl", True]
    assert recording["format"] == "capture"
    assert recording["results"] == trace["results"] != []
    assert (recording["requests"], recording["events"]) == (trace["requests"], trace["events"])
    assert reports["t.cap", False]["results"] == []
    assert reports["t.cap", False]["live_blocks"] == 60


def test_an_engines_capture_is_a_trace(shared_data: Path) -> None:
    """vLLM's and SGLang's own: as many blocks as their events name, each request a path."""
    counted = {}
    for name in ("vllm033_int", "sglang0523"):
        trace = trace_of_recording(shared_data / "captures" / f"{name}.cap", Reading())
        counted[name] = (trace.requests, trace.as_requests().blocks, set(trace.block_tokens))
    assert counted["vllm033_int"] == (365, 1700, {16})
    assert counted["sglang0523"] == (296, 2774, {16})
