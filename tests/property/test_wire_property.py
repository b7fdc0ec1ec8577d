"""Whatever bytes come, decoding gives a valid batch or one `WireError`; a batch survives the round trip."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from event_plane.errors import WireError
from event_plane.schema import RECORD_DTYPE, Batch, BatchKind, Namespace, SnapshotRange
from event_plane.wire import HEADER, decode, encode
from tests.examples import examples

U64 = st.integers(0, 2**64 - 1)
TEXT = st.text(max_size=8)
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | TEXT | st.binary()
RECORDS = st.binary(max_size=300).map(lambda raw: np.frombuffer(raw[: len(raw) // 100 * 100], RECORD_DTYPE))
NAMESPACES = st.builds(Namespace, tenant=TEXT, model=TEXT, adapter=TEXT, block_tokens=st.integers(0, 65535))
BATCHES = st.builds(
    Batch,
    producer=U64,
    epoch=U64,
    sequence=U64,
    records=RECORDS,
    kind=st.sampled_from(BatchKind),
    flags=st.integers(0, 65535),
    first_event_sequence=U64,
    timestamp_us=U64,
    namespaces=st.lists(NAMESPACES, max_size=3).map(tuple),
    locations=st.lists(TEXT, max_size=3).map(tuple),
    extra=st.lists(st.dictionaries(TEXT, SCALARS, max_size=3), max_size=3).map(tuple),
    snapshot=st.none() | st.builds(SnapshotRange, as_of=U64, through=U64),
)


@settings(max_examples=examples(150), deadline=None)
@given(BATCHES)
def test_batch_survives_the_round_trip(batch: Batch) -> None:
    decoded = decode(encode(batch))
    assert np.array_equal(decoded.records.tobytes(), batch.records.tobytes())
    for name in ("producer", "epoch", "sequence", "kind", "flags", "first_event_sequence", "timestamp_us",
                 "namespaces", "locations", "extra", "snapshot"):  # fmt: skip
        assert getattr(decoded, name) == getattr(batch, name)
    assert encode(decoded) == encode(batch)


@settings(max_examples=examples(150), deadline=None)
@given(BATCHES, st.data())
def test_flipped_bit_is_always_refused(batch: Batch, data: st.DataObject) -> None:
    payload = bytearray(encode(batch))
    bit = data.draw(st.integers(0, 8 * len(payload) - 1))
    payload[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError):
        decode(bytes(payload))


@settings(max_examples=examples(150), deadline=None)
@given(BATCHES, st.data())
def test_cut_batch_is_always_refused(batch: Batch, data: st.DataObject) -> None:
    payload = encode(batch)
    with pytest.raises(WireError):
        decode(payload[: data.draw(st.integers(0, len(payload) - 1))])


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_raise_nothing_but_wire_error(payload: bytes) -> None:
    with pytest.raises(WireError):
        decode(payload)


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=120))
def test_random_extension_under_a_right_crc_raises_nothing_but_wire_error(extension: bytes) -> None:
    head = HEADER.pack(b"KVE1", 1, 0, 0, 1, 2, 3, 0, 0, 0, 100, 64, len(extension), 0)[:60]
    payload = head + zlib.crc32(extension, zlib.crc32(head)).to_bytes(4, "little") + extension
    try:
        batch = decode(payload)
    except WireError:
        return
    encode(batch)
