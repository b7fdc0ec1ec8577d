"""TensorRT-LLM's events as our records: JSON of its API, and its stream."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from event_plane.dialects.trtllm import TrtllmDialect
from event_plane.errors import DialectError
from event_plane.schema import EventType, RecordFlag, Tier
from event_plane.transport import Message
from tests.foreign_streams import (
    CONFIGURED,
    engine_payload,
    events_of,
    hashes,
    level_event,
    level_stored,
    live,
    read,
    removed,
    stored,
)


def payload_of(*events: Any) -> bytes:
    return msgspec.json.encode(list(events))


def moved(block: int, old: int, new: int) -> dict[str, Any]:
    change = {"type": "event_diff", "old_value": old, "new_value": new}
    return {"type": "updated", "block_hash": block, "cache_level": change, "priority": None}


def test_one_event_and_a_list_of_events_are_read() -> None:
    event = level_event(level_stored([(11, 0, 32), (12, 0, 32)], parent=10))
    single, _ = read("trtllm", msgspec.json.encode(event))
    several, _ = read("trtllm", payload_of(event, level_event({"type": "removed", "block_hashes": [11]})))
    assert (hashes(single), hashes(single, "parent_hash")) == ([11, 12], [10, 11])
    assert single.records["block_tokens"].tolist() == [32, 32]
    assert {key[3] for key in live([several])} == {12}


def test_last_block_of_an_event_may_be_partial() -> None:
    batch, _ = read("trtllm", payload_of(level_event(level_stored([(11, 0, 32), (12, 0, 32), (13, 0, 5)]))))
    assert batch.records["block_tokens"].tolist() == [32, 32, 5]
    assert (hashes(batch, "parent_hash"), batch.records["depth"].tolist()) == ([0, 11, 12], [0, 1, 2])


def test_blocks_of_one_event_may_lie_in_two_cache_levels() -> None:
    batch, _ = read("trtllm", payload_of(level_event(level_stored([(11, 0, 8), (12, 1, 8), (13, 1, 8)]))))
    assert batch.records["tier"].tolist() == [Tier.G1, Tier.G2, Tier.G2]
    assert (hashes(batch, "parent_hash"), batch.records["depth"].tolist()) == ([0, 11, 12], [0, 1, 2])


def test_removed_block_leaves_both_cache_levels() -> None:
    batch, _ = read(
        "trtllm",
        payload_of(
            level_event(level_stored([(11, 0, 8), (12, 1, 8)])),
            level_event({"type": "removed", "block_hashes": [12, 11]}),
        ),
    )
    assert live([batch]) == set()


def test_updated_level_stores_a_copy_in_the_new_tier_before_it_leaves_the_old() -> None:
    batch, _ = read("trtllm", payload_of(level_event(moved(11, 0, 1))))
    assert events_of(batch) == [
        (EventType.STORE, Tier.G2, "CPU/window4096", [11]),
        (EventType.REMOVE, Tier.G1, "GPU/window4096", [11]),
    ]
    assert batch.records["flags"].tolist() == [RecordFlag.FIRST | RecordFlag.COPY, RecordFlag.FIRST]


@pytest.mark.parametrize(
    "data",
    [
        {"type": "updated", "block_hash": 11, "cache_level": None, "priority": {"old_value": 3, "new_value": None}},
        moved(11, 1, 1),
        {"type": "created", "num_blocks_per_cache_level": [101, 4]},
    ],
)
def test_what_changes_no_place_is_no_record(data: Any) -> None:
    batch, skipped = read("trtllm", payload_of(level_event(data)))
    assert (len(batch.records), skipped) == (0, {})


def test_windows_and_ranks_are_places_of_their_own() -> None:
    stores = [
        level_event(level_stored([(11, 0, 8)])),
        level_event(level_stored([(11, 0, 8)])) | {"window_size": 128},
        level_event(level_stored([(11, 0, 8)]), attention_dp_rank=2),
    ]
    batch, _ = read("trtllm", payload_of(*stores))
    assert batch.locations == ("GPU/window4096", "GPU/window128", "GPU/window4096/dp2")


def test_single_event_names_its_rank_and_number_and_a_list_has_the_transports() -> None:
    dialect = TrtllmDialect(namespace=CONFIGURED)
    single = msgspec.json.encode(level_event(moved(1, 0, 1), event_id=77, attention_dp_rank=3))
    origins = [
        dialect.origin(Message("t", b"", 5, payload))
        for payload in (single, payload_of(level_event(moved(1, 0, 1))), engine_payload(stored([1]), rank=2))
    ]
    assert [(origin.part, origin.sequence) for origin in origins] == [("dp3", 77), ("events", 5), ("dp2", 5)]


def test_stream_is_read_as_vllms_maps_and_as_a_set() -> None:
    batch, skipped = read("trtllm", engine_payload(stored([-11]), stored([-11]), removed([-11])))
    assert hashes(batch) == [2**64 - 11] * 3
    assert live([batch]) == set()
    assert (batch.namespaces[0].hash_scheme, skipped) == ("trtllm", {})


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (17, "no event"),
        ({"data": {}}, "no event"),
        (level_event({"type": "moved"}), "unknown event type"),
        (level_event(level_stored([])), "no hashes"),
        (level_event(level_stored([(0, 0, 8)])), "bad hash"),
        (level_event(level_stored([(2**64, 0, 8)])), "bad hash"),
        (level_event(level_stored([(11, 2, 8)])), "unknown cache level"),
        (level_event({"type": "stored", "blocks": [3]}), "bad block"),
        (level_event({"type": "stored", "blocks": [{"block_hash": 1, "tokens": 5}]}), "bad tokens"),
        (level_event({"type": "removed", "block_hashes": [1.5]}), "bad hash"),
        (level_event({"type": "removed"}), "bad hashes"),
        (level_event(moved(0, 0, 1)), "bad hash"),
        (level_event({"type": "updated", "block_hash": 1, "cache_level": 1}), "bad cache_level"),
        (level_event(moved(1, 0, 1), attention_dp_rank=-1), "bad attention_dp_rank"),
        (level_event(moved(1, 0, 1)) | {"window_size": "all"}, "bad window_size"),
    ],
)
def test_bad_event_is_counted_by_reason_and_the_list_goes_on(event: Any, reason: str) -> None:
    good = [level_event(level_stored([(each, 0, 8)])) for each in (1, 2)]
    batch, skipped = read("trtllm", payload_of(good[0], event, good[1]))
    assert (hashes(batch), skipped) == ([1, 2], {reason: 1})


@pytest.mark.parametrize("payload", [b"", b"{", b"[1", b"\xc1", b'{"data": ', msgspec.msgpack.encode({"a": 1})])
def test_payload_that_is_no_event_is_one_error(payload: bytes) -> None:
    with pytest.raises(DialectError, match="TensorRT-LLM payload"):
        read("trtllm", payload)


@pytest.mark.parametrize("event_id", [-1, 2**64, "x"])
def test_event_id_that_is_no_u64_is_an_error(event_id: Any) -> None:
    payload = msgspec.json.encode(level_event(moved(1, 0, 1)) | {"event_id": event_id})
    with pytest.raises(DialectError, match="TensorRT-LLM"):
        TrtllmDialect(namespace=CONFIGURED).origin(Message("t", b"", 0, payload))
