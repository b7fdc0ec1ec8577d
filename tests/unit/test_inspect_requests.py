"""`kvadvisor inspect --requests`: what there is to know of a workload before it is replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from advisor.cli import main
from event_plane.parquet import write_parquet
from event_plane.parquet_rows import RecordedBatch
from event_plane.schema import Batch, BatchTables, EventRecord, EventType, Namespace, to_records

LLAMA = Namespace(tenant="blue", model="llama", block_tokens=16)


def inspected(file: Path, *options: str) -> dict[str, Any]:
    out = file.with_suffix(".figures")
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(file), "--json", str(out), *options])
    assert ended.value.code in (0, None)
    figures: dict[str, Any] = json.loads(out.read_text())
    return figures


def test_requests_behind_a_recording_are_counted_only_where_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "r.parquet"
    chain = [
        EventRecord(EventType.STORE, 1, block, LLAMA, "gpu", block - 1, block_size=64, block_tokens=16)
        for block in (1, 2, 3)
    ]
    tables = BatchTables()
    records = to_records(chain, tables, 1)
    batch = Batch(
        7, 3, 1, records, namespaces=tuple(tables.namespaces), locations=tuple(tables.locations), timestamp_us=5_000_000
    )
    write_parquet(file, [RecordedBatch(batch, "engine", 1)])
    assert "requests" not in inspected(file)
    figures = inspected(file, "--requests")
    assert figures["events"] == 3
    assert figures["requests"] == {
        "requests": 1, "accesses": 3, "blocks": 3, "input_tokens": 48, "block_tokens": 16, "block_bytes": 64,
        "span_s": 0.0,
    }  # fmt: skip


def test_a_trace_has_requests_and_no_events(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 1_024, "output_length": 1, "hash_ids": [1, 2]},
        {"timestamp": 2_500, "input_length": 1_000, "output_length": 1, "hash_ids": [1, 3]},
    ]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    figures = inspected(file, "--requests")
    assert (figures["events"], figures["batches"]) == (0, 0)
    facts = figures["requests"]
    assert (facts["requests"], facts["accesses"], facts["blocks"], facts["input_tokens"]) == (2, 4, 3, 2_024)
    assert facts["span_s"] == 2.5
