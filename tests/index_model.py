"""The index and the fold of its records in plain dictionaries, one rule a line: what `ArrayIndex` must answer."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from advisor.index.keys import Key, PlaceKey
from event_plane.schema import (
    DEPTH_UNKNOWN,
    LOCATION_ALL,
    NAMESPACE_ALL,
    EventType,
    RecordFlag,
    Records,
)


class FrequencyOrder:
    """Least frequently used: uses counted while in the place; ties to the least recently promoted."""

    def __init__(self) -> None:
        self.count: dict[NaiveBlock, int] = {}
        self.buckets: dict[int, OrderedDict[NaiveBlock, None]] = {}

    def stored(self, block: NaiveBlock) -> None:
        self.count[block] = 1
        self.buckets.setdefault(1, OrderedDict())[block] = None

    def touched(self, block: NaiveBlock, hits: int) -> None:
        self._leave(block)
        self.count[block] += hits
        self.buckets.setdefault(self.count[block], OrderedDict())[block] = None

    def removed(self, block: NaiveBlock) -> None:
        self._leave(block)
        del self.count[block]

    def _leave(self, block: NaiveBlock) -> None:
        bucket = self.buckets[self.count[block]]
        del bucket[block]
        if not bucket:
            del self.buckets[self.count[block]]

    def coldest(self) -> Iterator[NaiveBlock]:
        for count in sorted(self.buckets):
            yield from self.buckets[count]


class NaivePlacement:
    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.references = 1
        self.last_use_us = 0


class NaiveBlock:
    def __init__(self, key: Key) -> None:
        self.key = key
        self.parent: NaiveBlock | None = None
        self.children: dict[NaiveBlock, None] = {}
        self.placements: dict[NaivePlace, NaivePlacement] = {}
        self.depth = DEPTH_UNKNOWN
        self.block_tokens = 0
        self.touches = 0
        self.first_touch_us = 0
        self.last_touch_us = 0

    def descendants(self) -> Iterator[NaiveBlock]:
        for child in self.children:
            yield child
            yield from child.descendants()


class NaivePlace:
    def __init__(self, key: PlaceKey) -> None:
        self.key = key
        self.volume = False
        self.blocks: OrderedDict[NaiveBlock, NaivePlacement] = OrderedDict()
        self.reads = 0
        self.order: FrequencyOrder | None = None

    def coldest(self) -> Iterator[NaiveBlock]:
        return iter(self.blocks) if self.order is None else self.order.coldest()


class NaiveIndex:
    def __init__(self) -> None:
        self.blocks: dict[Key, NaiveBlock] = {}
        self.places: dict[PlaceKey, NaivePlace] = {}
        self.touched: dict[NaiveBlock, None] = {}
        self.skipped: Counter[str] = Counter()
        self.hits_by_tier: Counter[int] = Counter()
        self.recomputed = 0

    # -- places

    def place(self, key: PlaceKey) -> NaivePlace:
        return self.places.setdefault(key, NaivePlace(key))

    def set_order(self, place: NaivePlace, order: str) -> None:
        place.order = FrequencyOrder() if order == "lfu" else None
        if place.order is not None:
            for block in place.blocks:
                place.order.stored(block)

    # -- changes

    def store(
        self, key: Key, place: NaivePlace, parent_key: Key | None, depth: int, block_bytes: int, block_tokens: int
    ) -> tuple[NaiveBlock, bool]:
        block = self.blocks.get(key)
        if parent_key == key and (block is None or block.parent is None):
            raise ValueError("a block names itself as its parent")
        if block is None:
            block = self.blocks[key] = NaiveBlock(key)
        if parent_key is not None and block.parent is None:
            self._attach(block, parent_key)
        if block.depth == DEPTH_UNKNOWN:
            if depth != DEPTH_UNKNOWN:
                block.depth = depth
            elif block.parent is not None and block.parent.depth != DEPTH_UNKNOWN:
                block.depth = block.parent.depth + 1
        if block_tokens:
            block.block_tokens = block_tokens
        placement = block.placements.get(place)
        if placement is not None:
            if block_bytes:
                placement.block_bytes = block_bytes
            return block, False
        placement = NaivePlacement(block_bytes)
        block.placements[place] = placement
        place.blocks[block] = placement
        if place.order is not None:
            place.order.stored(block)
        return block, True

    def _attach(self, block: NaiveBlock, parent_key: Key) -> None:
        parent = self.blocks.get(parent_key)
        if parent is None:
            parent = self.blocks[parent_key] = NaiveBlock(parent_key)
        elif parent in set(block.descendants()):
            raise ValueError("a block's parent is its own descendant")
        block.parent = parent
        parent.children[block] = None

    def touch(self, block: NaiveBlock, place: NaivePlace, hits: int, now_us: int, entered: bool = False) -> None:
        if not block.touches:
            block.first_touch_us = now_us
        block.touches += hits
        block.last_touch_us = now_us
        if not entered and place in block.placements:
            self._refresh(block, place, hits, now_us)
        if place.key.tier <= 2 and len(block.placements) > 1:
            for other in block.placements:
                if other.volume:
                    self._refresh(block, other, hits, now_us)

    @staticmethod
    def _refresh(block: NaiveBlock, place: NaivePlace, hits: int, now_us: int) -> None:
        block.placements[place].last_use_us = now_us // 1_000_000 * 1_000_000
        place.blocks.move_to_end(block)
        if place.order is not None:
            place.order.touched(block, hits)

    def remove(self, block: NaiveBlock, place: NaivePlace) -> None:
        del block.placements[place]
        del place.blocks[block]
        if place.order is not None:
            place.order.removed(block)
        if not block.placements:
            block.touches = block.first_touch_us = block.last_touch_us = 0
        current: NaiveBlock | None = block
        while current is not None and not current.placements and not current.children:
            parent = current.parent
            del self.blocks[current.key]
            if parent is not None:
                del parent.children[current]
            current = parent

    def clear(self, places: Iterable[NaivePlace], only: Callable[[Key], bool] = lambda _: True) -> int:
        count = 0
        for place in places:
            for block in [block for block in place.blocks if only(block.key)]:
                self.remove(block, place)
                count += 1
        return count

    def clear_producer(self, producer: int) -> int:
        return self.clear([place for key, place in self.places.items() if key.producer == producer])

    def remove_subtree(self, key: Key, place: NaivePlace | None) -> int:
        top = self.blocks.get(key)
        if top is None:
            return 0
        """How many blocks went from somewhere."""
        gone = set()
        for block in [top, *top.descendants()]:
            for here in list(block.placements):
                if place is None or here is place:
                    self.remove(block, here)
                    gone.add(block)
        return len(gone)

    # -- records

    def apply(
        self,
        records: Records,
        producer: int,
        namespace_ids: Sequence[int],
        locations: Sequence[str],
        now_us: int,
    ) -> None:
        announced_until = 0
        rows: list[dict[str, Any]] = [
            dict(zip(records.dtype.names or (), row.tolist(), strict=True)) for row in records
        ]
        for i, row in enumerate(rows):
            kind, tier = row["event_type"], row["tier"]
            sequence_hash = row["sequence_hash_hi"] << 64 | row["sequence_hash_lo"]
            parent_hash = row["parent_hash_hi"] << 64 | row["parent_hash_lo"]
            if kind == EventType.CLEAR:
                self._clear_record(row, producer, namespace_ids, locations)
                continue
            if not 1 <= kind <= 4:
                self.skipped["unknown event type"] += 1
                continue
            if row["namespace"] >= len(namespace_ids) or row["storage_location"] >= len(locations):
                self.skipped["namespace or location outside its table"] += 1
                continue
            if not 1 <= tier <= 4 or not sequence_hash:
                self.skipped["no tier" if sequence_hash else "no sequence hash"] += 1
                continue
            place = self.place(PlaceKey(producer, tier, locations[row["storage_location"]]))
            namespace_id = namespace_ids[row["namespace"]]
            key = Key(namespace_id, row["group"], sequence_hash)
            if kind == EventType.STORE:
                starts = row["flags"] & RecordFlag.COUNTED and row["flags"] & RecordFlag.FIRST and not parent_hash
                if i >= announced_until and starts:
                    announced_until = self._announced(rows, i, namespace_id, place)
                parent = Key(namespace_id, row["group"], parent_hash) if parent_hash else None
                self._store_record(row, key, place, parent, now_us, i < announced_until)
                continue
            block = self.blocks.get(key)
            if kind == EventType.REMOVE:
                placement = block.placements.get(place) if block is not None else None
                if block is None or placement is None:
                    self.skipped["remove of an unknown block"] += 1
                elif row["flags"] & RecordFlag.COUNTED and placement.references > 1:
                    placement.references -= 1
                else:
                    self.remove(block, place)
            elif block is None or not block.placements:
                self.skipped["access to an unknown block"] += 1
            else:
                hits = row["hits"] or 1
                self.touch(block, place, hits, now_us)
                place.reads += hits
                self.hits_by_tier[tier] += hits
                self._note(block)

    def _store_record(
        self, row: dict[str, Any], key: Key, place: NaivePlace, parent: Key | None, now_us: int, announced: bool
    ) -> None:
        try:
            block, entered = self.store(
                key, place, parent, row["depth"], row["block_size"], row["block_tokens"]
            )
        except ValueError as fault:
            self.skipped[str(fault)] += 1
            return
        if entered:
            block.placements[place].last_use_us = now_us // 1_000_000 * 1_000_000
        if row["flags"] & RecordFlag.COUNTED and not entered and not announced:
            block.placements[place].references += 1
        if not row["flags"] & RecordFlag.COPY:
            self.touch(block, place, 1, now_us, entered)
            self._note(block)
            if place.key.tier == 1 and not row["flags"] & RecordFlag.COUNTED:
                self.recomputed += 1

    def _note(self, block: NaiveBlock) -> None:
        if any(place.volume for place in block.placements):
            self.touched[block] = None

    def _announced(self, rows: list[dict[str, Any]], start: int, namespace_id: int, place: NaivePlace) -> int:
        end = start
        while end < len(rows):
            row = rows[end]
            if row["event_type"] != EventType.STORE or (end > start and row["flags"] & RecordFlag.FIRST):
                break
            key = Key(namespace_id, row["group"], row["sequence_hash_hi"] << 64 | row["sequence_hash_lo"])
            block = self.blocks.get(key)
            if block is None or place not in block.placements:
                return start
            end += 1
        return end

    def _clear_record(
        self, row: dict[str, Any], producer: int, namespace_ids: Sequence[int], locations: Sequence[str]
    ) -> None:
        location, namespace, tier = row["storage_location"], row["namespace"], row["tier"]
        if location != LOCATION_ALL and location >= len(locations):
            self.skipped["namespace or location outside its table"] += 1
            return
        if namespace != NAMESPACE_ALL and namespace >= len(namespace_ids):
            self.skipped["namespace or location outside its table"] += 1
            return
        places = [
            place
            for key, place in self.places.items()
            if key.producer == producer
            and (not tier or key.tier == tier)
            and (location == LOCATION_ALL or key.location == locations[location])
        ]
        if namespace == NAMESPACE_ALL:
            self.clear(places)
        else:
            self.clear(places, lambda key: key.namespace_id == namespace_ids[namespace])

    # -- questions

    def placed(self) -> list[NaiveBlock]:
        return [block for block in self.blocks.values() if block.placements]

    def drain(self) -> list[NaiveBlock]:
        rows = [block for block in self.touched if block.placements]
        self.touched.clear()
        return rows

    def match(
        self, namespace_id: int, group: int, hashes: Sequence[int], place: NaivePlace | None = None
    ) -> int:
        count = 0
        for sequence_hash in hashes:
            block = self.blocks.get(Key(namespace_id, group, sequence_hash))
            if block is None or not block.placements or (place is not None and place not in block.placements):
                break
            count += 1
        return count

    def leaves_first(self, place: NaivePlace) -> Iterator[NaiveBlock]:
        rank = {block: i for i, block in enumerate(place.coldest())}
        waiting = {block: sum(child in rank for child in block.children) for block in rank}
        heap = [(rank[block], block.key) for block, children in waiting.items() if not children]
        heapq.heapify(heap)
        while heap:
            _, key = heapq.heappop(heap)
            block = self.blocks[key]
            yield block
            parent = block.parent
            if parent is not None and parent in waiting:
                waiting[parent] -= 1
                if not waiting[parent]:
                    heapq.heappush(heap, (rank[parent], parent.key))

    def root(self, block: NaiveBlock) -> NaiveBlock:
        while block.parent is not None:
            block = block.parent
        return block
