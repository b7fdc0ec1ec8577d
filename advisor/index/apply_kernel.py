"""A batch of wire records, applied in order in one call.

The kernel reads the records where they lie. It asks for memory ahead: 32 records ahead the hash slots, 20 ahead the
block rows, 10 ahead what hangs on them. It stops where Python must act first (a place or realm named for the first
time, a Clear) and is called again from there, all within one batch and one hold of the lock.
"""

from __future__ import annotations

from advisor.index.hash_table import find, home_of, tag_of
from advisor.index.jit import inlined, kernel, prefetch, routine
from advisor.index.keep import keep_block, keep_placement
from advisor.index.layout import (
    ANNOUNCED_UNTIL,
    DEPTH_UNKNOWN,
    ENTERED,
    HITS,
    LIMBO,
    LOW_16,
    NOTED,
    RECOMPUTED,
    RING,
    RING_RECORDS,
    SKIPPED,
    SKIPS,
    STOP,
    Array,
    Row,
    Tables,
    int64,
)
from advisor.index.placing import (
    note_touched,
    placement_in,
    placements_spare,
    put_in,
    resize,
    take_out,
    touch,
)
from advisor.index.tree import attach, blocks_spare, leave_limbo, make_block, root_of
from event_plane.schema import EventType, RecordFlag

STORE, REMOVE, ACCESS, CLEAR = (
    int(kind) for kind in (EventType.STORE, EventType.REMOVE, EventType.ACCESS, EventType.CLEAR)
)
FIRST, COUNTED, COPY = (int(flag) for flag in (RecordFlag.FIRST, RecordFlag.COUNTED, RecordFlag.COPY))

DONE, NEEDS_PLACE, NEEDS_REALM, NEEDS_CLEAR = range(4)
"""Why the kernel stopped, in `state[STOP]`."""

SKIP_REASONS = (
    "unknown event type",
    "namespace or location outside its table",
    "no tier",
    "no sequence hash",
    "remove of an unknown block",
    "access to an unknown block",
    "a block names itself as its parent",
    "a block's parent is its own descendant",
    "the index is full",
)
(
    UNKNOWN_TYPE, OUTSIDE_TABLE, NO_TIER, NO_HASH, UNKNOWN_REMOVE, UNKNOWN_ACCESS, OWN_PARENT, CYCLE, FULL,
) = range(len(SKIP_REASONS))  # fmt: skip

UNKNOWN_REALM = -1
NO_REALM = -2
"""A record for which no realm is left: refused as full."""
REALMS_A_NAMESPACE = 256

_SLOTS_AHEAD = 32
_ROWS_AHEAD = 20
_LINKS_AHEAD = 10


@inlined
def skip(s: Array, reason: int) -> None:
    s[SKIPPED + reason] += 1
    s[SKIPS] += 1


@inlined
def realm_of_record(r: Row, realm_of: Array) -> int:
    at = int64(r["namespace"]) * REALMS_A_NAMESPACE + int64(r["group"])
    if at >= len(realm_of):
        return UNKNOWN_REALM
    return int64(realm_of[at])


@inlined
def ring_place(i: int) -> int:
    """Where the ring holds what was found out about record `i`."""
    return RING + 3 * (i & (RING_RECORDS - 1))


@inlined
def look_ahead_slots(t: Tables, records: Array, i: int, realm_of: Array) -> None:
    """Compute tags of record `i` and its parent into the ring, and ask for their hash slots. -1: none."""
    s = t.state
    r = records[i]
    at = ring_place(i)
    s[at] = -1
    s[at + 1] = -1
    realm = realm_of_record(r, realm_of)
    if realm < 0:
        return
    tag = tag_of(s, r["sequence_hash_lo"], r["sequence_hash_hi"], realm)
    s[at] = tag
    prefetch(t.entries, home_of(s, tag))
    if r["event_type"] != STORE:
        return
    lo = r["parent_hash_lo"]
    hi = r["parent_hash_hi"]
    if lo == 0 and hi == 0:
        return
    if i > 0:
        before = records[i - 1]
        if before["sequence_hash_lo"] == lo and before["sequence_hash_hi"] == hi:
            return
    tag = tag_of(s, lo, hi, realm)
    s[at + 1] = tag
    prefetch(t.entries, home_of(s, tag))


@inlined
def likely_row(t: Tables, tag: int) -> int:
    """The row of the first entry with that tag near its home, without comparing keys; -1 where there is none."""
    p = home_of(t.state, tag)
    for _ in range(4):
        slot = int64(t.entries[p].slot)
        if slot == 0:
            return -1
        if int64(t.entries[p].tag) == tag:
            return slot - 1
        p += 1
    return -1


@inlined
def look_ahead_rows(t: Tables, i: int) -> None:
    s = t.state
    at = ring_place(i)
    s[at + 2] = -1
    if s[at] >= 0:
        row = likely_row(t, s[at])
        s[at + 2] = row
        if row >= 0:
            prefetch(t.blocks, row)
            prefetch(t.heat, row)
    if s[at + 1] >= 0:
        row = likely_row(t, s[at + 1])
        if row >= 0:
            prefetch(t.blocks, row)


@inlined
def look_ahead_placements(t: Tables, i: int) -> None:
    row = t.state[ring_place(i) + 2]
    if row >= 0:
        b = t.blocks[row]
        if b.placed >= 0:
            prefetch(t.placements, int64(b.placed))
        if b.parent >= 0:
            prefetch(t.blocks, int64(b.parent))


@inlined
def look_ahead_links(t: Tables, i: int) -> None:
    row = t.state[ring_place(i) + 2]
    if row >= 0:
        p = int64(t.blocks[row].placed)
        if p >= 0:
            x = t.placements[p]
            if x.older >= 0:
                prefetch(t.placements, int64(x.older))
            if x.newer >= 0:
                prefetch(t.placements, int64(x.newer))


@routine
def announced_end(t: Tables, records: Array, start: int, realm_of: Array, place: int) -> int:
    """End of the foreign event at `start` if it only announces again what is live there, else `start`.

    The counting rule of vLLM: a Store without a parent whose hashes are all live adds no references.
    """
    namespace = int64(records[start]["namespace"])
    end = start
    while end < len(records):
        r = records[end]
        if r["event_type"] != STORE or (end > start and r["flags"] & FIRST):
            break
        realm = int64(realm_of[namespace * REALMS_A_NAMESPACE + int64(r["group"])])
        if realm < 0:
            return start
        lo = r["sequence_hash_lo"]
        hi = r["sequence_hash_hi"]
        row = find(t, tag_of(t.state, lo, hi, realm), lo, hi, realm)
        if row < 0 or placement_in(t, row, place) < 0:
            return start
        end += 1
    return end


@inlined
def store(
    t: Tables, r: Row, place: int, realm: int, tag: int, parent_tag: int, last: int, now_ms: int, announced: bool
) -> int:
    """One Store. Returns the block's row, or -1 where the record was skipped. `last` may be the parent's row."""
    s = t.state
    lo = r["sequence_hash_lo"]
    hi = r["sequence_hash_hi"]
    parent_lo = r["parent_hash_lo"]
    parent_hi = r["parent_hash_hi"]
    flags = int64(r["flags"])
    has_parent = parent_lo != 0 or parent_hi != 0
    row = find(t, tag, lo, hi, realm)
    p = int64(-1)
    if row >= 0:
        p = placement_in(t, row, place)
        has_parent = has_parent and t.blocks[row].parent < 0
    if has_parent and parent_lo == lo and parent_hi == hi:
        skip(s, OWN_PARENT)
        return int64(-1)
    if p < 0 or has_parent:
        if blocks_spare(s) < 2 and s[LIMBO] > 0:
            leave_limbo(t)
        if blocks_spare(s) < 2 or placements_spare(s) < 1:
            skip(s, FULL)
            return int64(-1)
    if has_parent:
        parent = int64(-1)
        if last >= 0:
            b = t.blocks[last]
            if b.hash_lo == parent_lo and b.hash_hi == parent_hi and b.realm == realm:
                parent = last
        if parent < 0:
            if parent_tag < 0:
                parent_tag = tag_of(s, parent_lo, parent_hi, realm)
            parent = find(t, parent_tag, parent_lo, parent_hi, realm)
        if parent >= 0 and row >= 0 and t.blocks[row].first_child >= 0 and root_of(t, parent) == row:
            skip(s, CYCLE)
            return int64(-1)
        if row < 0:
            row = make_block(t, tag, lo, hi, realm)
        if parent < 0:
            parent = make_block(t, parent_tag, parent_lo, parent_hi, realm)
        attach(t, row, parent)
    elif row < 0:
        row = make_block(t, tag, lo, hi, realm)
    keep_block(t, row)
    b = t.blocks[row]
    if b.depth == DEPTH_UNKNOWN:
        depth = int64(r["depth"])
        parent = int64(b.parent)
        if depth != DEPTH_UNKNOWN:
            b.depth = depth
        elif parent >= 0 and t.blocks[parent].depth != DEPTH_UNKNOWN:
            b.depth = int64(t.blocks[parent].depth) + 1
    if r["block_tokens"]:
        b.block_tokens = r["block_tokens"]
    block_bytes = int64(r["block_size"])
    if p >= 0:
        if block_bytes != 0 and block_bytes != t.placements[p].block_bytes:
            resize(t, row, place, p, block_bytes)
        if flags & COUNTED and not announced:
            keep_placement(t, p)
            t.placements[p].references = min(int64(t.placements[p].references) + 1, LOW_16)
    else:
        put_in(t, row, place, block_bytes, now_ms)
    if not flags & COPY:
        touch(t, row, place, p, 1, now_ms)
        note_touched(t, row)
        # An engine that counts references tells nothing of what it found again: a share of it would be made up.
        if t.places[place].tier == 1 and not flags & COUNTED:
            s[RECOMPUTED] += 1
    return row


@inlined
def remove(t: Tables, r: Row, place: int, realm: int, tag: int) -> None:
    lo = r["sequence_hash_lo"]
    hi = r["sequence_hash_hi"]
    row = int64(-1)
    p = int64(-1)
    if realm >= 0:
        row = find(t, tag, lo, hi, realm)
    if row >= 0:
        p = placement_in(t, row, place)
    if p < 0:
        skip(t.state, UNKNOWN_REMOVE)
    elif r["flags"] & COUNTED and t.placements[p].references > 1:
        keep_placement(t, p)
        t.placements[p].references = int64(t.placements[p].references) - 1
    else:
        take_out(t, row, place, p)


@inlined
def access(t: Tables, r: Row, place: int, realm: int, tag: int, now_ms: int) -> None:
    s = t.state
    row = int64(-1)
    if realm >= 0:
        row = find(t, tag, r["sequence_hash_lo"], r["sequence_hash_hi"], realm)
    if row < 0 or t.blocks[row].placed < 0:
        skip(s, UNKNOWN_ACCESS)
        return
    hits = max(int64(r["hits"]), 1)
    touch(t, row, place, placement_in(t, row, place), hits, now_ms)
    z = t.places[place]
    z.reads += hits
    s[HITS + int64(z.tier)] += hits
    note_touched(t, row)


@kernel
def apply_records(
    t: Tables,
    records: Array,
    start: int,
    begins: bool,
    place_of: Array,
    realm_of: Array,
    now_ms: int,
) -> int:
    """Apply `records[start:]`; returns how far it came and says in `state[STOP]` why it stopped.

    `begins`: the batch's figures in `state` start from zero.

    `place_of` i4 (5 × locations, by tier and location) and `realm_of` i4 (256 × namespaces, by namespace and group)
    translate the batch's own numbers; -1 is not known yet.
    """
    s = t.state
    n = len(records)
    namespaces = len(realm_of) // REALMS_A_NAMESPACE
    locations = len(place_of) // 5
    s[STOP] = DONE
    if begins:
        s[ANNOUNCED_UNTIL] = 0
        s[RECOMPUTED] = 0
        s[NOTED] = 0
        s[ENTERED] = 0
        s[SKIPS] = 0
        s[HITS : HITS + 5] = 0
        s[SKIPPED : SKIPPED + len(SKIP_REASONS)] = 0
    last = int64(-1)
    for ahead in range(start, n + _SLOTS_AHEAD):
        if ahead < n:
            look_ahead_slots(t, records, ahead, realm_of)
        i = ahead - (_SLOTS_AHEAD - _ROWS_AHEAD)
        if start <= i < n:
            look_ahead_rows(t, i)
        i = ahead - (_SLOTS_AHEAD - _LINKS_AHEAD)
        if start <= i < n:
            look_ahead_placements(t, i)
        i = ahead - (_SLOTS_AHEAD - _LINKS_AHEAD // 2)
        if start <= i < n:
            look_ahead_links(t, i)
        i = ahead - _SLOTS_AHEAD
        if i < start:
            continue
        r = records[i]
        kind = int64(r["event_type"])
        if kind == CLEAR:
            s[STOP] = NEEDS_CLEAR
            return i
        if kind < STORE or kind > CLEAR:
            skip(s, UNKNOWN_TYPE)
            continue
        namespace = int64(r["namespace"])
        location = int64(r["storage_location"])
        if namespace >= namespaces or location >= locations:
            skip(s, OUTSIDE_TABLE)
            continue
        tier = int64(r["tier"])
        no_hash = r["sequence_hash_lo"] == 0 and r["sequence_hash_hi"] == 0
        if no_hash or tier < 1 or tier > 4:
            skip(s, NO_HASH if no_hash else NO_TIER)
            continue
        place = int64(place_of[tier * locations + location])
        if place < 0:
            s[STOP] = NEEDS_PLACE
            return i
        realm = realm_of_record(r, realm_of)
        tag = s[ring_place(i)]
        if tag < 0 and realm >= 0:
            tag = tag_of(s, r["sequence_hash_lo"], r["sequence_hash_hi"], realm)
        if kind == STORE:
            if realm < 0:
                if realm == UNKNOWN_REALM:
                    s[STOP] = NEEDS_REALM
                    return i
                skip(s, FULL)
                continue
            starts = int64(r["flags"]) & (COUNTED | FIRST) == COUNTED | FIRST
            if starts and i >= s[ANNOUNCED_UNTIL] and r["parent_hash_lo"] == 0 and r["parent_hash_hi"] == 0:
                s[ANNOUNCED_UNTIL] = announced_end(t, records, i, realm_of, place)
            announced = i < s[ANNOUNCED_UNTIL]
            last = store(t, r, place, realm, tag, s[ring_place(i) + 1], last, now_ms, announced)
        elif kind == REMOVE:
            remove(t, r, place, realm, tag)
            last = int64(-1)
        else:
            access(t, r, place, realm, tag, now_ms)
    return n
