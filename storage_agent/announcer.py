"""What happened on an agent's volumes, told to the event plane."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from event_plane.errors import TransportError
from event_plane.schema import DEPTH_UNKNOWN, TIER_ALL, EventRecord, EventType, RecordFlag, producer_id
from event_plane.transport import Publisher
from storage_agent.access_fold import AccessFold
from storage_agent.block_header import BlockHeader
from storage_agent.descriptor import VolumeDescriptor


class Announcer:
    """Publishes one agent's Store, Remove, Access and Clear events. Thread-safe.

    Store and Remove go out in the call that tells of them, so that events of one block are in the order they happened.
    Access is folded and sent by a thread of its own, so that no get waits for the event plane.
    `ordering` is held while a Store is announced with the change it tells of, and while a snapshot is listed and
    published: so that a snapshot names exactly what the events before it placed.
    """

    def __init__(self, agent: str, publisher: Publisher | None) -> None:
        self._publisher = publisher
        self.producer = publisher.producer if publisher is not None else producer_id(agent)
        self.epoch = publisher.epoch if publisher is not None else 0
        self.ordering = threading.RLock()
        self._fold = AccessFold[BlockHeader]()
        self._changed = threading.Condition()
        self._closed = False
        self._silent: set[str] = set()
        self._tiers: dict[str, int] = {}
        self._thread: threading.Thread | None = None
        if publisher is not None:
            self._thread = threading.Thread(target=self._send_accesses, name=f"accesses-{agent}", daemon=True)
            self._thread.start()

    def set_silent(self, volume: str, is_silent: bool) -> None:
        """Whether another agent owns the volume, and tells of it; until it is said otherwise of this id."""
        if is_silent:
            self._silent.add(volume)
        else:
            self._silent.discard(volume)

    def is_silent(self, volume: str) -> bool:
        return volume in self._silent

    def snapshot(self, blocks: Iterable[tuple[VolumeDescriptor, Sequence[BlockHeader]]]) -> None:
        """Everything on this agent's volumes; what it had announced and is not among it is gone. Hold `ordering`."""
        if self._publisher is not None:
            now_us = time.time_ns() // 1000
            self._publisher.publish_snapshot(
                [
                    _record(EventType.STORE, volume.tier, volume.id, header, now_us, flags=RecordFlag.COPY)
                    for volume, headers in blocks
                    if volume.id not in self._silent
                    for header in headers
                ]
            )

    def serve_snapshots(self, announce: Callable[[], None]) -> None:
        """Call `announce`, which calls `snapshot`, whenever a subscriber asks for one."""
        if self._publisher is not None:
            self._publisher.serve_snapshots(announce)

    def stored(self, volume: VolumeDescriptor, headers: Sequence[BlockHeader]) -> None:
        self._publish(volume, EventType.STORE, sorted(headers, key=lambda header: header.depth), RecordFlag.COPY)

    def freed(self, volume: VolumeDescriptor, headers: Sequence[BlockHeader]) -> None:
        self.flush_accesses()  # an access of a block comes before its end
        # Children go first; a block of unknown depth has none that we know of.
        order = sorted(headers, key=lambda h: -1 if h.depth == DEPTH_UNKNOWN else h.depth, reverse=True)
        self._publish(volume, EventType.REMOVE, order, RecordFlag(0))

    def reconciled(
        self, volume: VolumeDescriptor, announced: Sequence[BlockHeader], found: Sequence[BlockHeader]
    ) -> None:
        """A volume was opened anew: tell how what it holds differs from what was announced."""
        before, after = ({header.key for header in headers} for headers in (announced, found))
        self.freed(volume, [header for header in announced if header.key not in after])
        self.stored(volume, [header for header in found if header.key not in before])

    def unregistered(self, volume: VolumeDescriptor) -> None:
        """Nothing of this agent is on the volume any more."""
        if self._publisher is not None and volume.id not in self._silent:
            self.flush_accesses()
            self._publisher.publish(
                [EventRecord(EventType.CLEAR, TIER_ALL, location=volume.id, timestamp_us=time.time_ns() // 1000)]
            )

    def accessed(self, volume: VolumeDescriptor, headers: Iterable[BlockHeader]) -> None:
        """Blocks were read. Never waits for the event plane."""
        if self._publisher is None or volume.id in self._silent:
            return
        now_s = time.monotonic()
        with self._changed:
            self._tiers[volume.id] = volume.tier
            before = self._fold.due_in_s(now_s)
            for header in headers:
                self._fold.add(volume.id, header.key, header, now_s)
            if self._fold.due_in_s(now_s) != before:
                self._changed.notify()

    def flush_accesses(self) -> None:
        """Publish what waits now."""
        if self._publisher is None:
            return
        with self._changed:
            drained = [(self._tiers[volume], volume, header, hits) for volume, header, hits in self._fold.drain()]
        if drained:
            now_us = time.time_ns() // 1000
            self._publisher.publish(
                [
                    _record(EventType.ACCESS, tier, volume, header, now_us, hits=hits)
                    for tier, volume, header, hits in drained
                ]
            )

    def flush(self) -> int:
        """Everything told so far is sent. The sequence of the batch that holds the last of it; -1 if there is none."""
        return self._publisher.flush() if self._publisher is not None else -1

    def close(self) -> None:
        """Send what waits and stop; the publisher stays open. Idempotent."""
        with self._changed:
            already, self._closed = self._closed, True
            self._changed.notify()
        if already or self._thread is None:
            return
        self._thread.join()
        with suppress(TransportError):  # the publisher was closed first: nobody is left to tell
            self.flush_accesses()
            self.flush()

    def _publish(
        self, volume: VolumeDescriptor, event_type: EventType, headers: Sequence[BlockHeader], flags: RecordFlag
    ) -> None:
        if self._publisher is None or not headers or volume.id in self._silent:
            return
        now_us = time.time_ns() // 1000
        self._publisher.publish(
            [_record(event_type, volume.tier, volume.id, header, now_us, flags=flags) for header in headers]
        )

    def _send_accesses(self) -> None:
        while True:
            with self._changed:
                due_in_s = self._fold.due_in_s(time.monotonic())
                while not self._closed and due_in_s != 0.0:
                    self._changed.wait(due_in_s)
                    due_in_s = self._fold.due_in_s(time.monotonic())
                if self._closed:
                    return
            try:
                self.flush_accesses()
            except TransportError:
                return  # the publisher was closed under us; puts and deletes say so to their callers


def _record(
    event_type: EventType, tier: int, volume: str, header: BlockHeader, now_us: int, *, flags: int = 0, hits: int = 0
) -> EventRecord:
    return EventRecord(
        event_type,
        tier,
        header.key.sequence_hash,
        header.namespace,
        volume,
        parent_hash=header.parent_hash,
        depth=header.depth,
        group=header.key.group,
        block_size=header.payload_bytes,
        block_tokens=header.block_tokens,
        flags=flags,
        hits=hits,
        timestamp_us=now_us,
    )
