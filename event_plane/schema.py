"""The event contract: records, batches, namespaces and their limits (ARCHITECTURE.md, section 5).

Everything here is data. Encoding lives in `event_plane.wire`, hashing in `event_plane.hashing`.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

DEPTH_UNKNOWN = 0xFFFF_FFFF
LOCATION_ALL = 0xFFFF
NAMESPACE_ALL = 0xFFFF_FFFF
TIER_ALL = 0

RECORD_COUNT_MAX = 65_536
"""Records in one batch. A batch of this size is 6.5 MB."""
EXTENSION_BYTES_MAX = 4 * 1024 * 1024
"""Bytes of one batch's extension block."""
RECORD_BYTES_MAX = 1_024
"""Largest record size a reader accepts; what lies past `RECORD_DTYPE` is stepped over."""


class EventType(enum.IntEnum):
    STORE = 1
    REMOVE = 2
    ACCESS = 3
    CLEAR = 4


class Tier(enum.IntEnum):
    """Where in the memory hierarchy: device, host, local disk, remote."""

    G1 = 1
    G2 = 2
    G3 = 3
    G4 = 4


class RecordFlag(enum.IntFlag):
    FIRST = 1
    """First record of a foreign event; an event stays in one batch."""
    COUNTED = 2
    """The fold applies the counting rule; without it, set semantics."""
    COPY = 4
    """Copy of an existing block (offload, put, onboard, move): not a touch."""


class BatchKind(enum.IntEnum):
    EVENTS = 0
    SNAPSHOT_BEGIN = 1
    SNAPSHOT_CHUNK = 2
    SNAPSHOT_END = 3
    HEARTBEAT = 4
    LOST = 5
    """Sequences `sequence` … `snapshot.through` can never be had: the fold clears what this producer placed."""


RECORD_DTYPE: np.dtype[np.void] = np.dtype(
    [
        ("event_type", "u1"),
        ("flags", "u1"),
        ("tier", "u1"),
        ("group", "u1"),
        ("depth", "<u4"),
        ("sequence_hash_lo", "<u8"),
        ("sequence_hash_hi", "<u8"),
        ("prefix_hash_lo", "<u8"),
        ("prefix_hash_hi", "<u8"),
        ("parent_hash_lo", "<u8"),
        ("parent_hash_hi", "<u8"),
        ("block_size", "<u4"),
        ("block_tokens", "<u2"),
        ("storage_location", "<u2"),
        ("namespace", "<u4"),
        ("timestamp_us", "<u8"),
        ("event_sequence", "<u8"),
        ("extra", "<u4"),
        ("hits", "<u4"),
        ("reserved", "u1", (8,)),
    ]
)
"""One event, 100 bytes, little-endian, unaligned."""

assert RECORD_DTYPE.itemsize == 100

Records = npt.NDArray[np.void]
"""One-dimensional array of `RECORD_DTYPE`."""


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal before two blocks with one hash are the same block."""

    tenant: str = "default"
    model: str = ""
    revision: str = ""
    adapter: str = ""
    kv_dtype: str = ""
    block_tokens: int = 0
    hash_scheme: str = "xxh3-blake2b"
    hash_root: str = ""
    """Salt or root of the hash chain; for a foreign stream producer and epoch, unless its root is declared shared."""

    def canonical(self) -> bytes:
        """The bytes that `namespace_id` is the digest of: MessagePack, fields in declaration order."""
        return msgspec.msgpack.encode(msgspec.structs.astuple(self))

    @property
    def namespace_id(self) -> int:
        """u64 identity, the same in every process: BLAKE2b-64 of `canonical()`."""
        return _namespace_id(self)


@lru_cache(maxsize=4096)
def _namespace_id(namespace: Namespace) -> int:
    """Kept: every batch of a producer brings the same few."""
    return int.from_bytes(hashlib.blake2b(namespace.canonical(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class SnapshotRange:
    """Extension key `snapshot`. `as_of`: last sequence that the snapshot includes. `through`: last lost sequence."""

    as_of: int = 0
    through: int = 0


@dataclass(frozen=True)
class Batch:
    """One decoded batch. `records` is read-only and may share memory with the bytes it came from."""

    producer: int
    epoch: int
    sequence: int
    records: Records
    kind: BatchKind = BatchKind.EVENTS
    flags: int = 0
    first_event_sequence: int = 0
    timestamp_us: int = 0
    namespaces: tuple[Namespace, ...] = ()
    locations: tuple[str, ...] = ()
    extra: tuple[Mapping[str, Any], ...] = ()
    """Partner metadata; a record's `extra` is 1-based here, 0 is none."""
    snapshot: SnapshotRange | None = None

    @cached_property
    def namespace_ids(self) -> tuple[int, ...]:
        return tuple(namespace.namespace_id for namespace in self.namespaces)


@dataclass(slots=True)
class EventRecord:
    """One event as a publisher hands it over, before batching gives it table indexes and a sequence.

    Hashes are 128-bit integers, sizes bytes, times µs by the producer's clock.
    """

    event_type: EventType
    tier: int
    sequence_hash: int = 0
    namespace: Namespace | None = None
    """None: every namespace (Clear only)."""
    location: str | None = None
    """None: every location (Clear only)."""
    parent_hash: int = 0
    prefix_hash: int = 0
    depth: int = DEPTH_UNKNOWN
    group: int = 0
    block_size: int = 0
    block_tokens: int = 0
    flags: int = 0
    hits: int = 0
    timestamp_us: int = 0
    extra: Mapping[str, Any] | None = None


def producer_id(name: str) -> int:
    """u64 id of a producer, stable across its lives: BLAKE2b-64 of its name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


@dataclass(slots=True)
class BatchTables:
    """Collects the location, namespace and extra tables while a batch is built."""

    namespaces: dict[Namespace, int] = field(default_factory=dict)
    locations: dict[str, int] = field(default_factory=dict)
    extra: list[Mapping[str, Any]] = field(default_factory=list)

    def namespace(self, namespace: Namespace | None) -> int:
        return NAMESPACE_ALL if namespace is None else self.namespaces.setdefault(namespace, len(self.namespaces))

    def location(self, location: str | None) -> int:
        return LOCATION_ALL if location is None else self.locations.setdefault(location, len(self.locations))

    def add_extra(self, extra: Mapping[str, Any] | None) -> int:
        if not extra:
            return 0
        self.extra.append(extra)
        return len(self.extra)


def to_records(events: list[EventRecord], tables: BatchTables, first_event_sequence: int) -> Records:
    """Lay `events` out as `RECORD_DTYPE`, filling `tables`; event sequences rise from `first_event_sequence`."""
    mask = 0xFFFF_FFFF_FFFF_FFFF
    rows = [
        (
            e.event_type,
            e.flags,
            e.tier,
            e.group,
            e.depth,
            e.sequence_hash & mask,
            e.sequence_hash >> 64,
            e.prefix_hash & mask,
            e.prefix_hash >> 64,
            e.parent_hash & mask,
            e.parent_hash >> 64,
            e.block_size,
            e.block_tokens,
            tables.location(e.location),
            tables.namespace(e.namespace),
            e.timestamp_us,
            first_event_sequence + i,
            tables.add_extra(e.extra),
            e.hits,
            (0,) * 8,
        )
        for i, e in enumerate(events)
    ]
    return np.array(rows, dtype=RECORD_DTYPE)
