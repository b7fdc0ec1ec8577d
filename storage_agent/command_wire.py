"""Commands and answers as MessagePack: what `client` and `service` say to each other. Pure.

MessagePack has no integers of 128 bits, so a sequence hash travels as its low and high 64.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from storage_agent.errors import CommandRefused
from storage_agent.port import AgentStat, BlockKey, CommandOutcome, Outcome, Result

REQUEST_BYTES_MAX = 4 * 1024 * 1024
"""Longest message either side takes: about 100,000 block keys."""
COMMAND_ID_BYTES_MAX = 256

_MASK64 = 0xFFFF_FFFF_FFFF_FFFF
KeyWire = tuple[int, int, int, int]
"""Namespace id, group, sequence hash low and high."""


class StatRequest(msgspec.Struct, frozen=True, tag="stat"):
    pass


class CopyRequest(msgspec.Struct, frozen=True, tag="copy"):
    command_id: str
    keys: list[KeyWire]
    source: str
    target: str


class DeleteRequest(msgspec.Struct, frozen=True, tag="delete"):
    command_id: str
    volume: str
    keys: list[KeyWire]


class OutcomeWire(msgspec.Struct, frozen=True, array_like=True):
    key: KeyWire
    result: Result
    volume: str
    payload_bytes: int
    reason: str


class StatReply(msgspec.Struct, frozen=True, tag="stat"):
    stat: AgentStat


class CommandReply(msgspec.Struct, frozen=True, tag="outcome"):
    command_id: str
    outcomes: list[OutcomeWire]
    producer: int
    epoch: int
    sequence: int
    seconds: float


class RefusedReply(msgspec.Struct, frozen=True, tag="refused"):
    reason: str


Request = StatRequest | CopyRequest | DeleteRequest
Reply = StatReply | CommandReply | RefusedReply

_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    return _ENCODER.encode(message)


def decode_request(payload: bytes) -> Request:
    """Raises `CommandRefused` for what is no request, or one without a usable command id."""
    try:
        request = _REQUESTS.decode(payload)
    except msgspec.MsgspecError as error:
        raise CommandRefused(f"the command cannot be read: {error}") from error
    if not isinstance(request, StatRequest) and not 0 < len(request.command_id.encode()) <= COMMAND_ID_BYTES_MAX:
        raise CommandRefused(f"a command id has 1 to {COMMAND_ID_BYTES_MAX} bytes, this has {len(request.command_id)}")
    return request


def decode_reply(payload: bytes) -> Reply:
    """Raises `CommandRefused` for what is no reply."""
    try:
        return _REPLIES.decode(payload)
    except msgspec.MsgspecError as error:
        raise CommandRefused(f"the answer cannot be read: {error}; is this the command port of an agent?") from error


def keys_to_wire(keys: Iterable[BlockKey]) -> list[KeyWire]:
    return [_key_to_wire(key) for key in keys]


def keys_from_wire(keys: Iterable[KeyWire]) -> list[BlockKey]:
    return [_key_from_wire(key) for key in keys]


def outcome_to_wire(outcome: CommandOutcome) -> CommandReply:
    return CommandReply(
        outcome.command_id,
        [OutcomeWire(_key_to_wire(o.key), o.result, o.volume, o.payload_bytes, o.reason) for o in outcome.outcomes],
        outcome.producer,
        outcome.epoch,
        outcome.sequence,
        outcome.seconds,
    )


def outcome_from_wire(reply: CommandReply) -> CommandOutcome:
    return CommandOutcome(
        reply.command_id,
        [Outcome(_key_from_wire(o.key), o.result, o.volume, o.payload_bytes, o.reason) for o in reply.outcomes],
        reply.producer,
        reply.epoch,
        reply.sequence,
        reply.seconds,
    )


def _key_to_wire(key: BlockKey) -> KeyWire:
    return key.namespace_id, key.group, key.sequence_hash & _MASK64, key.sequence_hash >> 64


def _key_from_wire(key: KeyWire) -> BlockKey:
    namespace_id, group, low, high = key
    return BlockKey(namespace_id, group, high << 64 | low)
