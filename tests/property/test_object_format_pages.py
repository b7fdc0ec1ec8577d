"""Objects of a volume say what they hold, and nothing that was changed is taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from event_plane.schema import Namespace
from storage_agent.block_header import PAGE_BYTES, BlockHeader
from storage_agent.errors import BlockFormatError
from storage_agent.object_catalogue import ObjectCatalogue, Place
from storage_agent.object_format import (
    Holder,
    OwnerRecord,
    blocks_name,
    index_bytes,
    is_begun,
    mark_in,
    pack_freed,
    pack_index,
    pack_owner,
    unpack_freed,
    unpack_index,
    unpack_owner,
)
from storage_agent.port import BlockKey
from storage_agent.shards import Axis, BlockLayout, ShardSpan
from tests.examples import examples

LAYOUT = BlockLayout((Axis("token", 16), Axis("head", 8)), 2, "head", "float16")
NAMESPACES = [Namespace(tenant="a"), Namespace(tenant="b", model="llama", block_tokens=16)]
U64 = st.integers(0, 2**64 - 1)


def header(number: int, size: int = 100, **facts: object) -> BlockHeader:
    namespace = NAMESPACES[number % 2]
    key = BlockKey(namespace.namespace_id, 0, number + 1)
    return BlockHeader(0, key, namespace, 0, 0, 16, size, 7, number + 1)._replace(**facts)


@st.composite
def headers(draw: st.DrawFn) -> BlockHeader:
    sharded = draw(st.booleans())
    namespace = draw(st.sampled_from(NAMESPACES))
    return BlockHeader(
        slot=0,
        key=BlockKey(namespace.namespace_id, draw(st.integers(0, 255)), draw(st.integers(1, 2**128 - 1))),
        namespace=namespace,
        parent_hash=draw(st.integers(0, 2**128 - 1)),
        depth=draw(st.integers(0, 2**32 - 1)),
        block_tokens=draw(st.integers(0, 2**16 - 1)),
        payload_bytes=128 if sharded else draw(st.integers(1, 2**31)),
        payload_checksum=draw(U64),
        generation=draw(U64),
        span=ShardSpan(64, 2, 4) if sharded else None,
        layout=LAYOUT if sharded else None,
    )


@settings(max_examples=examples(60))
@given(U64, st.lists(st.tuples(headers(), st.integers(0, 2**63 - 1)), min_size=1, max_size=8))
def test_an_index_says_what_was_put_and_where_it_lies(mark: int, blocks: list[tuple[BlockHeader, int]]) -> None:
    packed, index = pack_index(mark, [(each._replace(slot=n), time_ms) for n, (each, time_ms) in enumerate(blocks)])
    found = unpack_index(packed + b"payload", mark)
    assert (found.mark, found.object_bytes, found.blocks) == (mark, index.object_bytes, index.blocks)
    assert index_bytes(packed[:48]) == len(packed) == index.blocks[0].offset
    assert [block.header._replace(slot=0) for block in index.blocks] == [each for each, _ in blocks]
    assert [block.stored_ms for block in index.blocks] == [stored_ms for _, stored_ms in blocks]
    ends = [block.end for block in index.blocks]
    assert [block.offset for block in index.blocks[1:]] == ends[:-1]
    assert index.object_bytes == ends[-1] == len(packed) + sum(PAGE_BYTES + each.payload_bytes for each, _ in blocks)


@settings(max_examples=examples(60))
@given(st.data())
def test_a_changed_or_cut_index_is_refused(data: st.DataObject) -> None:
    packed, _ = pack_index(5, [(header(number), number) for number in range(3)])
    at = data.draw(st.integers(0, len(packed) - 1))
    bit = 1 << data.draw(st.integers(0, 7))
    changed = bytearray(packed)
    changed[at] ^= bit
    with pytest.raises(BlockFormatError):
        unpack_index(bytes(changed), 5)
    with pytest.raises(BlockFormatError):
        unpack_index(packed[: data.draw(st.integers(0, len(packed) - 1))], 5)


def test_an_object_under_another_name_is_refused() -> None:
    packed, _ = pack_index(5, [(header(1), 1)])
    with pytest.raises(BlockFormatError, match="written as 0000000000000005, it lies under the name 0000000000000006"):
        unpack_index(packed, 6)
    assert is_begun(packed)
    assert not is_begun(b"someone's")


def test_a_number_without_room_is_refused() -> None:
    with pytest.raises(BlockFormatError, match="out of range"):
        pack_index(1, [(header(1, depth=-1), 0)])


@given(U64)
def test_names_lead_back_to_marks(mark: int) -> None:
    assert mark_in(blocks_name("a/b", mark), "a/b/blocks") == mark
    sixteen = "0000000000000001"
    for other in ("a/blocks/1", "a/blocks/zzzzzzzzzzzzzzzz", f"a/blocks/{sixteen}/x", f"b/blocks/{sixteen}"):
        assert mark_in(other, "a/blocks") is None


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))), U64)
def test_freed_blocks_are_found_again(drawn: tuple[int, set[int]], mark: int) -> None:
    count, freed = drawn
    packed = pack_freed(mark, count, freed)
    assert unpack_freed(packed, mark) == freed
    for changed in (packed[:-1], b"", bytes([packed[0] ^ 1]) + packed[1:]):
        with pytest.raises(BlockFormatError):
            unpack_freed(changed, mark)
    with pytest.raises(BlockFormatError, match="written for"):
        unpack_freed(packed, mark ^ 1)


def test_an_owner_is_named_in_words() -> None:
    record = OwnerRecord(
        volume="v", is_open=True, holder=Holder("host", "boot", 7, "99"), beat=3, lease_s=30, generation_next=12
    )
    packed = pack_owner(record)
    assert unpack_owner(packed) == record
    assert b'"host": "host"' in packed
    for other in (b"", b"{}", b"[1]", packed.replace(b'"version": 1', b'"version": 9')):
        with pytest.raises(BlockFormatError):
            unpack_owner(other)


class CatalogueMachine(RuleBasedStateMachine):
    """Objects come, blocks go, copies move: every held slot has one place, and the sums are those of a full count."""

    def __init__(self) -> None:
        super().__init__()
        self.catalogue = ObjectCatalogue()
        self.slots: dict[int, BlockHeader] = {}
        self.mark = 0

    @rule(sizes=st.lists(st.integers(1, 9000), min_size=1, max_size=5))
    def put(self, sizes: list[int]) -> None:
        self.mark += 1
        first = max(self.slots, default=-1) + 1
        made = [header(first + n, size) for n, size in enumerate(sizes)]
        _, index = pack_index(self.mark, [(each, self.mark) for each in made])
        self.catalogue.add(index, {n: first + n for n in range(len(sizes))})
        self.slots |= dict(enumerate(made, first))

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        gone = data.draw(st.lists(st.sampled_from(sorted(self.slots)), min_size=1, unique=True))
        changed = self.catalogue.after_freeing(gone)
        self.catalogue.free([*gone, 10_000])
        for mark, freed in changed.items():
            known = self.catalogue.objects.get(mark)
            assert known is None or known.freed == freed
        for slot in gone:
            del self.slots[slot]

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), object_bytes=st.sampled_from([4096, 40_000]), blocks_max=st.sampled_from([3, 1000]))
    def compact(self, data: st.DataObject, object_bytes: int, blocks_max: int) -> None:
        blocks = self.catalogue.blocks_of(self.catalogue.worth_rewriting(object_bytes, blocks_max))
        if not blocks:
            return
        self.mark += 1
        _, index = pack_index(self.mark, [(block.header, block.stored_ms) for _, block in blocks])
        slots = [block.header.slot for _, block in blocks]
        gone = data.draw(st.lists(st.sampled_from(slots), unique=True))  # deleted while the copies were written
        self.catalogue.free(gone)
        for slot in gone:
            del self.slots[slot]
        moved = self.catalogue.move(index, [place for place, _ in blocks])
        assert sorted(moved.values()) == sorted(set(slots) - set(gone))
        for entry, slot in moved.items():
            assert self.catalogue.place(slot) == Place(self.mark, entry, index.blocks[entry].offset)

    @invariant()
    def every_slot_has_one_place_and_sums_are_true(self) -> None:
        held = self.catalogue.blocks_of(list(self.catalogue.objects))
        assert sorted(block.header.slot for _, block in held) == sorted(self.slots)
        for place, block in held:
            assert self.catalogue.place(block.header.slot) == place
            assert block.header._replace(slot=0).key == self.slots[block.header.slot].key
        assert all(known.held for known in self.catalogue.objects.values())
        total = sum(known.index.object_bytes for known in self.catalogue.objects.values())
        assert (self.catalogue._object_bytes, self.catalogue._held_bytes) == (
            total,
            sum(block.end - block.offset for _, block in held),
        )
        assert len(self.catalogue.expired(self.mark + 1)) == len(self.slots)


CatalogueMachine.TestCase.settings = settings(max_examples=examples(25), stateful_step_count=15)
TestCatalogueMachine = CatalogueMachine.TestCase
