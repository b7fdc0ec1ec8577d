"""Rows as they were when a save began.

While a save copies the tables chunk by chunk between batches, a batch keeps each row that it is about to change and
that the save has not copied yet, once. The saved file is the copied tables and then the kept rows, which win: together
the state at the moment the save began. `keep_block` and `keep_placement` stand before every first change of a row.
"""

from __future__ import annotations

from advisor.index.jit import inlined, routine
from advisor.index.layout import (
    KEEP_BLOCKS_BELOW,
    KEEP_BLOCKS_FROM,
    KEEP_PLACEMENTS_BELOW,
    KEEP_PLACEMENTS_FROM,
    KEPT_BLOCKS,
    KEPT_PLACEMENT_BITS,
    KEPT_PLACEMENTS,
    Array,
    Tables,
    int64,
)


@inlined
def keep_block(t: Tables, row: int) -> None:
    if row < t.state[KEEP_BLOCKS_BELOW]:
        copy_block(t.blocks, t.kept_blocks, t.kept_bits, t.state, row)


@inlined
def keep_placement(t: Tables, p: int) -> None:
    if p < t.state[KEEP_PLACEMENTS_BELOW]:
        copy_placement(t.placements, t.kept_placements, t.kept_bits, t.state, p)


@inlined
def first_time(bits: Array, base: int, row: int) -> bool:
    byte = base + (row >> 3)
    bit = int64(1) << (row & 7)
    before = int64(bits[byte])
    if before & bit:
        return False
    bits[byte] = before | bit
    return True


@routine
def copy_block(blocks: Array, kept: Array, bits: Array, s: Array, row: int) -> None:
    if row < s[KEEP_BLOCKS_FROM] or not first_time(bits, 0, row):
        return
    b = blocks[row]
    k = kept[s[KEPT_BLOCKS]]
    s[KEPT_BLOCKS] += 1
    k.row = row
    k.hash_lo = b.hash_lo
    k.hash_hi = b.hash_hi
    k.parent = b.parent
    k.first_child = b.first_child
    k.next_sibling = b.next_sibling
    k.prev_sibling = b.prev_sibling
    k.root = b.root
    k.placed = b.placed
    k.depth = b.depth
    k.touches = b.touches
    k.realm = b.realm
    k.block_tokens = b.block_tokens
    k.first_touch = b.first_touch
    k.last_touch = b.last_touch
    k.marks = b.marks


@routine
def copy_placement(placements: Array, kept: Array, bits: Array, s: Array, p: int) -> None:
    if p < s[KEEP_PLACEMENTS_FROM] or not first_time(bits, s[KEPT_PLACEMENT_BITS], p):
        return
    x = placements[p]
    k = kept[s[KEPT_PLACEMENTS]]
    s[KEPT_PLACEMENTS] += 1
    k.row = p
    k.block = x.block
    k.next_placed = x.next_placed
    k.older = x.older
    k.newer = x.newer
    k.block_bytes = x.block_bytes
    k.references = x.references
    k.uses = x.uses
    k.last_use = x.last_use
    k.place = x.place
