"""How much of a sequence is present: anywhere, in one place, in each place."""

from __future__ import annotations

from advisor.index.hash_table import find, home_of, tag_of
from advisor.index.jit import inlined, kernel, prefetch
from advisor.index.layout import RING, Array, Lookup, int64
from advisor.index.placing import placement_in

_STRIDE = 64


@inlined
def peek_row(t: Lookup, tag: int) -> int:
    slot = int64(t.entries[home_of(t.state, tag)].slot)
    return slot - 1


@inlined
def run_length(t: Lookup, hashes: Array, first: int, last: int, realm: int, place: int) -> int:
    """Of `hashes[first:last]`, how many leading ones are present, in `place` or (-1) anywhere."""
    s = t.state
    at = first
    while at < last:
        end = min(at + _STRIDE, last)
        for i in range(at, end):
            tag = tag_of(s, hashes[i, 0], hashes[i, 1], realm)
            s[RING + i - at] = tag
            prefetch(t.entries, home_of(s, tag))
        for i in range(at, end):
            prefetch(t.blocks, max(peek_row(t, s[RING + i - at]), 0))
        for i in range(at, end):
            row = find(t, s[RING + i - at], hashes[i, 0], hashes[i, 1], realm)
            if row < 0 or t.blocks[row].placed < 0:
                return i - first
            if place >= 0 and placement_in(t, row, place) < 0:
                return i - first
        at = end
    return last - first


@kernel
def match_one(t: Lookup, hashes: Array, realm: int, place: int) -> int:
    """`hashes` is u8 (n, 2), low half first."""
    return run_length(t, hashes, 0, len(hashes), realm, place)


@kernel
def match_several(t: Lookup, hashes: Array, ends: Array, realms: Array, place: int, out: Array) -> None:
    """Sequences one after the other in `hashes`, each up to its `ends`; lengths go to `out`."""
    first = int64(0)
    for i in range(len(ends)):
        out[i] = 0
        if realms[i] >= 0:
            out[i] = run_length(t, hashes, first, ends[i], realms[i], place)
        first = ends[i]


@kernel
def match_by_place(t: Lookup, hashes: Array, realm: int, runs: Array, found: Array) -> int:
    """Leading run of every place that has the first block.

    `found` i4 receives those places; `runs` i4 by place, zero before, their lengths. Returns how many places.
    """
    count = int64(0)
    for i in range(len(hashes)):
        tag = tag_of(t.state, hashes[i, 0], hashes[i, 1], realm)
        row = find(t, tag, hashes[i, 0], hashes[i, 1], realm)
        if row < 0:
            return count
        going_on = False
        p = int64(t.blocks[row].placed)
        while p >= 0:
            place = int64(t.placements[p].place)
            if runs[place] == i:
                if i == 0:
                    found[count] = place
                    count += 1
                runs[place] = i + 1
                going_on = True
            p = int64(t.placements[p].next_placed)
        if not going_on:
            return count
    return count


@kernel
def row_of_key(t: Lookup, hashes: Array, realm: int) -> int:
    """The block row of the only hash, ghosts included, or -1."""
    return find(t, tag_of(t.state, hashes[0, 0], hashes[0, 1], realm), hashes[0, 0], hashes[0, 1], realm)
