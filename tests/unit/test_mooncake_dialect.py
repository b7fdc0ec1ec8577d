"""Mooncake Store's events as our records: times in ms, numbers from 1, many nil fields."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from event_plane.dialects.mooncake import MooncakeDialect
from event_plane.errors import DialectError
from event_plane.schema import DEPTH_UNKNOWN, Tier
from event_plane.transport import Message
from tests.foreign_streams import CONFIGURED, engine_payload, hashes, live, read, store_event


def test_timestamps_are_ms() -> None:
    batch, _ = read("mooncake", engine_payload(store_event("stored", [11]), timestamp=1_795_970_465_812))
    assert batch.timestamp_us == 1_795_970_465_812_000


def test_numbers_begin_with_1() -> None:
    dialect = MooncakeDialect(namespace=CONFIGURED)
    origin = dialect.origin(Message("m", b"", 1, engine_payload(timestamp=1)))
    assert (origin.part, origin.sequence) == ("store", 0)
    with pytest.raises(DialectError, match="sequence 0, it counts from 1"):
        dialect.origin(Message("m", b"", 0, engine_payload(timestamp=1)))


def test_event_whose_other_fields_are_nil_is_read() -> None:
    batch, skipped = read("mooncake", engine_payload(store_event("stored", [11, 12])))
    assert (hashes(batch), hashes(batch, "parent_hash")) == ([11, 12], [0, 11])
    assert (batch.records["tier"].tolist(), batch.locations, batch.extra) == ([Tier.G4] * 2, ("STORE",), ())
    assert skipped == {}


def test_blocks_are_named_by_block_hashes_where_sequence_hashes_lack() -> None:
    batch, _ = read("mooncake", engine_payload(store_event("stored", None, block_hashes=[-11], parent_hash=-10)))
    assert (hashes(batch), hashes(batch, "parent_hash")) == ([2**64 - 11], [2**64 - 10])


@pytest.mark.parametrize(
    ("base", "parent", "depth"),
    [(None, None, [0, 1]), (0, None, [0, 1]), (5, 10, [5, 6]), (5, None, [5, 6]), (None, 10, [DEPTH_UNKNOWN] * 2),
     (0, 10, [DEPTH_UNKNOWN] * 2)],
)  # fmt: skip
def test_base_block_index_is_the_depth(base: int | None, parent: int | None, depth: list[int]) -> None:
    event = store_event("stored", [11, 12], base_block_idx=base, parent_hash=parent)
    batch, _ = read("mooncake", engine_payload(event))
    assert batch.records["depth"].tolist() == depth


def test_medium_group_and_back_end_are_the_place() -> None:
    places = [
        {"medium": "cpu", "group_id": 1, "backend_id": "b0"},
        {"medium": "disk", "group_id": 1, "backend_id": "b0"},
        {"medium": "cpu", "group_id": 2, "backend_id": "b0"},
        {"medium": "cpu", "group_id": "draft", "backend_id": 3},
    ]
    stores = [store_event("stored", [11], **place) for place in places]
    batch, _ = read("mooncake", engine_payload(*stores))
    assert live([batch]) == {
        (Tier.G2, "CPU/b0", 1, 11),
        (Tier.G3, "DISK/b0", 1, 11),
        (Tier.G2, "CPU/b0", 2, 11),
        (Tier.G2, "CPU/3/group-draft", 0, 11),
    }
    gone, _ = read("mooncake", engine_payload(*(store_event("removed", [11], **place) for place in places)))
    assert live([batch, gone]) == set()


def test_what_only_a_store_says_goes_to_extra_and_tenant_comes_from_configuration() -> None:
    event = store_event("stored", [11], tenant_id="red", object_key="k", lora_name="a")
    batch, _ = read("mooncake", engine_payload(event))
    assert batch.extra == ({"tenant_id": "red", "lora_name": "a", "object_key": "k"},)
    assert batch.namespaces[0].tenant == "blue"


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (17, "no event"),
        (store_event("moved", [11]), "unknown event type"),
        (store_event("stored", None), "no hashes"),
        (store_event("removed", []), "no hashes"),
        (store_event("stored", [0]), "bad hash"),
        (store_event("stored", [11], parent_hash="x"), "bad hash"),
        (store_event("stored", [11], medium="tape"), "unknown medium"),
        (store_event("stored", [11], medium=3), "unknown medium"),
        (store_event("stored", [11], group_id=1.5), "bad group_id"),
        (store_event("stored", [11], backend_id=True), "bad backend_id"),
        (store_event("stored", [11], base_block_idx=-1), "bad base_block_idx"),
        (store_event("stored", [11], block_size=65_536), "bad block_size"),
    ],
)
def test_bad_event_is_counted_by_reason_and_the_batch_goes_on(event: Any, reason: str) -> None:
    batch, skipped = read("mooncake", engine_payload(store_event("stored", [1]), event, store_event("stored", [2])))
    assert (hashes(batch), skipped) == ([1, 2], {reason: 1})


def test_locations_past_what_a_batch_carries_are_counted_as_bad_events() -> None:
    names = [str(number) for number in range(1_030)]
    stores = [store_event("stored", [11], backend_id=name) for name in (*names, "x" * 300, "0")]
    batch, skipped = read("mooncake", engine_payload(*stores))
    assert (len(batch.records), len(batch.locations)) == (1_025, 1_024)
    assert skipped == {"too many locations": 6, "location too long": 1}


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x91\x01", msgspec.msgpack.encode({"a": 1})])
def test_payload_that_is_no_batch_is_one_error(payload: bytes) -> None:
    with pytest.raises(DialectError, match="Mooncake payload"):
        read("mooncake", payload)
