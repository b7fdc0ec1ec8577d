"""Our stream in other engines' words: who reads them holds what our producers placed, whatever they did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from event_plane.dialects.known import open_dialect
from event_plane.dialects.outgoing import Restater, in_payloads, vllm_payload
from event_plane.dialects.words import Words
from event_plane.schema import Batch, BatchKind, BatchTables, EventRecord, EventType, Namespace, to_records
from tests.examples import examples
from tests.foreign_streams import CONFIGURED, live

NAMESPACES = (Namespace(model="m"), Namespace(model="m", adapter="sql"))
Place = tuple[int, int, str, int, int]
"""Producer, tier, location, namespace, group."""
HASHES = st.sampled_from([1, 2, 3, 4, 1 << 64 | 5, 2**128 - 1])
PRODUCERS = st.sampled_from([7, 2**64 - 1])
PLACES = st.tuples(
    PRODUCERS, st.integers(1, 4), st.sampled_from(["gpu:0", "pool"]), st.integers(0, 1), st.sampled_from([0, 2])
)
CHAINS = st.lists(HASHES, min_size=1, max_size=4, unique=True)
OPERATIONS = st.one_of(
    st.tuples(st.just("store"), PLACES, CHAINS),
    st.tuples(st.just("store"), PLACES, CHAINS),
    st.tuples(st.just("remove"), PLACES, CHAINS),
    st.tuples(st.just("clear"), PRODUCERS, st.integers(0, 4), st.sampled_from([None, "gpu:0"])),
    st.tuples(st.just("restart"), PRODUCERS),
    st.tuples(st.just("lost"), PRODUCERS),
    st.tuples(st.just("snapshot"), PRODUCERS, st.lists(st.tuples(PLACES, CHAINS), max_size=3), st.booleans()),
)


@dataclass
class Producers:
    """What was done, as batches, and what is placed after it."""

    placed: set[tuple[Place, int]] = field(default_factory=set)
    epochs: dict[int, int] = field(default_factory=dict)

    def do(self, operation: tuple[Any, ...]) -> Iterator[Batch]:
        match operation:
            case ("store", place, chain):
                self.placed |= {(place, block) for block in chain}
                yield self._batch(place[0], chained(EventType.STORE, place, chain))
            case ("remove", place, chain):
                self.placed -= {(place, block) for block in chain}
                yield self._batch(place[0], chained(EventType.REMOVE, place, chain))
            case ("clear", producer, tier, location):
                self.placed = {
                    (place, block)
                    for place, block in self.placed
                    if place[0] != producer or tier not in (0, place[1]) or location not in (None, place[2])
                }
                yield self._batch(producer, [EventRecord(EventType.CLEAR, tier, location=location)])
            case ("restart", producer):
                self._forget(producer)
                self.epochs[producer] = self.epochs.get(producer, 1) + 1
                yield self._batch(producer, [])
            case ("lost", producer):
                self._forget(producer)
                yield self._batch(producer, [], BatchKind.LOST)
            case ("snapshot", producer, contents, in_new_life):
                if in_new_life:
                    self.epochs[producer] = self.epochs.get(producer, 1) + 1
                self._forget(producer)
                own = [((producer, *place[1:]), chain) for place, chain in contents]
                self.placed |= {(place, block) for place, chain in own for block in chain}
                yield self._batch(producer, [], BatchKind.SNAPSHOT_BEGIN)
                for place, chain in own:
                    yield self._batch(producer, chained(EventType.STORE, place, chain), BatchKind.SNAPSHOT_CHUNK)
                yield self._batch(producer, [], BatchKind.SNAPSHOT_END)

    def _forget(self, producer: int) -> None:
        self.placed = {(place, block) for place, block in self.placed if place[0] != producer}

    def _batch(self, producer: int, events: list[EventRecord], kind: BatchKind = BatchKind.EVENTS) -> Batch:
        tables = BatchTables()
        records = to_records(events, tables, 0)
        epoch = self.epochs.get(producer, 1)
        return Batch(
            producer, epoch, 0, records, kind, namespaces=tuple(tables.namespaces), locations=tuple(tables.locations)
        )


def chained(kind: EventType, place: Place, chain: list[int]) -> list[EventRecord]:
    _, tier, location, namespace, group = place
    whose = NAMESPACES[namespace]
    return [
        EventRecord(kind, tier, block, whose, location, parent_hash=parent, group=group, block_tokens=16)
        for block, parent in zip(chain, [0, *chain], strict=False)
    ]


def read_back(words: Words, batches: list[Batch], dialect: str) -> set[tuple[int, str, int, int]]:
    opened = open_dialect(dialect, namespace=CONFIGURED)
    read = []
    for batch in batches:
        for played in words.say(batch, 1):
            decoded, skipped = opened.decode(played.payload, producer=1, epoch=1, sequence=played.sequence)
            assert (skipped, played.sequence) == ({}, len(read))
            read.append(decoded)
    return live(read)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(OPERATIONS, max_size=12))
def test_reader_of_vllms_words_holds_what_any_producer_placed(operations: list[tuple[Any, ...]]) -> None:
    producers = Producers()
    batches = [batch for operation in operations for batch in producers.do(operation)]
    held = read_back(Words("vllm", b"kv-events"), batches, "vllm")
    assert {(tier, group, block) for tier, _, group, block in held} == {
        (place[1], place[4], block) for place, block in producers.placed
    }


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(OPERATIONS, max_size=12), st.booleans())
def test_reader_of_dynamos_words_holds_what_each_producer_placed(operations: list[tuple[Any, ...]], json: bool) -> None:
    producers = Producers()
    batches = [batch for operation in operations for batch in producers.do(operation)]
    held = read_back(Words("dynamo", b"kv-events", 9, json=json), batches, "dynamo")
    assert {(location, tier, block) for tier, location, _, block in held} == {
        (f"worker-{place[0]}/dp0", place[1], block & (2**64 - 1)) for place, block in producers.placed
    }


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(OPERATIONS, max_size=8))
def test_arrays_say_what_maps_say(operations: list[tuple[Any, ...]]) -> None:
    producers, restater = Producers(), Restater("vllm")
    vllm = open_dialect("vllm", namespace=CONFIGURED)
    for operation in operations:
        for batch in producers.do(operation):
            for changes in in_payloads(restater.take(batch)):
                maps, arrays = (
                    vllm.decode(vllm_payload(changes, 1, arrays=arrays), producer=1, epoch=1, sequence=0)[0]
                    for arrays in (False, True)
                )
                assert maps.records.tobytes() == arrays.records.tobytes()
                assert maps.locations == arrays.locations
