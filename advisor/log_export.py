"""A log as a file for other programs: JSON lines, or a Parquet recording of its batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from advisor.entries import EventLog, LogEntry, decode_control
from advisor.log import read_decoded
from event_plane.parquet import write_parquet
from event_plane.parquet_rows import RecordedBatch
from event_plane.part_file import PartFile
from event_plane.schema import Batch

_HASHES = ("sequence_hash", "prefix_hash", "parent_hash")
_HALVES = {f"{name}_{half}" for name in _HASHES for half in ("lo", "hi")}
_LEFT_OUT = {"reserved", "storage_location", "namespace", "extra", *_HALVES}


def export_json_lines(log: EventLog, place: Path | str, out: Path, first: int, last: int | None) -> int:
    """One line an entry; returns how many. The file has its name when it is whole.

    Numbers of 64 bits and hashes are hexadecimal text, since JSON's readers lose digits. Raises `LogError` or
    `RecordingError`.
    """
    part = PartFile(out)
    encoder = msgspec.json.Encoder()
    count = size_bytes = 0
    try:
        for entry, batch in _within(log, place, first, last):
            line = encoder.encode(entry_object(entry, batch)) + b"\n"
            part.file.write(line)
            count += 1
            size_bytes += len(line)
        part.finish(size_bytes)
    except OSError as error:
        part.discard()
        raise part.unwritable(error) from error
    except BaseException:
        part.discard()
        raise
    return count


def export_parquet(log: EventLog, place: Path | str, out: Path, first: int, last: int | None) -> int:
    """The batches as a recording, without ticks and other entries; returns how many. Raises as the other does."""
    return write_parquet(out, _recorded(_within(log, place, first, last)))


def _within(
    log: EventLog, place: Path | str, first: int, last: int | None
) -> Iterator[tuple[LogEntry, Batch | None]]:
    for entry, batch in read_decoded(log, place, first):
        if last is not None and entry.position > last:
            return
        yield entry, batch


def _recorded(entries: Iterable[tuple[LogEntry, Batch | None]]) -> Iterator[RecordedBatch]:
    for entry, batch in entries:
        if batch is not None:
            yield RecordedBatch(batch, entry.source, entry.position, entry.recorded_us)


def entry_object(entry: LogEntry, batch: Batch | None) -> dict[str, Any]:
    """An entry as JSON types."""
    shown: dict[str, Any] = {"position": entry.position, "kind": str(entry.kind), "recorded_us": entry.recorded_us}
    if batch is None:
        return shown | {"entry": decode_control(entry.payload)}
    shown |= {
        "source": entry.source,
        "producer": f"{batch.producer:016x}",
        "epoch": f"{batch.epoch:016x}",
        "sequence": batch.sequence,
        "foreign_crc": entry.foreign_crc,
        "batch_kind": batch.kind.name.lower(),
        "timestamp_us": batch.timestamp_us,
    }
    if batch.snapshot is not None:
        shown["snapshot"] = {"as_of": batch.snapshot.as_of, "through": batch.snapshot.through}
    return shown | {"events": [_event(batch, record) for record in batch.records]}


def _event(batch: Batch, record: np.void) -> dict[str, Any]:
    names = record.dtype.names or ()
    event = {name: record[name].item() for name in names if name not in _LEFT_OUT}
    event |= {name: f"{int(record[f'{name}_hi']):016x}{int(record[f'{name}_lo']):016x}" for name in _HASHES}
    namespace, location, extra = (int(record[name]) for name in ("namespace", "storage_location", "extra"))
    event["namespace"] = batch.namespaces[namespace] if namespace < len(batch.namespaces) else None
    event["location"] = batch.locations[location] if location < len(batch.locations) else None
    if extra:
        event["extra"] = batch.extra[extra - 1]
    return event
