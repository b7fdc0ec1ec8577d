"""The only encoder and decoder of our batches: 64-byte header, records, extension (ARCHITECTURE.md, section 5).

docs/wire-format.md gives the same by byte offset, with an example.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import msgspec
import numpy as np
from zlib_ng.zlib_ng import crc32

from event_plane.errors import WireError
from event_plane.schema import (
    EXTENSION_BYTES_MAX,
    LOCATION_ALL,
    RECORD_BYTES_MAX,
    RECORD_COUNT_MAX,
    RECORD_DTYPE,
    Batch,
    BatchKind,
    Namespace,
    Records,
    SnapshotRange,
)

MAGIC = b"KVE1"
VERSION = 1
HEADER = struct.Struct("<4sBBHQQQQQIHHII")
CRC_OFFSET = 60
"""Where the CRC-32 lies: the last field of the 64-byte header. It covers what is before and what is after it."""

assert HEADER.size == CRC_OFFSET + 4 == 64

BATCH_BYTES_MAX = HEADER.size + RECORD_COUNT_MAX * RECORD_BYTES_MAX + EXTENSION_BYTES_MAX
"""No batch that keeps the limits is larger; transports refuse larger messages before they read them."""

_KIND_MAX = max(BatchKind)

LOCATIONS_MAX = LOCATION_ALL
"""Entries of the location table: a record's index is a u16 whose last value means all."""


class _Header(NamedTuple):
    magic: bytes
    version: int
    kind: int
    flags: int
    producer: int
    epoch: int
    sequence: int
    first_event_sequence: int
    timestamp_us: int
    record_count: int
    record_bytes: int
    header_bytes: int
    extension_bytes: int
    crc: int


class _Extension(msgspec.Struct, frozen=True, omit_defaults=True):
    namespaces: tuple[Namespace, ...] = ()
    locations: tuple[str, ...] = ()
    extra: tuple[dict[str, Any], ...] = ()
    snapshot: SnapshotRange | None = None


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Extension)


def is_batch(payload: bytes | memoryview) -> bool:
    """Whether `payload` claims to be one of our batches. A foreign MessagePack array never starts like one."""
    return bytes(payload[:4]) == MAGIC


def encode(batch: Batch) -> bytes:
    """Canonical bytes of `batch`. Raises `WireError` where it breaks a limit or holds what the format cannot say."""
    records = batch.records
    if records.ndim != 1 or records.dtype != RECORD_DTYPE:
        raise WireError(f"records have shape {records.shape} and dtype {records.dtype}: give 1-d RECORD_DTYPE")
    if len(records) > RECORD_COUNT_MAX:
        raise WireError(f"batch has {len(records)} records, the limit is {RECORD_COUNT_MAX}: split it")
    if len(batch.locations) > LOCATIONS_MAX:
        raise WireError(f"batch has {len(batch.locations)} locations, the limit is {LOCATIONS_MAX}: split it")
    extension = _encode_extension(batch)
    body = np.ascontiguousarray(records).view(np.uint8).data
    fields = (
        MAGIC, VERSION, batch.kind, batch.flags, batch.producer, batch.epoch, batch.sequence,
        batch.first_event_sequence, batch.timestamp_us, len(records), RECORD_DTYPE.itemsize, HEADER.size,
        len(extension),
    )  # fmt: skip
    try:
        head = HEADER.pack(*fields, 0)[:CRC_OFFSET]
    except struct.error as error:
        raise WireError(f"batch header field out of range ({error}): {_Header(*fields, 0)}") from error
    crc = crc32(extension, crc32(body, crc32(head)))
    return b"".join((head, crc.to_bytes(4, "little"), body, extension))


def decode(payload: bytes | memoryview) -> Batch:
    """Decode one batch. `records` is read-only and shares memory with `payload` (a copy where records are longer).

    Table indexes inside records are not checked: a record that points outside its tables is the fold's to count.
    Raises `WireError`, and nothing else, for bytes that are no whole, undamaged batch within the limits.
    """
    view = memoryview(payload)
    if view.format != "B" or not view.c_contiguous:
        view = memoryview(view.tobytes())
    header = _decode_header(view)
    records_end = header.header_bytes + header.record_count * header.record_bytes
    total_bytes = records_end + header.extension_bytes
    if len(view) != total_bytes:
        raise WireError(f"batch is {len(view)} bytes long but its header says {total_bytes}: it was cut or joined")
    crc = crc32(view[HEADER.size :], crc32(view[:CRC_OFFSET]))
    if crc != header.crc:
        raise WireError(f"batch CRC-32 is {crc:#010x} but its header says {header.crc:#010x}: the bytes were damaged")
    extension = _decode_extension(view[records_end:])
    return Batch(
        producer=header.producer,
        epoch=header.epoch,
        sequence=header.sequence,
        records=_view_records(view, header),
        kind=BatchKind(header.kind),
        flags=header.flags,
        first_event_sequence=header.first_event_sequence,
        timestamp_us=header.timestamp_us,
        namespaces=extension.namespaces,
        locations=extension.locations,
        extra=extension.extra,
        snapshot=extension.snapshot,
    )


def _decode_header(view: memoryview) -> _Header:
    if len(view) < HEADER.size:
        raise WireError(f"batch is {len(view)} bytes long, shorter than its {HEADER.size}-byte header: it was cut")
    header = _Header(*HEADER.unpack_from(view))
    if header.magic != MAGIC:
        raise WireError(f"batch starts with {header.magic!r}, not {MAGIC!r}: it is no batch of this event plane")
    if header.version != VERSION:
        raise WireError(f"batch has version {header.version}, this reader knows {VERSION}: upgrade the older side")
    if header.kind > _KIND_MAX:
        raise WireError(f"batch has unknown kind {header.kind}: upgrade this reader")
    if header.header_bytes < HEADER.size:
        raise WireError(f"batch header size {header.header_bytes} is below {HEADER.size}")
    if not RECORD_DTYPE.itemsize <= header.record_bytes <= RECORD_BYTES_MAX:
        limits = f"{RECORD_DTYPE.itemsize} to {RECORD_BYTES_MAX}"
        raise WireError(f"batch record size {header.record_bytes} is outside {limits}")
    if header.record_count > RECORD_COUNT_MAX:
        raise WireError(f"batch has {header.record_count} records, the limit is {RECORD_COUNT_MAX}")
    if header.extension_bytes > EXTENSION_BYTES_MAX:
        raise WireError(f"batch extension is {header.extension_bytes} bytes, the limit is {EXTENSION_BYTES_MAX}")
    return header


def _view_records(view: memoryview, header: _Header) -> Records:
    if header.record_bytes == RECORD_DTYPE.itemsize:
        records = np.frombuffer(view, RECORD_DTYPE, count=header.record_count, offset=header.header_bytes)
    else:
        strided: Records = np.ndarray(
            header.record_count, RECORD_DTYPE, view, header.header_bytes, (header.record_bytes,)
        )
        records = strided.copy()
    records.flags.writeable = False
    return records


def _encode_extension(batch: Batch) -> bytes:
    if not (batch.namespaces or batch.locations or batch.extra or batch.snapshot):
        return b""
    tables = _Extension(batch.namespaces, batch.locations, tuple(dict(entry) for entry in batch.extra), batch.snapshot)
    try:
        extension = _ENCODER.encode(tables)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"batch extension holds what MessagePack cannot say: {error}") from error
    if len(extension) > EXTENSION_BYTES_MAX:
        raise WireError(f"batch extension is {len(extension)} bytes, the limit is {EXTENSION_BYTES_MAX}: split it")
    return extension


def _decode_extension(extension: memoryview) -> _Extension:
    if not extension:
        return _Extension()
    try:
        tables = _DECODER.decode(extension)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"batch extension of {len(extension)} bytes cannot be read: {error}") from error
    if len(tables.locations) > LOCATIONS_MAX:
        raise WireError(f"batch has {len(tables.locations)} locations, the limit is {LOCATIONS_MAX}")
    if tables.snapshot and min(tables.snapshot.as_of, tables.snapshot.through) < 0:
        raise WireError(f"batch extension has a negative sequence in {tables.snapshot}")
    return tables
