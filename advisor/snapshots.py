"""A producer's snapshot: kept chunk by chunk until its end, then taken for all that the producer has placed. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from advisor.index import INDEX_FULL, ArrayIndex, PlaceKey
from event_plane.schema import RECORD_DTYPE, EventType, RecordFlag, Records


@dataclass(frozen=True, slots=True)
class Chunk:
    """Records of one batch with its tables. The records' flags are not read: every Store of a snapshot is a copy."""

    records: Records
    namespace_ids: tuple[int, ...]
    locations: tuple[str, ...]


@dataclass(slots=True)
class PendingSnapshot:
    """A snapshot whose end has not come; its first batch is `sequence`."""

    sequence: int
    chunks: list[Chunk] = field(default_factory=list)
    records: int = 0

    def add(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.records += len(chunk.records)


@dataclass(frozen=True, slots=True)
class Replaced:
    """What taking a snapshot did: records read, placements taken out, records skipped by reason."""

    records: int
    removed: int
    skipped: Counter[str]


def replace_placements(index: ArrayIndex, producer: int, chunks: Sequence[Chunk], now_us: int) -> Replaced:
    """Make `chunks` all that `producer` has placed. Blocks that stay where they are keep their history and order.

    No Store is a touch. What is not named goes only when all that is named is there, so that a block that moved keeps
    its history too.
    """
    skipped = _store(index, producer, chunks, now_us)
    removed = _remove_unnamed(index, producer, chunks, now_us)
    if removed and skipped[INDEX_FULL]:
        # There is room now for what there was none for; the rest is there already and does not change.
        skipped = _store(index, producer, chunks, now_us)
    return Replaced(sum(len(chunk.records) for chunk in chunks), removed, skipped)


def _store(index: ArrayIndex, producer: int, chunks: Sequence[Chunk], now_us: int) -> Counter[str]:
    skipped: Counter[str] = Counter()
    for chunk in chunks:
        stores = chunk.records[chunk.records["event_type"] == EventType.STORE]
        if others := len(chunk.records) - len(stores):
            skipped["no Store in a snapshot"] += others
        stores["flags"] = RecordFlag.COPY
        applied = index.apply(
            stores, producer=producer, namespace_ids=chunk.namespace_ids, locations=chunk.locations, now_us=now_us
        )
        skipped.update(applied.skipped)
    return skipped


def _remove_unnamed(index: ArrayIndex, producer: int, chunks: Sequence[Chunk], now_us: int) -> int:
    named = _named(producer, chunks)
    removed = 0
    for place in index.places_of(producer):
        key = index.places[place]
        placed = index.placed_keys(place)
        parts = named.get(key, [])
        unnamed = placed[absent(placed, np.concatenate(parts) if parts else placed[:0])]
        if not len(unnamed):
            continue
        namespace_ids, numbers = np.unique(unnamed["namespace_id"], return_inverse=True)
        removes = np.zeros(len(unnamed), RECORD_DTYPE)
        removes["event_type"] = EventType.REMOVE
        removes["tier"] = key.tier
        removes["namespace"] = numbers
        for name in ("group", "sequence_hash_lo", "sequence_hash_hi"):
            removes[name] = unnamed[name]
        index.apply(
            removes,
            producer=producer,
            namespace_ids=namespace_ids.tolist(),
            locations=(key.location,),
            now_us=now_us,
        )
        removed += len(unnamed)
    return removed


def _named(producer: int, chunks: Sequence[Chunk]) -> dict[PlaceKey, list[npt.NDArray[np.void]]]:
    """By place, the keys of the Stores that make sense."""
    named: dict[PlaceKey, list[npt.NDArray[np.void]]] = defaultdict(list)
    for chunk in chunks:
        records = chunk.records
        sound = (
            (records["event_type"] == EventType.STORE)
            & (records["namespace"] < len(chunk.namespace_ids))
            & (records["storage_location"] < len(chunk.locations))
        )
        records = records[sound]
        keys = np.zeros(len(records), ArrayIndex.KEY_DTYPE)
        if len(records):
            keys["namespace_id"] = np.array(chunk.namespace_ids, np.uint64)[records["namespace"]]
        for name in ("group", "sequence_hash_lo", "sequence_hash_hi"):
            keys[name] = records[name]
        where = records["storage_location"].astype(np.int64) << 8 | records["tier"]
        for each in np.unique(where).tolist():
            named[PlaceKey(producer, each & 0xFF, chunk.locations[each >> 8])].append(keys[where == each])
    return named


def absent(keys: npt.NDArray[np.void], among: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Which of `keys` are not `among` those, exactly; both `ArrayIndex.KEY_DTYPE`."""
    both = np.concatenate([among, keys])
    asked = np.arange(len(both)) >= len(among)
    # Equal keys side by side, those of `among` first; the last of lexsort's columns counts most.
    columns = [both[name] for name in ("namespace_id", "group", "sequence_hash_hi", "sequence_hash_lo")]
    order = np.lexsort((asked, *columns))
    starts = np.zeros(len(both), bool)
    starts[:1] = True
    for column in columns:
        in_order = column[order]
        starts[1:] |= in_order[1:] != in_order[:-1]
    first_of_equals = np.flatnonzero(starts)[np.cumsum(starts) - 1] if len(both) else order
    missing = np.zeros(len(both), bool)
    missing[order] = asked[order[first_of_equals]]
    return missing[len(among) :]
