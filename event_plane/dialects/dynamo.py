"""NVIDIA Dynamo's router events, MessagePack or JSON, over NATS or ZeroMQ (with a 5-byte header before the envelope).

An envelope `{publisher_id, sequence, published_at ms, topic, payload}` holds a list of router events `{worker_id,
storage_tier, event{data, dp_rank}}`, `data` being `stored`, `removed` or `"cleared"`. The stream is reference-counted
already, so its records are a set. One publisher may speak for several workers: the sequence is the publisher's, so it
is the producer, and a block's location is worker and rank, in the tier that the event names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import msgspec

from event_plane.dialects.columns import (
    MALFORMED,
    U64_MAX,
    US_PER_MS,
    BadEventError,
    Columns,
    checked_hashes,
    checked_integer,
    checked_unsigned,
    microseconds,
)
from event_plane.dialects.protocol import Origin
from event_plane.dialects.reading import ColumnDialect
from event_plane.errors import DialectError
from event_plane.schema import DEPTH_UNKNOWN, Namespace, Tier
from event_plane.transport import Message

HEADER_TAG: Final = b"\x01"
HEADER_BYTES: Final = 5
"""Before an envelope on ZeroMQ: the tag, then the envelope's length, u32 big-endian."""
DEFAULT_TIER: Final = "device"
TIERS: Final[dict[str, Tier]] = {
    DEFAULT_TIER: Tier.G1,
    "host_pinned": Tier.G2,
    "disk": Tier.G3,
    "external": Tier.G4,
}
_U32_MAX: Final = 0xFFFF_FFFF


class _Envelope(msgspec.Struct):
    publisher_id: int
    sequence: int
    payload: msgspec.Raw
    published_at: float | int | None = None


class _Block(msgspec.Struct, gc=False):
    block_hash: int


class _Stored(msgspec.Struct, gc=False):
    blocks: list[_Block]
    parent_hash: int | None = None


class _Removed(msgspec.Struct, gc=False):
    block_hashes: list[int]


class _Change(msgspec.Struct, gc=False):
    stored: _Stored | None = None
    removed: _Removed | None = None


class _Event(msgspec.Struct, gc=False):
    data: _Change | Literal["cleared"]
    dp_rank: int | None = None


class _RouterEvent(msgspec.Struct, gc=False):
    worker_id: int
    event: _Event
    storage_tier: str = DEFAULT_TIER


class _Codec:
    """One encoding of envelopes and of the router events inside."""

    def __init__(self, decoder: Any) -> None:
        self.envelope = decoder(_Envelope)
        self.events = decoder(list[_RouterEvent])
        self.anything = decoder(list[Any])


_MESSAGEPACK: Final = _Codec(msgspec.msgpack.Decoder)
_JSON: Final = _Codec(msgspec.json.Decoder)
_MESSAGEPACK_BYTES: Final = msgspec.msgpack.Decoder(bytes)


class DynamoDialect(ColumnDialect):
    """See `Dialect`."""

    def __init__(self, *, namespace: Namespace, hash_root_shared: bool = False) -> None:
        super().__init__("dynamo", namespace=namespace, hash_root_shared=hash_root_shared)

    def origin(self, message: Message) -> Origin:
        """The publisher, and the envelope's own sequence. Raises `DialectError`."""
        envelope, _, _ = _open(message.payload)
        if not (0 <= envelope.publisher_id <= U64_MAX and 0 <= envelope.sequence <= U64_MAX):
            raise DialectError(
                f"Dynamo envelope has publisher {envelope.publisher_id} and sequence {envelope.sequence}: each must be"
                " a u64"
            )
        return Origin(f"{envelope.publisher_id:016x}", envelope.sequence)

    def _read_typed(self, payload: bytes) -> tuple[Columns, int]:
        envelope, codec, events = _open(payload)
        columns = Columns("Dynamo")
        _add_typed(columns, _Places(columns), codec.events.decode(events))
        return columns, microseconds(envelope.published_at, US_PER_MS)

    def _read_each(self, payload: bytes, skipped: Counter[str]) -> tuple[Columns, int]:
        envelope, codec, raw_events = _open(payload)
        try:
            events = codec.anything.decode(raw_events)
        except MALFORMED as error:
            raise DialectError(
                f"router events of a {len(payload)}-byte Dynamo payload cannot be read: {error}"
            ) from error
        columns = Columns("Dynamo")
        places = _Places(columns)
        for event in events:
            try:
                _add_checked(columns, places, event)
            except BadEventError as reason:
                skipped[str(reason)] += 1
        return columns, microseconds(envelope.published_at, US_PER_MS)


def strip_header(payload: bytes) -> bytes:
    """`payload` without the header that it has on ZeroMQ."""
    length = int.from_bytes(payload[1:HEADER_BYTES], "big")
    headed = payload[:1] == HEADER_TAG and length == len(payload) - HEADER_BYTES
    return payload[HEADER_BYTES:] if headed else payload


def _open(payload: bytes) -> tuple[_Envelope, _Codec, bytes | msgspec.Raw]:
    """The envelope, how it is encoded, and the encoded list of router events. Raises `DialectError`."""
    inside = strip_header(payload)
    codec = _JSON if inside[:64].lstrip()[:1] == b"{" else _MESSAGEPACK
    try:
        envelope = codec.envelope.decode(inside)
        return envelope, codec, _events(codec, envelope.payload)
    except MALFORMED as error:
        raise DialectError(
            f"{len(payload)} bytes are no Dynamo payload {{publisher_id, sequence, published_at, topic, payload}}:"
            f" {error}"
        ) from error


def _events(codec: _Codec, payload: msgspec.Raw) -> bytes | msgspec.Raw:
    """JSON has no bytes: there the events stand for themselves, as text, or as a list of their text's bytes."""
    if codec is _MESSAGEPACK:
        read: bytes = _MESSAGEPACK_BYTES.decode(payload)
        return read
    start = bytes(memoryview(payload)[:64]).lstrip()
    if start[:1] == b'"':
        text: str = msgspec.json.decode(payload, type=str)
        return text.encode()
    if start[1:].lstrip()[:1].isdigit():
        return bytes(msgspec.json.decode(payload, type=list[int]))
    return payload


class _Places(dict[tuple[str, int, int | None], int]):
    """Numbers of a payload's places, by tier, worker and rank. Raises `BadEventError` for one that is none."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    def __missing__(self, key: tuple[str, int, int | None]) -> int:
        self[key] = place = self._columns.place(*_where(*key))
        return place


def _where(storage_tier: str, worker: int, rank: int | None) -> tuple[Tier, str]:
    tier = TIERS.get(storage_tier.lower())
    if tier is None:
        raise BadEventError("unknown storage tier")
    if not 0 <= worker <= U64_MAX:
        raise BadEventError("bad worker_id")
    if not 0 <= (rank or 0) <= _U32_MAX:
        raise BadEventError("bad dp_rank")
    return tier, f"worker-{worker}/dp{rank or 0}"


def _add_typed(columns: Columns, places: _Places, events: Iterable[_RouterEvent]) -> None:
    for routed in events:
        data = routed.event.data
        key = (routed.storage_tier, routed.worker_id, routed.event.dp_rank)
        if isinstance(data, str):
            columns.clear(*_where(*key))
        elif data.stored is not None and data.removed is None:
            parent = data.stored.parent_hash
            _add_stored(columns, [block.block_hash for block in data.stored.blocks], places[key], parent)
        elif data.removed is not None and data.stored is None and data.removed.block_hashes:
            columns.remove(data.removed.block_hashes, places[key])
        else:
            raise BadEventError


def _add_stored(columns: Columns, hashes: list[Any], place: int, parent: Any) -> None:
    if not hashes:
        raise BadEventError
    columns.store(hashes, place, parent, 0 if parent is None else DEPTH_UNKNOWN, 0)


def _add_checked(columns: Columns, places: _Places, routed: object) -> None:
    """Add one router event of any shape. Raises `BadEventError`, and has then added nothing."""
    match routed:
        case {"worker_id": int(worker), "event": {"data": data, **event}, **others} if not isinstance(worker, bool):
            key = (_text(others, "storage_tier", DEFAULT_TIER), worker, checked_unsigned(event, "dp_rank", _U32_MAX))
        case {"worker_id": _, "event": {"data": _}}:
            raise BadEventError("bad worker_id")
        case _:
            raise BadEventError("no event")
    match data:
        case "cleared":
            columns.clear(*_where(*key))
        case {"stored": dict(), "removed": dict()}:
            raise BadEventError("unknown event type")
        case {"stored": {"blocks": [*blocks], **stored}}:
            named = checked_hashes([block.get("block_hash") if isinstance(block, dict) else None for block in blocks])
            hashes = [checked_integer(each) for each in named]
            given_parent = stored.get("parent_hash")
            parent = None if given_parent is None else checked_integer(given_parent)
            _add_stored(columns, hashes, places[key], parent)
        case {"removed": {"block_hashes": [*given]}}:
            columns.remove([checked_integer(each) for each in checked_hashes(given)], places[key])
        case _:
            raise BadEventError("unknown event type")


def _text(fields: Mapping[Any, Any], name: str, default: str) -> str:
    given = fields.get(name, default)
    if not isinstance(given, str):
        raise BadEventError("unknown storage tier")
    return given
