"""Block rows by key: open addressing, linear probing, backward-shift delete, doubled in place in small steps.

An entry's home is the top bits of its 32-bit tag, so that doubling sends home h to 2h or 2h + 1. While the table
doubles, homes below `FRONTIER` are still where they were; the rest, moved from the top down, lie past twice the
frontier, and the gap between keeps the two apart. A lookup therefore looks in one place only. Probing never wraps:
there is room past the last home.
"""

from __future__ import annotations

from advisor.index.jit import inlined, routine
from advisor.index.layout import (
    BITS,
    BITS_MAX,
    ENTRIES,
    FAULT,
    FINISH_HOMES,
    FRONTIER,
    GROW_AT,
    LOW_32,
    OLD_SHIFT,
    SEED,
    SHIFT,
    STEP_HOMES,
    Array,
    Lookup,
    Tables,
    int64,
    uint64,
)

ENTRIES_PER_STEP = 64


@inlined
def tag_of(s: Array, lo: int, hi: int, realm: int) -> int:
    """A key's 32-bit tag. Products of 32 and 31 bits stay below 2^63, so this is the same in Python and compiled."""
    low = uint64(LOW_32)
    half = uint64(32)
    y = (int64(lo & low) * 1640531527) ^ (int64(lo >> half) * 1540483477) ^ s[SEED]
    y ^= (int64(hi & low) * 1812433253) ^ (int64(hi >> half) * 1103515245) ^ (int64(realm) * 2027808485)
    z = ((y ^ (y >> 32)) & LOW_32) * 1664525437
    return (z ^ (z >> 32)) & LOW_32


@inlined
def home_of(s: Array, tag: int) -> int:
    home = tag >> s[OLD_SHIFT]
    if home >= s[FRONTIER]:
        home = tag >> s[SHIFT]
    return home


@inlined
def find(t: Tables | Lookup, tag: int, lo: int, hi: int, realm: int) -> int:
    """The block row of a key, ghosts included, or -1."""
    p = home_of(t.state, tag)
    while True:
        e = t.entries[p]
        slot = int64(e.slot)
        if slot == 0:
            return -1
        if int64(e.tag) == tag:
            b = t.blocks[slot - 1]
            if b.hash_lo == lo and b.hash_hi == hi and b.realm == realm:
                return slot - 1
        p += 1


@inlined
def insert_entry(t: Tables, tag: int, row: int) -> None:
    """Enter a row that is not there. The caller has made sure that there is room."""
    s = t.state
    p = home_of(s, tag)
    while t.entries[p].slot != 0:
        p += 1
    e = t.entries[p]
    e.tag = tag
    e.slot = row + 1
    s[ENTRIES] += 1
    if s[FRONTIER] > 0 and p + 1 >= 2 * s[FRONTIER] and (tag >> s[OLD_SHIFT]) < s[FRONTIER]:
        # The old part has grown up to the moved one.
        move_homes(t.entries, t.spare, s, s[FRONTIER])
    if s[ENTRIES] >= s[GROW_AT]:
        grow_a_step(t.entries, t.spare, s)


@inlined
def delete_entry(t: Tables, tag: int, row: int) -> None:
    s = t.state
    hole = home_of(s, tag)
    while int64(t.entries[hole].slot) != row + 1:
        hole += 1
    p = hole + 1
    while t.entries[p].slot != 0:
        e = t.entries[p]
        if home_of(s, int64(e.tag)) <= hole:
            t.entries[hole].tag = e.tag
            t.entries[hole].slot = e.slot
            hole = p
        p += 1
    t.entries[hole].slot = 0
    s[ENTRIES] -= 1


@routine
def grow_a_step(entries: Array, spare: Array, s: Array) -> None:
    """Start doubling, or move the next homes; asks to be called again once more entries have arrived."""
    if s[FRONTIER] == 0:
        if s[BITS] >= s[BITS_MAX]:
            s[GROW_AT] = int64(1) << 62
            return
        s[FRONTIER] = int64(1) << s[BITS]
        s[OLD_SHIFT] = s[SHIFT]
        s[SHIFT] -= 1
        s[BITS] += 1
    move_homes(entries, spare, s, s[STEP_HOMES])
    s[GROW_AT] = s[ENTRIES] + ENTRIES_PER_STEP if s[FRONTIER] > 0 else int64(3) << (s[BITS] - 2)


@routine
def move_homes(entries: Array, spare: Array, s: Array, homes: int) -> None:
    """Move the `homes` highest old homes. Entries of lower homes that had spilled among them stay in the old part."""
    frontier = s[FRONTIER]
    start = frontier - homes
    if start < s[FINISH_HOMES]:
        start = int64(0)
    end = frontier
    while entries[end].slot != 0:
        end += 1
    if 2 * start < end:
        start = int64(0)
    if end - start > len(spare):
        s[FAULT] = 1
        return
    count = int64(0)
    for p in range(start, end):
        if entries[p].slot != 0:
            spare[count].tag = entries[p].tag
            spare[count].slot = entries[p].slot
            entries[p].slot = 0
            count += 1
    s[FRONTIER] = start
    for i in range(count):
        p = home_of(s, int64(spare[i].tag))
        while entries[p].slot != 0:
            p += 1
        entries[p].tag = spare[i].tag
        entries[p].slot = spare[i].slot
