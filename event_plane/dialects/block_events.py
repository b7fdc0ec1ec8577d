"""The events that vLLM, SGLang and TensorRT-LLM's stream share: BlockStored, BlockRemoved, AllBlocksCleared.

A payload is the MessagePack array `[timestamp s, events, data-parallel rank]`. Events are arrays with the tag first or
maps with key `type`; which fields follow is each engine's own (`Flavour`). One record per block, one batch per payload.

A payload whose every event is as it should be is read by typed decoders alone; in any other each event is read for
itself, so that a bad one is counted and the others stand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Any, Final

import msgspec

from event_plane.dialects.columns import (
    MALFORMED,
    US_PER_S,
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

RANK_MAX: Final = 65_535
DEFAULT_MEDIUM: Final = "GPU"
STORED: Final = "BlockStored"
REMOVED: Final = "BlockRemoved"
CLEARED: Final = "AllBlocksCleared"
TAG_FIELD: Final = "type"
_TOKENS_MAX: Final = 0xFFFF
_GROUP_MAX: Final = 0xFF

_TYPES: Final[dict[str, Any]] = {
    "block_hashes": list[Hash],
    "parent_block_hash": Hash | None,
    "block_size": Annotated[int, msgspec.Meta(ge=0, le=_TOKENS_MAX)] | None,
    "medium": str | None,
    "group_idx": Annotated[int, msgspec.Meta(ge=0, le=_GROUP_MAX)] | None,
    "locality": str | None,
}
"""Of the fields that are read. What only a Store says may be anything; all else stays undecoded."""


class Envelope(msgspec.Struct, array_like=True):
    """The payload, its events unread. vLLM 0.9.0 and 0.9.3 end after the events; what others append is not read."""

    timestamp: float | int | None
    events: msgspec.Raw
    rank: int | None = None


_ENVELOPES: Final = msgspec.msgpack.Decoder(Envelope)
_EVENTS: Final = msgspec.msgpack.Decoder(list[Any])


@dataclass(frozen=True, slots=True)
class Flavour:
    """One engine's way to write block events. `stored` and `removed`: its fields, in the order of its arrays."""

    name: str
    title: str
    """The engine, as errors call it."""
    flags: int
    """Of every record: COUNTED where the engine keeps several copies of one block."""
    tiers: Mapping[str, Tier]
    """By medium, in capitals."""
    stored: tuple[str, ...]
    removed: tuple[str, ...]
    extra: tuple[str, ...]
    """Fields of a BlockStored that only it says and its hash already covers."""
    maps: msgspec.msgpack.Decoder[Any] = field(init=False)
    arrays: msgspec.msgpack.Decoder[Any] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "maps", _decoder(self, array_like=False))
        object.__setattr__(self, "arrays", _decoder(self, array_like=True))

    def fields(self, tag: str) -> tuple[str, ...]:
        """Fields of an event that is an array, after its tag."""
        return {STORED: self.stored, REMOVED: self.removed}.get(tag, ())


class BlockEventDialect(ColumnDialect):
    """Turns payloads of one flavour into our batches. Holds configuration only, so one may serve every thread."""

    def __init__(self, flavour: Flavour, *, namespace: Namespace, hash_root_shared: bool) -> None:
        super().__init__(flavour.name, namespace=namespace, hash_root_shared=hash_root_shared)
        self._flavour = flavour

    def rank(self, payload: bytes) -> int:
        """Data-parallel rank that sent `payload`, 0 where it says none. Raises `DialectError`."""
        rank = self._envelope(payload).rank or 0
        if not 0 <= rank <= RANK_MAX:
            raise DialectError(
                f"{self._flavour.title} payload has data-parallel rank {rank}, outside 0 to {RANK_MAX}: mend its sender"
            )
        return rank

    def origin(self, message: Message) -> Origin:
        """See `Dialect.origin`."""
        return Origin(f"dp{self.rank(message.payload)}", message.transport_sequence)

    def _read_typed(self, payload: bytes) -> tuple[Columns, int]:
        try:
            read = self._flavour.maps.decode(payload)
        except msgspec.ValidationError:
            read = self._flavour.arrays.decode(payload)
        columns = Columns(self._flavour.title, self._flavour.flags)
        _add_typed(columns, _Places(columns, self._flavour), read.events, self._flavour.extra)
        return columns, microseconds(read.timestamp, US_PER_S)

    def _read_each(self, payload: bytes, skipped: Counter[str]) -> tuple[Columns, int]:
        envelope = self._envelope(payload)
        try:
            events = _EVENTS.decode(envelope.events)
        except MALFORMED as error:
            raise DialectError(
                f"events of a {len(payload)}-byte {self._flavour.title} payload cannot be read: {error}"
            ) from error
        columns = Columns(self._flavour.title, self._flavour.flags)
        places = _Places(columns, self._flavour)
        for event in events:
            try:
                _add_checked(columns, places, self._flavour, event)
            except BadEventError as reason:
                skipped[str(reason)] += 1
        return columns, microseconds(envelope.timestamp, US_PER_S)

    def _envelope(self, payload: bytes) -> Envelope:
        try:
            return _ENVELOPES.decode(payload)
        except MALFORMED as error:
            raise DialectError(
                f"{len(payload)} bytes are no {self._flavour.title} payload [timestamp, events, rank]: {error}"
            ) from error


class _Places(dict[tuple[str | None, str | None, int | None], int]):
    """Numbers of a payload's places, by medium, locality and group. Raises `BadEventError` for an unknown one."""

    def __init__(self, columns: Columns, flavour: Flavour) -> None:
        self._columns = columns
        self._flavour = flavour

    def __missing__(self, key: tuple[str | None, str | None, int | None]) -> int:
        medium, locality, group = key
        location = (medium or DEFAULT_MEDIUM).upper() if medium is not None else DEFAULT_MEDIUM
        tier = self._flavour.tiers.get(location)
        if tier is None:
            raise BadEventError("unknown medium")
        match locality.upper() if locality is not None else "LOCAL":
            case "LOCAL":
                pass
            case "REMOTE":
                location = f"{location}/REMOTE"
            case _:
                raise BadEventError("unknown locality")
        place = self[key] = self._columns.place(tier, location, group or 0)
        return place


def _add_typed(columns: Columns, places: _Places, events: list[Any], extra_fields: tuple[str, ...]) -> None:
    """Add events that a typed decoder read."""
    said = attrgetter(*extra_fields) if anything_said(events, extra_fields) else None
    for event in events:
        tag = event.tag
        if tag == STORED:
            hashes = event.block_hashes
            if not hashes:
                raise BadEventError
            columns.store(
                hashes,
                places[event.medium, event.locality, event.group_idx],
                event.parent_block_hash,
                0 if event.parent_block_hash is None else DEPTH_UNKNOWN,
                event.block_size or 0,
                0 if said is None else columns.extra(dict(zip(extra_fields, said(event), strict=True))),
            )
        elif tag == REMOVED:
            hashes = event.block_hashes
            if not hashes:
                raise BadEventError
            columns.remove(hashes, places[event.medium, event.locality, event.group_idx])
        else:
            columns.clear()


def _add_checked(columns: Columns, places: _Places, flavour: Flavour, event: object) -> None:
    """Add one event of any shape. Raises `BadEventError`, and has then added nothing."""
    fields: Mapping[Any, Any]
    match event:
        case {"type": str(tag), **others}:
            fields = others
        case [str(tag), *values]:
            fields = dict(zip(flavour.fields(tag), values, strict=False))
        case _:
            raise BadEventError("no event")
    match tag:
        case "BlockStored":
            _add_stored(columns, places, flavour, fields)
        case "BlockRemoved":
            hashes = checked_hashes(fields.get("block_hashes"))
            columns.remove(hashes, _checked_place(places, flavour.removed, fields))
        case "AllBlocksCleared":
            columns.clear()
        case _:
            raise BadEventError("unknown event type")


def _add_stored(columns: Columns, places: _Places, flavour: Flavour, fields: Mapping[Any, Any]) -> None:
    hashes = checked_hashes(fields.get("block_hashes"))
    block_tokens = checked_unsigned(fields, "block_size", _TOKENS_MAX)
    parent = fields.get("parent_block_hash")
    columns.store(
        hashes,
        _checked_place(places, flavour.stored, fields),
        None if parent is None else checked_hash(parent),
        DEPTH_UNKNOWN if parent is not None else 0,
        block_tokens,
        columns.extra({name: fields.get(name) for name in flavour.extra}),
    )


def _checked_place(places: _Places, known: tuple[str, ...], fields: Mapping[Any, Any]) -> int:
    medium, locality = fields.get("medium"), fields.get("locality") if "locality" in known else None
    if not isinstance(medium, str | None):
        raise BadEventError("unknown medium")
    if not isinstance(locality, str | None):
        raise BadEventError("unknown locality")
    group = checked_unsigned(fields, "group_idx", _GROUP_MAX) if "group_idx" in known else 0
    return places[medium, locality, group]


def _decoder(flavour: Flavour, *, array_like: bool) -> msgspec.msgpack.Decoder[Any]:
    """Of a whole payload whose events are all arrays, or all maps."""
    events: Any = (
        _event(STORED, flavour.stored, flavour.extra, array_like)
        | _event(REMOVED, flavour.removed, flavour.extra, array_like)
        | _event(CLEARED, (), flavour.extra, array_like)
    )
    fields: list[Any] = [("timestamp", float | int | None), ("events", list[events]), ("rank", int | None, None)]
    return msgspec.msgpack.Decoder(msgspec.defstruct("Payload", fields, array_like=True))


def _event(tag: str, names: tuple[str, ...], extra: tuple[str, ...], array_like: bool) -> Any:
    """A struct of the fields that are read; in an array the others hold their places, undecoded."""
    fields: list[Any] = []
    for name in names:
        if name == "block_hashes":
            fields.append((name, _TYPES[name]))
        elif name in _TYPES or name in extra:
            fields.append((name, _TYPES.get(name, Any), None))
        elif array_like:
            fields.append((name, msgspec.Raw, msgspec.Raw()))
    absent = dict.fromkeys({"locality", "group_idx", *extra} - set(names))
    return msgspec.defstruct(
        tag, fields, namespace=absent | {"tag": tag}, tag_field=TAG_FIELD, tag=tag, array_like=array_like, gc=False
    )
