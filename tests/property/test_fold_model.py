"""The fold against a naive model: plain dicts, one rule a line."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from advisor.entries import EntryKind, LogEntry
from advisor.fold import Fold
from advisor.fold_state import export_state, restore_state
from advisor.index import ArrayIndex, IndexSize, Key, PlaceKey
from event_plane import wire
from event_plane.schema import (
    Batch,
    BatchKind,
    BatchTables,
    EventRecord,
    EventType,
    Namespace,
    RecordFlag,
    SnapshotRange,
    to_records,
)
from tests.examples import examples

NAMESPACES = [Namespace(tenant="a"), Namespace(tenant="b")]
PRODUCERS = [11, 12]
LOCATIONS = [(1, "gpu"), (3, "disk")]
HASHES = st.integers(1, 12)
PRODUCER = st.sampled_from(PRODUCERS)
PLACE = st.sampled_from(LOCATIONS)
NAMESPACE = st.integers(0, 1)


@dataclass
class Model:
    """By producer: location to key to references."""

    placed: dict[int, dict[tuple[int, str], Counter[Key]]] = field(
        default_factory=lambda: {p: {place: Counter() for place in LOCATIONS} for p in PRODUCERS}
    )


class FoldMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.fold = Fold(ArrayIndex(IndexSize.for_blocks(256, 1024)))
        self.again = Fold(ArrayIndex(IndexSize.for_blocks(256, 1024)))
        self.model = Model()
        self.computed = 0
        """Stores in G1 of engines that tell what they find, which one that counts references does not."""
        self.position = 0
        self.epochs = dict.fromkeys(PRODUCERS, 1)
        self.sequences = dict.fromkeys(PRODUCERS, 0)
        self.log: list[LogEntry] = []
        self.pending = dict.fromkeys(PRODUCERS, False)
        """Whose snapshot lacks its end."""

    def send(self, producer: int, events: list[EventRecord], kind: BatchKind = BatchKind.EVENTS) -> None:
        tables = BatchTables()
        records = to_records(events, tables, 0)
        batch = Batch(
            producer,
            self.epochs[producer],
            self.sequences[producer],
            records,
            kind=kind,
            namespaces=tuple(tables.namespaces),
            locations=tuple(tables.locations),
            snapshot=SnapshotRange(through=self.sequences[producer]) if kind is BatchKind.LOST else None,
        )
        self.sequences[producer] += 1
        self.position += 1
        if kind in (BatchKind.EVENTS, BatchKind.LOST) and self.pending[producer]:
            # Whatever comes instead of the end breaks the snapshot off: nothing is known of the producer then.
            self.pending[producer] = False
            self.forget(producer)
        entry = LogEntry(self.position, EntryKind.BATCH, wire.encode(batch), source="model")
        self.log.append(entry)
        self.fold.apply(entry, batch)

    # A hash's parent is fixed, as in a real chain: block n follows block n // 2.
    def event(self, kind: EventType, place: tuple[int, str], namespace: int, h: int, flags: int = 0) -> EventRecord:
        return EventRecord(
            kind, place[0], h, NAMESPACES[namespace], place[1], parent_hash=h // 2, block_size=10, flags=flags
        )

    @rule(p=PRODUCER, at=PLACE, ns=NAMESPACE, hs=st.lists(HASHES, min_size=1))
    def store_as_set(self, p: int, at: tuple[int, str], ns: int, hs: list[int]) -> None:
        self.send(p, [self.event(EventType.STORE, at, ns, h) for h in hs])
        self.computed += len(hs) if at[0] == 1 else 0
        for h in hs:
            self.model.placed[p][at][self.key(ns, h)] = self.model.placed[p][at][self.key(ns, h)] or 1

    @rule(p=PRODUCER, at=PLACE, ns=NAMESPACE, hs=st.lists(HASHES, min_size=1, max_size=4))
    def store_counted(self, p: int, at: tuple[int, str], ns: int, hs: list[int]) -> None:
        flags = [RecordFlag.COUNTED | (RecordFlag.FIRST if i == 0 else 0) for i in range(len(hs))]
        self.send(p, [self.event(EventType.STORE, at, ns, h, f) for h, f in zip(hs, flags, strict=True)])
        placed = self.model.placed[p][at]
        keys = [self.key(ns, h) for h in hs]
        if hs[0] // 2 == 0 and all(placed[key] for key in keys):
            return
        for key in keys:
            placed[key] += 1

    @rule(p=PRODUCER, at=PLACE, ns=NAMESPACE, h=HASHES, counted=st.booleans())
    def remove(self, p: int, at: tuple[int, str], ns: int, h: int, counted: bool) -> None:
        self.send(p, [self.event(EventType.REMOVE, at, ns, h, RecordFlag.COUNTED if counted else 0)])
        placed, key = self.model.placed[p][at], self.key(ns, h)
        placed[key] = placed[key] - 1 if counted and placed[key] > 1 else 0

    @rule(p=PRODUCER, at=PLACE, ns=NAMESPACE, h=HASHES)
    def access(self, p: int, at: tuple[int, str], ns: int, h: int) -> None:
        self.send(p, [self.event(EventType.ACCESS, at, ns, h)])

    @rule(p=PRODUCER, at=st.sampled_from([*LOCATIONS, None]), ns=st.sampled_from([0, 1, None]))
    def clear(self, p: int, at: tuple[int, str] | None, ns: int | None) -> None:
        namespace = None if ns is None else NAMESPACES[ns]
        tier, location = (0, None) if at is None else at
        self.send(p, [EventRecord(EventType.CLEAR, tier, namespace=namespace, location=location)])
        for place, placed in self.model.placed[p].items():
            if at is None or place == at:
                for key in list(placed):
                    if namespace is None or key.namespace_id == namespace.namespace_id:
                        placed[key] = 0

    @rule(p=PRODUCER)
    def restart(self, p: int) -> None:
        self.epochs[p] += 1
        self.sequences[p] = 0
        self.send(p, [])
        self.forget(p)

    @rule(
        p=PRODUCER,
        placed=st.lists(st.tuples(PLACE, NAMESPACE, HASHES), max_size=12, unique=True),
        chunk_events=st.integers(1, 6),
        ends=st.booleans(),
        new_epoch=st.booleans(),
        skipped=st.integers(0, 2),
        saved_after=st.none() | st.integers(0, 3),
    )
    def snapshot(
        self,
        p: int,
        placed: list[tuple[tuple[int, str], int, int]],
        chunk_events: int,
        ends: bool,
        new_epoch: bool,
        skipped: int,
        saved_after: int | None,
    ) -> None:
        if new_epoch:
            self.epochs[p] += 1
            self.sequences[p] = 0
        self.sequences[p] += skipped
        stores = [self.event(EventType.STORE, *each) for each in placed]
        kinds: list[tuple[BatchKind, list[EventRecord]]] = [(BatchKind.SNAPSHOT_BEGIN, [])]
        kinds += [(BatchKind.SNAPSHOT_CHUNK, stores[i : i + chunk_events]) for i in range(0, len(stores), chunk_events)]
        kinds += [(BatchKind.SNAPSHOT_END, [])] * ends
        touches = self.touches()
        for number, (kind, events) in enumerate(kinds):
            self.send(p, events, kind)
            if number == saved_after:
                self.save_and_load()
        self.pending[p] = not ends
        if ends:
            for place in LOCATIONS:
                self.model.placed[p][place] = Counter(
                    {self.key(ns, h): 1 for at, ns, h in placed if at == place}
                    | {
                        key: references
                        for key, references in self.model.placed[p][place].items()
                        if references and (place, key) in {(at, self.key(ns, h)) for at, ns, h in placed}
                    }
                )
            assert not self.fold.producers[p].partial
        elif skipped and not new_epoch:
            assert self.fold.producers[p].partial
        now = self.touches()
        assert {key: count for key, count in touches.items() if key in now} == {
            key: count for key, count in now.items() if key in touches
        }

    def touches(self) -> dict[Key, int]:
        return {block.key: block.touches for block in self.fold.index.page(limit=100)[0]}

    def save_and_load(self) -> None:
        """The fold goes on from its own checkpoint."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "index"
            self.fold.index.save(path, export_state(self.fold))
            index, state = ArrayIndex.load(path, IndexSize.for_blocks(256, 1024))
        self.fold = Fold(index)
        restore_state(self.fold, state)

    @rule(p=PRODUCER)
    def lose(self, p: int) -> None:
        self.send(p, [], BatchKind.LOST)
        self.forget(p)
        assert self.fold.producers[p].partial

    def forget(self, p: int) -> None:
        for placed in self.model.placed[p].values():
            placed.clear()

    @staticmethod
    def key(ns: int, h: int) -> Key:
        return Key(NAMESPACES[ns].namespace_id, 0, h)

    @invariant()
    def same_placements(self) -> None:
        index = self.fold.index
        index.check()
        for producer, places in self.model.placed.items():
            for (tier, location), placed in places.items():
                place = index.place(PlaceKey(producer, tier, location))
                found = [index.block(row) for row in index.coldest(place, 100)]
                there = {block.key: block.placed_in(place).references for block in found}  # type: ignore[union-attr]
                assert there == {key: references for key, references in placed.items() if references}
        every = [placed for places in self.model.placed.values() for placed in places.values()]
        live = {key for placed in every for key, references in placed.items() if references}
        assert len(index) == len(live)
        assert self.fold.recomputed == self.computed

    @invariant()
    def matches_stop_at_the_first_absent_block(self) -> None:
        present = [self.fold.index.get(self.key(0, h)) is not None for h in (1, 2, 4, 8)]
        expected = present.index(False) if False in present else 4
        assert self.fold.index.match(NAMESPACES[0].namespace_id, 0, [1, 2, 4, 8]) == expected

    def teardown(self) -> None:
        # Decoded from the bytes this time: the same log gives the same state.
        for entry in self.log:
            self.again.apply(entry)
        assert self.again.digest() == self.fold.digest()


TestFold = FoldMachine.TestCase
TestFold.settings = settings(max_examples=examples(50), stateful_step_count=25, deadline=None)
