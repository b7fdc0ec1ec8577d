"""Keys, headers and outcomes of blocks in messages between an agent and its callers. Pure.

MessagePack has no integers of 128 bits, so a hash travels as its low and high 64.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from event_plane.schema import Namespace
from storage_agent.block_header import BlockHeader
from storage_agent.descriptor import BLOCK_BYTES_MAX, CAPACITY_BLOCKS_MAX
from storage_agent.errors import CommandRefused
from storage_agent.leases import BlockFacts
from storage_agent.port import BlockKey, Outcome, Result
from storage_agent.shards import BlockLayout, Shard, ShardSpan

_MASK64 = 0xFFFF_FFFF_FFFF_FFFF
U64 = Annotated[int, msgspec.Meta(ge=0)]
"""MessagePack has nothing larger."""
PayloadBytes = Annotated[int, msgspec.Meta(ge=0, le=BLOCK_BYTES_MAX)]
Slot = Annotated[int, msgspec.Meta(ge=0, le=CAPACITY_BLOCKS_MAX)]
KeyWire = tuple[int, int, int, int]
"""Namespace id, group, sequence hash low and high."""
SpanWire = tuple[int, int, int]
"""Bytes of a shard, the first one, how many there are in all."""
ShardWire = tuple[int, int, BlockLayout | None]
"""Index, count and layout."""


class OutcomeWire(msgspec.Struct, frozen=True, array_like=True):
    key: KeyWire
    result: Result
    volume: str
    payload_bytes: int
    reason: str


class FactsWire(msgspec.Struct, frozen=True, array_like=True):
    """What a put says of a block."""

    key: KeyWire
    namespace: Namespace
    parent: tuple[int, int]
    depth: int
    block_tokens: int
    payload_bytes: PayloadBytes
    span: SpanWire | None
    layout: BlockLayout | None


class HeaderWire(msgspec.Struct, frozen=True, array_like=True):
    """What a slot holds."""

    slot: Slot
    facts: FactsWire
    payload_checksum: U64
    generation: U64


def key_to_wire(key: BlockKey) -> KeyWire:
    return key.namespace_id, key.group, key.sequence_hash & _MASK64, key.sequence_hash >> 64


def key_from_wire(key: KeyWire) -> BlockKey:
    namespace_id, group, low, high = key
    return BlockKey(namespace_id, group, high << 64 | low)


def keys_to_wire(keys: Iterable[BlockKey]) -> list[KeyWire]:
    return [key_to_wire(key) for key in keys]


def keys_from_wire(keys: Iterable[KeyWire]) -> list[BlockKey]:
    return [key_from_wire(key) for key in keys]


def shard_to_wire(wanted: Shard | None) -> ShardWire | None:
    return (wanted.index, wanted.count, wanted.layout) if wanted is not None else None


def shard_from_wire(wanted: ShardWire | None) -> Shard | None:
    return Shard(*wanted) if wanted is not None else None


def outcome_of_block_to_wire(outcome: Outcome) -> OutcomeWire:
    return OutcomeWire(
        key_to_wire(outcome.key), outcome.result, outcome.volume, outcome.payload_bytes, outcome.reason
    )


def outcome_of_block_from_wire(outcome: OutcomeWire) -> Outcome:
    return Outcome(
        key_from_wire(outcome.key), outcome.result, outcome.volume, outcome.payload_bytes, outcome.reason
    )


def facts_to_wire(facts: BlockFacts) -> FactsWire:
    span = (facts.span.shard_bytes, facts.span.first, facts.span.count) if facts.span is not None else None
    parent = (facts.parent_hash & _MASK64, facts.parent_hash >> 64)
    return FactsWire(
        key_to_wire(facts.key),
        facts.namespace,
        parent,
        facts.depth,
        facts.block_tokens,
        facts.payload_bytes,
        span,
        facts.layout,
    )


def facts_from_wire(facts: FactsWire) -> BlockFacts:
    low, high = facts.parent
    return BlockFacts(
        key_from_wire(facts.key),
        facts.namespace,
        high << 64 | low,
        facts.depth,
        facts.block_tokens,
        facts.payload_bytes,
        ShardSpan(*facts.span) if facts.span is not None else None,
        facts.layout,
    )


def header_to_wire(header: BlockHeader) -> HeaderWire:
    facts = BlockFacts(
        header.key,
        header.namespace,
        header.parent_hash,
        header.depth,
        header.block_tokens,
        header.payload_bytes,
        header.span,
        header.layout,
    )
    return HeaderWire(header.slot, facts_to_wire(facts), header.payload_checksum, header.generation)


def require_answers(found: int, asked: int) -> None:
    """Raises `CommandRefused` unless there is an answer for each block."""
    if found != asked:
        raise CommandRefused(
            f"the agent answered about {found} blocks where {asked} were asked about; run one release on both sides"
        )


def headers_from_wire(keys: Sequence[BlockKey], headers: Sequence[HeaderWire | None]) -> list[BlockHeader | None]:
    """What an agent says of `keys`. Raises `CommandRefused` where it speaks of others."""
    require_answers(len(headers), len(keys))
    found = [header_from_wire(header) if header is not None else None for header in headers]
    for key, header in zip(keys, found, strict=True):
        if header is not None:
            require_key(header.key, key)
    return found


def require_key(found: BlockKey, asked: BlockKey) -> None:
    """Raises `CommandRefused` where an agent speaks of another block than it was asked about."""
    if found != asked:
        raise CommandRefused(f"the agent answered about {found}, asked about {asked}; run one release on both sides")


def header_from_wire(header: HeaderWire) -> BlockHeader:
    facts = facts_from_wire(header.facts)
    return BlockHeader(
        header.slot,
        facts.key,
        facts.namespace,
        facts.parent_hash,
        facts.depth,
        facts.block_tokens,
        facts.payload_bytes,
        header.payload_checksum,
        header.generation,
        facts.span,
        facts.layout,
    )
