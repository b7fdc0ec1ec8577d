"""vLLM's KV events, 0.9 to 0.33: arrays and maps, integer and byte hashes.

A payload is the MessagePack array `[timestamp s, events, data-parallel rank]`; fields and traps are listed in the
reference on foreign streams. One record per block, one batch per payload.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from event_plane.errors import DialectError
from event_plane.schema import (
    DEPTH_UNKNOWN,
    EXTENSION_BYTES_MAX,
    RECORD_COUNT_MAX,
    TIER_ALL,
    Batch,
    BatchTables,
    EventRecord,
    EventType,
    Namespace,
    RecordFlag,
    Tier,
    to_records,
)

HASH_SCHEME: Final = "vllm"
RANK_MAX: Final = 65_535

# Order of the fields while events are arrays; each release appended to it.
FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
        "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership", "session_id",
        "lookahead_token_ids",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx", "locality", "ownership"),
    "AllBlocksCleared": (),
}  # fmt: skip

TIERS: Final[dict[str, Tier]] = {
    "GPU": Tier.G1,
    "CPU": Tier.G2,
    "STORAGE": Tier.G3,
    "FS": Tier.G3,
    "DISK": Tier.G3,
    "OBJ": Tier.G4,
    "EXTERNAL": Tier.G4,
}

_EXTRA_FIELDS: Final = ("lora_id", "lora_name", "extra_keys")
_EXTRA_BYTES_MAX: Final = EXTENSION_BYTES_MAX // 2
_EVENT_SEQUENCE_SHIFT: Final = 16
"""Foreign events have no numbers: sequence << 16 | place in the batch rises, since a batch has at most 2^16 records."""
_FIRST: Final = RecordFlag.FIRST | RecordFlag.COUNTED
_FOLLOWING: Final = RecordFlag.COUNTED
_U64: Final = 0xFFFF_FFFF_FFFF_FFFF

assert RECORD_COUNT_MAX <= 1 << _EVENT_SEQUENCE_SHIFT


class _Envelope(msgspec.Struct, array_like=True):
    """The payload, its events unread. 0.9.0 and 0.9.3 end after the events; what later releases append is not read."""

    timestamp: float | int | None
    events: msgspec.Raw
    rank: int | None = None


_ENVELOPES: Final = msgspec.msgpack.Decoder(_Envelope)
_EVENTS: Final = msgspec.msgpack.Decoder(list[Any])


class _BadEventError(Exception):
    """One event that makes no sense; its text is the reason it is counted under."""


class VllmDialect:
    """Turns vLLM payloads into our batches. Holds configuration only, so one may serve every thread."""

    def __init__(self, *, namespace: Namespace, hash_root_shared: bool = False) -> None:
        """`namespace`: tenant, model and revision as configured; nothing else of it is used, the engine says the rest.

        `hash_root_shared`: hashes mean the same in every life of the engine, so its epochs share one namespace.
        """
        self._namespace = Namespace(
            tenant=namespace.tenant,
            model=namespace.model,
            revision=namespace.revision,
            hash_scheme=HASH_SCHEME,
            hash_root=namespace.hash_root,
        )
        self._hash_root_shared = hash_root_shared

    def rank(self, payload: bytes) -> int:
        """Data-parallel rank that sent `payload`, 0 where it says none. Raises `DialectError`."""
        rank = _envelope(payload).rank or 0
        if not 0 <= rank <= RANK_MAX:
            raise DialectError(f"vLLM payload has data-parallel rank {rank}, outside 0 to {RANK_MAX}")
        return rank

    def decode(self, payload: bytes, *, producer: int, epoch: int, sequence: int) -> tuple[Batch, Counter[str]]:
        """The batch, and how many events were skipped for which reason.

        Raises `DialectError` for a payload that is no vLLM batch or holds more blocks than a batch may.
        """
        envelope = _envelope(payload)
        try:
            events = _EVENTS.decode(envelope.events)
        except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
            raise DialectError(f"events of a {len(payload)}-byte vLLM payload cannot be read: {error}") from error
        skipped: Counter[str] = Counter()
        reader = _EventReader(self._namespace_of(producer, epoch), _microseconds(envelope.timestamp))
        records: list[EventRecord] = []
        for event in events:
            try:
                records += reader.read(event)
            except _BadEventError as reason:
                skipped[str(reason)] += 1
        if len(records) > RECORD_COUNT_MAX:
            raise DialectError(f"vLLM payload names {len(records)} blocks, a batch holds {RECORD_COUNT_MAX}")
        tables = BatchTables()
        first_event_sequence = sequence << _EVENT_SEQUENCE_SHIFT & _U64
        batch = Batch(
            producer=producer,
            epoch=epoch,
            sequence=sequence,
            records=to_records(records, tables, first_event_sequence),
            first_event_sequence=first_event_sequence,
            timestamp_us=reader.timestamp_us,
            namespaces=tuple(tables.namespaces),
            locations=tuple(tables.locations),
            extra=tuple(tables.extra),
        )
        return batch, skipped

    def _namespace_of(self, producer: int, epoch: int) -> Namespace:
        if self._hash_root_shared:
            return self._namespace
        return msgspec.structs.replace(self._namespace, hash_root=f"{producer:016x}/{epoch:x}")


class _EventReader:
    """Reads the events of one payload. Raises `_BadEventError` for one that makes no sense."""

    def __init__(self, namespace: Namespace, timestamp_us: int) -> None:
        self.timestamp_us = timestamp_us
        self._namespace = namespace
        self._extra_bytes = 0

    def read(self, event: object) -> list[EventRecord]:
        tag, fields = _fields(event)
        match tag:
            case "BlockStored":
                return self._stored(fields)
            case "BlockRemoved":
                return self._removed(fields)
            case "AllBlocksCleared":
                return [EventRecord(EventType.CLEAR, tier=TIER_ALL, flags=_FIRST, timestamp_us=self.timestamp_us)]
        raise _BadEventError("unknown event type")

    def _stored(self, fields: Mapping[str, Any]) -> list[EventRecord]:
        hashes = _hashes(fields)
        block_tokens = _unsigned(fields, "block_size", 0xFFFF)
        given_parent = fields.get("parent_block_hash")
        at_root = given_parent is None
        before = 0 if at_root else _hash(given_parent)
        parent = 0
        records = self._records(EventType.STORE, hashes, fields)
        for depth, (block, record) in enumerate(zip(hashes, records, strict=True)):
            # A block that follows itself is not its own parent: it keeps the one it had, or none that is known.
            if block != before:
                parent, before = before, block
            record.parent_hash = parent
            record.block_tokens = block_tokens
            record.depth = depth if at_root else DEPTH_UNKNOWN
            record.prefix_hash = hashes[0] if at_root else 0
        records[0].extra = self._extra(fields)
        return records

    def _removed(self, fields: Mapping[str, Any]) -> list[EventRecord]:
        return self._records(EventType.REMOVE, _hashes(fields), fields)

    def _records(self, event_type: EventType, hashes: list[int], fields: Mapping[str, Any]) -> list[EventRecord]:
        """One record per block, with what Store and Remove both say: the place, which is part of the key."""
        medium = _medium(fields)
        tier = TIERS[medium]
        group = _unsigned(fields, "group_idx", 0xFF)
        location = _location(medium, fields)
        return [
            EventRecord(
                event_type,
                tier=tier,
                sequence_hash=sequence_hash,
                namespace=self._namespace,
                location=location,
                group=group,
                flags=_FOLLOWING if i else _FIRST,
                timestamp_us=self.timestamp_us,
            )
            for i, sequence_hash in enumerate(hashes)
        ]

    def _extra(self, fields: Mapping[str, Any]) -> dict[str, Any] | None:
        """What only a Store says and the hash already covers: shown, never part of a key."""
        extra = {name: fields[name] for name in _EXTRA_FIELDS if _says_something(fields.get(name))}
        if not extra:
            return None
        self._extra_bytes += len(msgspec.msgpack.encode(extra))
        return extra if self._extra_bytes <= _EXTRA_BYTES_MAX else None


def _envelope(payload: bytes) -> _Envelope:
    try:
        return _ENVELOPES.decode(payload)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise DialectError(f"{len(payload)} bytes are no vLLM payload [timestamp, events, rank]: {error}") from error


def _fields(event: Any) -> tuple[str, Mapping[str, Any]]:
    match event:
        case {"type": str(tag)}:
            return tag, event
        case [str(tag), *values]:
            return tag, dict(zip(FIELDS.get(tag, ()), values, strict=False))
    raise _BadEventError("no event")


def _hashes(fields: Mapping[str, Any]) -> list[int]:
    match fields.get("block_hashes"):
        case [_, *_] as given:
            return [_hash(each) for each in given]
        case []:
            raise _BadEventError("no hashes")
    raise _BadEventError("bad hashes")


def _hash(given: object) -> int:
    """128 bits. An integer is the low half, signed where Python's own hash was used (0.9); of bytes the last 16 count,
    so that both modes agree in the low half."""
    match given:
        case bool():
            pass
        case int() if given:
            return given & _U64
        case bytes() if any(given[-16:]):
            return int.from_bytes(given[-16:], "big")
    raise _BadEventError("bad hash")


def _medium(fields: Mapping[str, Any]) -> str:
    match fields.get("medium"):
        case None:
            return "GPU"
        case str(given) if given.upper() in TIERS:
            return given.upper()
    raise _BadEventError("unknown medium")


def _location(medium: str, fields: Mapping[str, Any]) -> str:
    match fields.get("locality"):
        case None:
            return medium
        case str(given) if given.upper() == "LOCAL":
            return medium
        case str(given) if given.upper() == "REMOTE":
            return f"{medium}/REMOTE"
    raise _BadEventError("unknown locality")


def _unsigned(fields: Mapping[str, Any], name: str, maximum: int) -> int:
    given = fields.get(name)
    if given is None:
        return 0
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given <= maximum:
        raise _BadEventError(f"bad {name}")
    return given


def _says_something(given: object) -> bool:
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        return any(each is not None for each in given)
    return given is not None and given != ""


def _microseconds(timestamp_s: float | int | None) -> int:
    """0 where the engine's clock says nothing that makes sense."""
    if timestamp_s is None or not math.isfinite(timestamp_s) or not 0 <= timestamp_s * 1e6 <= _U64:
        return 0
    return min(round(timestamp_s * 1e6), _U64)
