"""Commands and answers as MessagePack: what `client` and `service` say to each other. Pure.

How blocks look in them: `block_wire`. What clients that move bytes say: `data_wire`.
"""

from __future__ import annotations

import msgspec

from storage_agent.block_wire import KeyWire, OutcomeWire, outcome_of_block_from_wire, outcome_of_block_to_wire
from storage_agent.data_wire import DataReply, DataRequest
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import UNREADABLE, CommandRefused, FieldFault
from storage_agent.port import AgentStat, CommandOutcome, CompactReport, ScrubReport, VolumeStat

REQUEST_BYTES_MAX = 4 * 1024 * 1024
"""Longest message either side takes: about 100,000 block keys."""
COMMAND_ID_BYTES_MAX = 256


class StatRequest(msgspec.Struct, frozen=True, tag="stat"):
    pass


class CopyRequest(msgspec.Struct, frozen=True, tag="copy"):
    command_id: str
    keys: list[KeyWire]
    source: str
    target: str
    term: int = 0


class DeleteRequest(msgspec.Struct, frozen=True, tag="delete"):
    command_id: str
    volume: str
    keys: list[KeyWire]
    term: int = 0


class MoveRequest(msgspec.Struct, frozen=True, tag="move"):
    command_id: str
    keys: list[KeyWire]
    source: str
    target: str
    keep: bool
    term: int = 0


class ScrubRequest(msgspec.Struct, frozen=True, tag="scrub"):
    command_id: str
    volume: str
    term: int = 0


class CompactRequest(msgspec.Struct, frozen=True, tag="compact"):
    command_id: str
    volume: str
    term: int = 0
    keys: list[KeyWire] = []


class RefuseRequest(msgspec.Struct, frozen=True, tag="refuse_tenants"):
    """Answered with `DoneReply`."""

    tenants: list[str]
    term: int = 0


class RegisterRequest(msgspec.Struct, frozen=True, tag="register"):
    """Answered with `VolumeReply`."""

    descriptor: VolumeDescriptor
    term: int = 0


class UnregisterRequest(msgspec.Struct, frozen=True, tag="unregister"):
    """Answered with `DoneReply`. `drain_s`: how long those that use the volume are waited for, at most a minute."""

    volume: str
    drain_s: float = 0.0
    term: int = 0


class ResizeRequest(msgspec.Struct, frozen=True, tag="resize"):
    """Answered with `VolumeReply`."""

    volume: str
    capacity_blocks: int
    term: int = 0


class VolumeReply(msgspec.Struct, frozen=True, tag="volume"):
    stat: VolumeStat


class StatReply(msgspec.Struct, frozen=True, tag="stat"):
    stat: AgentStat


class CommandReply(msgspec.Struct, frozen=True, tag="outcome"):
    command_id: str
    outcomes: list[OutcomeWire]
    producer: int
    epoch: int
    sequence: int
    seconds: float


class ScrubReply(msgspec.Struct, frozen=True, tag="scrubbed"):
    report: ScrubReport


class CompactReply(msgspec.Struct, frozen=True, tag="compacted"):
    report: CompactReport


class RefusedReply(msgspec.Struct, frozen=True, tag="refused"):
    """`is_stale`: the command's term is over. `fault`: of a descriptor."""

    reason: str
    is_stale: bool = False
    fault: FieldFault | None = None


Command = CopyRequest | DeleteRequest | MoveRequest | ScrubRequest | CompactRequest
VolumeRequest = RegisterRequest | UnregisterRequest | ResizeRequest
Request = StatRequest | Command | RefuseRequest | VolumeRequest | DataRequest
Reply = StatReply | CommandReply | ScrubReply | CompactReply | VolumeReply | RefusedReply | DataReply

_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    return _ENCODER.encode(message)


def decode_request(payload: bytes) -> Request:
    """Raises `CommandRefused` for what is no request, or one without a usable command id."""
    try:
        request = _REQUESTS.decode(payload)
    except UNREADABLE as error:
        raise CommandRefused(f"the command cannot be read: {error}") from error
    if isinstance(request, Command) and not 0 < len(request.command_id.encode()) <= COMMAND_ID_BYTES_MAX:
        raise CommandRefused(f"a command id has 1 to {COMMAND_ID_BYTES_MAX} bytes, this has {len(request.command_id)}")
    return request


def decode_reply(payload: bytes) -> Reply:
    """Raises `CommandRefused` for what is no reply."""
    try:
        return _REPLIES.decode(payload)
    except UNREADABLE as error:
        raise CommandRefused(f"the answer cannot be read: {error}; is this the command port of an agent?") from error


def outcome_to_wire(outcome: CommandOutcome) -> CommandReply:
    return CommandReply(
        outcome.command_id,
        [outcome_of_block_to_wire(each) for each in outcome.outcomes],
        outcome.producer,
        outcome.epoch,
        outcome.sequence,
        outcome.seconds,
    )


def outcome_from_wire(reply: CommandReply) -> CommandOutcome:
    return CommandOutcome(
        reply.command_id,
        [outcome_of_block_from_wire(each) for each in reply.outcomes],
        reply.producer,
        reply.epoch,
        reply.sequence,
        reply.seconds,
    )
