"""Dynamo's router events as our records, in MessagePack and JSON, over NATS and ZeroMQ."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from event_plane.dialects.dynamo import DynamoDialect
from event_plane.errors import DialectError
from event_plane.schema import RECORD_COUNT_MAX, EventType, Tier
from event_plane.transport import Message
from tests.foreign_streams import (
    CONFIGURED,
    envelope,
    events_of,
    hashes,
    live,
    read,
    router_event,
    router_removed,
    router_stored,
)

WORKER = "worker-42/dp0"


def on_zmq(payload: bytes) -> bytes:
    return b"\x01" + len(payload).to_bytes(4, "big") + payload


@pytest.mark.parametrize("json", [False, True], ids=["MessagePack", "JSON"])
@pytest.mark.parametrize("framed", [False, True], ids=["NATS", "ZeroMQ"])
def test_events_are_read_in_either_encoding_on_either_transport(json: bool, framed: bool) -> None:
    payload = envelope(
        router_event(router_stored([11, 2**64 - 1], parent=10)),
        router_event(router_removed([11])),
        router_event("cleared"),
        json=json,
    )
    batch, skipped = read("dynamo", on_zmq(payload) if framed else payload)
    assert events_of(batch) == [
        (EventType.STORE, Tier.G1, WORKER, [11, 2**64 - 1]),
        (EventType.REMOVE, Tier.G1, WORKER, [11]),
        (EventType.CLEAR, Tier.G1, WORKER, [0]),
    ]
    assert hashes(batch, "parent_hash") == [10, 11, 0, 0]
    assert batch.timestamp_us == 1_795_970_465_812_000
    assert skipped == {}


@pytest.mark.parametrize("inner", ["events", "bytes", "text"])
def test_json_envelope_may_hold_events_their_bytes_or_their_text(inner: str) -> None:
    events = [router_event(router_stored([11]))]
    text = msgspec.json.encode(events)
    payload = {"events": events, "bytes": list(text), "text": text.decode()}[inner]
    batch, _ = read("dynamo", msgspec.json.encode({"publisher_id": 7, "sequence": 0, "payload": payload}))
    assert hashes(batch) == [11]


@pytest.mark.parametrize(
    ("name", "tier"),
    [("device", Tier.G1), ("host_pinned", Tier.G2), ("disk", Tier.G3), ("external", Tier.G4), (None, Tier.G1)],
)
def test_storage_tier_is_the_true_tier(name: str | None, tier: Tier) -> None:
    batch, _ = read("dynamo", envelope(router_event(router_stored([11]), tier=name)))
    assert batch.records["tier"].tolist() == [tier]


def test_root_is_known_by_its_absent_parent() -> None:
    batch, _ = read("dynamo", envelope(router_event(router_stored([11, 12]))))
    assert batch.records["depth"].tolist() == [0, 1]
    assert hashes(batch, "prefix_hash") == [11, 11]


def test_workers_and_ranks_of_one_message_have_places_of_their_own() -> None:
    batch, _ = read(
        "dynamo",
        envelope(
            router_event(router_stored([11]), worker=1),
            router_event(router_stored([11]), worker=2),
            router_event(router_stored([11]), worker=2, rank=1),
            router_event(router_removed([11]), worker=2, rank=None),
            router_event("cleared", worker=1),
        ),
    )
    assert live([batch]) == {(Tier.G1, "worker-2/dp1", 0, 11)}


def test_producer_is_the_publisher_whose_sequence_it_is() -> None:
    dialect = DynamoDialect(namespace=CONFIGURED)
    messages = [envelope(router_event("cleared"), sequence=sequence, publisher=0xAB) for sequence in (0, 2**64 - 1)]
    origins = [dialect.origin(Message("d", b"subject", 99, payload)) for payload in (*messages, on_zmq(messages[0]))]
    assert [(origin.part, origin.sequence) for origin in origins] == [
        ("00000000000000ab", 0),
        ("00000000000000ab", 2**64 - 1),
        ("00000000000000ab", 0),
    ]


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (17, "no event"),
        ({"worker_id": 1}, "no event"),
        (router_event(router_stored([11]), worker=-1), "bad worker_id"),
        (router_event(router_stored([11]), worker=True), "bad worker_id"),
        (router_event(router_stored([11]), rank=-1), "bad dp_rank"),
        (router_event(router_stored([11]), tier="tape"), "unknown storage tier"),
        (router_event(router_stored([])), "no hashes"),
        (router_event(router_stored([0])), "bad hash"),
        (router_event(router_stored([11], parent=0)), "bad hash"),
        (router_event({"stored": {"blocks": [3]}}), "bad hash"),
        (router_event(router_removed([])), "no hashes"),
        (router_event({"moved": {}}), "unknown event type"),
        (router_event(router_stored([11]) | router_removed([11])), "unknown event type"),
        (router_event("forgotten"), "unknown event type"),
    ],
)
def test_bad_event_is_counted_by_reason_and_the_batch_goes_on(event: Any, reason: str) -> None:
    batch, skipped = read("dynamo", envelope(router_event(router_stored([1])), event, router_event(router_stored([2]))))
    assert (hashes(batch), skipped) == ([1, 2], {reason: 1})


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"{", b'{"publisher_id": 1}', on_zmq(b"")[:3], msgspec.msgpack.encode([1.0, [], 0]),
     msgspec.msgpack.encode({"publisher_id": 1, "sequence": 1, "payload": "text"}),
     msgspec.msgpack.encode({"publisher_id": 1, "sequence": 1, "payload": b"\xc1"}),
     b'{"publisher_id": 1, "sequence": 1, "payload": [256]}', b'{"publisher_id": 1, "sequence": 1, "payload": 3}'],
)  # fmt: skip
def test_payload_that_is_no_envelope_is_one_error(payload: bytes) -> None:
    with pytest.raises(DialectError, match="Dynamo payload"):
        read("dynamo", payload)


@pytest.mark.parametrize(("publisher", "sequence"), [(-1, 0), (1, -1)])
def test_number_that_is_no_u64_is_an_error(publisher: int, sequence: int) -> None:
    payload = msgspec.msgpack.encode({"publisher_id": publisher, "sequence": sequence, "payload": b"\x90"})
    with pytest.raises(DialectError, match="each must be a u64"):
        DynamoDialect(namespace=CONFIGURED).origin(Message("d", b"", 0, payload))


def test_payload_of_more_blocks_than_a_batch_holds_is_one_error() -> None:
    with pytest.raises(DialectError, match=f"Dynamo payload names {RECORD_COUNT_MAX + 1} blocks"):
        read("dynamo", envelope(router_event(router_removed(list(range(1, RECORD_COUNT_MAX + 2))))))
