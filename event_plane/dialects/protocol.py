"""What a dialect offers: it reads the messages of one kind of foreign engine (`event_plane.dialects.known`)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from event_plane.schema import Batch
from event_plane.transport import Message


@dataclass(frozen=True, slots=True)
class Origin:
    """Who sent a foreign message, and which of its messages this is.

    `part` names the sender within its topic (`dp0`): source, topic and part are the producer. `sequence` counts that
    producer's messages from 0, whatever the engine calls it.
    """

    part: str
    sequence: int


class Dialect(Protocol):
    """Holds configuration only, so one may serve every thread and every producer of its source."""

    name: str

    def origin(self, message: Message) -> Origin:
        """Told from as little of the message as possible. Raises `DialectError` for one that it cannot be told from."""

    def decode(self, payload: bytes, *, producer: int, epoch: int, sequence: int) -> tuple[Batch, Counter[str]]:
        """The batch, and how many events were skipped for which reason (reasons are few: none quotes a message).

        Raises `DialectError`, and nothing else, for a payload that cannot be read or holds more blocks than a batch.
        """
