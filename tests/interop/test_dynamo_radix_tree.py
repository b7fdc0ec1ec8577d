"""NVIDIA Dynamo's own prefix index takes our stream in Dynamo's words."""

from __future__ import annotations

import json

import pytest

from event_plane.dialects.outgoing import Restater, dynamo_payload, in_payloads
from event_plane.schema import Batch, BatchTables, EventRecord, EventType, Namespace, to_records

peer = pytest.importorskip("dynamo.llm", reason="ai-dynamo-runtime is not installed: pip install 'kvadvisor[peers]'")

PRODUCER = 42
CHAIN = [2**64 - 3, 12, 13, 14]


def events(kind: EventType, blocks: list[int]) -> Batch:
    tables = BatchTables()
    parents = [0, *CHAIN]
    records = [
        EventRecord(kind, 1, block, Namespace(), "gpu:0", parent_hash=parents[CHAIN.index(block)]) for block in blocks
    ]
    rows = to_records(records, tables, 0)
    return Batch(PRODUCER, 1, 0, rows, namespaces=tuple(tables.namespaces), locations=tuple(tables.locations))


def test_radix_tree_finds_what_our_producer_placed() -> None:
    tree, restater = peer.RadixTree(), Restater("dynamo")

    def take(batch: Batch) -> int:
        for changes in in_payloads(restater.take(batch)):
            envelope = json.loads(dynamo_payload(changes, 1, publisher=1, sequence=0, first_event=0, json=True))
            for routed in json.loads(envelope["payload"]):
                tree.apply_event(routed["worker_id"], json.dumps(routed["event"]).encode())
        scores = {worker: score for (worker, _), score in tree.find_matches(CHAIN).scores.items()}
        return int(scores.get(PRODUCER, 0))

    assert take(events(EventType.STORE, CHAIN[:2])) == 2
    assert take(events(EventType.STORE, CHAIN[2:])) == 4
    assert take(events(EventType.REMOVE, CHAIN[:2:-1])) == 3
    assert take(Batch(PRODUCER, 2, 0, events(EventType.STORE, []).records)) == 0
