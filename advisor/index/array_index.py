"""The index as Python sees it: one object, one lock, kernels without the GIL.

Every public method takes the index's lock, so that a reader sees a whole batch or none of it; a caller that needs
several answers of one moment holds `lock` around them (it is reentrant). Blocks are named by row numbers, places by ids
(see layout.py); a row is good while the lock is held, or until the next batch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from advisor.index import apply_kernel, audit_kernels, cache_kernel, change_kernels, match_kernel, order_kernels
from advisor.index.errors import IndexFault, IndexFull
from advisor.index.heat import EXACT_LEVEL_MAX
from advisor.index.keys import Key, PlaceKey
from advisor.index.layout import (
    BITS,
    BLOCK_DTYPE,
    BLOCK_MAX,
    BLOCK_ROWS,
    BLOCK_TOP,
    BLOCKS_FREE,
    ENTRY_DTYPE,
    FAULT,
    FIRST_HIGH,
    FREE,
    GHOSTS,
    HISTOGRAM,
    HITS,
    LAST_SHIFT,
    LEVELS,
    LIMBO,
    PLACEMENT_MAX,
    PLACEMENT_TOP,
    PLACEMENTS_FREE,
    PLACES_MAX,
    REALMS_MAX,
    SKIPPED,
    SKIPS,
    STOP,
    TIME_MS_MAX,
    TOUCHED_COUNT,
    Array,
    IndexSize,
    Lookup,
    make_tables,
    populate,
)
from advisor.index.saved_index import Contents, Save, read_contents, read_tables
from advisor.index.views import Applied, BlockRow, Figures, Group, Matched, PlacedIn, PlaceFigures, Totals
from advisor.turnstile import Turnstile
from event_plane.schema import LOCATION_ALL, NAMESPACE_ALL, RECORD_DTYPE, Records

INDEX_FULL = apply_kernel.SKIP_REASONS[apply_kernel.FULL]
PLACES_SPENT = "no more places"
_PLACES_FOR_EVENTS = PLACES_MAX - 1_024
"""Places that events may make by naming them; the rest is kept for volumes."""
ORDERS = ("lru", "lfu")
MEMORY_BYTES_MAX = 4 << 30
"""Memory limit where none is given: 36 M blocks."""

_HASH_LO, _HASH_HI, _PLACED, _REALM, _MARKS = (
    (BLOCK_DTYPE.names or ()).index(name) for name in ("hash_lo", "hash_hi", "placed", "realm", "marks")
)
_PAGE_ROWS = 1 << 16
_REALMS_A_STEP = 4_096
_CACHED_TABLES_MAX = 4096
_ALL_REALMS = np.zeros(0, np.uint8)

Hashes = Sequence[int] | npt.NDArray[np.uint64]
"""128-bit integers, or their halves as u8 (n, 2), low half first."""


class ArrayIndex:
    """All blocks and places. One writer at a time, any number of readers."""

    KEY_DTYPE = np.dtype(
        [("namespace_id", "u8"), ("sequence_hash_lo", "u8"), ("sequence_hash_hi", "u8"), ("group", "u1")]
    )

    def __init__(self, size: IndexSize | None = None, *, lock: Turnstile | None = None) -> None:
        self.size = size if size is not None else IndexSize.for_bytes(MEMORY_BYTES_MAX)
        self.lock = lock if lock is not None else Turnstile()
        self.tables = make_tables(self.size, int.from_bytes(os.urandom(8), "little") >> 2)
        self.places: list[PlaceKey] = []
        """By place id."""
        self._state = self.tables.state
        self._lookup = Lookup(self.tables.blocks, self.tables.placements, self.tables.entries, self.tables.state)
        self._place_ids: dict[PlaceKey, int] = {}
        self._producer_places: dict[int, list[int]] = {}
        self._realm_ids: dict[tuple[int, int], int] = {}
        self._realms_free: list[int] = []
        self._realms_made = 0
        self._place_tables: dict[tuple[int, tuple[str, ...]], Array] = {}
        self._realm_tables: dict[tuple[int, ...], Array] = {}
        self._runs = np.zeros(0, np.int32)
        self._save: Save | None = None

    # -- places

    def place(self, key: PlaceKey) -> int:
        """The id of a place, made when first named. Raises `IndexFull` past 65,536 places."""
        with self.lock:
            place = self._place_ids.get(key)
            if place is None:
                place = len(self.places)
                if place >= PLACES_MAX:
                    raise IndexFull(f"{PLACES_MAX} places are known and {key} is one more: restart with a new log")
                z = self.tables.places[place]
                z.oldest = z.newest = z.lowest = -1
                z.tier = key.tier
                self.places.append(key)
                self._place_ids[key] = place
                self._producer_places.setdefault(key.producer, []).append(place)
            return place

    def known_place(self, key: PlaceKey) -> int | None:
        """The id of a place if it was ever named."""
        return self._place_ids.get(key)

    def places_of(self, producer: int) -> list[int]:
        return list(self._producer_places.get(producer, ()))

    def is_volume(self, place: int) -> bool:
        return bool(self.tables.places["volume"][place])

    def set_volume(self, place: int, volume: bool) -> None:
        """Whether a place is a registered volume: uses in G1 and G2 refresh blocks there, and touches are noted."""
        with self.lock:
            self.tables.places[place].volume = volume

    def order(self, place: int) -> str:
        return ORDERS[int(self.tables.places["by_frequency"][place])]

    def set_order(self, place: int, order: str) -> None:
        """Evict from `place` by "lru" or "lfu" from now on; "lfu" counts each block's uses from 1 again.

        Takes time in proportion to the place. Raises `ValueError` for another order.
        """
        if order not in ORDERS:
            raise ValueError(f"eviction order {order!r} is not known: choose one of {', '.join(ORDERS)}")
        with self.lock:
            change_kernels.set_frequency_order(self.tables, place, order == "lfu")

    def place_figures(self, place: int) -> PlaceFigures:
        z = self.tables.places[place]
        with self.lock:
            return PlaceFigures(int(z.placements), int(z.placed_bytes), int(z.reads))

    # -- changes

    def apply(
        self,
        records: Records,
        *,
        producer: int,
        namespace_ids: Sequence[int],
        locations: Sequence[str],
        now_us: int,
    ) -> Applied:
        """Apply a batch's records in order; one that makes no sense is counted and skipped.

        Where there is no more room, Stores of what is not there are skipped under `INDEX_FULL`; all else goes on.
        Events at a new place are skipped under `PLACES_SPENT` where no more places are made.
        """
        if records.dtype != RECORD_DTYPE:
            raise ValueError(f"records have dtype {records.dtype}: give RECORD_DTYPE")
        rows = np.ascontiguousarray(records).view()
        rows.flags.writeable = False
        now_ms = min(max(int(now_us) // 1000, 0), TIME_MS_MAX)
        s = self._state
        with self.lock:
            place_of = self._place_table(producer, tuple(locations))
            realm_of = self._realm_table(tuple(namespace_ids))
            cleared_all = False
            placeless = 0
            t, kernel = self.tables, apply_kernel.apply_records
            at = kernel(t, rows, 0, True, place_of, realm_of, now_ms)
            while s[STOP]:
                if s[STOP] == apply_kernel.NEEDS_CLEAR:
                    cleared_all |= self._clear_record(rows[at], producer, namespace_ids, locations)
                    at += 1
                elif s[STOP] == apply_kernel.NEEDS_PLACE:
                    named = self._name_place(rows[at], producer, locations, place_of)
                    placeless += not named
                    at += not named
                else:
                    self._name_realm(rows[at], namespace_ids, realm_of)
                at = kernel(t, rows, at, False, place_of, realm_of, now_ms)
            _, fault, recomputed, touched, entered, skips, *hits = s[STOP : HITS + 5].tolist()
            if fault:
                self._require_sound()
            applied = Applied(len(rows), recomputed, touched, entered, cleared_all)
            if skips:
                counts = zip(apply_kernel.SKIP_REASONS, s[SKIPPED:HISTOGRAM].tolist(), strict=False)
                applied.skipped = {reason: count for reason, count in counts if count}
                realm_of[realm_of == apply_kernel.NO_REALM] = apply_kernel.UNKNOWN_REALM
            if placeless:
                applied.skipped[PLACES_SPENT] = placeless
            if any(hits):
                applied.hits_by_tier = {tier: count for tier, count in enumerate(hits) if count}
        return applied

    def serve_from(
        self, records: Records, *, place: int, namespace_id: int, capacity_blocks: int, now_us: int
    ) -> tuple[int, Records]:
        """Run one request's blocks (root to leaf, group 0) through `place` as a cache of `capacity_blocks`.

        `place` holds blocks of that namespace and group alone, or the Removes would not say which block they mean.

        Returns how many were present when their turn came, and the records as they were applied: Access, Store, and
        Remove for what gave way.
        """
        sent = np.empty(2 * len(records), RECORD_DTYPE)
        with self.lock:
            realm = self._make_realm(namespace_id, 0)
            present, count = cache_kernel.serve_request(
                self.tables, records, place, realm, capacity_blocks, min(now_us // 1000, TIME_MS_MAX), sent
            )
        return int(present), sent[: int(count)]

    def clear(self, places: Iterable[int], namespace_id: int | None = None) -> int:
        """Take every block, or those of one namespace, out of `places`; returns how many placements went."""
        with self.lock:
            realms = _ALL_REALMS if namespace_id is None else self._realms_of([namespace_id])
            return sum(change_kernels.clear_place(self.tables, place, realms) for place in places)

    def clear_producer(self, producer: int) -> int:
        """Take out all that a producer has placed; returns how many placements went."""
        return self.clear(self.places_of(producer))

    def remove(self, row: int, place: int) -> bool:
        """Take one block out of a place, whatever its references; whether it was there."""
        with self.lock:
            return bool(change_kernels.remove_one(self.tables, row, place))

    def remove_subtree(self, key: Key, place: int | None = None, at_a_time: int = 4096) -> int:
        """Take a block and all its descendants out of `place` or (None) of every place, children before parents.

        Releases the lock after every `at_a_time` blocks; what is stored meanwhile goes too. Returns how many went.
        """
        scratch = np.empty(at_a_time, np.int32)
        total = 0
        while True:
            with self.lock:
                row = self.row_of(key)
                if row is None:
                    return total
                where = -1 if place is None else place
                count = int(change_kernels.remove_subtree(self.tables, row, where, scratch))
            total += count
            if count < at_a_time:
                return total

    def touched_since_drain(self) -> Array:
        """Rows (i4) of blocks placed in a volume when touched, still placed, in order of first touch; forgets them."""
        with self.lock:
            out = np.empty(int(self._state[TOUCHED_COUNT]), np.int32)
            return out[: change_kernels.drain_touched(self.tables, out)]

    def touched(self) -> Array:
        """The same, and remembers them."""
        with self.lock:
            rows = self.tables.touched[: int(self._state[TOUCHED_COUNT])]
            return rows[self.tables.blocks["placed"][rows] >= 0]

    # -- questions about a sequence

    def match(self, namespace_id: int, group: int, hashes: Hashes, place: int | None = None) -> int:
        """How many leading `hashes` are present in a row, in `place` or (None) anywhere."""
        pairs = as_pairs(hashes)
        realm = self._realm_ids.get((namespace_id, group))
        if realm is None:
            return 0
        with self.lock:
            return int(match_kernel.match_one(self._lookup, pairs, realm, -1 if place is None else place))

    def match_by_place(self, namespace_id: int, group: int, hashes: Hashes) -> Matched:
        """How many leading `hashes` each place has in a row."""
        pairs = as_pairs(hashes)
        realm = self._realm_ids.get((namespace_id, group))
        if realm is None:
            return Matched({})
        with self.lock:
            if len(self._runs) < len(self.places):
                self._runs = np.zeros(2 * len(self.places), np.int32)
            found = np.empty(len(self.places), np.int32)
            found = found[: match_kernel.match_by_place(self._lookup, pairs, realm, self._runs, found)]
            runs = self._runs[found].tolist()
            self._runs[found] = 0
        return Matched(dict(zip(found.tolist(), runs, strict=True)))

    def match_many(self, sequences: Sequence[tuple[int, int, Hashes]], place: int | None = None) -> list[int]:
        """`match` of many (namespace id, group, hashes) at one moment."""
        pairs = [as_pairs(hashes) for _, _, hashes in sequences]
        if not pairs:
            return []
        ends = np.cumsum([len(each) for each in pairs], dtype=np.int64)
        joined = np.concatenate(pairs)
        joined.flags.writeable = False
        out = np.empty(len(pairs), np.int64)
        with self.lock:
            keys = [(namespace_id, group) for namespace_id, group, _ in sequences]
            realms = np.array([self._realm_ids.get(key, -1) for key in keys], np.int64)
            match_kernel.match_several(self._lookup, joined, ends, realms, -1 if place is None else place, out)
        return list(out.tolist())

    # -- questions about blocks

    def __len__(self) -> int:
        """Blocks that are placed somewhere."""
        return int(self._state[BLOCK_ROWS] - self._state[GHOSTS])

    def row_of(self, key: Key) -> int | None:
        """The row of a block or ghost."""
        realm = self._realm_ids.get((key.namespace_id, key.group))
        if realm is None:
            return None
        pairs = as_pairs((key.sequence_hash,))
        with self.lock:
            row = int(match_kernel.row_of_key(self._lookup, pairs, realm))
        return row if row >= 0 else None

    def get(self, key: Key) -> BlockRow | None:
        """The block, or None where it is placed nowhere."""
        with self.lock:
            row = self.row_of(key)
            if row is None:
                return None
            block = self.block(row)
            return block if block.placements else None

    def again(self, block: BlockRow) -> BlockRow | None:
        """The block as it is now, or None where it is placed nowhere any more."""
        with self.lock:
            if self.key_of(block.row) != block.key:
                return None
            now = self.block(block.row)
            return now if now.placements else None

    def key_of(self, row: int) -> Key | None:
        """Of the block or ghost in this row; None for a free one."""
        with self.lock:
            if not 0 <= row < self._state[BLOCK_TOP]:
                return None
            block = self.tables.blocks.item(row)
            return None if block[_MARKS] & FREE else self._key(block[_HASH_LO], block[_HASH_HI], block[_REALM])

    def _key(self, lo: int, hi: int, realm: int) -> Key:
        namespace_id, group, *_ = self.tables.realms.item(realm)
        return Key(namespace_id, group, hi << 64 | lo)

    def block(self, row: int) -> BlockRow:
        """What a row holds. Raises `IndexFault` for a free one."""
        with self.lock:
            if not 0 <= row < self._state[BLOCK_TOP]:
                raise IndexFault(f"there is no block row {row}")
            # By `item`: a row as np.record costs a hundred times as much.
            block = self.tables.blocks.item(row)
            (lo, hi, parent, _, _, _, _, first, depth, touches, realm, block_tokens, first_ms, last_ms, marks) = block
            if marks & FREE:
                raise IndexFault(f"block row {row} is free")
            placements = []
            while first >= 0:
                placed = self.tables.placements.item(first)
                _, _, _, _, block_bytes, uses, last_use_s, references, place = placed
                placements.append(PlacedIn(place, block_bytes, references, uses, last_use_s * 1_000_000))
                first = placed[1]
            return BlockRow(
                row,
                self._key(lo, hi, realm),
                parent,
                depth,
                block_tokens,
                touches,
                ((marks & FIRST_HIGH) << 32 | first_ms) * 1000,
                ((marks >> LAST_SHIFT & FIRST_HIGH) << 32 | last_ms) * 1000,
                tuple(placements),
            )

    def blocks_of(self, rows: Iterable[int]) -> list[BlockRow]:
        """Several at one moment."""
        with self.lock:
            return [self.block(row) for row in rows]

    def is_placed(self, row: int, place: int) -> bool:
        """Whether a block is in a place."""
        with self.lock:
            return self.block(row).placed_in(place) is not None

    def children(self, row: int, at_most: int = 1000) -> tuple[list[int], int]:
        """Rows of children, ghosts among them, the last attached first, and how many there are in all."""
        out = np.empty(at_most, np.int32)
        with self.lock:
            count = int(order_kernels.children_of(self.tables, row, out))
        return list(out[:count].tolist()), count

    def child_counts(self, rows: Sequence[int]) -> list[int]:
        """How many children each has, ghosts among them."""
        out = np.empty(len(rows), np.int64)
        with self.lock:
            order_kernels.child_counts(self.tables, np.asarray(rows, np.int32), out)
        return list(out.tolist())

    def placed_keys(self, place: int) -> npt.NDArray[np.void]:
        """Keys of all blocks of a place, in its order of eviction: `KEY_DTYPE`."""
        with self.lock:
            rows = np.empty(int(self.tables.places[place].placements), np.int32)
            blocks = self.tables.blocks[rows[: order_kernels.coldest_blocks(self.tables, place, rows)]]
            realms = self.tables.realms[blocks["realm"]]
            keys = np.empty(len(blocks), self.KEY_DTYPE)
            keys["namespace_id"], keys["group"] = realms["namespace_id"], realms["group"]
            keys["sequence_hash_lo"], keys["sequence_hash_hi"] = blocks["hash_lo"], blocks["hash_hi"]
        return keys

    # -- orders

    def coldest(self, place: int, count: int = 1) -> list[int]:
        """Rows in the place's order of eviction, leaf or not."""
        out = np.empty(count, np.int32)
        with self.lock:
            return list(out[: order_kernels.coldest_blocks(self.tables, place, out)].tolist())

    def leaves_first(self, place: int, count: int) -> list[int]:
        """Rows of a place, coldest leaf first; a block comes after all its children in that place."""
        out = np.empty(count, np.int32)
        size = 1 << max(12, (8 * count - 1).bit_length())
        with self.lock:
            while True:
                keys = np.zeros(size, np.int64)
                values, heap = np.empty(size, np.int64), np.empty(size // 2, np.int64)
                found = int(order_kernels.coldest_leaves(self.tables, place, out, keys, values, heap))
                if found >= 0:
                    return list(out[:found].tolist())
                size *= 4

    def every_leaf_first(self, place: int) -> Iterator[int]:
        """`leaves_first` without an end. The caller holds `lock` until it is done."""
        given, count = 0, 64
        while True:
            rows = self.leaves_first(place, count)
            yield from rows[given:]
            if len(rows) < count:
                return
            given, count = count, 4 * count

    def hottest(self, count: int, outside: int | None = None) -> list[int]:
        """Rows of the blocks used most that are placed, but not in the place `outside`; ties in row order."""
        place = -1 if outside is None else outside
        with self.lock:
            levels = self._state[HISTOGRAM : HISTOGRAM + LEVELS]
            at_least = np.cumsum(levels[::-1])[::-1]
            wanted = count
            while True:
                deep = np.flatnonzero(at_least[1:] >= wanted)
                level = int(deep[-1]) + 1 if len(deep) else 1
                exact = level <= EXACT_LEVEL_MAX
                room = int(at_least[level + 1] if level + 1 < LEVELS else 0) + (count if exact else int(levels[level]))
                out = np.empty(room, np.int32)
                enough = count if exact else room
                found = int(order_kernels.hot_blocks(self.tables, place, level, enough, out))
                if found >= count or level == 1:
                    break
                wanted = 4 * int(at_least[level])
            rows = out[:found]
            touches = self.tables.blocks["touches"][rows].astype(np.int64)
        return list(rows[np.lexsort((rows, -touches))[:count]].tolist())

    def page(
        self,
        after: int = -1,
        limit: int = 100,
        *,
        place: int | None = None,
        tier: int | None = None,
        namespace_ids: Iterable[int] | None = None,
        hash_prefix: str = "",
        touches: tuple[int, int] | None = None,
        last_touch_us: tuple[int, int] | None = None,
        rows_max: int | None = None,
    ) -> tuple[list[BlockRow], int | None]:
        """Placed blocks after row `after` in row order, and the `after` of the next page (None at the end).

        A block keeps its row, so no page repeats or misses one that stays. The lock is released between steps of
        65,536 rows: blocks of one page may be of different moments. `hash_prefix` is hex. `touches` and `last_touch_us`
        are the least and the most. A page ends short, or empty, once `rows_max` rows were looked at. Raises
        `ValueError`.
        """
        pattern = as_pairs(_prefix(hash_prefix)).reshape(-1)
        where = -1 if place is None else place
        is_sifted = touches is not None or last_touch_us is not None
        blocks: list[BlockRow] = []
        looked_at = 0
        while True:
            room = limit + 1 - len(blocks)
            out = np.empty(1 + (_PAGE_ROWS if is_sifted else room), np.int32)
            with self.lock.shared():
                realms = _ALL_REALMS if namespace_ids is None else self._realms_of(namespace_ids)
                found = order_kernels.page_rows(self.tables, after, _PAGE_ROWS, where, tier or 0, realms, pattern, out)
                rows = out[1 : 1 + found]
                if is_sifted:
                    rows = rows[self._used_so(rows, touches, last_touch_us)][:room]
                blocks += [self.block(row) for row in rows.tolist()]
                looked_at += int(out[0]) - after
                after = int(out[0])
                ended = after >= self._state[BLOCK_TOP] - 1
            if len(blocks) > limit:
                return blocks[:limit], blocks[limit - 1].row
            if ended:
                return blocks, None
            if rows_max is not None and looked_at >= rows_max:
                return blocks, after

    def _used_so(self, rows: Array, touches: tuple[int, int] | None, last_touch_us: tuple[int, int] | None) -> Array:
        """Which of `rows` were touched so often, and last so long ago."""
        blocks = self.tables.blocks
        wanted = np.ones(len(rows), np.bool_)
        if touches is not None:
            times = blocks["touches"][rows]
            wanted &= (times >= touches[0]) & (times <= touches[1])
        if last_touch_us is not None:
            high = blocks["marks"][rows].astype(np.int64) >> LAST_SHIFT & FIRST_HIGH
            last_us = (high << 32 | blocks["last_touch"][rows]) * 1000
            wanted &= (last_us >= last_touch_us[0]) & (last_us <= last_touch_us[1])
        return wanted

    def named(
        self, sequence_hash: int, namespace_ids: Iterable[int] | None = None, at_most: int = 100
    ) -> list[BlockRow]:
        """Placed blocks with this hash, of every namespace and group or of the namespaces' groups."""
        pairs = as_pairs((sequence_hash,))
        wanted = None if namespace_ids is None else set(namespace_ids)
        with self.lock.shared():
            realms = [realm for (each, _), realm in self._realm_ids.items() if wanted is None or each in wanted]
        found: list[BlockRow] = []
        for begin in range(0, len(realms), _REALMS_A_STEP):
            with self.lock.shared():
                for realm in realms[begin : begin + _REALMS_A_STEP]:
                    row = int(match_kernel.row_of_key(self._lookup, pairs, realm))
                    if row < 0 or self.tables.blocks.item(row)[_PLACED] < 0:
                        continue
                    block = self.block(row)
                    # A realm that fell idle between two steps may be another namespace's by now.
                    if wanted is None or block.key.namespace_id in wanted:
                        found.append(block)
            if len(found) >= at_most:
                break
        return found[:at_most]

    # -- figures

    def totals(self) -> Totals:
        """Figures of the whole index at one moment."""
        with self.lock.shared():
            places = self.tables.places[: len(self.places)]
            columns = (places["placements"].tolist(), places["placed_bytes"].tolist(), places["reads"].tolist())
            by_place = [PlaceFigures(*row) for row in zip(*columns, strict=True)]
            by_tier = {tier: Figures(0, 0) for tier in (1, 2, 3, 4)}
            for key, figures in zip(self.places, by_place, strict=True):
                blocks, block_bytes = by_tier.get(key.tier, (0, 0))
                by_tier[key.tier] = Figures(blocks + figures.blocks, block_bytes + figures.block_bytes)
            by_namespace: dict[int, Figures] = {}
            for (namespace_id, _), realm in self._realm_ids.items():
                z = self.tables.realms[realm]
                blocks, block_bytes = by_namespace.get(namespace_id, (0, 0))
                by_namespace[namespace_id] = Figures(blocks + int(z.blocks), block_bytes + int(z.placed_bytes))
            return Totals(
                blocks=len(self),
                ghosts=int(self._state[GHOSTS]),
                placements=int(self._state[PLACEMENT_TOP] - self._state[PLACEMENTS_FREE]),
                by_place=by_place,
                by_tier=by_tier,
                by_namespace=by_namespace,
            )

    def group_of(self, row: int) -> Group:
        """The prefix group of a block."""
        with self.lock.shared():
            while (parent := int(self.tables.blocks[row].parent)) >= 0:
                row = parent
            return self._groups(np.array([row], np.int32))[0]

    def largest_groups(self, count: int) -> list[Group]:
        """Prefix groups with the most blocks. Reads every row, in steps; the lock is released between them."""
        largest: list[Group] = []
        after, ended = -1, False
        while not ended:
            out = np.empty(_PAGE_ROWS + 1, np.int32)
            with self.lock.shared():
                found = int(order_kernels.roots(self.tables, after, _PAGE_ROWS, out))
                after = int(out[0])
                ended = after >= self._state[BLOCK_TOP] - 1
                rows = out[1 : 1 + found]
                figures = np.empty((found, 2), np.int64)
                order_kernels.group_figures(self.tables, rows, figures)
                rows = rows[np.argsort(-figures[:, 0], kind="stable")[:count]]
                largest += self._groups(rows)
            largest = sorted(largest, key=lambda group: (-group.blocks, group.key))[:count]
        return largest

    def _groups(self, rows: Array) -> list[Group]:
        figures = np.empty((len(rows), 2), np.int64)
        order_kernels.group_figures(self.tables, rows, figures)
        pairs = zip(rows.tolist(), figures.tolist(), strict=True)
        return [Group(row, self.block(row).key, blocks, block_bytes) for row, (blocks, block_bytes) in pairs]

    def memory_bytes(self) -> int:
        """Bytes of the tables in use: what has been touched once, and is kept for reuse."""
        s, t = self._state, self.tables
        blocks = int(s[BLOCK_TOP]) * (t.blocks.itemsize + 1) + len(t.peaks)
        ranks = t.ranks.itemsize + t.steps.itemsize if any(t.places["by_frequency"][: len(self.places)]) else 0
        placements = int(s[PLACEMENT_TOP]) * (t.placements.itemsize + ranks)
        return blocks + placements + (ENTRY_DTYPE.itemsize << int(s[BITS]))

    def room(self) -> tuple[int, int]:
        """Blocks and placements that can still be added."""
        s = self._state
        blocks = s[BLOCK_MAX] - s[BLOCK_TOP] + s[BLOCKS_FREE] + s[LIMBO]
        return int(blocks), int(s[PLACEMENT_MAX] - s[PLACEMENT_TOP] + s[PLACEMENTS_FREE])

    def touch_ahead(self, blocks: int) -> None:
        """Have memory ready for so many more blocks, a placement each. Needs no lock: nothing changes."""
        s, t = self._state, self.tables
        top, placed = int(s[BLOCK_TOP]), int(s[PLACEMENT_TOP])
        for table in (t.blocks, t.heat, t.touched):
            populate(table, top, top + blocks)
        populate(t.placements, placed, placed + blocks)
        # A table that doubles spreads over twice the homes.
        populate(t.entries, 0, min(len(t.entries), 4 * (top + blocks)))

    # -- in a file

    def begin_save(self) -> Save:
        """The index as it is at this moment, to be written while batches go on. Close it; one at a time.

        Whoever saves other state with it holds `lock` around both. Raises `ValueError` while another is open.
        """
        with self.lock:
            if self._save is not None:
                raise ValueError("the index is being saved: wait for that save to end")
            self._save = Save.begin(self.tables, self.lock, self.places, self._realms_made, self._end_save)
            return self._save

    def _end_save(self) -> None:
        self._save = None

    def save(self, path: Path, extra: bytes = b"") -> int:
        """Write the index to a file while batches go on; returns its bytes. Raises `OSError`."""
        with self.begin_save() as save:
            return save.write(path, extra)

    @classmethod
    def load(
        cls, path: Path, size: IndexSize | None = None, *, lock: Turnstile | None = None
    ) -> tuple[ArrayIndex, bytes]:
        """An index from a file, and the `extra` that was saved with it.

        Raises `OSError`, `IndexDamaged` where the file is not whole and unaltered, `IndexFull` where it holds more than
        `size` allows.
        """
        size = size if size is not None else IndexSize.for_bytes(MEMORY_BYTES_MAX)
        with open(path, "rb", buffering=0) as file:
            contents = read_contents(path, file)
            blocks, placements = contents.sections["blocks"].rows, contents.sections["placements"].rows
            if blocks > size.blocks_max or placements > size.placements_max:
                raise IndexFull(
                    f"{path} holds {blocks} blocks and {placements} placements, the limit is {size.blocks_max} and "
                    f"{size.placements_max}: raise the index's memory limit"
                )
            bits = size.hash_bits
            while bits < size.hash_bits_max and 4 * blocks > 3 << bits:
                bits += 1
            index = cls(replace(size, hash_bits=bits), lock=lock)
            read_tables(path, file, contents, index.tables)
        index._adopt(contents)
        return index, contents.extra

    def _adopt(self, contents: Contents) -> None:
        """Make again what is not saved."""
        for row, (producer, tier, location) in enumerate(contents.places):
            key = PlaceKey(producer, tier, location)
            self.places.append(key)
            self._place_ids[key] = row
            self._producer_places.setdefault(producer, []).append(row)
            if self.tables.places[row].by_frequency:
                audit_kernels.rank_place(self.tables, row)
        self._realms_made = contents.sections["realms"].rows
        for realm in range(self._realms_made):
            z = self.tables.realms[realm]
            if z.rows:
                self._realm_ids[int(z.namespace_id), int(z.group)] = realm
            else:
                self._realms_free.append(realm)
        audit_kernels.index_rows(self.tables)

    # -- proof

    def check(self) -> None:
        """Verify every invariant, holding the lock. Raises `IndexFault` naming the first that does not hold."""
        with self.lock:
            self._require_sound()
            sums = np.zeros((self._realms_made + LEVELS, 3), np.int64)
            groups = np.zeros((int(self._state[BLOCK_TOP]), 2), np.int64)
            out = np.zeros(2, np.int64)
            for fault in (
                audit_kernels.check_blocks(self.tables, sums, groups, out),
                audit_kernels.check_trees(self.tables, sums, groups, out),
                audit_kernels.check_places(self.tables, len(self.places), out),
                audit_kernels.check_free(self.tables, out),
            ):
                if fault:
                    raise IndexFault(audit_kernels.FAULTS[fault].format(*out.tolist()))

    def _require_sound(self) -> None:
        if self._state[FAULT]:
            raise IndexFault("the hash table's entries crowd in one place, which random tags never do: restart")

    # -- names of places and namespaces

    def _place_table(self, producer: int, locations: tuple[str, ...]) -> Array:
        table = self._place_tables.get((producer, locations))
        if table is None:
            if len(self._place_tables) >= _CACHED_TABLES_MAX:
                self._place_tables.clear()
            table = np.full(5 * len(locations), -1, np.int32)
            self._place_tables[producer, locations] = table
        return table

    def _realm_table(self, namespace_ids: tuple[int, ...]) -> Array:
        table = self._realm_tables.get(namespace_ids)
        if table is None:
            if len(self._realm_tables) >= _CACHED_TABLES_MAX:
                self._realm_tables.clear()
            width = apply_kernel.REALMS_A_NAMESPACE
            table = np.full(width * len(namespace_ids), apply_kernel.UNKNOWN_REALM, np.int32)
            wanted = {namespace_id: i for i, namespace_id in enumerate(namespace_ids)}
            for (namespace_id, group), realm in self._realm_ids.items():
                if namespace_id in wanted:
                    table[wanted[namespace_id] * width + group] = realm
            self._realm_tables[namespace_ids] = table
        return table

    def _make_realm(self, namespace_id: int, group: int) -> int:
        """The realm of a namespace and group, made if there is none; `NO_REALM` where all are in use."""
        known = self._realm_ids.get((namespace_id, group))
        if known is not None:
            return known
        if not self._realms_free and self._realms_made == REALMS_MAX:
            self._drop_idle_realms()
        if self._realms_free:
            realm = self._realms_free.pop()
        elif self._realms_made < REALMS_MAX:
            realm = self._realms_made
            self._realms_made += 1
        else:
            return apply_kernel.NO_REALM
        z = self.tables.realms[realm]
        z.namespace_id, z.group = namespace_id, group
        self._realm_ids[namespace_id, group] = realm
        # Tables made before do not know it: a Remove in a batch that names the namespaces as they do would be none.
        self._realm_tables.clear()
        return realm

    def _drop_idle_realms(self) -> None:
        rows = self.tables.realms["rows"]
        for key, realm in list(self._realm_ids.items()):
            if rows[realm] == 0:
                del self._realm_ids[key]
                self._realms_free.append(realm)
        self._realm_tables.clear()

    def _realms_of(self, namespace_ids: Iterable[int]) -> Array:
        """u1 by realm, 1 for those of the namespaces."""
        wanted = set(namespace_ids)
        marked = np.zeros(max(1, self._realms_made), np.uint8)
        marked[[realm for (namespace_id, _), realm in self._realm_ids.items() if namespace_id in wanted]] = 1
        return marked

    def _name_place(self, record: np.void, producer: int, locations: Sequence[str], place_of: Array) -> bool:
        """Look up or make the record's place; False where no more are made."""
        tier, location = int(record["tier"]), int(record["storage_location"])
        key = PlaceKey(producer, tier, locations[location])
        if len(self.places) >= _PLACES_FOR_EVENTS and key not in self._place_ids:
            return False
        place_of[tier * len(locations) + location] = self.place(key)
        return True

    def _name_realm(self, record: np.void, namespace_ids: Sequence[int], realm_of: Array) -> None:
        namespace, group = int(record["namespace"]), int(record["group"])
        realm = self._make_realm(namespace_ids[namespace], group)
        realm_of[namespace * apply_kernel.REALMS_A_NAMESPACE + group] = realm

    def _clear_record(
        self, record: np.void, producer: int, namespace_ids: Sequence[int], locations: Sequence[str]
    ) -> bool:
        """Obey a Clear; whether it meant everything the producer had placed."""
        tier, location = int(record["tier"]), int(record["storage_location"])
        namespace = int(record["namespace"])
        outside = (location != LOCATION_ALL and location >= len(locations)) or (
            namespace != NAMESPACE_ALL and namespace >= len(namespace_ids)
        )
        if outside:
            self._state[[SKIPPED + apply_kernel.OUTSIDE_TABLE, SKIPS]] += 1
            return False
        name = None if location == LOCATION_ALL else locations[location]
        places = [
            place
            for place in self._producer_places.get(producer, ())
            if (not tier or self.places[place].tier == tier) and (name is None or self.places[place].location == name)
        ]
        self.clear(places, None if namespace == NAMESPACE_ALL else namespace_ids[namespace])
        return namespace == NAMESPACE_ALL and not tier and name is None


def as_pairs(hashes: Hashes) -> npt.NDArray[np.uint64]:
    """`hashes` as read-only u8 (n, 2)."""
    if isinstance(hashes, np.ndarray):
        if hashes.dtype == np.uint64 and hashes.flags.c_contiguous and not hashes.flags.writeable:
            return hashes
        pairs = np.ascontiguousarray(hashes, np.uint64).view()
        pairs.flags.writeable = False
        return pairs
    joined = b"".join([each.to_bytes(16, "little") for each in hashes])
    return np.frombuffer(joined, np.uint64).reshape(-1, 2)


def _prefix(text: str) -> tuple[int, int]:
    """Value and mask of the leading hex digits of a 128-bit hash."""
    if len(text) > 32:
        raise ValueError(f"hash prefix {text!r} has {len(text)} digits: a hash has 32")
    if not text:
        return 0, 0
    rest = 4 * (32 - len(text))
    return int(text, 16) << rest, ((1 << 128) - 1) >> rest << rest
