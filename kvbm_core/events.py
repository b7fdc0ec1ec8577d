"""What the core announces: Store, Remove and Access of its own tiers, in the order in which they happened."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from event_plane.schema import EventRecord, EventType, RecordFlag, Tier
from event_plane.transport import Publisher
from kvbm_core.identity import BlockIdentity

Placed = tuple[Tier, str, Sequence[BlockIdentity]]
"""A tier, its location, and the blocks there."""


class BlockEvents:
    """Notes events under the pools' locks and hands them to the publisher outside them, since publishing may wait.

    Thread-safe. Nothing is published until `send`. `clock_us` gives µs since the Unix epoch.
    """

    def __init__(self, publisher: Publisher, block_bytes: int, clock_us: Callable[[], int]) -> None:
        self._publisher = publisher
        self._block_bytes = block_bytes
        self._clock_us = clock_us
        self._noted: deque[EventRecord] = deque()
        self._sending = threading.Lock()

    def store(self, tier: Tier, location: str, identity: BlockIdentity, copied: bool) -> None:
        self._noted.append(self._stored(tier, location, identity, copied))

    def remove(self, tier: Tier, location: str, identity: BlockIdentity) -> None:
        self._noted.append(self._record(EventType.REMOVE, tier, location, identity))

    def access(self, tier: Tier, location: str, identity: BlockIdentity) -> None:
        """One match of one block."""
        record = self._record(EventType.ACCESS, tier, location, identity)
        record.hits = 1
        self._noted.append(record)

    def clear(self) -> None:
        """Everything this core had placed is gone."""
        self._noted.append(EventRecord(EventType.CLEAR, tier=0, timestamp_us=self._clock_us()))

    def send(self) -> None:
        """Publish what was noted. The lock keeps two threads from publishing out of order."""
        with self._sending:
            self._publish(self._take_noted())

    def send_snapshot(self, standing_still: AbstractContextManager[Sequence[Placed]]) -> None:
        """Publish what was noted, then a snapshot. Within `standing_still`, which gives what is placed, nothing is
        noted, so that the snapshot says what the events before it lead to."""
        with self._sending:
            with standing_still as tiers:
                noted = self._take_noted()
                placed = [
                    self._stored(tier, location, identity, copied=True)
                    for tier, location, identities in tiers
                    for identity in identities
                ]
            self._publish(noted)
            self._publisher.publish_snapshot(placed)

    def _take_noted(self) -> list[EventRecord]:
        noted = []
        while self._noted:
            noted.append(self._noted.popleft())
        return noted

    def _publish(self, records: list[EventRecord]) -> None:
        if records:
            self._publisher.publish(records)

    def _stored(self, tier: Tier, location: str, identity: BlockIdentity, copied: bool) -> EventRecord:
        record = self._record(EventType.STORE, tier, location, identity)
        record.flags = RecordFlag.COPY if copied else 0
        return record

    def _record(self, event_type: EventType, tier: Tier, location: str, identity: BlockIdentity) -> EventRecord:
        return EventRecord(
            event_type,
            tier=tier,
            sequence_hash=identity.key.sequence_hash,
            namespace=identity.namespace,
            location=location,
            parent_hash=identity.parent_hash,
            prefix_hash=identity.prefix_hash,
            depth=identity.depth,
            group=identity.key.group,
            block_size=self._block_bytes,
            block_tokens=identity.block_tokens,
            timestamp_us=self._clock_us(),
        )
