"""What a subscription has received and not yet handed on: bounded, filled by a loop's thread, emptied by another."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from event_plane.transport import Received

MESSAGES_MAX: Final = 4096
BYTES_MAX: Final = 32 * 1024 * 1024
_MESSAGE_BYTES = 512
"""What one message takes beside its payload."""

Mark = TypeVar("Mark")


@dataclass(slots=True)
class Letter(Generic[Mark]):
    """`mark` is the owner's: which resend it belongs to, or how to acknowledge it."""

    received: Received
    payload_bytes: int
    mark: Mark


@dataclass(slots=True)
class Lane(Generic[Mark]):
    """One kind of message: live or resent. Neither may starve the other."""

    letters: deque[Letter[Mark]] = field(default_factory=deque)
    bytes: int = 0

    @property
    def is_full(self) -> bool:
        return len(self.letters) >= MESSAGES_MAX or self.bytes >= BYTES_MAX


class Mailbox(Generic[Mark]):
    """Two lanes, live and resent, each of at most `MESSAGES_MAX` messages and about `BYTES_MAX` bytes.

    `fileno` is readable exactly while something waits. `put…` belong to the loop's thread, the rest to any.
    """

    def __init__(self) -> None:
        self.live: Lane[Mark] = Lane()
        self.resent: Lane[Mark] = Lane()
        self.dropped = 0
        self._lock = threading.Lock()
        self._ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._room = asyncio.Event()
        self._room_awaited = False
        self._closed = False

    def fileno(self) -> int:
        return self._ready

    def put(self, lane: Lane[Mark], received: Received, payload_bytes: int, mark: Mark) -> None:
        """Always takes it: for messages that are few, or that room was found for."""
        with self._lock:
            if self._closed:
                return
            lane.letters.append(Letter(received, payload_bytes, mark))
            lane.bytes += payload_bytes + _MESSAGE_BYTES
            os.eventfd_write(self._ready, 1)

    async def room(self, lane: Lane[Mark]) -> None:
        """Wait until `lane` is not full."""
        self._loop = asyncio.get_running_loop()
        while True:
            self._room.clear()
            self._room_awaited = True
            if not lane.is_full:
                return
            await self._room.wait()

    def take(self, count_max: int, handed_out: Callable[[Letter[Mark]], bool]) -> list[Received]:
        """At most `count_max` messages, the resent ones at most half while live ones wait. `handed_out` is told of each
        and may refuse it, which drops it."""
        with self._lock:
            if self._closed:
                return []
            received: list[Received] = []
            self._take_from(self.resent, received, count_max - count_max // 2, handed_out)
            self._take_from(self.live, received, count_max, handed_out)
            self._take_from(self.resent, received, count_max, handed_out)
            os.eventfd_write(self._ready, 1)
            os.eventfd_read(self._ready)
            if self.live.letters or self.resent.letters:
                os.eventfd_write(self._ready, 1)
            if self._loop is not None and self._room_awaited:
                self._room_awaited = False
                self._loop.call_soon_threadsafe(self._room.set)
            return received

    def pollables(self) -> list[Any]:
        with self._lock:
            return [] if self._closed else [self._ready]

    def close(self) -> None:
        """Forget everything. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop = None
                self.live.letters.clear()
                self.resent.letters.clear()
                os.close(self._ready)

    def _take_from(
        self,
        lane: Lane[Mark],
        received: list[Received],
        count_max: int,
        handed_out: Callable[[Letter[Mark]], bool],
    ) -> None:
        while lane.letters and len(received) < count_max:
            letter = lane.letters.popleft()
            lane.bytes -= letter.payload_bytes + _MESSAGE_BYTES
            if handed_out(letter):
                received.append(letter.received)
