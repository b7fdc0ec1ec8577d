"""Subjects, headers and requests that our publishers and subscribers use on NATS and JetStream. Pure.

A producer's batches are published on `<subject>.<producer, 16 hex digits>`. Requests go to
`<subject>.<producer>.requests`, or `<subject>.all.requests` for whoever publishes there, with the header `Kv-Request`:

| Kv-Request | body, big-endian u64 | reply |
|---|---|---|
| resend | first sequence | each buffered batch, then an empty message whose Kv-Sequence is 2^64-1 |
| ack | producer, epoch, sequence | none; the reply subject names the subscriber |
| snapshot | producer, epoch | none; the snapshot follows in the stream |
| who | | the publisher's epoch: the producer is in use |
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from event_plane.publishing import Acknowledgement, Ask, SnapshotAsk

REQUEST_HEADER: Final = "Kv-Request"
PRODUCER_HEADER: Final = "Kv-Producer"
EPOCH_HEADER: Final = "Kv-Epoch"
SEQUENCE_HEADER: Final = "Kv-Sequence"
EVERYONE: Final = "all"
_U64_MAX: Final = 0xFFFF_FFFF_FFFF_FFFF
_EPOCH = struct.Struct(">Q")
_RESEND = struct.Struct(">Q")
_ACK = struct.Struct(">QQQ")
_SNAPSHOT = struct.Struct(">QQ")


class RequestKind(StrEnum):
    RESEND = "resend"
    ACK = "ack"
    SNAPSHOT = "snapshot"
    WHO = "who"


def batch_subject(subject: str, producer: int) -> str:
    """Where a producer's batches are published."""
    return f"{subject}.{producer:016x}"


def request_subject(subject: str, producer: int | None) -> str:
    """Where a producer listens for requests; None: every producer under `subject`."""
    return f"{subject}.{EVERYONE}.requests" if producer is None else f"{batch_subject(subject, producer)}.requests"


def batch_headers(producer: int, epoch: int, sequence: int) -> dict[str, str]:
    """Headers of one published batch."""
    return {PRODUCER_HEADER: f"{producer:016x}", EPOCH_HEADER: str(epoch), SEQUENCE_HEADER: str(sequence)}


def read_headers(headers: Mapping[str, str] | None) -> tuple[int, int, int] | None:
    """(producer, epoch, sequence) of a batch of ours; None where the headers do not say, or hold no u64."""
    try:
        identity = None if headers is None else (
            int(headers[PRODUCER_HEADER], 16), int(headers[EPOCH_HEADER]), int(headers[SEQUENCE_HEADER])
        )  # fmt: skip
    except (KeyError, ValueError):
        return None
    return identity if identity is not None and all(0 <= each <= _U64_MAX for each in identity) else None


def request_headers(kind: RequestKind) -> dict[str, str]:
    return {REQUEST_HEADER: kind}


def resend_body(from_sequence: int) -> bytes:
    return _RESEND.pack(from_sequence)


def ack_body(producer: int, epoch: int, sequence: int) -> bytes:
    return _ACK.pack(producer, epoch, sequence)


def snapshot_body(producer: int, epoch: int) -> bytes:
    return _SNAPSHOT.pack(producer, epoch)


def who_reply(epoch: int) -> bytes:
    return _EPOCH.pack(epoch)


def read_who_reply(body: bytes) -> int | None:
    """The epoch of the publisher that answered; None for a body that is no such answer."""
    epoch: int
    if len(body) != _EPOCH.size:
        return None
    (epoch,) = _EPOCH.unpack(body)
    return epoch


def read_request(kind: str, body: bytes, peer: str) -> Ask | Acknowledgement | SnapshotAsk | None:
    """The request, `peer` being its reply subject; None for one that cannot be read, or needs a peer and has none."""
    match kind:
        case RequestKind.RESEND if len(body) == _RESEND.size and peer:
            return Ask(peer.encode(), *_RESEND.unpack(body))
        case RequestKind.ACK if len(body) == _ACK.size and peer:
            return Acknowledgement(peer.encode(), *_ACK.unpack(body))
        case RequestKind.SNAPSHOT if len(body) == _SNAPSHOT.size:
            return SnapshotAsk(peer.encode(), *_SNAPSHOT.unpack(body))
    return None
