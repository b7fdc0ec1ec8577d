"""Events of Dynamo's block manager: what a positional lineage hash tells of depth and parent."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from event_plane.dialects.dynamo_kvbm import DynamoKvbmDialect
from event_plane.errors import DialectError
from event_plane.schema import EventType, Tier
from event_plane.transport import Message
from tests.foreign_streams import CONFIGURED, events_of, hashes, kvbm_payload, lineage_hash, live, read

OWN = [0x9E37_79B9_7F4A_7C15 * (i + 1) & (2**64 - 1) for i in range(300)]


def chain(first: int, count: int) -> list[bytes]:
    """Blocks at positions `first` … of one sequence."""
    return [lineage_hash(first + i, OWN[i], OWN[i - 1] if i else 0) for i in range(count)]


def whole(raw: bytes) -> int:
    return int.from_bytes(raw, "big")


def test_create_stores_by_the_whole_hash_with_its_position_as_depth() -> None:
    blocks = chain(0, 3)
    batch, skipped = read("dynamo-kvbm", kvbm_payload({"Create": blocks}))
    assert events_of(batch) == [(EventType.STORE, Tier.G2, "kvbm", [whole(block) for block in blocks])]
    assert batch.records["depth"].tolist() == [0, 1, 2]
    assert hashes(batch, "parent_hash") == [0, whole(blocks[0]), whole(blocks[1])]
    assert hashes(batch, "prefix_hash") == [whole(blocks[0]), 0, 0]
    assert skipped == {}


@pytest.mark.parametrize("first", [0, 254, 255, 256, 65_534, 65_535, 65_536, 2**24 - 2])
def test_position_and_parent_are_read_in_each_mode_and_across_modes(first: int) -> None:
    blocks = chain(first, 2)
    batch, _ = read("dynamo-kvbm", kvbm_payload({"Create": blocks}))
    assert batch.records["depth"].tolist() == [first, first + 1]
    assert hashes(batch, "parent_hash") == [0, whole(blocks[0])]


def test_blocks_of_several_sequences_by_ascending_position_find_their_own_parents() -> None:
    left = [lineage_hash(i, OWN[i], OWN[i - 1] if i else 0) for i in range(3)]
    right = [lineage_hash(i, OWN[i + 10], OWN[i + 9] if i else 0) for i in range(3)]
    mixed = [block for pair in zip(left, right, strict=True) for block in pair]
    batch, _ = read("dynamo-kvbm", kvbm_payload({"Create": mixed}))
    assert hashes(batch, "parent_hash") == [0, 0, *(whole(block) for block in mixed[:4])]


def test_parent_that_is_not_in_the_message_is_unknown() -> None:
    batch, _ = read("dynamo-kvbm", kvbm_payload({"Create": [lineage_hash(7, OWN[1], OWN[0])]}))
    assert (hashes(batch, "parent_hash"), batch.records["depth"].tolist()) == ([0], [7])


def test_remove_by_descending_position_and_shutdown() -> None:
    blocks = chain(0, 3)
    created, _ = read("dynamo-kvbm", kvbm_payload({"Create": blocks}))
    taken, _ = read("dynamo-kvbm", kvbm_payload({"Remove": blocks[:0:-1]}))
    assert {key[3] for key in live([created, taken])} == {whole(blocks[0])}
    ended, _ = read("dynamo-kvbm", kvbm_payload("Shutdown"))
    assert live([created, ended]) == set()


def test_producer_is_the_instance_and_the_transport_numbers_it() -> None:
    origin = DynamoKvbmDialect(namespace=CONFIGURED).origin(Message("k", b"kvbm.events", 5, kvbm_payload("Shutdown")))
    assert (origin.part, origin.sequence) == ("0" * 31 + "9", 5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"Create": []}, "no hashes"),
        ({"Remove": 5}, "bad hashes"),
        ({"Create": [b"short"]}, "bad hash"),
        ({"Create": [5]}, "bad hash"),
        ({"Create": [bytes(16)]}, "bad hash"),
        ({"Create": [b"\xff" * 16]}, "bad hash"),
        ({"Moved": []}, "unknown event type"),
        ({}, "unknown event type"),
        ("Paused", "unknown event type"),
    ],
)
def test_change_that_makes_no_sense_is_counted(change: Any, reason: str) -> None:
    batch, skipped = read("dynamo-kvbm", kvbm_payload(change))
    assert (len(batch.records), skipped) == (0, {reason: 1})


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x92\xc0", msgspec.msgpack.encode(["Shutdown"]), msgspec.msgpack.encode(["Shutdown", 1])],
)
def test_payload_that_is_no_change_of_an_instance_is_one_error(payload: bytes) -> None:
    with pytest.raises(DialectError, match="Dynamo KVBM payload"):
        read("dynamo-kvbm", payload)
