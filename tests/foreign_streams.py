"""Messages as foreign engines write them, for tests; and the state that a reader of records would end with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from event_plane.dialects.known import open_dialect
from event_plane.schema import LOCATION_ALL, TIER_ALL, Batch, EventType, Namespace, RecordFlag
from event_plane.wire import decode, encode

Key = tuple[int, str, int, int]
"""Tier, location, group, 128-bit hash."""
CONFIGURED = Namespace(tenant="blue", model="llama", revision="main", adapter="ignored", block_tokens=99)


def read(dialect: str, payload: bytes, sequence: int = 5) -> tuple[Batch, Counter[str]]:
    """One payload through the dialect and our own wire."""
    opened = open_dialect(dialect, namespace=CONFIGURED)
    batch, skipped = opened.decode(payload, producer=0xAB, epoch=3, sequence=sequence)
    return decode(encode(batch)), skipped


def hashes(batch: Batch, field: str = "sequence_hash") -> list[int]:
    return [
        int(high) << 64 | int(low)
        for low, high in zip(batch.records[f"{field}_lo"], batch.records[f"{field}_hi"], strict=True)
    ]


def live(batches: Iterable[Batch]) -> set[Key]:
    """What is placed after `batches`, of one producer, read as a set."""
    placed: dict[Key, None] = {}
    for batch in batches:
        for record, block in zip(batch.records, hashes(batch), strict=True):
            tier, group, location = int(record["tier"]), int(record["group"]), int(record["storage_location"])
            where = None if location == LOCATION_ALL else batch.locations[location]
            match EventType(int(record["event_type"])):
                case EventType.STORE:
                    assert where is not None
                    placed[tier, where, group, block] = None
                case EventType.REMOVE:
                    assert where is not None
                    placed.pop((tier, where, group, block), None)
                case EventType.CLEAR:
                    for key in list(placed):
                        if tier in (TIER_ALL, key[0]) and where in (None, key[1]):
                            del placed[key]
    return set(placed)


def events_of(batch: Batch) -> list[tuple[EventType, int, str | None, list[int]]]:
    """Each foreign event as (type, tier, location, hashes)."""
    events: list[tuple[EventType, int, str | None, list[int]]] = []
    for record, block in zip(batch.records, hashes(batch), strict=True):
        location = int(record["storage_location"])
        if record["flags"] & RecordFlag.FIRST:
            where = None if location == LOCATION_ALL else batch.locations[location]
            events.append((EventType(int(record["event_type"])), int(record["tier"]), where, []))
        events[-1][3].append(block)
    return events


def engine_payload(*events: Any, timestamp: Any = 12.5, rank: int | None = 0) -> bytes:
    """Of vLLM, SGLang, Mooncake and TensorRT-LLM's stream."""
    return msgspec.msgpack.encode([timestamp, list(events), *([] if rank is None else [rank])])


def stored(block_hashes: list[Any], parent: Any = None, **fields: Any) -> dict[str, Any]:
    """A BlockStored of maps, as far as vLLM and SGLang agree."""
    tokens = list(range(16 * len(block_hashes)))
    event = {"type": "BlockStored", "block_hashes": block_hashes, "parent_block_hash": parent, "token_ids": tokens}
    return event | {"block_size": 16, "lora_id": None, "medium": "GPU"} | fields


def removed(block_hashes: list[Any], **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": block_hashes} | fields


def router_event(data: Any, worker: int = 42, tier: str | None = "device", rank: int | None = 0) -> dict[str, Any]:
    """One of Dynamo's."""
    event = {"event_id": 1, "data": data} | ({} if rank is None else {"dp_rank": rank})
    routed: dict[str, Any] = {"worker_id": worker, "residency_domain": "worker", "event": event}
    return routed | ({} if tier is None else {"storage_tier": tier})


def router_stored(block_hashes: list[int], parent: int | None = None) -> dict[str, Any]:
    blocks = [{"block_hash": each, "tokens_hash": each ^ 1, "mm_extra_info": None} for each in block_hashes]
    return {"stored": {"parent_hash": parent, "start_position": None, "blocks": blocks}}


def router_removed(block_hashes: list[int]) -> dict[str, Any]:
    return {"removed": {"block_hashes": block_hashes}}


def envelope(*events: Any, sequence: int = 0, json: bool = False, publisher: int = 7) -> bytes:
    """Of Dynamo's router events."""
    encode_one = msgspec.json.encode if json else msgspec.msgpack.encode
    inner = encode_one(list(events))
    fields = {"publisher_id": publisher, "sequence": sequence, "published_at": 1_795_970_465_812, "topic": "kv-events"}
    return encode_one(fields | {"payload": list(inner) if json else inner})


def lineage_hash(position: int, own: int, parent: int) -> bytes:
    """A positional lineage hash: `own` and `parent` are the blocks' u64."""
    mode = 0 if position < 1 << 8 else 1 if position < 1 << 16 else 2
    position_bits, parent_bits = ((8, 54), (16, 46), (24, 38))[mode]
    whole = (mode << position_bits | position) << 64 | own
    return (whole << parent_bits | parent & ((1 << parent_bits) - 1)).to_bytes(16, "big")


def kvbm_payload(change: Any, instance: int = 9) -> bytes:
    return msgspec.msgpack.encode([change, instance.to_bytes(16, "big")])


def level_event(data: dict[str, Any], event_id: int = 0, **fields: Any) -> dict[str, Any]:
    """One of TensorRT-LLM's."""
    return {"event_id": event_id, "data": data, "window_size": 4096} | fields


def level_stored(blocks: list[tuple[int, int, int]], parent: int | None = None) -> dict[str, Any]:
    """`blocks`: hash, cache level and number of tokens of each."""
    return {
        "type": "stored",
        "parent_hash": parent,
        "blocks": [
            {
                "type": "stored_block",
                "block_hash": block,
                "tokens": [{"type": "unique_token", "token_id": each, "token_extra_id": 0} for each in range(tokens)],
                "cache_level": level,
                "priority": 35,
            }
            for block, level, tokens in blocks
        ],
    }


def store_event(kind: str, seq_hashes: list[int] | None, **fields: Any) -> dict[str, Any]:
    """One of Mooncake Store's, with the fields that it sends as nil."""
    event: dict[str, Any] = dict.fromkeys(
        ("model_name", "block_size", "lora_name", "tenant_id", "backend_id", "group_id", "medium", "dp_rank",
         "object_key", "block_hashes", "base_block_idx", "parent_hash", "token_ids")
    )  # fmt: skip
    return {"event_type": kind, "seq_hashes": seq_hashes} | event | fields
