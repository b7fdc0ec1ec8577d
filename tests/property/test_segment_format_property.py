"""Frames of a segment: what is written comes back, and no altered bit passes."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.entries import EntryKind, LogEntry, NewEntry, logged
from advisor.segment_format import HEAD, META, FrameDamaged, decode_body, decode_head, encode_group, later_frames, peek
from tests.examples import examples
from tests.property.test_log_model import ENTRIES

GROUPS = st.lists(ENTRIES, min_size=1, max_size=4)
POSITIONS = st.integers(1, 2**64 - 10)
TIMES = st.integers(0, 2**64 - 1)


def decoded(content: bytes) -> list[tuple[LogEntry, int, int]]:
    """Entry, first position and size of its group, up to the content's end."""
    view, at = memoryview(content), 0
    found = []
    while at < len(content):
        head = decode_head(view[at:])
        if head is None:
            break
        body = view[at + HEAD.size : at + HEAD.size + head.body_bytes]
        read = decode_body(head, body)
        found.append((read.entry, head.first, read.group_entries))
        at += HEAD.size + head.body_bytes
    return found


@settings(max_examples=examples(100), deadline=None)
@given(GROUPS, POSITIONS, TIMES)
def test_group_comes_back_as_it_was(group: list[NewEntry], first: int, recorded_us: int) -> None:
    buffers, count_bytes = encode_group(group, first, recorded_us)
    content = b"".join(buffers)
    assert len(content) == count_bytes
    wanted = [(logged(first + i, entry, recorded_us), first, len(group)) for i, entry in enumerate(group)]
    assert decoded(content + bytes(HEAD.size)) == wanted


@settings(max_examples=examples(200), deadline=None)
@given(GROUPS, POSITIONS, st.data())
def test_altered_bit_is_found(group: list[NewEntry], first: int, data: st.DataObject) -> None:
    content = bytearray(b"".join(encode_group(group, first, 5)[0]))
    bit = data.draw(st.integers(0, len(content) * 8 - 1))
    content[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameDamaged):
        decoded(bytes(content))


@settings(max_examples=examples(100), deadline=None)
@given(GROUPS, GROUPS, st.integers(1, 2**32), st.binary(max_size=100))
def test_later_append_is_found_behind_damage(
    damaged: list[NewEntry], later: list[NewEntry], first: int, noise: bytes
) -> None:
    after = first + len(damaged)
    torn = b"".join(encode_group(damaged, first, 5)[0])
    whole = b"".join(encode_group(later, after, 5)[0])
    assert [head.first for head in later_frames(memoryview(torn[1:] + noise + whole), first)][:1] == [after]
    assert list(later_frames(memoryview(torn[1:] + noise), first)) == []


@given(ENTRIES)
def test_kind_and_group_are_told_without_the_payload(entry: NewEntry) -> None:
    content = b"".join(encode_group([entry, entry], 7, 5)[0])
    kind, group = peek(memoryview(content)[HEAD.size : HEAD.size + META.size])
    assert (kind, group) == (content[HEAD.size], 2)


def test_bytes_lie_where_the_page_says() -> None:
    """docs/log.md, "Segments, byte for byte"."""
    entry = NewEntry(EntryKind.BATCH, b"payload", 2**64 - 1, 3, 4, "core", 5)
    frame = b"".join(encode_group([entry, entry], 9, 1_234)[0])[: 80 + len("core") + len("payload")]
    numbers = {at: int.from_bytes(frame[at : at + size], "little") for at, size in OFFSETS.items()}
    assert frame[:4] == b"KVF1"
    assert numbers == {
        4: len(frame) - 32, 8: 9, 16: 9, 24: zlib.crc32(frame[32:]), 28: zlib.crc32(frame[:28]), 32: 1, 33: 3, 34: 4,
        36: 5, 40: 1_234, 48: 2**64 - 1, 56: 3, 64: 4, 72: 2, 76: 0,
    }  # fmt: skip
    assert frame[80:] == b"corepayload"


OFFSETS = {4: 4, 8: 8, 16: 8, 24: 4, 28: 4, 32: 1, 33: 1, 34: 2, 36: 4, 40: 8, 48: 8, 56: 8, 64: 8, 72: 4, 76: 4}
