"""How fast each dialect is from wire to columns, beside msgspec's generic decode of the same bytes.

Both are timed in turn, in CPU time of this thread, so that what else the machine does touches neither; the medians of
many rounds count. A message stores 512 blocks, in long events as a prefill's are, or of a few blocks each.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from event_plane.dialects.known import open_dialect
from event_plane.figures import Figure, at_most
from event_plane.schema import Namespace

BLOCKS = 512
BLOCK_TOKENS = 16
EVENT_BLOCKS = (64, 4)
"""Blocks an event: of a long prompt, and of the mix that engines send under load."""
RATIO_MAX = 1.5
ROUNDS = 200
ROUNDS_QUICK = 40

_to_messagepack = msgspec.msgpack.encode
_to_json = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class _Sample:
    """One message. `generic` decodes all of it, what is packed within included."""

    name: str
    dialect: str
    payload: bytes
    generic: Callable[[], object]


def decode_rows(quick: bool) -> list[Figure]:
    """Per dialect and kind of message, events/s and the ratio to generic decoding."""
    rounds = ROUNDS_QUICK if quick else ROUNDS
    figures = []
    for blocks in EVENT_BLOCKS:
        for sample in _samples(blocks):
            ours_s, generic_s = _medians(sample, rounds)
            name = f"{sample.name}, {blocks} blocks an event"
            figures.append(Figure(f"decode {name}", BLOCKS / ours_s, "events/s"))
            figures.append(at_most(f"decode {name}, of msgspec's generic time", ours_s / generic_s, "×", RATIO_MAX))
    return figures


def _medians(sample: _Sample, rounds: int) -> tuple[float, float]:
    """CPU seconds a message: through the dialect, and decoded generically."""
    dialect = open_dialect(sample.dialect, namespace=Namespace(model="bench"))
    batch, skipped = dialect.decode(sample.payload, producer=1, epoch=1, sequence=1)
    assert len(batch.records) == BLOCKS, f"{sample.name}: {len(batch.records)} records, {skipped} skipped"
    ours_s, generic_s = [], []
    for _ in range(rounds):
        start_s = time.thread_time()
        sample.generic()
        middle_s = time.thread_time()
        dialect.decode(sample.payload, producer=1, epoch=1, sequence=1)
        ours_s.append(time.thread_time() - middle_s)
        generic_s.append(middle_s - start_s)
    return statistics.median(ours_s), statistics.median(generic_s)


def _samples(event_blocks: int) -> list[_Sample]:
    numbers = random.Random(1)
    unsigned = _cut([numbers.getrandbits(64) | 1 for _ in range(BLOCKS)], event_blocks)
    signed = _cut([(numbers.getrandbits(64) | 1) - (1 << 63) for _ in range(BLOCKS)], event_blocks)
    digests = _cut([numbers.randbytes(32) for _ in range(BLOCKS)], event_blocks)
    lineage = [numbers.randrange(256) << 118 | numbers.getrandbits(118) for _ in range(BLOCKS)]
    created = {"Create": [each.to_bytes(16, "big") for each in sorted(lineage)]}
    router = [_router_event(hashes) for hashes in unsigned]
    samples = [
        _messagepack("vLLM maps", "vllm", [1.0, [_vllm_event(hashes) for hashes in unsigned], 0]),
        _messagepack("vLLM maps, byte hashes", "vllm", [1.0, [_vllm_event(hashes) for hashes in digests], 0]),
        _messagepack("vLLM arrays", "vllm", [1.0, [_vllm_array(hashes) for hashes in unsigned], 0]),
        _messagepack("SGLang", "sglang", [1.0, [_sglang_event(hashes) for hashes in signed], 0]),
        _json("TensorRT-LLM", "trtllm", [_trtllm_event(hashes) for hashes in unsigned]),
        _dynamo("Dynamo", router, _to_messagepack(router), _to_messagepack, msgspec.msgpack.decode),
        _dynamo("Dynamo in JSON", router, _to_json(router).decode(), _to_json, msgspec.json.decode),
        _messagepack("Mooncake", "mooncake", [1.0, [_mooncake_event(hashes) for hashes in unsigned], 0]),
    ]
    if event_blocks == EVENT_BLOCKS[0]:
        # One change a message, whatever its length.
        samples.append(_messagepack("Dynamo KVBM", "dynamo-kvbm", [created, bytes(16)]))
    return samples


def _cut(hashes: list[Any], event_blocks: int) -> list[list[Any]]:
    return [hashes[at : at + event_blocks] for at in range(0, len(hashes), event_blocks)]


def _messagepack(name: str, dialect: str, message: object) -> _Sample:
    payload = _to_messagepack(message)
    return _Sample(name, dialect, payload, lambda: msgspec.msgpack.decode(payload))


def _json(name: str, dialect: str, message: object) -> _Sample:
    payload = _to_json(message)
    return _Sample(name, dialect, payload, lambda: msgspec.json.decode(payload))


def _dynamo(
    name: str,
    events: object,
    packed: bytes | str,
    encode: Callable[[object], bytes],
    decode: Callable[[bytes], object],
) -> _Sample:
    envelope = {"publisher_id": 7, "sequence": 1, "published_at": 1_795_970_465_812, "topic": "kv-events"}
    payload, inside = encode(envelope | {"payload": packed}), encode(events)
    return _Sample(name, "dynamo", payload, lambda: (decode(payload), decode(inside)))


def _tokens(hashes: list[Any]) -> list[int]:
    return [token * 31 % 30_000 for token in range(len(hashes) * BLOCK_TOKENS)]


def _vllm_event(hashes: list[Any]) -> dict[str, Any]:
    return {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": hashes[-1], "token_ids": _tokens(hashes),
        "block_size": BLOCK_TOKENS, "lora_id": None, "medium": "GPU", "lora_name": None,
        "extra_keys": [None] * len(hashes), "group_idx": 0, "kv_cache_spec_kind": "full_attention",
    }  # fmt: skip


def _vllm_array(hashes: list[Any]) -> list[Any]:
    tokens, keys = _tokens(hashes), [None] * len(hashes)
    return ["BlockStored", hashes, hashes[-1], tokens, BLOCK_TOKENS, None, "GPU", None, keys, 0, "full_attention", None]


def _sglang_event(hashes: list[Any]) -> dict[str, Any]:
    return {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": hashes[-1], "token_ids": _tokens(hashes),
        "block_size": BLOCK_TOKENS, "lora_id": None, "medium": "GPU", "session_id": "s36",
    }  # fmt: skip


def _trtllm_event(hashes: list[Any]) -> dict[str, Any]:
    tokens = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in range(BLOCK_TOKENS)]
    blocks = [
        {"type": "stored_block", "block_hash": each, "tokens": tokens, "cache_level": 0, "priority": 35}
        for each in hashes
    ]
    data = {"type": "stored", "parent_hash": hashes[-1], "blocks": blocks}
    return {"event_id": 1, "data": data, "window_size": 4096}


def _router_event(hashes: list[Any]) -> dict[str, Any]:
    blocks = [{"block_hash": each, "tokens_hash": each ^ 1, "mm_extra_info": None} for each in hashes]
    data = {"stored": {"parent_hash": hashes[-1], "start_position": None, "blocks": blocks}}
    event = {"event_id": 1, "data": data, "dp_rank": 0}
    return {"worker_id": 42, "storage_tier": "device", "residency_domain": "worker", "event": event}


def _mooncake_event(hashes: list[Any]) -> dict[str, Any]:
    return {
        "event_type": "stored", "model_name": "m", "block_size": BLOCK_TOKENS, "lora_name": None, "tenant_id": None,
        "backend_id": "b0", "group_id": None, "medium": "cpu", "dp_rank": 0, "object_key": None, "seq_hashes": hashes,
        "block_hashes": None, "base_block_idx": 0, "parent_hash": None, "token_ids": _tokens(hashes),
    }  # fmt: skip
