"""One place run as a cache: what a trace's replay asks of the index, with the functions that apply every batch.

Each block of a request becomes an Access where it is present and a Store where it is absent; a full place gives up the
block that its own order puts first. The records, as they were applied, are the stream that a live producer would send.
"""

from __future__ import annotations

from advisor.index.apply_kernel import ACCESS, REMOVE, STORE, access, store
from advisor.index.hash_table import find, tag_of
from advisor.index.jit import kernel
from advisor.index.layout import HITS, SKIPPED, Array, Tables, int64
from advisor.index.placing import first_to_go, placement_in, take_out


@kernel
def serve_request(
    t: Tables, wanted: Array, place: int, realm: int, capacity: int, now_ms: int, sent: Array
) -> tuple[int, int]:
    """Serve `wanted` (records, root to leaf) from `place`. Returns how many were present and how many were sent.

    `sent` receives the records in order, at most two for each wanted one.
    """
    s = t.state
    for number in range(5):
        s[HITS + number] = 0
    for number in range(16):
        s[SKIPPED + number] = 0
    present = int64(0)
    count = int64(0)
    last = int64(-1)
    for i in range(len(wanted)):
        r = wanted[i]
        lo = r["sequence_hash_lo"]
        hi = r["sequence_hash_hi"]
        tag = tag_of(s, lo, hi, realm)
        row = find(t, tag, lo, hi, realm)
        if row >= 0 and placement_in(t, row, place) >= 0:
            present += 1
            sent[count] = r
            sent[count]["event_type"] = ACCESS
            access(t, sent[count], place, realm, tag, now_ms)
            count += 1
            last = row
            continue
        if t.places[place].placements >= capacity:
            p = first_to_go(t, place)
            victim = int64(t.placements[p].block)
            sent[count] = r
            sent[count]["event_type"] = REMOVE
            sent[count]["sequence_hash_lo"] = t.blocks[victim].hash_lo
            sent[count]["sequence_hash_hi"] = t.blocks[victim].hash_hi
            sent[count]["parent_hash_lo"] = 0
            sent[count]["parent_hash_hi"] = 0
            count += 1
            take_out(t, victim, place, p)
            # The row may have been freed with it, and the parent's with that.
            last = int64(-1)
        sent[count] = r
        sent[count]["event_type"] = STORE
        last = store(t, sent[count], place, realm, tag, int64(-1), last, now_ms, False)
        count += 1
    return present, count
