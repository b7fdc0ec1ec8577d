"""Headers and facts of blocks go through a message and back unchanged."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from event_plane.schema import Namespace
from storage_agent.block_header import BlockHeader
from storage_agent.block_wire import HeaderWire, header_from_wire, header_to_wire
from storage_agent.command_wire import decode_request, encode
from storage_agent.data_wire import LeaseRequest, OfferRequest, PlaceWire
from storage_agent.port import BlockKey
from storage_agent.shards import Axis, BlockLayout, ShardSpan
from tests.examples import examples

U64, U128 = st.integers(0, 2**64 - 1), st.integers(0, 2**128 - 1)
HEADERS = st.builds(
    BlockHeader,
    slot=st.integers(0, 2**31),
    key=st.builds(BlockKey, U64, st.integers(0, 255), U128),
    namespace=st.builds(Namespace, tenant=st.text(max_size=8), model=st.text(max_size=8), block_tokens=U64),
    parent_hash=U128,
    depth=st.integers(0, 2**32 - 1),
    block_tokens=st.integers(0, 2**16 - 1),
    payload_bytes=st.integers(1, 2**28),
    payload_checksum=U64,
    generation=U64,
    span=st.none() | st.builds(ShardSpan, st.integers(1, 2**28), st.integers(0, 255), st.integers(1, 256)),
    layout=st.none()
    | st.builds(
        BlockLayout,
        st.tuples(st.builds(Axis, st.text(max_size=4), st.integers(1, 1 << 24))),
        st.integers(1, 16),
        st.text(max_size=4),
    ),
)


@settings(max_examples=examples(150), deadline=None)
@given(HEADERS, U64)
def test_what_is_sent_is_what_arrives(header: BlockHeader, number: int) -> None:
    sent = msgspec.msgpack.encode(header_to_wire(header))
    assert header_from_wire(msgspec.msgpack.decode(sent, type=HeaderWire)) == header
    facts = header_to_wire(header).facts
    place = PlaceWire(header_to_wire(header), number)
    for request in (LeaseRequest("v", [(facts, 3)]), OfferRequest("v", b"metadata", number, [place], True)):
        assert decode_request(encode(request)) == request
