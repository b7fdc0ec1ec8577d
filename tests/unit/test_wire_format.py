"""The batch codec: layout, limits, and one named error for whatever is wrong."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest

from event_plane.errors import WireError
from event_plane.schema import (
    EXTENSION_BYTES_MAX,
    RECORD_COUNT_MAX,
    RECORD_DTYPE,
    Batch,
    BatchKind,
    BatchTables,
    EventRecord,
    EventType,
    Namespace,
    Records,
    SnapshotRange,
    to_records,
)
from event_plane.wire import CRC_OFFSET, HEADER, decode, encode, is_batch

NAMESPACE = Namespace(tenant="blue", model="llama", block_tokens=16)


def two_stores() -> Batch:
    tables = BatchTables()
    events = [
        EventRecord(EventType.STORE, 1, (7 << 64) | 5, NAMESPACE, "gpu:0", depth=0, block_size=4096, block_tokens=16),
        EventRecord(EventType.STORE, 1, 6, NAMESPACE, "gpu:0", parent_hash=(7 << 64) | 5, depth=1, extra={"lora": 3}),
    ]
    records = to_records(events, tables, first_event_sequence=40)
    return Batch(
        producer=2**64 - 1, epoch=9, sequence=3, records=records, first_event_sequence=40, timestamp_us=1_000_000,
        namespaces=tuple(tables.namespaces), locations=tuple(tables.locations), extra=tuple(tables.extra),
    )  # fmt: skip


def resealed(payload: bytes) -> bytes:
    """`payload` with the CRC-32 that its bytes ask for."""
    crc = zlib.crc32(payload[HEADER.size :], zlib.crc32(payload[:CRC_OFFSET]))
    return payload[:CRC_OFFSET] + crc.to_bytes(4, "little") + payload[HEADER.size :]


def with_field(payload: bytes, offset: int, layout: str, value: int) -> bytes:
    changed = bytearray(payload)
    struct.pack_into(layout, changed, offset, value)
    return resealed(bytes(changed))


def test_header_fields_lie_at_their_byte_offsets() -> None:
    payload = encode(two_stores())
    assert payload[:4] == b"KVE1"
    assert payload[4:8] == bytes((1, BatchKind.EVENTS, 0, 0))
    assert struct.unpack_from("<5Q", payload, 8) == (2**64 - 1, 9, 3, 40, 1_000_000)
    count, record_size, header_size, extension_length = struct.unpack_from("<IHHI", payload, 48)
    assert (count, record_size, header_size) == (2, 100, 64)
    assert len(payload) == 64 + 2 * 100 + extension_length


def test_crc_covers_everything_but_itself() -> None:
    payload = encode(two_stores())
    assert struct.unpack_from("<I", payload, 60)[0] == zlib.crc32(payload[:60] + payload[64:])


def test_record_fields_lie_at_their_byte_offsets() -> None:
    offsets = {name: RECORD_DTYPE.fields[name][1] for name in RECORD_DTYPE.names or () if RECORD_DTYPE.fields}
    assert offsets == {
        "event_type": 0, "flags": 1, "tier": 2, "group": 3, "depth": 4, "sequence_hash_lo": 8, "sequence_hash_hi": 16,
        "prefix_hash_lo": 24, "prefix_hash_hi": 32, "parent_hash_lo": 40, "parent_hash_hi": 48, "block_size": 56,
        "block_tokens": 60, "storage_location": 62, "namespace": 64, "timestamp_us": 68, "event_sequence": 76,
        "extra": 84, "hits": 88, "reserved": 92,
    }  # fmt: skip


def test_decoding_gives_back_what_was_encoded() -> None:
    batch = two_stores()
    decoded = decode(encode(batch))
    assert np.array_equal(decoded.records, batch.records)
    assert (decoded.namespaces, decoded.locations, decoded.extra) == ((NAMESPACE,), ("gpu:0",), ({"lora": 3},))
    assert (decoded.producer, decoded.epoch, decoded.sequence, decoded.kind) == (2**64 - 1, 9, 3, BatchKind.EVENTS)
    assert decoded.records["event_sequence"].tolist() == [40, 41]
    assert decoded.snapshot is None


def test_lost_batch_carries_its_range() -> None:
    nothing: Records = np.empty(0, RECORD_DTYPE)
    lost = Batch(1, 2, 5, nothing, kind=BatchKind.LOST, snapshot=SnapshotRange(through=8))
    decoded = decode(encode(lost))
    assert (decoded.kind, decoded.snapshot, len(decoded.records)) == (BatchKind.LOST, SnapshotRange(through=8), 0)


def test_batch_without_tables_has_no_extension() -> None:
    empty: Records = np.empty(0, RECORD_DTYPE)
    assert len(encode(Batch(1, 2, 3, empty))) == 64


def test_records_are_read_only_and_share_the_payload() -> None:
    payload = bytearray(encode(two_stores()))
    records = decode(memoryview(payload)).records
    with pytest.raises(ValueError, match="read-only"):
        records["depth"] = 0
    payload[64 + 4] = 77
    assert records["depth"][0] == 77


def test_longer_records_and_header_are_stepped_over() -> None:
    payload = encode(two_stores())
    records = [payload[64 + 100 * i : 164 + 100 * i] + b"future!!" for i in range(2)]
    longer = payload[:64] + b"?" * 16 + b"".join(records) + payload[264:]
    longer = with_field(with_field(longer, 52, "<H", 108), 54, "<H", 80)
    decoded = decode(longer)
    assert np.array_equal(decoded.records, two_stores().records)
    assert decoded.locations == ("gpu:0",)
    assert not decoded.records.flags.writeable


def test_unknown_extension_keys_and_namespace_fields_are_stepped_over() -> None:
    extension = msgspec.msgpack.encode({"namespaces": [{"tenant": "t", "colour": 1}], "weather": [1, 2]})
    payload = with_field(encode(Batch(1, 2, 3, np.empty(0, RECORD_DTYPE))) + extension, 56, "<I", len(extension))
    assert decode(payload).namespaces == (Namespace(tenant="t"),)


def test_record_that_points_outside_its_tables_still_decodes() -> None:
    batch = two_stores()
    records = batch.records.copy()
    records["namespace"], records["storage_location"], records["extra"] = 99, 98, 97
    decoded = decode(encode(Batch(1, 2, 3, records)))
    assert decoded.records["namespace"].tolist() == [99, 99]


def test_unknown_event_type_still_decodes() -> None:
    records = two_stores().records.copy()
    records["event_type"] = 200
    assert decode(encode(Batch(1, 2, 3, records))).records["event_type"].tolist() == [200, 200]


@pytest.mark.parametrize(
    ("offset", "layout", "value", "said"),
    [
        (0, "<I", 0, "starts with"),
        (4, "<B", 2, "version 2"),
        (5, "<B", 6, "unknown kind 6"),
        (48, "<I", RECORD_COUNT_MAX + 1, f"{RECORD_COUNT_MAX + 1} records"),
        (52, "<H", 99, "record size 99"),
        (52, "<H", 1025, "record size 1025"),
        (54, "<H", 63, "header size 63"),
        (56, "<I", EXTENSION_BYTES_MAX + 1, f"extension is {EXTENSION_BYTES_MAX + 1} bytes"),
        (48, "<I", 3, "its header says"),
    ],
)
def test_header_out_of_limits_is_refused(offset: int, layout: str, value: int, said: str) -> None:
    with pytest.raises(WireError, match=said):
        decode(with_field(encode(two_stores()), offset, layout, value))


def test_damaged_byte_is_refused_by_crc() -> None:
    payload = bytearray(encode(two_stores()))
    payload[100] ^= 1
    with pytest.raises(WireError, match="CRC-32"):
        decode(bytes(payload))


@pytest.mark.parametrize("length", [0, 63, 64, 100, 299])
def test_cut_batch_is_refused(length: int) -> None:
    with pytest.raises(WireError, match="bytes long"):
        decode(encode(two_stores())[:length])


@pytest.mark.parametrize(
    "extension",
    [b"\xc1", b"\x80\x80", msgspec.msgpack.encode([1]), msgspec.msgpack.encode({"locations": [1]}),
     msgspec.msgpack.encode({"snapshot": {"through": -1}}), b"\x81\xa5extra" + b"\x91" * 5000 + b"\xc0",
     b"\x81\xa9locations\x91\xa2\xff\xff"],
)  # fmt: skip
def test_unreadable_extension_is_refused(extension: bytes) -> None:
    payload = with_field(encode(Batch(1, 2, 3, np.empty(0, RECORD_DTYPE))) + extension, 56, "<I", len(extension))
    with pytest.raises(WireError, match="extension"):
        decode(payload)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"records": np.zeros(RECORD_COUNT_MAX + 1, RECORD_DTYPE)}, "records, the limit"),
        ({"records": np.zeros(2, "u1")}, "dtype"),
        ({"records": np.zeros((2, 2), RECORD_DTYPE)}, "shape"),
        ({"sequence": 2**64}, "out of range"),
        ({"locations": tuple(map(str, range(65_536)))}, "65536 locations"),
        ({"extra": ({"x": b"-" * EXTENSION_BYTES_MAX},)}, "split it"),
        ({"extra": ({"x": object()},)}, "cannot say"),
        ({"extra": ({"x": 2**64},)}, "cannot say"),
    ],
)
def test_batch_that_cannot_be_said_is_not_encoded(changes: Mapping[str, Any], said: str) -> None:
    fields: dict[str, Any] = {"producer": 1, "epoch": 2, "sequence": 3, "records": np.empty(0, RECORD_DTYPE)}
    with pytest.raises(WireError, match=said):
        encode(Batch(**(fields | dict(changes))))


def test_magic_tells_our_batches_from_foreign_payloads() -> None:
    assert is_batch(encode(two_stores()))
    assert not is_batch(msgspec.msgpack.encode([1.0, [], 0]))
    assert not is_batch(b"KV")
