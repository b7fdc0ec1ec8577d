"""Messages of published plans, in JSON: commands go out, outcomes come back (docs/moves.md). Pure.

Hashes and ids are hex, because a JSON reader may round longer integers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from advisor.errors import AdvisorError
from advisor.movers.port import MoveCommand, Phase
from advisor.moves import MoveKind
from storage_agent.descriptor import VolumeDescriptor, validate
from storage_agent.errors import VolumeError
from storage_agent.port import AgentStat, CommandOutcome, Outcome, Result, VolumeStat

MESSAGE_BYTES_MAX = 4 << 20
VOLUMES_MAX = 1_024
REASON_CHARACTERS_MAX = 300

Hash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
Id = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]


class PublishedBlock(msgspec.Struct, frozen=True):
    """One block of a command."""

    hash: Hash
    namespace_id: Id
    group: int
    block_bytes: int
    reason: str
    """Why the move was planned."""


class PublishedCommand(msgspec.Struct, frozen=True, tag="command"):
    """What is to be done before `deadline_us` (µs since the epoch), and not at all after it."""

    command_id: str
    term: int
    """Of the advisor that asks. Whoever has heard of a higher one does nothing."""
    kind: MoveKind
    phase: Phase
    source: str
    target: str
    deadline_us: int
    blocks: list[PublishedBlock]
    version: Literal[1] = 1


class BlockResult(msgspec.Struct, frozen=True):
    """What became of one block of a command."""

    result: Result
    reason: Annotated[str, msgspec.Meta(max_length=10_000)] = ""


class EventBatch(msgspec.Struct, frozen=True):
    """The batch that holds a command's events."""

    producer: Id
    epoch: Id
    sequence: Annotated[int, msgspec.Meta(ge=0)]


class PublishedOutcome(msgspec.Struct, frozen=True, tag="outcome"):
    """The answer to a command: a result for each block, in the command's order."""

    command_id: Annotated[str, msgspec.Meta(max_length=128)]
    results: list[BlockResult]
    events: EventBatch | None = None
    seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    version: Literal[1] = 1


class PublishedRefusal(msgspec.Struct, frozen=True, tag="refusal"):
    """A command that will not be carried out; its moves are aborted."""

    command_id: Annotated[str, msgspec.Meta(max_length=128)]
    reason: Annotated[str, msgspec.Meta(max_length=10_000)]
    version: Literal[1] = 1


class PublishedVolumes(msgspec.Struct, frozen=True, tag="volumes"):
    """The volumes that the sender moves blocks between, whole, and the producer of their events.

    Sent first and then at least every 5 s: it is also the sign of life, and where commands are sent to.
    """

    producer: Id
    volumes: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=VOLUMES_MAX)]
    version: Literal[1] = 1


Answer = PublishedOutcome | PublishedRefusal | PublishedVolumes

_ENCODER = msgspec.json.Encoder()
_ANSWERS: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


class BadAnswer(AdvisorError):
    """A message that is none of ours, or that does not fit its command. It is counted and changes nothing."""


def encode_command(command: MoveCommand, deadline_us: int) -> bytes:
    return _ENCODER.encode(
        PublishedCommand(
            command_id=command.command_id,
            term=command.term,
            kind=command.kind,
            phase=command.phase,
            source=command.source,
            target=command.target,
            deadline_us=deadline_us,
            blocks=[
                PublishedBlock(
                    hash=f"{block.key.sequence_hash:032x}",
                    namespace_id=f"{block.key.namespace_id:016x}",
                    group=block.key.group,
                    block_bytes=block.block_bytes,
                    reason=block.reason,
                )
                for block in command.blocks
            ],
        )
    )


def decode_answer(payload: bytes) -> Answer:
    """Raises `BadAnswer`."""
    if len(payload) > MESSAGE_BYTES_MAX:
        raise BadAnswer(f"an answer has {len(payload)} bytes; {MESSAGE_BYTES_MAX} are the most")
    try:
        return _ANSWERS.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadAnswer(f"an answer of {len(payload)} bytes cannot be read: {error}") from error


def outcome_of(answer: PublishedOutcome, command: MoveCommand) -> CommandOutcome:
    """Raises `BadAnswer` where it has not one result for each block."""
    if len(answer.results) != len(command.blocks):
        raise BadAnswer(
            f"the outcome of {command.command_id} has {len(answer.results)} results for {len(command.blocks)} blocks"
        )
    outcomes = [
        Outcome(block.key, result.result, volume_changed(command), reason=result.reason[:REASON_CHARACTERS_MAX])
        for block, result in zip(command.blocks, answer.results, strict=True)
    ]
    events = answer.events
    if events is None:
        return CommandOutcome(command.command_id, outcomes, sequence=-1, seconds=answer.seconds)
    if events.sequence >= 1 << 64:
        raise BadAnswer(f"the outcome of {command.command_id} names the batch {events.sequence}: it is past 64 bits")
    return CommandOutcome(
        command.command_id, outcomes, int(events.producer, 16), int(events.epoch, 16), events.sequence, answer.seconds
    )


def volume_changed(command: MoveCommand) -> str:
    """The volume that a command writes or frees."""
    return command.source if command.phase is Phase.FREE else command.target


def stat_of(agent: str, answer: PublishedVolumes) -> AgentStat:
    """Raises `BadAnswer` that names the volume and what is wrong with it."""
    volumes = []
    for described in answer.volumes:
        try:
            descriptor = msgspec.convert(described, VolumeDescriptor)
            validate(descriptor, [], use="none")
        except (msgspec.ValidationError, VolumeError) as error:
            raise BadAnswer(f"volume {str(described.get('id', ''))[:64]!r} of {agent}: {error}") from error
        volumes.append(VolumeStat(descriptor=descriptor, blocks=0, payload_bytes=0, slots_free=0, mode="published"))
    ids = [volume.descriptor.id for volume in volumes]
    if len(set(ids)) != len(ids):
        raise BadAnswer(f"{agent} names a volume twice: {', '.join(ids)[:REASON_CHARACTERS_MAX]}")
    return AgentStat(agent=agent, producer=int(answer.producer, 16), epoch=0, volumes=volumes)
