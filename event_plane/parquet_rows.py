"""Batches as rows of a Parquet recording, one row an event, and back without loss (docs/recordings.md). Pure.

What people query is in plain columns. What they do not (a batch's tables, partners' metadata) is in `envelope`: the
batch without its records in the wire format, on the batch's first row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from event_plane import wire
from event_plane.errors import RecordingError
from event_plane.schema import RECORD_DTYPE, Batch, BatchKind, EventType, Namespace, Records

NO_EVENT: Final = "none"
"""Event type of the one row of a batch without records; its other event columns are 0 or null."""

EVENT_NAMES: Final = [
    *({each.value: each.name.lower() for each in EventType}.get(number, str(number)) for number in range(256)),
    NO_EVENT,
]
"""By event type: its name, its number where it has none; last, `NO_EVENT`."""
_NO_EVENT_NUMBER: Final = 256
_EVENT_NUMBERS: Final = {name: number for number, name in enumerate(EVENT_NAMES)}

_TEXT: Final = pa.dictionary(pa.int32(), pa.string())
_KIND: Final = pa.dictionary(pa.int8(), pa.string())
_EVENT: Final = pa.dictionary(pa.int16(), pa.string())

SCHEMA: Final = pa.schema(
    [
        pa.field("position", pa.int64(), nullable=False),
        pa.field("received_at", pa.timestamp("us", tz="UTC")),
        pa.field("source", _TEXT, nullable=False),
        pa.field("producer", pa.uint64(), nullable=False),
        pa.field("epoch", pa.uint64(), nullable=False),
        pa.field("sequence", pa.uint64(), nullable=False),
        pa.field("kind", _KIND, nullable=False),
        pa.field("batch_flags", pa.uint16(), nullable=False),
        pa.field("batch_timestamp_us", pa.uint64(), nullable=False),
        pa.field("first_event_sequence", pa.uint64(), nullable=False),
        pa.field("snapshot_as_of", pa.uint64()),
        pa.field("snapshot_through", pa.uint64()),
        pa.field("event_type", _EVENT, nullable=False),
        pa.field("flags", pa.uint8(), nullable=False),
        pa.field("tier", pa.uint8(), nullable=False),
        pa.field("group", pa.uint8(), nullable=False),
        pa.field("depth", pa.uint32(), nullable=False),
        pa.field("sequence_hash_lo", pa.uint64(), nullable=False),
        pa.field("sequence_hash_hi", pa.uint64(), nullable=False),
        pa.field("prefix_hash_lo", pa.uint64(), nullable=False),
        pa.field("prefix_hash_hi", pa.uint64(), nullable=False),
        pa.field("parent_hash_lo", pa.uint64(), nullable=False),
        pa.field("parent_hash_hi", pa.uint64(), nullable=False),
        pa.field("block_size", pa.uint32(), nullable=False),
        pa.field("block_tokens", pa.uint16(), nullable=False),
        pa.field("location", _TEXT),
        pa.field("tenant", _TEXT),
        pa.field("model", _TEXT),
        pa.field("namespace", _TEXT),
        pa.field("extra", _TEXT),
        pa.field("timestamp_us", pa.uint64(), nullable=False),
        pa.field("event_sequence", pa.uint64(), nullable=False),
        pa.field("hits", pa.uint32(), nullable=False),
        pa.field("reserved", pa.uint64(), nullable=False),
        pa.field("location_index", pa.uint16(), nullable=False),
        pa.field("namespace_index", pa.uint32(), nullable=False),
        pa.field("extra_index", pa.uint32(), nullable=False),
        pa.field("envelope", pa.binary()),
    ]
)
"""Columns of a recording, in order."""

_INDEX_COLUMNS: Final = {
    "storage_location": "location_index", "namespace": "namespace_index", "extra": "extra_index",
}  # fmt: skip
"""Record fields that are indexes into a batch's tables, and the columns that keep them."""
_NUMBER_COLUMNS: Final = {
    name: _INDEX_COLUMNS.get(name, name) for name in RECORD_DTYPE.names or () if name not in ("event_type", "reserved")
}
"""Record fields that are numbers, and their columns."""
COLUMNS_READ: Final = (
    "position", "received_at", "source", "event_type", "reserved", "envelope", *_NUMBER_COLUMNS.values(),
)  # fmt: skip
"""All that a batch is made from again; the others say the same for people."""


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """A batch and how it came. `source` names producer or subscription, as the log does.

    `position` is its place in the recording, from 1, or in the log that it was exported from. `received_us` is µs since
    1970, 0 where it is not known.
    """

    batch: Batch
    source: str = ""
    position: int = 0
    received_us: int = 0


def row_count(batch: Batch) -> int:
    """Rows that `batch` takes: one an event, one where it has none."""
    return max(len(batch.records), 1)


def to_table(recorded: Sequence[RecordedBatch]) -> pa.Table:
    """The rows of `recorded`, in its order. Raises `WireError` for a batch that the wire format cannot say."""
    batches = [each.batch for each in recorded]
    counts = np.array([row_count(batch) for batch in batches])
    firsts = np.cumsum(counts) - counts
    records = np.concatenate([batch.records if len(batch.records) else _NO_RECORD for batch in batches])
    event_numbers = records["event_type"].astype(np.int16)
    event_numbers[firsts[[not len(batch.records) for batch in batches]]] = _NO_EVENT_NUMBER
    columns: dict[str, Any] = {
        "event_type": pa.DictionaryArray.from_arrays(event_numbers, EVENT_NAMES),
        "reserved": np.frombuffer(records["reserved"].tobytes(), "<u8"),
        "envelope": _envelopes(batches, firsts, len(records)),
    }
    columns |= {column: np.ascontiguousarray(records[name]) for name, column in _NUMBER_COLUMNS.items()}
    columns |= _batch_columns(recorded, counts)
    columns |= _texts(batches, records, counts)
    return pa.Table.from_arrays([pa.array(columns[field.name], field.type) for field in SCHEMA], schema=SCHEMA)


_NO_RECORD: Final = np.zeros(1, RECORD_DTYPE)
_NO_RECORDS: Final = np.empty(0, RECORD_DTYPE)


def _envelopes(batches: Sequence[Batch], firsts: npt.NDArray[np.intp], rows: int) -> pa.Array:
    envelopes = np.full(rows, None, dtype=object)
    envelopes[firsts] = [wire.encode(replace(batch, records=_NO_RECORDS)) for batch in batches]
    return pa.array(envelopes, pa.binary())


def _batch_columns(recorded: Sequence[RecordedBatch], counts: npt.NDArray[np.intp]) -> dict[str, Any]:
    """What each row says of its batch."""
    facts: dict[str, tuple[pa.DataType, list[Any]]] = {
        "position": (pa.int64(), [each.position for each in recorded]),
        "received_at": (SCHEMA.field("received_at").type, [each.received_us or None for each in recorded]),
        "source": (pa.string(), [each.source for each in recorded]),
        "producer": (pa.uint64(), [each.batch.producer for each in recorded]),
        "epoch": (pa.uint64(), [each.batch.epoch for each in recorded]),
        "sequence": (pa.uint64(), [each.batch.sequence for each in recorded]),
        "kind": (pa.string(), [BatchKind(each.batch.kind).name.lower() for each in recorded]),
        "batch_flags": (pa.uint16(), [each.batch.flags for each in recorded]),
        "batch_timestamp_us": (pa.uint64(), [each.batch.timestamp_us for each in recorded]),
        "first_event_sequence": (pa.uint64(), [each.batch.first_event_sequence for each in recorded]),
        "snapshot_as_of": (pa.uint64(), [each.batch.snapshot and each.batch.snapshot.as_of for each in recorded]),
        "snapshot_through": (pa.uint64(), [each.batch.snapshot and each.batch.snapshot.through for each in recorded]),
    }
    batch_of_row = pa.array(np.repeat(np.arange(len(recorded)), counts))
    columns = {}
    for name, (kind, values) in facts.items():
        once = pa.array(values, kind)
        if pa.types.is_dictionary(SCHEMA.field(name).type):
            once = once.dictionary_encode()
        columns[name] = once.take(batch_of_row)
    return columns


def _texts(batches: Sequence[Batch], records: Records, counts: npt.NDArray[np.intp]) -> dict[str, pa.Array]:
    """What the records' indexes mean: null for all of them, for none, and for one outside its table."""
    locations, namespaces, extra = (records[name].astype(np.int64) for name in _INDEX_COLUMNS)
    return {
        "location": _meant(locations, [b.locations for b in batches], counts),
        "tenant": _meant(namespaces, [[n.tenant for n in b.namespaces] for b in batches], counts),
        "model": _meant(namespaces, [[n.model for n in b.namespaces] for b in batches], counts),
        "namespace": _meant(namespaces, [[_as_json(n) for n in b.namespaces] for b in batches], counts),
        "extra": _meant(extra - 1, [[_as_json(e) for e in b.extra] for b in batches], counts),
    }


def _meant(
    indexes: npt.NDArray[np.int64], tables: Sequence[Sequence[str | None]], counts: npt.NDArray[np.intp]
) -> pa.Array:
    """For each row: the entry at its index of its batch's table. `counts`: rows of each batch."""
    sizes = np.array([len(table) for table in tables])
    entries = pa.array([entry for table in tables for entry in table], pa.string())
    places = indexes + np.repeat(np.cumsum(sizes) - sizes, counts)
    outside = (indexes < 0) | (indexes >= np.repeat(sizes, counts))
    return entries.dictionary_encode().take(pa.array(places, mask=outside))


def _as_json(entry: Namespace | object) -> str | None:
    """None for partner metadata that JSON cannot say; the envelope holds it all the same."""
    try:
        return msgspec.json.encode(entry).decode()
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError):
        return None


def from_table(table: pa.Table) -> Iterator[RecordedBatch]:
    """The batches of one row group, `COLUMNS_READ` of it at least. Raises `RecordingError` where they cannot be."""
    records = _records_of(table)
    starts = np.flatnonzero(table.column("envelope").is_valid().to_numpy())
    if table.num_rows and starts[:1].tolist() != [0]:
        raise RecordingError("its first row lacks the envelope that begins a batch")
    first = table.take(pa.array(starts))
    facts = zip(
        first.column("envelope").to_pylist(),
        first.column("event_type").to_pylist(),
        first.column("source").to_pylist(),
        first.column("position").to_pylist(),
        first.column("received_at").cast("int64").to_pylist(),
        starts.tolist(),
        [*starts[1:].tolist(), table.num_rows],
        strict=True,
    )
    for envelope, event_type, source, position, received_us, start, end in facts:
        rows = _NO_RECORDS if event_type == NO_EVENT else records[start:end]
        batch = replace(wire.decode(envelope), records=rows)
        yield RecordedBatch(batch, source or "", position, received_us or 0)


def _records_of(table: pa.Table) -> Records:
    records = np.zeros(table.num_rows, RECORD_DTYPE)
    chunks: list[pa.Array] = table.column("event_type").dictionary_encode().unify_dictionaries().chunks
    numbers = pa.concat_arrays(chunks) if chunks else pa.array([], _EVENT)
    try:
        known = [_EVENT_NUMBERS[name] % _NO_EVENT_NUMBER for name in numbers.dictionary.to_pylist()]
    except KeyError as error:
        raise RecordingError(f"it has event type {error}") from error
    records["event_type"] = np.array(known, np.uint8)[numbers.indices.to_numpy()]
    for name, column in _NUMBER_COLUMNS.items():
        records[name] = table.column(column).to_numpy()
    reserved = table.column("reserved").to_numpy().astype("<u8")
    records["reserved"] = np.frombuffer(reserved.tobytes(), "u1").reshape(-1, 8)
    records.flags.writeable = False
    return records
