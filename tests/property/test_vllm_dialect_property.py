"""Whatever bytes an engine sends: a batch that can be encoded, or the one documented error."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from event_plane.dialects.vllm import FIELDS, TIERS, VllmDialect
from event_plane.errors import DialectError
from event_plane.schema import EventType, Namespace, RecordFlag
from event_plane.wire import decode, encode
from tests.examples import examples

DIALECT = VllmDialect(namespace=Namespace(model="m"))
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5)
    | st.binary(max_size=40) | st.sampled_from(sorted(TIERS)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
HASHES = st.integers(1, 2**64 - 1) | st.binary(min_size=32, max_size=32).filter(lambda raw: any(raw[16:]))
FIELD_VALUES = st.lists(HASHES, max_size=4) | HASHES | ANYTHING
MAPS = st.sampled_from(sorted(FIELDS)).flatmap(
    lambda tag: st.fixed_dictionaries({"type": st.just(tag)}, optional=dict.fromkeys(FIELDS[tag], FIELD_VALUES))
)
ARRAYS = st.tuples(st.sampled_from(sorted(FIELDS)), st.lists(FIELD_VALUES, max_size=16)).map(lambda t: [t[0], *t[1]])


def check(payload: bytes) -> None:
    try:
        batch, skipped = DIALECT.decode(payload, producer=1, epoch=2, sequence=3)
        DIALECT.rank(payload)
    except DialectError:
        return
    decoded = decode(encode(batch))
    assert all(count > 0 for count in skipped.values())
    if len(decoded.records):
        assert decoded.records["flags"][0] & RecordFlag.FIRST
        assert (decoded.records["flags"] & RecordFlag.COUNTED).all()
        stores = decoded.records[decoded.records["event_type"] == EventType.STORE]
        own_parent = (stores["parent_hash_lo"] == stores["sequence_hash_lo"]) & (
            stores["parent_hash_hi"] == stores["sequence_hash_hi"]
        )
        assert not own_parent.any()


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(MAPS | ARRAYS | ANYTHING, max_size=5), st.floats() | st.none(), st.integers(-5, 70_000))
def test_events_of_any_shape_give_a_batch_or_the_one_error(events: list[Any], timestamp: Any, rank: int) -> None:
    check(msgspec.msgpack.encode([timestamp, events, rank]))


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=200))
@example(b"\x92\xc0\x91\x81\x81\x01\x02\x03")
@example(b"\x92\xc0\x91\xc7\x0c\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff")
def test_any_bytes_give_a_batch_or_the_one_error(payload: bytes) -> None:
    check(payload)
