"""Small valid inputs of every kind that is fuzzed, made here by the rules that engines and we keep."""

from __future__ import annotations

import struct
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np

from advisor.entries import (
    Control,
    DeletionStep,
    EntryKind,
    Measurement,
    MoveStep,
    NewEntry,
    OperatorEntry,
    OutcomeBatch,
    SettingsEntry,
    Tick,
    VolumeEntry,
    encode_control,
)
from advisor.segment_format import encode_group
from event_plane import wire
from event_plane.parquet import ParquetRecorder
from event_plane.schema import (
    RECORD_DTYPE,
    Batch,
    BatchKind,
    BatchTables,
    EventRecord,
    EventType,
    Namespace,
    SnapshotRange,
    to_records,
)
from tests.fuzz.mutations import with_crc

NAMESPACE = Namespace(tenant="acme", model="tiny", block_tokens=16)
_NONE = np.empty(0, RECORD_DTYPE)
_packed = msgspec.msgpack.encode


def our_batches() -> list[bytes]:
    """Events, each kind without records, and records longer than this version's."""
    tables = BatchTables()
    events = [
        EventRecord(EventType.STORE, 1, h, NAMESPACE, "gpu:0", h - 1, depth=h - 1, extra={"note": [h, "x"]})
        for h in (1, 2, 3)
    ]
    records = to_records(events, tables, 7)
    full = Batch(
        1, 2, 3, records,
        namespaces=tuple(tables.namespaces), locations=tuple(tables.locations), extra=tuple(tables.extra),
    )  # fmt: skip
    bare = [
        Batch(1, 2, 5, _NONE, BatchKind.SNAPSHOT_BEGIN, snapshot=SnapshotRange(as_of=4)),
        Batch(1, 2, 5, _NONE, BatchKind.HEARTBEAT),
        Batch(1, 2, 5, _NONE, BatchKind.LOST, snapshot=SnapshotRange(through=9)),
    ]
    longer = np.zeros((2, 120), np.uint8)
    longer[:, :100] = records[:2].view(np.uint8).reshape(2, 100)
    head = bytearray(wire.encode(Batch(1, 2, 3, _NONE)))
    struct.pack_into("<IH", head, 48, 2, 120)
    return [*(wire.encode(batch) for batch in [full, *bare]), with_crc(bytes(head) + longer.tobytes())]


def vllm() -> list[bytes]:
    stored = {
        "type": "BlockStored", "block_hashes": [2**63 + 5, 6], "parent_block_hash": None, "token_ids": list(range(32)),
        "block_size": 16, "medium": "GPU", "group_idx": 1, "extra_keys": [None, ["salt"]],
    }  # fmt: skip
    array = ["BlockStored", [b"\x01" * 32, b"\x02" * 32], b"\x03" * 32, list(range(32)), 16, None, "CPU", "adapter"]
    removed = {"type": "BlockRemoved", "block_hashes": [6], "medium": "GPU"}
    return [
        _packed([1.5, [stored, removed, {"type": "AllBlocksCleared"}], 0]),
        _packed([1.5, [array, ["BlockRemoved", [b"\x01" * 32], "CPU"], ["AllBlocksCleared"]], None]),
        _packed([1.5, [["BlockStored", [1, 2], None, list(range(32)), 16, None]]]),
    ]


def sglang() -> list[bytes]:
    pairs = [[n, n + 1] for n in range(48)]
    pages = ["BlockStored", [-(2**62), 7, -8], None, pairs, 16, None, "CPU_PINNED", "s", None, None]
    stored = {
        "type": "BlockStored", "block_hashes": [-5], "parent_block_hash": -6, "token_ids": list(range(16)),
        "block_size": 16, "medium": "DISK",
    }  # fmt: skip
    removed = {"type": "BlockRemoved", "block_hashes": [-5], "medium": "DISK"}
    return [
        _packed([1.5, [pages, ["BlockRemoved", [7], "GPU"], ["AllBlocksCleared"]], 0]),
        _packed([1.5, [stored, removed], 3]),
    ]


def trtllm() -> list[bytes]:
    """Pulled as JSON, one event or a list, and streamed as MessagePack."""
    tokens = [{"token_id": n, "token_extra_id": 0} for n in range(4)]
    block = {"type": "stored_block", "block_hash": 11, "tokens": tokens, "cache_level": 0, "priority": None}
    level = {"type": "event_diff", "old_value": 0, "new_value": 1}
    data: list[dict[str, Any]] = [
        {"type": "created", "num_blocks_per_cache_level": [100, 200]},
        {"type": "stored", "parent_hash": None, "blocks": [block, block | {"block_hash": 12}]},
        {"type": "updated", "block_hash": 11, "cache_level": level, "priority": None},
        {"type": "removed", "block_hashes": [12]},
    ]
    events = [{"event_id": n, "data": each, "window_size": 64, "attention_dp_rank": 0} for n, each in enumerate(data)]
    return [msgspec.json.encode(events), msgspec.json.encode(events[1]), *vllm()[:1]]


def dynamo() -> list[bytes]:
    """Router events as MessagePack within their envelope, with ZeroMQ's 5-byte header before it, and as JSON."""
    block = {"block_hash": 21, "tokens_hash": 22, "mm_extra_info": None}
    datas: list[Any] = [{"stored": {"parent_hash": None, "start_position": 0, "blocks": [block]}},
                        {"removed": {"block_hashes": [21]}}, "cleared"]  # fmt: skip
    events = [
        {
            "worker_id": 5, "storage_tier": "host_pinned", "residency_domain": None,
            "event": {"event_id": n, "data": data, "dp_rank": 0},
        }
        for n, data in enumerate(datas)
    ]  # fmt: skip
    envelope = {"publisher_id": 9, "sequence": 3, "published_at": 1_700_000_000_000, "topic": "kv-events"}
    packed = _packed(envelope | {"payload": _packed(events)})
    framed = b"\x01" + len(packed).to_bytes(4, "big") + packed
    return [packed, framed, msgspec.json.encode(envelope | {"payload": events}), msgspec.json.encode(events[0])]


def dynamo_kvbm() -> list[bytes]:
    """Positional: events (an externally tagged Create, Remove or Shutdown), instance as 16 bytes."""
    hashes = [(n << 118 | 77 << 54 | n).to_bytes(16, "big") for n in (0, 1)]
    instance = b"\x07" * 16
    return [_packed([{"Create": hashes}, instance]), _packed([{"Remove": hashes[::-1]}, instance]),
            _packed(["Shutdown", instance])]  # fmt: skip


def mooncake() -> list[bytes]:
    stored = {
        "event_type": "stored", "model_name": "m", "block_size": 16, "lora_name": None, "tenant_id": "t",
        "backend_id": "b0", "group_id": 0, "medium": "CPU", "dp_rank": 0, "object_key": "k", "seq_hashes": [-31, 32],
        "block_hashes": [1, 2], "base_block_idx": 0, "parent_hash": None, "token_ids": None,
    }  # fmt: skip
    removed = stored | {"event_type": "removed", "seq_hashes": [32], "block_hashes": [2]}
    return [_packed([1_700_000_000_000, [stored, removed], 0])]


def nats() -> list[bytes]:
    """Headers and bodies, as `targets.check_nats` reads them."""
    batch = {"Kv-Producer": "9252a8a0b7442dfb", "Kv-Epoch": "5", "Kv-Sequence": "18446744073709551615", "body": ""}
    bodies = {"resend": 8, "ack": 24, "snapshot": 16, "who": 0}
    requests = [{"Kv-Request": kind, "body": "\x07" * length} for kind, length in bodies.items()]
    return [msgspec.json.encode(each) for each in (batch, *requests)]


def capture() -> list[bytes]:
    """Two messages of a vLLM."""
    frames = [[b"kv-events", sequence.to_bytes(8, "big"), payload] for sequence, payload in enumerate(vllm()[:2])]
    return [b"".join(struct.pack("<I", 3) + b"".join(struct.pack("<I", len(f)) + f for f in each) for each in frames)]


def parquet() -> list[bytes]:
    """A recording of two groups, the second without records."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "seed.parquet"
        with ParquetRecorder(path, group_rows=3) as recorder:
            for batch in our_batches()[:2]:
                recorder.write(wire.decode(batch), "core", received_us=1_700_000_000_000_000)
        return [path.read_bytes()]


def trace() -> list[bytes]:
    line = {"timestamp": 10, "input_length": 1200, "output_length": 5, "hash_ids": [1, 2, 3]}
    return [msgspec.json.encode(line) + b"\n" + msgspec.json.encode(line | {"timestamp": 20.5}) + b"\n"]


def segments() -> list[bytes]:
    """A log's segment of two appends."""
    (batch, *_), entries = our_batches(), [NewEntry(EntryKind.TICK, controls()[0])]
    entries.append(NewEntry(EntryKind.BATCH, batch, 1, 2, 3, "vllm/kv-events/dp0", 0xABCD))
    buffers = [*encode_group(entries, 1, 1_700_000_000_000_000)[0], *encode_group(entries[:1], 3, 5)[0]]
    return [b"".join(buffers)]


def controls() -> list[bytes]:
    """One of each kind of entry that is no batch."""
    each: list[Control] = [
        Tick(1_700_000_000_000_000),
        MoveStep("copied", ["7-0"], "done", OutcomeBatch(1, 2, 3)),
        SettingsEntry({"policy": {"eviction": "lru"}}, "1", 4),
        VolumeEntry({"id": "fast", "tier": 3, "capacity_blocks": 100}, "agent", 5),
        OperatorEntry("ann", "pause", "fast"),
        OperatorEntry("ann", "delete", deletion="d-1", namespace_id=7, prefix=f"{9:032x}"),
        DeletionStep("d-1", "fast", 1, 3, 3, 0, "", OutcomeBatch(1, 2, 3)),
        Measurement("fast", "read", 1 << 30, 0.5),
    ]
    return [encode_control(control) for control in each]
