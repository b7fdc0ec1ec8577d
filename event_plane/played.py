"""A recording as messages to publish again, as they were: numbers, epochs and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from event_plane import wire
from event_plane.dialects.known import open_dialect
from event_plane.dialects.protocol import Dialect
from event_plane.errors import DialectError, RecordingError, WireError
from event_plane.parquet import read_parquet
from event_plane.parquet_rows import RecordedBatch
from event_plane.recording import capture_dialect, detect_format, message_of, read_capture
from event_plane.schema import Batch, BatchKind, Namespace
from event_plane.transport import Message

_OURS = "kvadvisor"


@dataclass(frozen=True, slots=True)
class Played:
    """One message. A foreign one has no `producer`, and its `topic` and `sequence` are the transport's.

    `at_us`: when it was received, else published, in µs since 1970; 0 unknown.
    """

    at_us: int
    payload: bytes
    sequence: int
    producer: int | None = None
    epoch: int = 0
    topic: bytes = b""
    is_heartbeat: bool = False


def read_played(path: Path) -> Iterator[Played]:
    """The messages of a capture or a Parquet recording, in order.

    Raises `RecordingError` for a file that is damaged, or that holds no messages.
    """
    match detect_format(path):
        case "parquet":
            yield from as_played(read_parquet(path))
        case "capture":
            yield from _read_capture(path)
        case "trace":
            raise RecordingError(f"{path} is a trace of requests, which holds no messages: `kvadvisor replay` runs it")


def as_played(recorded: Iterable[RecordedBatch]) -> Iterator[Played]:
    """Recorded or logged batches as messages.

    What a gate declared lost is left out: it is no message, and who hears the others misses it again.
    """
    for each in recorded:
        if not _is_declared_lost(each.batch):
            yield _ours(each.batch, wire.encode(each.batch), each.received_us)


def _is_declared_lost(batch: Batch) -> bool:
    return batch.kind is BatchKind.LOST and (batch.snapshot is None or batch.snapshot.through != batch.sequence)


def _ours(batch: Batch, payload: bytes, received_us: int = 0, topic: bytes = b"") -> Played:
    return Played(
        received_us or batch.timestamp_us,
        payload,
        batch.sequence,
        batch.producer,
        batch.epoch,
        topic,
        batch.kind is BatchKind.HEARTBEAT,
    )


def _read_capture(path: Path) -> Iterator[Played]:
    name = capture_dialect(path)
    dialect = None if name == _OURS else open_dialect(name, namespace=Namespace())
    for number, frames in enumerate(read_capture(path)):
        message = message_of(frames, path.name)
        if message is None:
            raise RecordingError(f"{path}: message {number} is damaged ({len(frames)} frames): record it again")
        if dialect is None:
            try:
                yield _ours(wire.decode(message.payload), message.payload, topic=message.topic)
            except WireError as error:
                raise RecordingError(f"{path}: message {number} is damaged ({error}): record it again") from error
        else:
            yield _foreign(message, dialect, is_numbered=len(frames) > 2, number=number)


def _foreign(message: Message, dialect: Dialect, *, is_numbered: bool, number: int) -> Played:
    """`number` is a message's of NATS, where ZeroMQ asks for one."""
    try:
        batch, _ = dialect.decode(message.payload, producer=0, epoch=0, sequence=0)
        at_us = batch.timestamp_us
    except DialectError:
        # It is played all the same: who hears it must cope, as live.
        at_us = 0
    return Played(
        at_us, message.payload, message.transport_sequence if is_numbered else number, topic=message.topic
    )
