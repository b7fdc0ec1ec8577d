"""A slab's own pages: what is packed comes back, and no flipped bit goes unseen."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage_agent.block_header import PAGE_BYTES, seal
from storage_agent.errors import BlockFormatError
from storage_agent.slab_format import (
    SLOTS_OFFSET,
    Intents,
    Session,
    Superblock,
    pack_intents,
    pack_session,
    pack_superblock,
    unpack_intents,
    unpack_session,
    unpack_superblock,
)
from storage_agent.slot_classes import CLASSES_MAX, SlotClass
from tests.examples import examples

u64 = st.integers(0, 2**64 - 1)
names = st.from_regex(r"[a-z0-9-]{1,64}", fullmatch=True)
of_equal_slots = st.builds(
    Superblock,
    volume_id=names,
    capacity_blocks=st.integers(1, 2**31),
    block_bytes_max=st.integers(1, 2**28),
    mark=u64,
    edition=u64,
)


@st.composite
def of_classes(draw: st.DrawFn) -> Superblock:
    sizes = sorted(draw(st.sets(st.integers(1, 2**28), min_size=1, max_size=CLASSES_MAX)))
    classes = tuple(SlotClass(size, draw(st.integers(1, 2**27))) for size in sizes)
    capacity = sum(each.blocks for each in classes)
    return Superblock(draw(names), capacity, sizes[-1], draw(u64), draw(u64), classes)


superblocks = of_equal_slots | of_classes()
sessions = st.builds(
    Session, is_open=st.booleans(), pid=u64, generation_next=u64, host=st.text("abc-.0", max_size=200)
)
bits = st.integers(0, PAGE_BYTES * 8 - 1)


def flip(page: bytes, bit: int) -> bytes:
    flipped = bytearray(page)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


def intents_of(superblock: Superblock, table: int, seed: int) -> Intents:
    changed = np.random.default_rng(seed % 2**32).random(superblock.regions) < 0.3
    return Intents(table, table ^ 1, superblock.region_slots, changed)


@settings(deadline=None)
@given(superblocks, sessions)
def test_superblock_and_session_come_back_as_they_were(superblock: Superblock, session: Session) -> None:
    assert unpack_superblock(pack_superblock(superblock)) == superblock
    assert unpack_session(pack_session(session)) == session


@settings(deadline=None)
@given(superblocks, u64)
def test_every_region_of_every_size_of_slab_has_its_intent(superblock: Superblock, table: int) -> None:
    intents = intents_of(superblock, table, table)
    found = unpack_intents(pack_intents(intents), superblock)
    assert (found.table, found.table_next) == (table, table ^ 1)
    assert found.changed.tolist() == intents.changed.tolist()
    assert superblock.regions * superblock.region_slots >= superblock.capacity_blocks


@settings(deadline=None)
@given(superblocks)
def test_slots_lie_on_page_boundaries_one_after_another(superblock: Superblock) -> None:
    last = superblock.capacity_blocks - 1
    assert superblock.slot_offset(0) == SLOTS_OFFSET == 4 * PAGE_BYTES
    assert superblock.slot_offset(last) % PAGE_BYTES == 0
    assert superblock.slot_offset(last) + superblock.slot_bytes == superblock.file_bytes
    assert superblock.slot_bytes >= PAGE_BYTES + superblock.block_bytes_max
    for before, after in pairwise(superblock.runs):
        assert superblock.slot_offset(after.first) == superblock.slot_offset(after.first - 1) + before.slot_bytes
        assert before.slot_bytes <= after.slot_bytes


@settings(max_examples=examples(200), deadline=None)
@given(superblocks, sessions, bits)
def test_a_flipped_bit_is_always_caught(superblock: Superblock, session: Session, bit: int) -> None:
    with pytest.raises(BlockFormatError):
        unpack_superblock(flip(pack_superblock(superblock), bit))
    with pytest.raises(BlockFormatError):
        unpack_session(flip(pack_session(session), bit))
    with pytest.raises(BlockFormatError):
        unpack_intents(flip(pack_intents(intents_of(superblock, 1, bit)), bit), superblock)


def test_a_slab_of_format_1_is_refused_with_what_to_do() -> None:
    first = seal(b"KVASLAB\0" + (1).to_bytes(4, "little"))
    with pytest.raises(BlockFormatError, match=r"slab format 1, this version reads 2; .* remove the file"):
        unpack_superblock(first)


def test_intents_of_another_size_of_slab_are_not_taken() -> None:
    small, large = Superblock("v", 1000, 1), Superblock("v", 2**31, 1)
    assert small.region_slots != large.region_slots
    with pytest.raises(BlockFormatError, match="not of this slab"):
        unpack_intents(pack_intents(intents_of(small, 1, 1)), large)
