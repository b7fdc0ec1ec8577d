"""SGLang's events as our records: signed hashes, pairs of tokens, many pages an event, and a set in the end."""

from __future__ import annotations

from typing import Any

import pytest

from event_plane.schema import DEPTH_UNKNOWN, Tier
from tests.foreign_streams import engine_payload, events_of, hashes, live, read, removed, stored


def test_signed_hashes_are_the_low_half() -> None:
    batch, skipped = read("sglang", engine_payload(stored([-5, 7], parent=-9)))
    assert hashes(batch) == [2**64 - 5, 7]
    assert hashes(batch, "parent_hash") == [2**64 - 9, 2**64 - 5]
    assert skipped == {}


def test_token_ids_that_are_pairs_with_speculative_decoding_are_read() -> None:
    pairs = [[token, token + 1] for token in range(16)]
    batch, skipped = read("sglang", engine_payload(stored([11], token_ids=pairs)))
    assert (hashes(batch), batch.records["block_tokens"].tolist(), skipped) == ([11], [16], {})


def test_one_event_carries_many_pages_of_a_chain() -> None:
    batch, _ = read("sglang", engine_payload(stored(list(range(1, 301)))))
    assert hashes(batch) == list(range(1, 301))
    assert hashes(batch, "parent_hash") == list(range(300))
    assert batch.records["depth"].tolist() == list(range(300))
    assert set(hashes(batch, "prefix_hash")) == {1}


def test_records_are_a_set_and_not_counted() -> None:
    batch, _ = read("sglang", engine_payload(stored([11]), stored([11]), removed([11], medium="GPU")))
    assert batch.records["flags"].tolist() == [1, 1, 1]
    assert live([batch]) == set()


@pytest.mark.parametrize(
    ("medium", "tier"),
    [("GPU", Tier.G1), ("CPU_PINNED", Tier.G2), ("cpu_pinned", Tier.G2), ("DISK", Tier.G3), ("EXTERNAL", Tier.G4)],
)
def test_media_are_tiers_and_locations(medium: str, tier: Tier) -> None:
    batch, _ = read("sglang", engine_payload(stored([11], medium=medium), removed([11], medium=medium)))
    assert (batch.records["tier"].tolist(), batch.locations) == ([tier, tier], (medium.upper(),))


def test_array_fields_are_in_sglangs_order() -> None:
    arrays: list[Any] = [
        ["BlockStored", [11], -3, [1] * 16, 16, None],
        ["BlockStored", [12], -3, [1] * 16, 16, None, "CPU_PINNED"],
        ["BlockStored", [13], -3, [1] * 16, 16, None, "GPU", "salt", "s36", "sql"],
        ["BlockRemoved", [12], "CPU_PINNED"],
        ["BlockRemoved", [11]],
        ["AllBlocksCleared"],
    ]
    batch, skipped = read("sglang", engine_payload(*arrays))
    assert [event[1:] for event in events_of(batch)] == [
        (Tier.G1, "GPU", [11]),
        (Tier.G2, "CPU_PINNED", [12]),
        (Tier.G1, "GPU", [13]),
        (Tier.G2, "CPU_PINNED", [12]),
        (Tier.G1, "GPU", [11]),
        (0, None, [0]),
    ]
    assert batch.extra == ({"lora_name": "sql", "cache_salt": "salt"},)
    assert skipped == {}


def test_node_split_that_removes_and_stores_again_keeps_what_was_stored_last() -> None:
    batch, _ = read(
        "sglang",
        engine_payload(stored([1, 2, 3, 4]), removed([3, 4], medium="GPU"), stored([3, 4], parent=2)),
    )
    assert {key[3] for key in live([batch])} == {1, 2, 3, 4}
    assert batch.records["depth"].tolist()[-2:] == [DEPTH_UNKNOWN] * 2


def test_fields_of_vllm_alone_are_not_part_of_the_place() -> None:
    batch, skipped = read("sglang", engine_payload(stored([11], group_idx=3, locality="REMOTE")))
    assert (batch.records["group"].tolist(), batch.locations, skipped) == ([0], ("GPU",), {})


def test_bad_event_is_counted_by_reason_and_the_batch_goes_on() -> None:
    batch, skipped = read(
        "sglang", engine_payload(stored([-1]), stored([0]), stored([5], medium="TAPE"), {"type": "Moved"}, stored([2]))
    )
    assert hashes(batch) == [2**64 - 1, 2]
    assert skipped == {"bad hash": 1, "unknown medium": 1, "unknown event type": 1}
