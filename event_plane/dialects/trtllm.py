"""TensorRT-LLM's KV events: JSON as its API gives them, one or a list of them, and the stream of a newer build.

An event is `{event_id, data, window_size, attention_dp_rank}`; `data.type` is `created`, `stored`, `removed` or
`updated`. A Remove does not tell the cache level, so the block leaves both; `updated` is how a block changes its level.
The stream is vLLM's maps in MessagePack, of which the engine holds one copy each. Records are a set in both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Annotated, Any, Final

import msgspec

from event_plane.dialects import vllm
from event_plane.dialects.block_events import RANK_MAX, REMOVED, STORED, BlockEventDialect, Flavour
from event_plane.dialects.columns import (
    MALFORMED,
    U64_MAX,
    BadEventError,
    Columns,
    checked_hashes,
    checked_integer,
    checked_unsigned,
)
from event_plane.dialects.protocol import Origin
from event_plane.dialects.reading import ColumnDialect
from event_plane.errors import DialectError
from event_plane.schema import DEPTH_UNKNOWN, Batch, Namespace, RecordFlag, Tier
from event_plane.transport import Message

STREAM: Final = Flavour(
    name="trtllm",
    title="TensorRT-LLM",
    flags=0,
    tiers=vllm.TIERS,
    stored=vllm.FIELDS[STORED],
    removed=vllm.FIELDS[REMOVED],
    extra=vllm.FLAVOUR.extra,
)
LEVELS: Final[tuple[tuple[Tier, str], ...]] = ((Tier.G1, "GPU"), (Tier.G2, "CPU"))
"""Tier and location by cache level."""
_WINDOW_MAX: Final = 0xFFFF_FFFF
_TOKENS_MAX: Final = 0xFFFF

_Level = Annotated[int, msgspec.Meta(ge=0, lt=len(LEVELS))]
_Window = Annotated[int, msgspec.Meta(ge=0, le=_WINDOW_MAX)] | None
_Rank = Annotated[int, msgspec.Meta(ge=0, le=RANK_MAX)] | None


class _Block(msgspec.Struct, gc=False):
    block_hash: int
    tokens: msgspec.Raw = msgspec.Raw(b"null")
    cache_level: _Level = 0


class _Stored(msgspec.Struct, tag="stored", gc=False):
    blocks: list[_Block]
    parent_hash: int | None = None


class _Removed(msgspec.Struct, tag="removed", gc=False):
    block_hashes: list[int]


class _LevelChange(msgspec.Struct, gc=False):
    old_value: _Level
    new_value: _Level


class _Updated(msgspec.Struct, tag="updated", gc=False):
    block_hash: int
    cache_level: _LevelChange | None = None


class _Created(msgspec.Struct, tag="created", gc=False):
    pass


class _Event(msgspec.Struct, gc=False):
    data: _Stored | _Removed | _Updated | _Created
    window_size: _Window = None
    attention_dp_rank: _Rank = None


class _Sender(msgspec.Struct):
    event_id: Annotated[int, msgspec.Meta(ge=0)]
    attention_dp_rank: _Rank = None


_EVENT: Final = msgspec.json.Decoder(_Event)
_EVENTS: Final = msgspec.json.Decoder(list[_Event])
_SENDER: Final = msgspec.json.Decoder(_Sender)
_ANYTHING: Final = msgspec.json.Decoder(dict[str, Any] | list[Any])
_TOKENS: Final = msgspec.json.Decoder(list[msgspec.Raw] | None)


class TrtllmDialect(ColumnDialect):
    """See `Dialect`."""

    def __init__(self, *, namespace: Namespace, hash_root_shared: bool = False) -> None:
        super().__init__("trtllm", namespace=namespace, hash_root_shared=hash_root_shared)
        self._stream = BlockEventDialect(STREAM, namespace=namespace, hash_root_shared=hash_root_shared)

    def origin(self, message: Message) -> Origin:
        """One event says its rank and number itself; of a list and of the stream the transport's number counts."""
        match _first(message.payload):
            case b"{":
                try:
                    sender = _SENDER.decode(message.payload)
                except MALFORMED as error:
                    raise _unreadable(message.payload, error) from error
                if sender.event_id > U64_MAX:
                    raise DialectError(f"TensorRT-LLM event has id {sender.event_id}, which is no u64: mend its sender")
                return Origin(f"dp{sender.attention_dp_rank or 0}", sender.event_id)
            case b"[":
                return Origin("events", message.transport_sequence)
        return self._stream.origin(message)

    def decode(self, payload: bytes, *, producer: int, epoch: int, sequence: int) -> tuple[Batch, Counter[str]]:
        """See `Dialect.decode`."""
        if _first(payload) in (b"{", b"["):
            return super().decode(payload, producer=producer, epoch=epoch, sequence=sequence)
        return self._stream.decode(payload, producer=producer, epoch=epoch, sequence=sequence)

    def _read_typed(self, payload: bytes) -> tuple[Columns, int]:
        columns = Columns("TensorRT-LLM")
        events = [_EVENT.decode(payload)] if _first(payload) == b"{" else _EVENTS.decode(payload)
        _add_typed(columns, _Places(columns), events)
        return columns, 0

    def _read_each(self, payload: bytes, skipped: Counter[str]) -> tuple[Columns, int]:
        try:
            read = _ANYTHING.decode(payload)
        except MALFORMED as error:
            raise _unreadable(payload, error) from error
        columns = Columns("TensorRT-LLM")
        places = _Places(columns)
        for event in read if isinstance(read, list) else [read]:
            try:
                _add_typed(columns, places, [_checked(event)])
            except BadEventError as reason:
                skipped[str(reason)] += 1
        return columns, 0


def _first(payload: bytes) -> bytes:
    return payload[:64].lstrip()[:1]


def _unreadable(payload: bytes, error: Exception) -> DialectError:
    return DialectError(f"{len(payload)} bytes are no TensorRT-LLM payload, an event or a list of events: {error}")


class _Places(dict[tuple[int, int | None, int | None], int]):
    """Numbers of a payload's places, by cache level, window and rank."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    def __missing__(self, key: tuple[int, int | None, int | None]) -> int:
        level, window, rank = key
        tier, location = LEVELS[level]
        location += "" if window is None else f"/window{window}"
        self[key] = place = self._columns.place(tier, location + ("" if rank is None else f"/dp{rank}"))
        return place


def _add_typed(columns: Columns, places: _Places, events: Iterable[_Event]) -> None:
    for event in events:
        where = (event.window_size, event.attention_dp_rank)
        data = event.data
        if isinstance(data, _Stored):
            _add_stored(columns, places, where, data)
        elif isinstance(data, _Removed):
            if not data.block_hashes:
                raise BadEventError("no hashes")
            for level in range(len(LEVELS)):
                columns.remove(data.block_hashes, places[level, *where])
        elif isinstance(data, _Updated) and data.cache_level is not None:
            # Stored before it is removed, so that the block and its history are never gone.
            old, new = data.cache_level.old_value, data.cache_level.new_value
            if old != new:
                flags = RecordFlag.COPY
                columns.store([data.block_hash], places[new, *where], None, DEPTH_UNKNOWN, 0, flags=flags)
                columns.remove([data.block_hash], places[old, *where])


def _add_stored(columns: Columns, places: _Places, where: tuple[int | None, int | None], data: _Stored) -> None:
    """Runs of blocks of one cache level, each of which follows the one before."""
    if not data.blocks:
        raise BadEventError("no hashes")
    parent = data.parent_hash
    depth = 0 if parent is None else DEPTH_UNKNOWN
    block_tokens, last_tokens = _token_count(data.blocks[0]), _token_count(data.blocks[-1])
    # Blocks are full but for the last of an event.
    partial = data.blocks[-1] if last_tokens != block_tokens else None
    for (level, is_partial), blocks in groupby(data.blocks, key=lambda block: (block.cache_level, block is partial)):
        hashes = [block.block_hash for block in blocks]
        columns.store(hashes, places[level, *where], parent, depth, last_tokens if is_partial else block_tokens)
        parent = hashes[-1]
        depth = depth + len(hashes) if depth != DEPTH_UNKNOWN else DEPTH_UNKNOWN


def _token_count(block: _Block) -> int:
    return min(len(_TOKENS.decode(block.tokens) or ()), _TOKENS_MAX)


def _checked(event: object) -> _Event:
    """One event of any shape, as typed decoding would have read it. Raises `BadEventError`."""
    match event:
        case {"data": {"type": str(kind), **fields}, **others}:
            pass
        case _:
            raise BadEventError("no event")
    window = _optional(others, "window_size", _WINDOW_MAX)
    rank = _optional(others, "attention_dp_rank", RANK_MAX)
    data: _Stored | _Removed | _Updated | _Created
    match kind:
        case "stored":
            given = fields.get("blocks")
            blocks = [_checked_block(block) for block in given] if isinstance(given, list) else []
            parent = fields.get("parent_hash")
            data = _Stored(blocks, None if parent is None else checked_integer(parent))
        case "removed":
            data = _Removed([checked_integer(each) for each in checked_hashes(fields.get("block_hashes"))])
        case "updated":
            data = _Updated(checked_integer(fields.get("block_hash")), _checked_change(fields.get("cache_level")))
        case "created":
            data = _Created()
        case _:
            raise BadEventError("unknown event type")
    return _Event(data, window, rank)


def _optional(fields: Mapping[Any, Any], name: str, maximum: int) -> int | None:
    return None if fields.get(name) is None else checked_unsigned(fields, name, maximum)


def _checked_block(block: object) -> _Block:
    if not isinstance(block, dict):
        raise BadEventError("bad block")
    tokens = block.get("tokens")
    if not isinstance(tokens, list | None):
        raise BadEventError("bad tokens")
    raw_tokens = msgspec.Raw(msgspec.json.encode(tokens))
    return _Block(checked_integer(block.get("block_hash")), raw_tokens, _checked_level(block, "cache_level"))


def _checked_change(given: object) -> _LevelChange | None:
    if given is None:
        return None
    if not isinstance(given, dict):
        raise BadEventError("bad cache_level")
    return _LevelChange(_checked_level(given, "old_value"), _checked_level(given, "new_value"))


def _checked_level(fields: Mapping[Any, Any], name: str) -> int:
    level = checked_unsigned(fields, name, 0xFFFF_FFFF)
    if level >= len(LEVELS):
        raise BadEventError("unknown cache level")
    return level


