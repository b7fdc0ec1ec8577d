"""Mooncake Store's KV events: `[timestamp ms, events, 0]` in MessagePack, numbered from 1, with no way to ask again.

An event is a map whose `event_type` is `stored` or `removed`; many of its fields are nil. Its medium, group and back
end are the block's place, since a Remove tells them too. Blocks are named by `seq_hashes`, or `block_hashes` where they
lack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from operator import attrgetter
from typing import Annotated, Any, Final

import msgspec

from event_plane.dialects.columns import (
    MALFORMED,
    US_PER_MS,
    BadEventError,
    Columns,
    Hash,
    anything_said,
    checked_hash,
    checked_hashes,
    checked_unsigned,
    microseconds,
)
from event_plane.dialects.protocol import Origin
from event_plane.dialects.reading import ColumnDialect
from event_plane.errors import DialectError
from event_plane.schema import DEPTH_UNKNOWN, Namespace, Tier
from event_plane.transport import Message

DEFAULT_MEDIUM: Final = "STORE"
"""Of an event that names none: the store is a pool that other hosts share."""
TIERS: Final[dict[str, Tier]] = {
    "GPU": Tier.G1,
    "CPU": Tier.G2,
    "DRAM": Tier.G2,
    "MEMORY": Tier.G2,
    "DISK": Tier.G3,
    "SSD": Tier.G3,
    "LOCAL_DISK": Tier.G3,
    "NOF": Tier.G4,
    "OBJ": Tier.G4,
    "REMOTE": Tier.G4,
    DEFAULT_MEDIUM: Tier.G4,
}
EXTRA: Final = ("tenant_id", "lora_name", "object_key")
_FIRST_SEQUENCE: Final = 1
_GROUP_MAX: Final = 0xFF
_TOKENS_MAX: Final = 0xFFFF
_DEPTH_MAX: Final = DEPTH_UNKNOWN >> 1

_Name = str | int | None


class _Event(msgspec.Struct, gc=False):
    event_type: str
    seq_hashes: list[Hash] | None = None
    block_hashes: list[Hash] | None = None
    parent_hash: Hash | None = None
    base_block_idx: Annotated[int, msgspec.Meta(ge=0, le=_DEPTH_MAX)] | None = None
    block_size: Annotated[int, msgspec.Meta(ge=0, le=_TOKENS_MAX)] | None = None
    medium: str | None = None
    group_id: _Name = None
    backend_id: _Name = None
    tenant_id: Any = None
    lora_name: Any = None
    object_key: Any = None


class _Payload(msgspec.Struct, array_like=True):
    timestamp: float | int | None
    events: list[_Event]


class _Envelope(msgspec.Struct, array_like=True):
    timestamp: float | int | None
    events: list[Any]


_SAID: Final = attrgetter(*EXTRA)
_PAYLOADS: Final = msgspec.msgpack.Decoder(_Payload)
_ENVELOPES: Final = msgspec.msgpack.Decoder(_Envelope)


class MooncakeDialect(ColumnDialect):
    """See `Dialect`."""

    def __init__(self, *, namespace: Namespace, hash_root_shared: bool = False) -> None:
        super().__init__("mooncake", namespace=namespace, hash_root_shared=hash_root_shared)

    def origin(self, message: Message) -> Origin:
        """The store; its numbers begin with 1. Raises `DialectError` for 0."""
        if message.transport_sequence < _FIRST_SEQUENCE:
            raise DialectError(
                f"Mooncake batch has sequence {message.transport_sequence}, it counts from {_FIRST_SEQUENCE}: check"
                " that this is its stream"
            )
        return Origin("store", message.transport_sequence - _FIRST_SEQUENCE)

    def _read_typed(self, payload: bytes) -> tuple[Columns, int]:
        read = _PAYLOADS.decode(payload)
        columns = Columns("Mooncake")
        _add_typed(columns, _Places(columns), read.events)
        return columns, microseconds(read.timestamp, US_PER_MS)

    def _read_each(self, payload: bytes, skipped: Counter[str]) -> tuple[Columns, int]:
        try:
            envelope = _ENVELOPES.decode(payload)
        except MALFORMED as error:
            raise DialectError(f"{len(payload)} bytes are no Mooncake payload [timestamp, events]: {error}") from error
        columns = Columns("Mooncake")
        places = _Places(columns)
        for event in envelope.events:
            try:
                _add_checked(columns, places, event)
            except BadEventError as reason:
                skipped[str(reason)] += 1
        return columns, microseconds(envelope.timestamp, US_PER_MS)


class _Places(dict[tuple[str | None, _Name, _Name], int]):
    """Numbers of a payload's places, by medium, group and back end. Raises `BadEventError` for an unknown medium."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    def __missing__(self, key: tuple[str | None, _Name, _Name]) -> int:
        medium, group, backend = key
        name = DEFAULT_MEDIUM if medium is None else medium.upper()
        tier = TIERS.get(name)
        if tier is None:
            raise BadEventError("unknown medium")
        location = name if backend is None else f"{name}/{backend}"
        number = 0
        if isinstance(group, int) and 0 <= group <= _GROUP_MAX:
            number = group
        elif group is not None:
            # It cannot be part of the block's key, so it is part of the place.
            location += f"/group-{group}"
        self[key] = place = self._columns.place(tier, location, number)
        return place


def _add_typed(columns: Columns, places: _Places, events: list[_Event]) -> None:
    said = anything_said(events, EXTRA)
    for event in events:
        hashes = event.seq_hashes or event.block_hashes
        if not hashes:
            raise BadEventError
        place = places[event.medium, event.group_id, event.backend_id]
        if event.event_type == "stored":
            extra = columns.extra(dict(zip(EXTRA, _SAID(event), strict=True))) if said else 0
            depth = _depth(event.base_block_idx, event.parent_hash)
            columns.store(hashes, place, event.parent_hash, depth, event.block_size or 0, extra)
        elif event.event_type == "removed":
            columns.remove(hashes, place)
        else:
            raise BadEventError


def _add_checked(columns: Columns, places: _Places, event: object) -> None:
    """Add one event of any shape. Raises `BadEventError`, and has then added nothing."""
    match event:
        case {"event_type": "stored" | "removed" as kind, **fields}:
            pass
        case {"event_type": _}:
            raise BadEventError("unknown event type")
        case _:
            raise BadEventError("no event")
    named = fields.get("seq_hashes") or fields.get("block_hashes")
    hashes = checked_hashes([] if named is None else named)
    key = _checked_key(fields)
    if kind == "removed":
        columns.remove(hashes, places[key])
        return
    given_parent = fields.get("parent_hash")
    parent = None if given_parent is None else checked_hash(given_parent)
    base = checked_unsigned(fields, "base_block_idx", _DEPTH_MAX) if fields.get("base_block_idx") is not None else None
    block_tokens = checked_unsigned(fields, "block_size", _TOKENS_MAX)
    place = places[key]
    extra = columns.extra({name: fields.get(name) for name in EXTRA})
    columns.store(hashes, place, parent, _depth(base, parent), block_tokens, extra)


def _checked_key(fields: Mapping[Any, Any]) -> tuple[str | None, _Name, _Name]:
    medium, group, backend = fields.get("medium"), fields.get("group_id"), fields.get("backend_id")
    if not isinstance(medium, str | None):
        raise BadEventError("unknown medium")
    for name, given in (("group_id", group), ("backend_id", backend)):
        if isinstance(given, bool) or not isinstance(given, str | int | None):
            raise BadEventError(f"bad {name}")
    return medium, group, backend


def _depth(base: int | None, parent: Hash | None) -> int:
    if base is None or (base == 0 and parent is not None):
        return 0 if parent is None else DEPTH_UNKNOWN
    return base
