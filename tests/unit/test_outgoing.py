"""Our records as vLLM's and Dynamo's events: the fields that a router reads."""

from __future__ import annotations

import msgspec
import pytest

from event_plane.dialects.outgoing import BLOCKS_MAX, Change, Restater, Shelf, dynamo_payload, in_payloads, vllm_payload
from event_plane.schema import Batch, BatchTables, EventRecord, EventType, Namespace, Tier, to_records

NAMESPACE = Namespace(model="m")


def batch(*events: EventRecord, producer: int = 7) -> Batch:
    tables = BatchTables()
    records = to_records(list(events), tables, 0)
    return Batch(
        producer, 1, 0, records, namespaces=tuple(tables.namespaces), locations=tuple(tables.locations)
    )


def store(block: int, parent: int = 0, tier: int = Tier.G1, location: str = "gpu:0") -> EventRecord:
    return EventRecord(EventType.STORE, tier, block, NAMESPACE, location, parent_hash=parent, block_tokens=16)


def remove(block: int, tier: int = Tier.G1, location: str = "gpu:0") -> EventRecord:
    return EventRecord(EventType.REMOVE, tier, block, NAMESPACE, location)


def test_chain_is_one_store_and_a_branch_begins_another() -> None:
    changes = Restater("vllm").take(batch(store(1), store(2, 1), store(3, 2), store(4, 2)))
    assert [(change.hashes, change.parent) for change in changes] == [([1, 2, 3], 0), ([4], 2)]


def test_block_is_stored_with_its_first_copy_in_a_tier_and_removed_with_its_last() -> None:
    restater = Restater("vllm")
    shelf = Shelf(0, Tier.G3, 0)
    first, second = store(1, tier=Tier.G3, location="nvme0"), store(1, tier=Tier.G3, location="nvme1")
    assert restater.take(batch(first, second)) == [Change(True, shelf, [1], block_tokens=16)]
    assert restater.take(batch(remove(1, Tier.G3, "nvme0"))) == []
    assert restater.take(batch(remove(1, Tier.G3, "nvme1"))) == [Change(False, shelf, [1])]


def test_access_and_unknown_removes_change_nothing() -> None:
    access = EventRecord(EventType.ACCESS, Tier.G1, 1, NAMESPACE, "gpu:0", hits=3)
    assert Restater("vllm").take(batch(access, remove(1))) == []


@pytest.mark.parametrize(("tier", "medium"), [(1, "GPU"), (2, "CPU"), (3, "STORAGE"), (4, "OBJ")])
def test_vllm_event_has_the_fields_of_0_33(tier: int, medium: str) -> None:
    (changes,) = in_payloads(Restater("vllm").take(batch(store(0xA, 0xB, tier), remove(0xA, tier))))
    timestamp, events, rank = msgspec.msgpack.decode(vllm_payload(changes, 1_500_000))
    assert (timestamp, rank) == (1.5, 0)
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": [(0xA).to_bytes(16, "big")],
            "parent_block_hash": (0xB).to_bytes(16, "big"),
            "token_ids": [],
            "block_size": 16,
            "lora_id": None,
            "lora_name": None,
            "extra_keys": None,
            "medium": medium,
            "group_idx": 0,
        },
        {"type": "BlockRemoved", "block_hashes": [(0xA).to_bytes(16, "big")], "medium": medium, "group_idx": 0},
    ]


@pytest.mark.parametrize(("tier", "name"), [(1, "device"), (2, "host_pinned"), (3, "disk"), (4, "external")])
def test_dynamo_event_says_worker_and_true_tier(tier: int, name: str) -> None:
    (changes,) = in_payloads(Restater("dynamo").take(batch(store(1 << 64 | 0xA, 0xB, tier), producer=42)))
    read = msgspec.msgpack.decode(dynamo_payload(changes, 1_500_000, publisher=9, sequence=3, first_event=5))
    events = msgspec.msgpack.decode(read.pop("payload"))
    assert read == {"publisher_id": 9, "sequence": 3, "published_at": 1500, "topic": "kv-events"}
    assert events == [
        {
            "worker_id": 42,
            "storage_tier": name,
            "residency_domain": "worker",
            "event": {
                "event_id": 5,
                "data": {
                    "stored": {
                        "parent_hash": 0xB,
                        "start_position": None,
                        "blocks": [{"block_hash": 0xA, "tokens_hash": 0xA, "mm_extra_info": None}],
                    }
                },
                "dp_rank": 0,
            },
        }
    ]


def test_long_run_goes_on_in_the_next_payload() -> None:
    run = Change(True, Shelf(0, 1, 0), list(range(1, BLOCKS_MAX + 3)), parent=9, block_tokens=16)
    first, second = in_payloads([run])
    assert [change.parent for change in (*first, *second)] == [9, BLOCKS_MAX]
    assert [each for change in (*first, *second) for each in change.hashes] == run.hashes
