"""Every kernel once, so that it is compiled, or read from numba's cache, before it is needed."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from advisor.index.array_index import ArrayIndex
from advisor.index.keys import Key, PlaceKey
from advisor.index.layout import IndexSize
from event_plane.schema import BatchTables, EventRecord, EventType, Namespace, RecordFlag, Records, to_records

_NAMESPACE = Namespace()


def warm() -> None:
    """Takes about half a minute where nothing is compiled yet, about a second from the cache."""
    index = ArrayIndex(IndexSize.for_blocks(256, 1024))
    place = index.place(PlaceKey(1, 3, "warm"))
    index.set_volume(place, True)
    for order in ("lfu", "lru"):
        index.set_order(place, order)
        _apply(index, [_event(EventType.STORE, h) for h in (1, 2, 3)])
        _apply(index, [_event(EventType.STORE, h, RecordFlag.FIRST | RecordFlag.COUNTED) for h in (1, 2)])
        _apply(index, [_event(EventType.ACCESS, 2), _event(EventType.REMOVE, 3), _event(EventType.STORE, 3)])
    key = Key(_NAMESPACE.namespace_id, 0, 1)
    index.match(key.namespace_id, 0, [1, 2, 3], place)
    index.match_many([(key.namespace_id, 0, [1, 2])])
    index.match_by_place(key.namespace_id, 0, [1, 2])
    row = index.row_of(key)
    assert row is not None
    index.children(row)
    index.child_counts([row])
    index.coldest(place, 2)
    index.leaves_first(place, 2)
    index.hottest(2)
    index.page()
    index.largest_groups(1)
    index.group_of(row)
    index.touched_since_drain()
    index.check()
    with tempfile.TemporaryDirectory() as folder:
        # Saved while a batch changes what is not copied yet.
        with index.begin_save() as save:
            _apply(index, [_event(EventType.ACCESS, 1), _event(EventType.REMOVE, 3)])
            save.write(Path(folder) / "warm")
        ArrayIndex.load(Path(folder) / "warm", index.size)
    request = _records([_event(EventType.STORE, h) for h in (7, 8)])
    index.serve_from(request, place=place, namespace_id=key.namespace_id, capacity_blocks=2, now_us=0)
    index.remove(row, place)
    index.remove_subtree(Key(key.namespace_id, 0, 7))
    _apply(index, [EventRecord(EventType.CLEAR, 3, namespace=_NAMESPACE)])
    index.clear_producer(1)


def _event(kind: EventType, h: int, flags: int = 0) -> EventRecord:
    return EventRecord(kind, 3, h, _NAMESPACE, "warm", parent_hash=h - 1, block_size=64, block_tokens=16, flags=flags)


def _records(events: list[EventRecord]) -> Records:
    records = to_records(events, BatchTables(), 0)
    # As they come from the wire: numba compiles for read-only arrays apart.
    return np.frombuffer(records.tobytes(), records.dtype)


def _apply(index: ArrayIndex, events: list[EventRecord]) -> None:
    ids = [_NAMESPACE.namespace_id]
    index.apply(_records(events), producer=1, namespace_ids=ids, locations=["warm"], now_us=1_000)
