"""What the core announces: Store, Remove and Access of its own tiers, in the order in which they happened."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from event_plane.errors import TransportError
from event_plane.schema import EventRecord, EventType, RecordFlag, Tier
from event_plane.transport import Publisher
from kvbm_core.identity import BlockIdentity
from storage_agent.access_fold import AccessFold

Placed = tuple[Tier, str, Sequence[BlockIdentity]]
"""A tier, its location, and the blocks there."""

_GATHER_S = 0.002
"""How long the thread waits for more after the first: an engine's calls come in bursts, and waking it costs them."""
_NOTED_MAX = 65_536
"""Events that wait to be published; past it the core's callers wait for the thread."""


class _Noted(NamedTuple):
    """One event as it is noted, under a pool's lock: as little work as can be. `identity` is None in a Clear."""

    event_type: EventType
    tier: int
    location: str
    identity: BlockIdentity | None
    flags: int
    timestamp_us: int


class PublishHandle:
    """Through which one pool tells of its blocks. Called under the pool's lock: it only notes what happened."""

    def __init__(self, events: BlockEvents, tier: Tier, location: str) -> None:
        self._note = events.note
        self._tier = tier
        self._location = location

    def stored(self, identity: BlockIdentity, copied: bool) -> None:
        """`copied`: it is a copy of a block that another tier holds, and no touch of it."""
        flags = RecordFlag.COPY if copied else 0
        self._note(EventType.STORE, self._tier, self._location, identity, flags)

    def removed(self, identity: BlockIdentity) -> None:
        self._note(EventType.REMOVE, self._tier, self._location, identity)


class BlockEvents:
    """Gathers what the pools tell and publishes it from a thread of its own, so that no engine waits for a publisher.

    Thread-safe. Matches are folded into one Access for each block and flush. A publisher that was closed ends it: what
    happens afterwards is counted in `lost` and told to nobody. `clock_us` gives µs since the Unix epoch.
    """

    def __init__(self, publisher: Publisher, block_bytes: int, clock_us: Callable[[], int]) -> None:
        self._publisher = publisher
        self._block_bytes = block_bytes
        self._clock_us = clock_us
        self._noted: deque[_Noted] = deque()
        self._fold = AccessFold[_Noted]()
        self._publishing = threading.Lock()
        """Keeps two threads from publishing out of order; guards the fold."""
        self._changed = threading.Condition()
        self._is_closed = False
        self._is_idle = False
        """The thread waits for a first event: set before it looks for one, so that none is missed."""
        self.lost = 0
        self._thread = threading.Thread(target=self._run, name="kvbm-events", daemon=True)
        self._thread.start()

    def note(
        self, event_type: EventType, tier: int, location: str, identity: BlockIdentity | None, flags: int = 0
    ) -> None:
        """Remember an event. Takes no lock that anybody holds for long, so that pools may call it under theirs."""
        self._noted.append(_Noted(event_type, tier, location, identity, flags, self._clock_us()))

    def send(self) -> None:
        """Something was noted: have it published soon. Waits only where too much is to be published."""
        if not self._is_idle and len(self._noted) <= _NOTED_MAX:
            return
        with self._changed:
            self._changed.notify_all()
            while len(self._noted) > _NOTED_MAX and not self._is_closed:
                self._changed.wait(0.1)

    def flush(self) -> None:
        """Publish now what was noted, folded matches included."""
        with self._publishing:
            self._publish(self._take_noted(), flush=True)

    def send_snapshot(self, standing_still: AbstractContextManager[Sequence[Placed]]) -> None:
        """Publish what was noted, then a snapshot. Within `standing_still`, which gives what is placed, nothing is
        noted, so that the snapshot says what the events before it lead to. Raises `TransportError`."""
        with self._publishing:
            with standing_still as tiers:
                noted = self._take_noted()
                now_us = self._clock_us()
                placed = [
                    self._record(_Noted(EventType.STORE, tier, location, identity, RecordFlag.COPY, now_us))
                    for tier, location, identities in tiers
                    for identity in identities
                ]
            self._publish(noted, flush=True)
            self._publisher.publish_snapshot(placed)

    def close(self) -> None:
        """Say that everything this core had placed is gone, and stop. The publisher stays open. Idempotent."""
        with self._changed:
            already, self._is_closed = self._is_closed, True
            self._changed.notify_all()
        if already or not self._thread.is_alive():  # what was placed is the parent's, where this process was forked
            return
        self._thread.join()
        self.note(EventType.CLEAR, 0, "", None)
        self.flush()

    def _run(self) -> None:
        while self._wait():
            time.sleep(_GATHER_S)
            with self._publishing:
                self._publish(self._take_noted())
            with self._changed:
                self._changed.notify_all()

    def _wait(self) -> bool:
        """Until there is something to publish; False: until closed."""
        with self._changed:
            self._is_idle = True
            while not self._noted and not self._is_closed and self._wait_s() != 0.0:
                self._changed.wait(self._wait_s())
            self._is_idle = False
            return not self._is_closed

    def _wait_s(self) -> float | None:
        return self._fold.due_in_s(time.monotonic())

    def _take_noted(self) -> list[_Noted]:
        noted = []
        while self._noted:
            noted.append(self._noted.popleft())
        return noted

    def _publish(self, noted: Sequence[_Noted], *, flush: bool = False) -> None:
        """Publish in order, but matches when they are due or their block goes."""
        records: list[EventRecord] = []
        now_s = time.monotonic()
        for each in noted:
            if each.event_type is EventType.ACCESS and each.identity is not None:
                self._fold.add(each.location, each.identity.key, each, now_s)
                continue
            if each.event_type is EventType.REMOVE and each.identity is not None:
                accessed = self._fold.take(each.location, each.identity.key)
                if accessed is not None:
                    records.append(self._record(*accessed))
            elif each.event_type is EventType.CLEAR:
                records += self._drain()
            records.append(self._record(each))
        if flush or self._fold.due_in_s(now_s) == 0.0:
            records += self._drain()
        if records:
            try:
                self._publisher.publish(records)
            except TransportError:
                self.lost += len(records)

    def _drain(self) -> list[EventRecord]:
        return [self._record(noted, hits) for _, noted, hits in self._fold.drain()]

    def _record(self, noted: _Noted, hits: int = 0) -> EventRecord:
        identity = noted.identity
        if identity is None:
            return EventRecord(noted.event_type, tier=noted.tier, timestamp_us=noted.timestamp_us)
        return EventRecord(
            noted.event_type,
            tier=noted.tier,
            sequence_hash=identity.key.sequence_hash,
            namespace=identity.namespace,
            location=noted.location,
            parent_hash=identity.parent_hash,
            prefix_hash=identity.prefix_hash,
            depth=identity.depth,
            group=identity.key.group,
            block_size=self._block_bytes,
            block_tokens=identity.block_tokens,
            flags=noted.flags,
            hits=hits,
            timestamp_us=noted.timestamp_us,
        )
