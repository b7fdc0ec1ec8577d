"""Slab pages: what is packed comes back, and no flipped bit goes unseen."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from event_plane.schema import Namespace
from storage_agent.errors import CorruptBlock, SlabFormatError
from storage_agent.port import BlockKey
from storage_agent.slab_format import (
    NAMESPACE_BYTES_MAX,
    PAGE_BYTES,
    ZERO_PAGE,
    Session,
    SlotHeader,
    Superblock,
    check_slot,
    pack_session,
    pack_slot_header,
    pack_superblock,
    payload_checksum,
    unpack_session,
    unpack_slot_header,
    unpack_superblock,
)

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
u128 = st.integers(0, 2**128 - 1)
words = st.text(max_size=40)
namespaces = st.builds(
    Namespace, tenant=words, model=words, revision=words, adapter=words, kv_dtype=words, block_tokens=u32,
    hash_root=words,
)  # fmt: skip
headers = st.builds(
    SlotHeader,
    slot=st.integers(0, 2**31),
    key=st.builds(BlockKey, u64, st.integers(0, 255), u128),
    namespace=namespaces,
    parent_hash=u128,
    depth=u32,
    block_tokens=st.integers(0, 2**16 - 1),
    payload_bytes=st.integers(1, 2**28),
    payload_checksum=u64,
    generation=u64,
)
superblocks = st.builds(
    Superblock,
    volume_id=st.from_regex(r"[a-z0-9-]{1,64}", fullmatch=True),
    capacity_blocks=st.integers(1, 2**31),
    block_bytes_max=st.integers(1, 2**28),
)
sessions = st.builds(Session, is_open=st.booleans(), pid=u64, generation_next=u64)
bits = st.integers(0, PAGE_BYTES * 8 - 1)


def flip(page: bytes, bit: int) -> bytes:
    flipped = bytearray(page)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


@given(headers)
def test_a_slot_header_comes_back_as_it_was(header: SlotHeader) -> None:
    page = pack_slot_header(header)
    assert len(page) == PAGE_BYTES
    assert unpack_slot_header(page, header.slot) == header


@given(superblocks, sessions)
def test_superblock_and_session_come_back_as_they_were(superblock: Superblock, session: Session) -> None:
    assert unpack_superblock(pack_superblock(superblock)) == superblock
    assert unpack_session(pack_session(session)) == session


@given(superblocks)
def test_slots_lie_on_page_boundaries_one_after_another(superblock: Superblock) -> None:
    last = superblock.capacity_blocks - 1
    assert superblock.slot_offset(0) == 2 * PAGE_BYTES
    assert superblock.slot_offset(last) % PAGE_BYTES == 0
    assert superblock.slot_offset(last) + superblock.slot_bytes == superblock.file_bytes
    assert superblock.slot_bytes >= PAGE_BYTES + superblock.block_bytes_max


@settings(max_examples=300)
@given(headers, superblocks, sessions, bits)
def test_a_flipped_bit_is_always_caught(
    header: SlotHeader, superblock: Superblock, session: Session, bit: int
) -> None:
    with pytest.raises(SlabFormatError):
        unpack_slot_header(flip(pack_slot_header(header), bit), header.slot)
    with pytest.raises(SlabFormatError):
        unpack_superblock(flip(pack_superblock(superblock), bit))
    with pytest.raises(SlabFormatError):
        unpack_session(flip(pack_session(session), bit))


@given(headers, st.binary(min_size=1, max_size=200), st.integers(0))
def test_a_flipped_bit_of_a_payload_is_always_caught(header: SlotHeader, payload: bytes, bit: int) -> None:
    stored = SlotHeader(
        header.slot, header.key, header.namespace, header.parent_hash, header.depth, header.block_tokens,
        len(payload), payload_checksum(payload), header.generation,
    )  # fmt: skip
    page = pack_slot_header(stored)
    check_slot(page, memoryview(payload), stored)
    with pytest.raises(CorruptBlock, match="checksum"):
        check_slot(page, memoryview(flip(payload, bit % (len(payload) * 8))), stored)


@given(headers, st.binary(min_size=1, max_size=99))
def test_a_whole_header_of_something_else_is_no_hit(header: SlotHeader, noise: bytes) -> None:
    page = pack_slot_header(header)
    with pytest.raises(SlabFormatError, match="was written for slot"):
        unpack_slot_header(page, header.slot + 1)
    newer = SlotHeader(*[getattr(header, name) for name in SlotHeader.__slots__[:-1]], header.generation + 1)
    with pytest.raises(CorruptBlock, match="generation"):
        check_slot(page, memoryview(b""), newer)
    with pytest.raises(CorruptBlock, match="empty"):
        check_slot(ZERO_PAGE, memoryview(b""), header)
    page_of_noise = (noise + b"\1").ljust(PAGE_BYTES, b"\0")
    with pytest.raises(SlabFormatError):
        unpack_slot_header(page_of_noise, 0)


def test_an_erased_page_is_a_free_slot() -> None:
    assert unpack_slot_header(ZERO_PAGE, 7) is None


def test_what_does_not_fit_a_header_is_an_error() -> None:
    long = Namespace(adapter="a" * NAMESPACE_BYTES_MAX)
    facts = {"parent_hash": 0, "depth": 0, "block_tokens": 16, "payload_bytes": 1, "payload_checksum": 0}
    with pytest.raises(SlabFormatError, match="shorten it"):
        pack_slot_header(SlotHeader(slot=0, key=BlockKey(0, 0, 1), namespace=long, generation=1, **facts))
    for key in (BlockKey(0, 256, 1), BlockKey(0, 0, 1 << 128), BlockKey(1 << 64, 0, 1), BlockKey(0, 0, -1)):
        with pytest.raises(SlabFormatError):
            pack_slot_header(SlotHeader(slot=0, key=key, namespace=Namespace(), generation=1, **facts))
