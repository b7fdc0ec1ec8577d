"""What workers tell each other of their memory: whole or refused, whatever happens to it on the way."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from event_plane.schema import Namespace
from kvbm_core.config import KvbmConfig
from kvbm_core.errors import LayoutFormatError
from kvbm_core.identity import BlockIdentity
from kvbm_core.remote_seal import Seal, SealState, pack_seal, seal_bytes, unpack_seal
from kvbm_core.remote_wire import (
    ExportedBlock,
    GivenUpNote,
    SerializedBlockSet,
    SerializedNixlBlockLayout,
    WrittenNote,
    decode_block_set,
    decode_nixl_layout,
    decode_note,
    encode_note,
)
from kvbm_core.serialized_layout import BufferPlace, serialize
from storage_agent.block_header import checksum
from storage_agent.nixl_memory import MemoryPlace
from storage_agent.port import BlockKey
from tests.examples import examples

U64 = st.integers(0, 2**64 - 1)
U128 = st.integers(0, 2**128 - 1)
FEW = settings(max_examples=examples(40), deadline=None)
BLOCKS, PAGE_TOKENS, HEADS = 16, 4, 2
CONFIG = KvbmConfig(
    layers=2, heads=HEADS, head_dim=8, page_tokens=PAGE_TOKENS, device_blocks=BLOCKS, hash_secret="sixteen characters"
)
BUFFER = BufferPlace(1 << 20, CONFIG.device_pool_layout.total_bytes)
LAYOUT = serialize(CONFIG.device_pool_layout, CONFIG, [BUFFER], memory="device", device=0)


@st.composite
def layouts(draw: st.DrawFn) -> SerializedNixlBlockLayout:
    seals = BufferPlace(draw(st.integers(0, 1 << 61)), BLOCKS * seal_bytes(HEADS))
    place = draw(st.sampled_from([MemoryPlace("DRAM", 0), MemoryPlace("VRAM", 3)]))
    return SerializedNixlBlockLayout(LAYOUT, place, draw(st.binary(max_size=40)), draw(U64), seals)


@st.composite
def block_sets(draw: st.DrawFn) -> SerializedBlockSet:
    tenants = st.sampled_from([Namespace(tenant="a"), Namespace(tenant="b", model="m")])
    blocks = []
    for number in draw(st.lists(U128, max_size=6, unique=True)):
        namespace = draw(tenants)
        key = BlockKey(namespace.namespace_id, draw(st.integers(0, 255)), number)
        depth = draw(st.integers(0, 2**32 - 1))
        block = BlockIdentity(key, namespace, draw(U128), draw(U128), depth, PAGE_TOKENS)
        at, seal = (draw(st.integers(0, BLOCKS - 1)) for _ in range(2))
        blocks.append(ExportedBlock(at, seal, draw(U64), block))
    return SerializedBlockSet(draw(layouts()), draw(st.booleans()), tuple(blocks))


@FEW
@given(layouts())
def test_a_layout_arrives_as_it_was_sent(layout: SerializedNixlBlockLayout) -> None:
    assert decode_nixl_layout(layout.encode()) == layout


@FEW
@given(block_sets())
def test_a_set_arrives_as_it_was_sent(offered: SerializedBlockSet) -> None:
    assert decode_block_set(offered.encode()) == offered


@FEW
@given(block_sets(), st.data())
def test_a_set_that_was_cut_or_changed_is_refused(offered: SerializedBlockSet, data: st.DataObject) -> None:
    raw = bytearray(offered.encode())
    at = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.booleans()):
        raw[at] ^= data.draw(st.integers(1, 255))
    else:
        del raw[at:]
    with pytest.raises(LayoutFormatError):
        decode_block_set(bytes(raw))


@FEW
@given(st.binary(max_size=80))
def test_bytes_that_are_no_set_nor_layout_are_refused(raw: bytes) -> None:
    for decode in (decode_block_set, decode_nixl_layout):
        with pytest.raises(LayoutFormatError):
            decode(raw)


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (ExportedBlock(BLOCKS, 0, 1, BlockIdentity(BlockKey(0, 0, 1), Namespace(), 0, 0, 0, 4)), "block = 16 is not"),
        (ExportedBlock(0, BLOCKS, 1, BlockIdentity(BlockKey(0, 0, 1), Namespace(), 0, 0, 0, 4)), "seal = 16 is not"),
        (ExportedBlock(0, 0, 1, BlockIdentity(BlockKey(0, 256, 1), Namespace(), 0, 0, 0, 4)), "group = 256 is not"),
    ],
)
def test_a_set_of_blocks_that_cannot_be_there_says_which_number_is_wrong(block: ExportedBlock, reason: str) -> None:
    seals = BufferPlace(0, BLOCKS * seal_bytes(HEADS))
    layout = SerializedNixlBlockLayout(LAYOUT, MemoryPlace("DRAM", 0), b"", 1, seals)
    with pytest.raises(LayoutFormatError, match=reason):
        decode_block_set(SerializedBlockSet(layout, False, (block,)).encode())
    sound = ExportedBlock(0, 0, 1, BlockIdentity(BlockKey(0, 0, 1), Namespace(), 0, 0, 0, 4))
    with pytest.raises(LayoutFormatError, match="a block set of 2 blocks names one twice"):
        decode_block_set(SerializedBlockSet(layout, False, (sound, sound)).encode())


def test_another_version_says_which_is_read() -> None:
    seals = BufferPlace(0, BLOCKS * seal_bytes(HEADS))
    layout = SerializedNixlBlockLayout(LAYOUT, MemoryPlace("DRAM", 0), b"", 1, seals)
    raw = layout.encode()
    body = msgspec.msgpack.encode([2, *msgspec.msgpack.decode(raw[16:])[1:]])
    with pytest.raises(LayoutFormatError, match="a NIXL block layout of version 2: this release reads 1; update the"):
        decode_nixl_layout(raw[:8] + checksum(body).to_bytes(8, "little") + body)


SEALS = st.builds(
    Seal, U64, U64, st.sampled_from(SealState), st.lists(U64, min_size=1, max_size=20).map(tuple)
)


@FEW
@given(SEALS)
def test_a_seal_is_read_as_it_was_written(seal: Seal) -> None:
    packed = pack_seal(seal)
    assert len(packed) == seal_bytes(len(seal.head_checksums))
    assert unpack_seal(packed) == seal


@FEW
@given(SEALS, SEALS, st.data())
def test_a_seal_that_is_read_while_it_is_written_is_none(before: Seal, after: Seal, data: st.DataObject) -> None:
    old, new = pack_seal(before), pack_seal(after)
    at = data.draw(st.integers(0, len(old)))
    torn = new[:at] + old[at:]
    assert unpack_seal(torn) in (before, after, None)
    assert unpack_seal(bytes(len(old))) is None


@FEW
@given(st.binary(max_size=200))
def test_bytes_that_are_no_seal_nor_note_are_none(raw: bytes) -> None:
    assert unpack_seal(raw) is None
    note = decode_note(raw)
    assert note is None or decode_note(encode_note(note)) == note


@FEW
@given(U64, st.integers(0, 4095), st.lists(st.tuples(U64, st.lists(U64, max_size=4)), max_size=4))
def test_notes_arrive_as_they_were_sent(mark: int, head: int, blocks: list[tuple[int, list[int]]]) -> None:
    for note in (WrittenNote(mark, head, blocks), GivenUpNote(mark, head, 2, [number for number, _ in blocks])):
        assert decode_note(encode_note(note)) == note
