"""Header pages of blocks: what is packed comes back, and nothing else passes for it."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from event_plane.schema import Namespace
from storage_agent.block_header import (
    PAGE_BYTES,
    ZERO_PAGE,
    BlockHeader,
    ChecksumName,
    PartChecksums,
    check_header,
    check_parts,
    checksum,
    copy_with_checksums,
    fold_checksums,
    pack_header,
    pack_key,
    part_checksums,
    seal,
    unpack_header,
)
from storage_agent.errors import BlockFormatError, CorruptBlock
from storage_agent.nh64_sums import nh64_of_bytes, nh64_of_tensors
from storage_agent.port import BlockKey
from storage_agent.shards import Axis, BlockLayout, ShardSpan
from storage_agent.slot_rows import KEY_BYTES, SlotRows
from tests.examples import examples

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
u128 = st.integers(0, 2**128 - 1)
words = st.text(max_size=40)
namespaces = st.builds(
    Namespace, tenant=words, model=words, revision=words, adapter=words, kv_dtype=words, block_tokens=u32,
    hash_root=words,
)  # fmt: skip
layouts = st.builds(
    BlockLayout,
    axes=st.lists(st.builds(Axis, words, st.integers(1, 2**24)), min_size=1, max_size=6).map(tuple),
    element_bytes=st.integers(1, 16),
    sharded_axis=words,
    dtype=words,
)
spans = st.builds(
    ShardSpan, shard_bytes=st.integers(1, 64), first=st.integers(0, 9), count=st.integers(1, 2**16 - 1)
)
payloads = st.binary(min_size=1, max_size=300)
bits = st.integers(0, PAGE_BYTES * 8 - 1)


def header_of(payload: bytes, span: ShardSpan | None, **facts: Any) -> tuple[BlockHeader, PartChecksums, bytes]:
    if span is not None:
        payload = payload[: max(1, len(payload) // span.shard_bytes) * span.shard_bytes].ljust(span.shard_bytes, b"x")
    checksums = part_checksums(memoryview(payload), span.shard_bytes if span is not None else len(payload))
    header = BlockHeader(
        slot=facts.pop("slot", 3),
        payload_bytes=len(payload),
        payload_checksum=fold_checksums(checksums.each),
        span=span,
        **facts,
    )
    return header, checksums, payload


facts = st.fixed_dictionaries(
    {
        "slot": st.integers(0, 99),
        "key": st.builds(BlockKey, u64, st.integers(0, 255), u128),
        "namespace": namespaces,
        "parent_hash": u128,
        "depth": u32,
        "block_tokens": st.integers(0, 2**16 - 1),
        "generation": st.integers(1, 2**64 - 1),
        "layout": st.none() | layouts,
    }
)


@settings(max_examples=examples(60), deadline=None)
@given(payloads, st.none() | spans, facts, u64, u64)
def test_a_header_comes_back_as_it_was_from_page_and_row(
    payload: bytes, span: ShardSpan | None, facts: dict[str, Any], place: int, mark: int
) -> None:
    header, checksums, whole = header_of(payload, span, **facts)
    page = pack_header(header, checksums, place=place, mark=mark)
    assert len(page) == PAGE_BYTES
    assert unpack_header(page, header.slot, place=place, mark=mark) == (header, checksums)
    assert check_header(page, header, place=place, mark=mark) == checksums
    check_parts(memoryview(whole), header, checksums)
    rows = SlotRows.of(100, [header])
    assert rows.header(header.slot) == header
    assert rows.packed_keys(rows.live_slots()) == [pack_key(header.key)]
    assert len(pack_key(header.key)) == KEY_BYTES


@settings(max_examples=examples(150), deadline=None)
@given(payloads, st.none() | spans, facts, bits)
def test_a_flipped_bit_of_a_page_is_always_caught(
    payload: bytes, span: ShardSpan | None, facts: dict[str, Any], bit: int
) -> None:
    header, checksums, _ = header_of(payload, span, **facts)
    flipped = bytearray(pack_header(header, checksums, place=7, mark=8))
    flipped[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptBlock):
        check_header(bytes(flipped), header, place=7, mark=8)


@settings(deadline=None)
@given(payloads, st.none() | spans, facts, st.integers(0))
def test_a_flipped_bit_of_a_payload_is_always_caught(
    payload: bytes, span: ShardSpan | None, facts: dict[str, Any], bit: int
) -> None:
    header, checksums, whole = header_of(payload, span, **facts)
    damaged = bytearray(whole)
    damaged[bit // 8 % len(whole)] ^= 1 << bit % 8
    with pytest.raises(CorruptBlock, match="checksum"):
        check_parts(memoryview(damaged), header, checksums)
    last = header.parts - 1  # a part read alone is checked alone
    check_parts(memoryview(whole)[last * header.part_bytes :], header, checksums, last)


PLAIN: dict[str, Any] = {
    "key": BlockKey(1, 0, 2), "namespace": Namespace(), "parent_hash": 0, "depth": 0, "block_tokens": 16,
    "generation": 5, "layout": None,
}  # fmt: skip


def test_a_whole_header_of_something_else_is_no_hit() -> None:
    header, checksums, _ = header_of(b"abc", None, **PLAIN)
    page = pack_header(header, checksums, place=3, mark=8)
    for place, mark, said in ((4, 8, "was written for 3"), (3, 9, "another file of this volume")):
        with pytest.raises(CorruptBlock, match=said):
            check_header(page, header, place=place, mark=mark)
    with pytest.raises(CorruptBlock, match=r"holds generation 5 .* not generation 6"):
        check_header(page, header._replace(generation=6), place=3, mark=8)
    with pytest.raises(CorruptBlock, match="is empty"):
        check_header(ZERO_PAGE, header, place=3, mark=8)
    with pytest.raises(CorruptBlock, match="does not start with"):
        check_header(b"noise".ljust(PAGE_BYTES, b"\0"), header, place=3, mark=8)


def test_a_header_with_checksums_of_another_payload_is_no_hit() -> None:
    header, _, _ = header_of(b"abc", None, **PLAIN)
    page = pack_header(header, PartChecksums((1234,)), place=3, mark=8)
    with pytest.raises(CorruptBlock, match="checksums are not those"):
        check_header(page, header, place=3, mark=8)


def test_what_does_not_fit_a_header_is_an_error() -> None:
    header, checksums, _ = header_of(b"abc", None, **PLAIN)
    with pytest.raises(BlockFormatError, match="shorten them"):
        pack_header(header._replace(namespace=Namespace(adapter="a" * PAGE_BYTES)), checksums, place=0, mark=0)
    for key in (BlockKey(0, 256, 1), BlockKey(0, 0, 1 << 128), BlockKey(1 << 64, 0, 1), BlockKey(0, 0, -1)):
        with pytest.raises(BlockFormatError):
            pack_header(header._replace(key=key), checksums, place=0, mark=0)
        with pytest.raises(BlockFormatError, match="is no block key"):
            pack_key(key)
    with pytest.raises(BlockFormatError):
        pack_header(header._replace(depth=-1), checksums, place=0, mark=0)


@given(part_bytes=st.sampled_from([1, 700, 64 * 1024, 100_000, 300_000]), parts=st.integers(1, 3))
def test_a_copy_is_the_payload_with_the_checksums_of_its_parts(part_bytes: int, parts: int) -> None:
    payload = memoryview(Random(part_bytes + parts).randbytes(part_bytes * parts))
    target = bytearray(payload.nbytes)
    found = copy_with_checksums(payload, part_bytes, memoryview(target))
    assert found == PartChecksums(tuple(checksum(payload[n * part_bytes : (n + 1) * part_bytes]) for n in range(parts)))
    assert target == payload


@settings(max_examples=examples(60), deadline=None)
@given(payloads, st.none() | spans, facts, st.integers(0))
def test_parts_are_checked_by_the_checksum_that_their_page_names(
    payload: bytes, span: ShardSpan | None, facts: dict[str, Any], bit: int
) -> None:
    header, _, whole = header_of(payload, span, **facts)
    size = header.part_bytes
    parts = [whole[at : at + size] for at in range(0, len(whole), size)]
    sums = PartChecksums(tuple(nh64_of_bytes(part) for part in parts), ChecksumName.NH64)
    header = header._replace(payload_checksum=fold_checksums(sums.each))
    page = pack_header(header, sums, place=1, mark=2)
    assert check_header(page, header, place=1, mark=2) == sums
    check_parts(memoryview(whole), header, sums)
    damaged = bytearray(whole)
    damaged[bit // 8 % len(whole)] ^= 1 << bit % 8
    with pytest.raises(CorruptBlock, match="nh64"):
        check_parts(memoryview(damaged), header, sums)
    with pytest.raises(CorruptBlock, match="xxh3"):
        check_parts(memoryview(whole), header, sums._replace(name=ChecksumName.XXH3))
    tensor = torch.frombuffer(bytearray(whole), dtype=torch.uint8).view(-1, size)
    assert nh64_of_tensors([tensor, tensor[:1]]) == [sums.each, sums.each[:1]]


def test_a_page_written_before_there_was_a_choice_of_checksums_names_xxh3() -> None:
    header, checksums, _ = header_of(b"abc", None, **PLAIN)
    page = pack_header(header, checksums, place=3, mark=8)
    assert page[12:16] == bytes([header.key.group, 0, 0, 0]), "the three bytes were zeros, and reserved"
    assert unpack_header(page, header.slot, place=3, mark=8) == (header, checksums)
    assert checksums.name is ChecksumName.XXH3


def test_a_checksum_that_is_not_known_here_is_named_and_the_block_is_no_hit() -> None:
    header, checksums, _ = header_of(b"abc", None, **PLAIN)
    body = bytearray(pack_header(header, checksums, place=3, mark=8)[:-8])
    body[13] = 2
    said = "the header at 3 names checksum 2; known are 0 to 1: read it with the version that wrote it"
    with pytest.raises(CorruptBlock, match=said):
        check_header(seal(bytes(body)), header, place=3, mark=8)


def test_a_header_with_fewer_checksums_than_parts_is_no_hit() -> None:
    header, checksums, whole = header_of(b"abcdef", ShardSpan(2, 0, 3), **PLAIN)
    with pytest.raises(CorruptBlock, match="has 2 checksums, too few for its parts"):
        check_parts(memoryview(whole), header, PartChecksums(checksums.each[:2]))
