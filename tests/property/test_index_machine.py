"""The array index against the naive model: equal answers after every step, whatever happens in which order.

Tables are so small that the hash table doubles in many steps, rows are reused, and a save is caught between batches.
"""

from __future__ import annotations

import copy
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from advisor.index import saved_index
from advisor.index.array_index import ArrayIndex
from advisor.index.jit import INTERPRETED
from advisor.index.keys import Key
from advisor.index.layout import IndexSize
from advisor.index.saved_index import Save
from advisor.turnstile import Turnstile
from event_plane.schema import DEPTH_UNKNOWN, LOCATION_ALL, NAMESPACE_ALL, RECORD_DTYPE, EventType, Records
from tests.examples import examples
from tests.index_model import NaiveIndex

SIZE = IndexSize(blocks_max=200, placements_max=400, hash_bits_max=8, hash_bits=2, step_homes=4, finish_homes=4)
NAMESPACES = [5, (1 << 64) - 1]
LOCATIONS = ["a", "b"]
PRODUCERS = [1, 2]

HASH = st.integers(1, 18)
TIER = st.sampled_from([1, 2, 3, 3, 4])
FLAGS = st.sampled_from([0, 0, 0, 1, 2, 2, 3, 3, 4])


def record(**fields: int) -> Records:
    row = np.zeros(1, RECORD_DTYPE)
    for name, value in fields.items():
        row[name] = value
    return row


def hashed(number: int) -> tuple[int, int]:
    """Low and high half: both matter, and neither alone tells all apart."""
    return number // 2, number % 2 << 63 | number // 4


def wide(number: int) -> int:
    lo, hi = hashed(number)
    return hi << 64 | lo


@st.composite
def event(draw: st.DrawFn) -> Records:
    number = draw(HASH)
    # As in a real chain, block n follows block n // 3; now and then it names another, or itself.
    parent = draw(st.sampled_from([number // 3, number // 3, number // 3, 0, number, draw(HASH)]))
    lo, hi = hashed(number)
    parent_lo, parent_hi = hashed(parent)
    return record(
        event_type=draw(st.sampled_from([1, 1, 1, 1, 2, 2, 3])),
        flags=draw(FLAGS),
        tier=draw(TIER),
        group=draw(st.sampled_from([0, 0, 0, 255])),
        depth=draw(st.sampled_from([DEPTH_UNKNOWN, DEPTH_UNKNOWN, 0, 3])),
        sequence_hash_lo=lo,
        sequence_hash_hi=hi,
        parent_hash_lo=parent_lo,
        parent_hash_hi=parent_hi,
        block_size=draw(st.sampled_from([0, 10, 10, 4_000_000_000])),
        block_tokens=draw(st.sampled_from([0, 16])),
        storage_location=draw(st.integers(0, 1)),
        namespace=draw(st.sampled_from([0, 0, 0, 1])),
        hits=draw(st.sampled_from([0, 1, 5, 200])),
    )


@st.composite
def odd_event(draw: st.DrawFn) -> Records:
    """A Clear, or a record that makes no sense."""
    kind = draw(st.sampled_from([4, 4, 4, 0, 9, 1, 2, 3]))
    return record(
        event_type=kind,
        tier=draw(st.sampled_from([0, 1, 3, 5])),
        sequence_hash_lo=draw(st.integers(0, 1)),
        storage_location=draw(st.sampled_from([0, 1, 2, LOCATION_ALL])),
        namespace=draw(st.sampled_from([0, 1, 2, NAMESPACE_ALL])),
    )


@st.composite
def foreign_event(draw: st.DrawFn) -> Records:
    """A counted chain that starts at its root, as vLLM announces it."""
    numbers = draw(st.lists(HASH, min_size=1, max_size=3, unique=True))
    rows = []
    for i, number in enumerate(numbers):
        lo, hi = hashed(number)
        parent_lo, parent_hi = hashed(numbers[i - 1]) if i else (0, 0)
        rows.append(
            record(
                event_type=1, flags=2 | (i == 0), tier=1, sequence_hash_lo=lo, sequence_hash_hi=hi,
                parent_hash_lo=parent_lo, parent_hash_hi=parent_hi, block_size=10,
            )
        )  # fmt: skip
    return np.concatenate(rows)


BATCH = st.lists(st.one_of(event(), event(), event(), foreign_event(), odd_event()), min_size=1, max_size=10).map(
    np.concatenate
)
BATCH_OF_EVENTS = st.lists(event(), min_size=1, max_size=6).map(np.concatenate)


def picture(index: ArrayIndex) -> dict[str, Any]:
    """All that an index knows, by key."""
    blocks = {}
    with index.lock:
        for row in range(int(index.tables.state[0])):
            if int(index.tables.blocks[row].marks) & 1 << 20:
                continue
            block = index.block(row)
            parent = None if block.parent < 0 else index.block(block.parent).key
            placed = {index.places[p.place]: (p.block_bytes, p.references, p.last_use_us) for p in block.placements}
            children, count = index.children(row)
            assert count == len(children)
            blocks[block.key] = (
                parent, block.depth, block.block_tokens, block.touches, block.first_touch_us, block.last_touch_us,
                placed, {index.block(child).key for child in children},
            )  # fmt: skip
        places = {}
        for place, key in enumerate(index.places):
            order = [index.block(row).key for row in index.coldest(place, 400)]
            places[key] = (index.is_volume(place), index.order(place), index.place_figures(place), order)
        touched = [index.block(row).key for row in index.touched().tolist()]
    return {"blocks": blocks, "places": places, "touched": touched}


def picture_of_model(model: NaiveIndex) -> dict[str, Any]:
    blocks = {
        key: (
            block.parent.key if block.parent is not None else None,
            block.depth, block.block_tokens, block.touches, block.first_touch_us, block.last_touch_us,
            {place.key: (x.block_bytes, x.references, x.last_use_us) for place, x in block.placements.items()},
            {child.key for child in block.children},
        )
        for key, block in model.blocks.items()
    }  # fmt: skip
    places = {
        key: (
            place.volume,
            "lru" if place.order is None else "lfu",
            (len(place.blocks), sum(x.block_bytes for x in place.blocks.values()), place.reads),
            [block.key for block in place.coldest()],
        )
        for key, place in model.places.items()
    }
    return {"blocks": blocks, "places": places, "touched": [b.key for b in model.touched if b.placements]}


class InterruptedLock(Turnstile):
    """Runs something whenever a save lets go of the lock."""

    def __init__(self, between: Callable[[], None]) -> None:
        super().__init__()
        self.between = between

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.between()


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = ArrayIndex(SIZE)
        self.model = NaiveIndex()
        self.skipped: Counter[str] = Counter()
        self.hits: Counter[int] = Counter()
        self.recomputed = 0
        self.now_us = 1_700_000_000_000_000
        self.save: Save | None = None
        self.saved: NaiveIndex | None = None
        self.folder = tempfile.TemporaryDirectory()
        self.file = Path(self.folder.name) / "index"

    def teardown(self) -> None:
        if self.save is not None:
            self.save.close()
        self.folder.cleanup()

    def apply(self, records: Records, producer: int) -> None:
        applied = self.index.apply(
            records,
            producer=producer,
            namespace_ids=NAMESPACES,
            locations=LOCATIONS,
            now_us=self.now_us,
        )
        self.skipped += Counter(applied.skipped)
        self.hits += Counter(applied.hits_by_tier)
        self.recomputed += applied.recomputed
        assert applied.events == len(records)

    @rule(records=BATCH, producer=st.sampled_from(PRODUCERS), ms=st.sampled_from([0, 1, 90_000]))
    def batch(self, records: Records, producer: int, ms: int) -> None:
        self.now_us += ms * 1000
        self.apply(records, producer)
        self.model.apply(records, producer, NAMESPACES, LOCATIONS, self.now_us)

    @rule(records=BATCH_OF_EVENTS, pick=st.integers(0, 9), capacity=st.integers(1, 4))
    def request_to_a_place_run_as_a_cache(self, records: Records, pick: int, capacity: int) -> None:
        if not self.index.places:
            return
        place = pick % len(self.index.places)
        key = self.index.places[place]
        if any((b.key.namespace_id, b.key.group) != (NAMESPACES[0], 0) for b in self.model.places[key].blocks):
            return
        wanted = records.copy()
        wanted["event_type"], wanted["flags"], wanted["namespace"], wanted["group"] = EventType.STORE, 0, 0, 0
        wanted["tier"], wanted["storage_location"] = key.tier, LOCATIONS.index(key.location)
        wanted = wanted[np.unique(wanted[["sequence_hash_lo", "sequence_hash_hi"]], return_index=True)[1]]
        _, sent = self.index.serve_from(
            wanted, place=place, namespace_id=NAMESPACES[0], capacity_blocks=capacity, now_us=self.now_us
        )
        # What it tells is what it did.
        self.model.apply(sent, key.producer, NAMESPACES, LOCATIONS, self.now_us)
        # Figures of a served request are its caller's to count.
        self.skipped, self.hits = +self.model.skipped, +self.model.hits_by_tier
        self.recomputed = self.model.recomputed

    @rule(producer=st.sampled_from(PRODUCERS))
    def restart(self, producer: int) -> None:
        assert self.index.clear_producer(producer) == self.model.clear_producer(producer)

    @rule(pick=st.integers(0, 100), volume=st.booleans(), order=st.sampled_from(["lru", "lfu"]))
    def register(self, pick: int, volume: bool, order: str) -> None:
        if self.index.places:
            place = pick % len(self.index.places)
            self.index.set_volume(place, volume)
            self.index.set_order(place, order)
            known = self.model.places[self.index.places[place]]
            known.volume = volume
            self.model.set_order(known, order)

    @rule(number=HASH, pick=st.integers(0, 100), at_a_time=st.integers(1, 4))
    def remove_subtree(self, number: int, pick: int, at_a_time: int) -> None:
        key = Key(NAMESPACES[0], 0, wide(number))
        place = pick % (len(self.index.places) + 1)
        everywhere = place == len(self.index.places)
        known = None if everywhere else self.model.places[self.index.places[place]]
        gone = self.index.remove_subtree(key, None if everywhere else place, at_a_time)
        assert gone == self.model.remove_subtree(key, known)

    @rule()
    def drain(self) -> None:
        rows = self.index.touched_since_drain().tolist()
        assert [self.index.block(row).key for row in rows] == [block.key for block in self.model.drain()]
        assert not len(self.index.touched())

    @precondition(lambda self: self.save is None)
    @rule()
    def begin_save(self) -> None:
        self.save = self.index.begin_save()
        self.saved = copy.deepcopy(self.model)

    @precondition(lambda self: self.save is not None)
    @rule(meanwhile=st.lists(BATCH_OF_EVENTS, max_size=6), recover=st.booleans())
    def end_save(self, meanwhile: list[Records], recover: bool) -> None:
        """Batches arrive between the chunks; the file holds the index as it was when the save began."""
        assert self.save is not None
        assert self.saved is not None

        def between() -> None:
            if meanwhile:
                records = meanwhile.pop()
                self.apply(records, 1)
                self.model.apply(records, 1, NAMESPACES, LOCATIONS, self.now_us)

        self.save.lock = InterruptedLock(between)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(saved_index, "CHUNK_BYTES", 256)
            size = self.save.write(self.file, b"extra")
        assert self.file.stat().st_size == size
        self.save.lock = self.index.lock
        self.save.close()
        self.save = None
        loaded, extra = ArrayIndex.load(self.file, SIZE)
        loaded.check()
        assert extra == b"extra"
        assert picture(loaded) == picture_of_model(self.saved)
        if recover:
            self.index, self.model = loaded, self.saved
            self.skipped, self.hits = +self.model.skipped, +self.model.hits_by_tier
            self.recomputed = self.model.recomputed
        self.saved = None

    @invariant()
    def all_is_equal(self) -> None:
        self.index.check()
        assert picture(self.index) == picture_of_model(self.model)
        assert dict(self.skipped) == dict(self.model.skipped)
        assert self.hits == self.model.hits_by_tier
        assert self.recomputed == self.model.recomputed

    @invariant()
    def equal_answers(self) -> None:
        index, model = self.index, self.model
        placed = model.placed()
        assert len(index) == len(placed)
        for place, key in enumerate(index.places):
            known = model.places[key]
            leaves = [index.block(row).key for row in index.leaves_first(place, 400)]
            assert leaves == [block.key for block in model.leaves_first(known)]
            assert [index.block(row).key for row in index.leaves_first(place, 2)] == leaves[:2]
            touches = [index.block(row).touches for row in index.hottest(3, place)]
            assert touches == sorted((b.touches for b in placed if known not in b.placements), reverse=True)[:3]
            page, _ = index.page(limit=500, place=place)
            assert {block.key for block in page} == {block.key for block in known.blocks}
        for namespace_id in NAMESPACES:
            for path in ([1, 3, 9], [1, 4, 13], [2, 7]):
                hashes = [wide(number) for number in path]
                assert index.match(namespace_id, 0, hashes) == model.match(namespace_id, 0, hashes)
                found = index.match_by_place(namespace_id, 0, hashes).by_place
                expected = {key: model.match(namespace_id, 0, hashes, place) for key, place in model.places.items()}
                by_place = {index.places[place]: count for place, count in found.items()}
                assert by_place == {key: count for key, count in expected.items() if count}
        totals = index.totals()
        assert (totals.blocks, totals.ghosts) == (len(placed), len(model.blocks) - len(placed))
        for namespace_id, figures in totals.by_namespace.items():
            mine = [block for block in placed if block.key.namespace_id == namespace_id]
            block_bytes = sum(x.block_bytes for block in mine for x in block.placements.values())
            assert figures == (len(mine), block_bytes)
        for tier, figures in totals.by_tier.items():
            sizes = [x.block_bytes for b in placed for place, x in b.placements.items() if place.key.tier == tier]
            assert figures == (len(sizes), sum(sizes))
        groups = Counter(model.root(block).key for block in placed)
        largest = {group.key: group.blocks for group in index.largest_groups(200)}
        assert largest == {key: groups[key] for key in largest}
        assert sum(largest.values()) == len(placed)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(
    max_examples=examples(2 if INTERPRETED else 50),
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
