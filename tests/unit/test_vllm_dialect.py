"""vLLM's events as our records: both encodings, every release's fields, and the traps seen in the field."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from event_plane.dialects.protocol import Origin
from event_plane.dialects.vllm import VllmDialect
from event_plane.errors import DialectError
from event_plane.schema import (
    DEPTH_UNKNOWN,
    LOCATION_ALL,
    NAMESPACE_ALL,
    RECORD_COUNT_MAX,
    Batch,
    EventType,
    Namespace,
    RecordFlag,
    Tier,
)
from event_plane.transport import Message
from event_plane.wire import decode, encode

CONFIGURED = Namespace(tenant="blue", model="llama", revision="main", adapter="ignored", block_tokens=99)
TOKENS = list(range(16))


def read(*events: Any, timestamp: Any = 12.5, rank: tuple[Any, ...] = (0,)) -> tuple[Batch, Counter[str]]:
    payload = msgspec.msgpack.encode([timestamp, list(events), *rank])
    batch, skipped = VllmDialect(namespace=CONFIGURED).decode(payload, producer=0xAB, epoch=3, sequence=5)
    return decode(encode(batch)), skipped


def stored(hashes: list[Any], parent: Any = None, **fields: Any) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": TOKENS}
    return event | {"block_size": 16, "lora_id": None} | fields


def removed(hashes: list[Any], **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes} | fields


def lows(batch: Batch, field: str) -> list[int]:
    return [int(value) for value in batch.records[f"{field}_lo"]]


def test_store_gives_one_record_a_block_with_its_parent() -> None:
    batch, skipped = read(stored([11, 12, 13], parent=10, medium="GPU"))
    assert lows(batch, "sequence_hash") == [11, 12, 13]
    assert lows(batch, "parent_hash") == [10, 11, 12]
    assert batch.records["event_type"].tolist() == [EventType.STORE] * 3
    assert batch.records["block_tokens"].tolist() == [16] * 3
    assert batch.records["block_size"].tolist() == [0] * 3
    assert batch.records["timestamp_us"].tolist() == [12_500_000] * 3
    assert skipped == {}


def test_depth_and_prefix_are_known_below_a_root_and_nowhere_else() -> None:
    batch, _ = read(stored([11, 12]), stored([21, 22], parent=12))
    assert batch.records["depth"].tolist() == [0, 1, DEPTH_UNKNOWN, DEPTH_UNKNOWN]
    assert lows(batch, "prefix_hash") == [11, 11, 0, 0]


def test_each_event_starts_with_the_first_flag_and_all_are_counted() -> None:
    batch, _ = read(stored([11, 12]), removed([11, 12]))
    first, following = RecordFlag.FIRST | RecordFlag.COUNTED, RecordFlag.COUNTED
    assert batch.records["flags"].tolist() == [first, following, first, following]


def test_batch_carries_what_the_gate_knows_and_event_numbers_that_rise_over_batches() -> None:
    batch, _ = read(stored([11, 12]))
    assert (batch.producer, batch.epoch, batch.sequence, batch.timestamp_us) == (0xAB, 3, 5, 12_500_000)
    assert batch.records["event_sequence"].tolist() == [5 << 16, (5 << 16) + 1]


def test_namespace_is_configuration_and_epoch_alone() -> None:
    batch, _ = read(stored([11], lora_name="adapter"))
    assert batch.namespaces == (
        Namespace(tenant="blue", model="llama", revision="main", hash_scheme="vllm", hash_root="00000000000000ab/3"),
    )


def test_shared_hash_root_keeps_one_namespace_across_epochs() -> None:
    dialect = VllmDialect(namespace=CONFIGURED, hash_root_shared=True)
    payload = msgspec.msgpack.encode([1.0, [stored([11])], 0])
    first, second = (dialect.decode(payload, producer=1, epoch=epoch, sequence=0)[0] for epoch in (1, 2))
    assert first.namespaces == second.namespaces
    assert first.namespaces[0].hash_root == ""


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param([[11], 10, TOKENS, 16, None], id="0.9"),
        pytest.param([[11], 10, TOKENS, 16, None, "GPU"], id="0.10.2"),
        pytest.param([[11], 10, TOKENS, 16, None, "GPU", None], id="0.14"),
        pytest.param([[11], 10, TOKENS, 16, None, "GPU", None, [None]], id="0.17"),
        pytest.param([[11], 10, TOKENS, 16, None, "GPU", None, [None], 0], id="0.19"),
        pytest.param([[11], 10, TOKENS, 16, None, "GPU", None, None, 0, "full_attention", None], id="0.22"),
        pytest.param([[11], 10, TOKENS, 16, *[None] * 20], id="a later one"),
    ],
)
def test_array_store_of_each_release_is_read(fields: list[Any]) -> None:
    batch, skipped = read(["BlockStored", *fields])
    assert (lows(batch, "sequence_hash"), lows(batch, "parent_hash")) == ([11], [10])
    assert (batch.locations, skipped) == (("GPU",), {})
    assert batch.records["tier"].tolist() == [Tier.G1]


def test_array_fields_of_a_remove_are_in_their_order() -> None:
    batch, _ = read(["BlockRemoved", [11]], ["BlockRemoved", [12], "CPU"], ["BlockRemoved", [13], "CPU", 2])
    assert batch.records["event_type"].tolist() == [EventType.REMOVE] * 3
    assert batch.records["tier"].tolist() == [Tier.G1, Tier.G2, Tier.G2]
    assert batch.records["group"].tolist() == [0, 0, 2]


@pytest.mark.parametrize("rank", [(), (0,), (None,), (3, "later")])
def test_rank_may_be_missing(rank: tuple[Any, ...]) -> None:
    batch, _ = read(stored([11]), rank=rank)
    assert lows(batch, "sequence_hash") == [11]
    payload = msgspec.msgpack.encode([1.0, [], *rank])
    assert VllmDialect(namespace=CONFIGURED).rank(payload) == (rank[0] or 0 if rank else 0)


@pytest.mark.parametrize("payload", [b"", b"\x93", msgspec.msgpack.encode([1.0, [], 70_000]), b"\x80", b"KVE1"])
def test_rank_of_what_is_no_payload_is_an_error(payload: bytes) -> None:
    with pytest.raises(DialectError, match=r"vLLM payload"):
        VllmDialect(namespace=CONFIGURED).rank(payload)


def test_two_ranks_on_one_port_are_two_producers_each_with_the_transports_number() -> None:
    dialect = VllmDialect(namespace=CONFIGURED)
    messages = [Message("vllm-0", b"kv", 9, msgspec.msgpack.encode([1.0, [], rank])) for rank in (0, 1)]
    assert [dialect.origin(message) for message in messages] == [Origin("dp0", 9), Origin("dp1", 9)]


def test_group_and_medium_are_part_of_the_key() -> None:
    places = [{"medium": medium, "group_idx": group} for medium in ("GPU", "CPU") for group in (0, 1)]
    batch, _ = read(*(stored([11], **place) for place in places), removed([11], medium="GPU", group_idx=1))
    assert batch.records["tier"].tolist() == [1, 1, 2, 2, 1]
    assert batch.records["group"].tolist() == [0, 1, 0, 1, 1]


def test_arrays_and_maps_in_one_payload_are_read() -> None:
    batch, skipped = read(stored([11]), ["BlockRemoved", [12]], stored([13]))
    assert (lows(batch, "sequence_hash"), skipped) == ([11, 12, 13], {})


def test_byte_hashes_keep_their_last_16_bytes_and_agree_with_integers_in_the_low_half() -> None:
    digest = bytes(range(32))
    batch, _ = read(stored([digest], parent=digest[::-1]), stored([int.from_bytes(digest[-8:], "big")]))
    assert lows(batch, "sequence_hash") == [int.from_bytes(digest[-8:], "big")] * 2
    assert batch.records["sequence_hash_hi"].tolist() == [int.from_bytes(digest[16:24], "big"), 0]
    assert batch.records["parent_hash_lo"].tolist()[0] == int.from_bytes(digest[::-1][-8:], "big")


def test_signed_hashes_of_pythons_own_hash_are_read_as_u64() -> None:
    batch, _ = read(["BlockStored", [-1], -2, TOKENS, 16, None])
    assert (lows(batch, "sequence_hash"), lows(batch, "parent_hash")) == ([2**64 - 1], [2**64 - 2])


@pytest.mark.parametrize(
    ("medium", "tier", "location"),
    [
        (None, Tier.G1, "GPU"), ("GPU", Tier.G1, "GPU"), ("gpu", Tier.G1, "GPU"), ("Cpu", Tier.G2, "CPU"),
        ("STORAGE", Tier.G3, "STORAGE"), ("fs", Tier.G3, "FS"), ("DISK", Tier.G3, "DISK"), ("OBJ", Tier.G4, "OBJ"),
        ("external", Tier.G4, "EXTERNAL"),
    ],
)  # fmt: skip
def test_media_in_any_case_are_tiers_and_locations(medium: str | None, tier: Tier, location: str) -> None:
    for event in (stored([11], medium=medium), removed([11], medium=medium)):
        batch, _ = read(event)
        assert (batch.records["tier"].tolist(), batch.locations) == ([tier], (location,))


def test_remote_blocks_have_a_place_of_their_own() -> None:
    batch, _ = read(stored([11], medium="CPU", locality="LOCAL"), stored([11], medium="CPU", locality="REMOTE"))
    assert batch.locations == ("CPU", "CPU/REMOTE")
    assert batch.records["storage_location"].tolist() == [0, 1]


def test_what_only_a_store_says_goes_to_extra_once_per_event() -> None:
    batch, _ = read(
        stored([11, 12], lora_id=4, lora_name="sql", extra_keys=[["salt"], None]), removed([11]), stored([13])
    )
    assert batch.extra == ({"lora_id": 4, "lora_name": "sql", "extra_keys": [["salt"], None]},)
    assert batch.records["extra"].tolist() == [1, 0, 0, 0]


def test_extra_keys_that_say_nothing_are_left_out() -> None:
    batch, _ = read(stored([11], extra_keys=[None], lora_name=None))
    assert batch.extra == ()


def test_extra_past_the_limit_is_left_out_and_the_event_stays() -> None:
    large = "x" * 1_500_000
    batch, skipped = read(stored([11], lora_name=large), stored([12], lora_name=large))
    assert (len(batch.extra), lows(batch, "sequence_hash"), skipped) == (1, [11, 12], {})


@pytest.mark.parametrize("event", [["AllBlocksCleared"], {"type": "AllBlocksCleared"}])
def test_clear_means_every_tier_namespace_and_location(event: Any) -> None:
    batch, _ = read(event)
    (record,) = batch.records
    assert (record["event_type"], record["tier"]) == (EventType.CLEAR, 0)
    assert (record["namespace"], record["storage_location"]) == (NAMESPACE_ALL, LOCATION_ALL)


def test_store_citing_a_parent_never_reported_is_kept() -> None:
    batch, skipped = read(stored([11], parent=999))
    assert (lows(batch, "parent_hash"), skipped) == ([999], {})


def test_block_that_names_itself_as_parent_has_no_parent_that_is_known() -> None:
    batch, skipped = read(stored([11, 12], parent=11))
    assert lows(batch, "parent_hash") == [0, 11]
    assert batch.records["depth"].tolist() == [DEPTH_UNKNOWN] * 2
    assert skipped == {}


def test_block_repeated_within_an_event_is_not_its_own_parent() -> None:
    batch, _ = read(stored([11, 11, 12], parent=10))
    assert lows(batch, "sequence_hash") == [11, 11, 12]
    assert lows(batch, "parent_hash") == [10, 10, 11]


@pytest.mark.parametrize("token_ids", [[], [1], None, [[1, 2], [3, 4]], "?"])
def test_token_ids_are_not_looked_at(token_ids: Any) -> None:
    batch, skipped = read(stored([11], token_ids=token_ids))
    assert (lows(batch, "sequence_hash"), skipped) == ([11], {})


def test_offload_placeholder_without_tokens_is_kept() -> None:
    batch, skipped = read(stored([11], block_size=0, token_ids=[], medium="CPU"))
    assert (batch.records["block_tokens"].tolist(), batch.records["tier"].tolist()) == ([0], [Tier.G2])
    assert skipped == {}


def test_hash_removed_twice_is_two_records() -> None:
    batch, skipped = read(removed([11, 11]), removed([11]))
    assert (lows(batch, "sequence_hash"), skipped) == ([11, 11, 11], {})


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({"type": "BlockMoved"}, "unknown event type"),
        (["BlockMoved", 1], "unknown event type"),
        (17, "no event"),
        ([], "no event"),
        ({"kind": "BlockStored"}, "no event"),
        (stored([]), "no hashes"),
        ({"type": "BlockStored"}, "bad hashes"),
        (stored(["text"]), "bad hash"),
        (stored([0]), "bad hash"),
        (stored([True]), "bad hash"),
        (stored([b""]), "bad hash"),
        (stored([11], parent=1.5), "bad hash"),
        (stored([11], medium="TAPE"), "unknown medium"),
        (removed([11], medium=3), "unknown medium"),
        (stored([11], locality="MARS"), "unknown locality"),
        (stored([11], block_size=-1), "bad block_size"),
        (stored([11], block_size=65_536), "bad block_size"),
        (removed([11], group_idx=256), "bad group_idx"),
        (removed([11], group_idx="0"), "bad group_idx"),
    ],
)
def test_bad_event_is_counted_by_reason_and_the_batch_goes_on(event: Any, reason: str) -> None:
    batch, skipped = read(stored([1]), event, stored([2]))
    assert lows(batch, "sequence_hash") == [1, 2]
    assert skipped == {reason: 1}


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x93\x01", msgspec.msgpack.encode({"ts": 1}), msgspec.msgpack.encode([1.0]),
     msgspec.msgpack.encode([1.0, 5]), msgspec.msgpack.encode(["now", []]), b"\x92\xc0" + b"\x91" * 5000 + b"\xc0"],
)  # fmt: skip
def test_payload_that_is_no_batch_is_one_error(payload: bytes) -> None:
    with pytest.raises(DialectError, match="vLLM payload"):
        VllmDialect(namespace=CONFIGURED).decode(payload, producer=1, epoch=1, sequence=0)


def test_payload_of_more_blocks_than_a_batch_holds_is_one_error() -> None:
    with pytest.raises(DialectError, match=f"names {RECORD_COUNT_MAX + 1} blocks"):
        read(removed(list(range(1, RECORD_COUNT_MAX + 2))))


@pytest.mark.parametrize("timestamp", [None, -1.0, float("nan"), float("inf"), 1e300])
def test_timestamp_that_makes_no_sense_is_zero(timestamp: Any) -> None:
    batch, skipped = read(stored([11]), timestamp=timestamp)
    assert (batch.timestamp_us, skipped) == (0, {})


def test_sequence_of_any_size_is_carried() -> None:
    payload = msgspec.msgpack.encode([1.0, [stored([11])], 0])
    batch, _ = VllmDialect(namespace=CONFIGURED).decode(payload, producer=1, epoch=1, sequence=2**64 - 1)
    assert decode(encode(batch)).sequence == 2**64 - 1
