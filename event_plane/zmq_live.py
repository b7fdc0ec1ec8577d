"""Where a ZeroMQ subscriber's live messages wait: in libzmq's queue, or in one of our own that counts its losses.

libzmq's queue holds its publisher's back when it is full, and the publisher drops where nobody sees it. A queue of our
own is always read into; what does not fit is dropped here, and counted.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Any, Final, Protocol

import zmq

DROPPING_BYTES_MAX: Final = 256 * 1024 * 1024


class LiveFeed(Protocol):
    """Used by one thread, except `dropped`."""

    dropped: int

    @property
    def pollable(self) -> Any:
        """What a `zmq.Poller` can wait on."""

    def take(self) -> list[bytes] | None:
        """The next message's frames; None where none waits."""

    def close(self) -> None:
        """Close the socket."""


class WaitingFeed:
    """Messages stay in libzmq until they are taken."""

    def __init__(self, sub: zmq.Socket[bytes]) -> None:
        self.dropped = 0
        self.pollable = sub

    def take(self) -> list[bytes] | None:
        return receive_now(self.pollable)

    def close(self) -> None:
        self.pollable.close()


class DroppingFeed:
    """A thread reads messages at once; past `messages_max` or `DROPPING_BYTES_MAX` waiting, the newest are dropped."""

    def __init__(self, sub: zmq.Socket[bytes], messages_max: int) -> None:
        self.dropped = 0
        self.pollable = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sub = sub
        self._messages_max = messages_max
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._waiting: deque[list[bytes]] = deque()
        self._bytes = 0
        self._thread = threading.Thread(target=self._read, name="live-feed", daemon=True)
        self._thread.start()

    def take(self) -> list[bytes] | None:
        with self._lock:
            if not self._waiting:
                return None
            frames = self._waiting.popleft()
            self._bytes -= sum(map(len, frames))
            if not self._waiting:
                os.eventfd_read(self.pollable)
            return frames

    def close(self) -> None:
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        self._sub.close()
        os.close(self.pollable)
        os.close(self._stop)

    def _read(self) -> None:
        poller = zmq.Poller()
        poller.register(self._sub, zmq.POLLIN)
        poller.register(self._stop, zmq.POLLIN)
        while self._stop not in (ready := dict(poller.poll())):
            if self._sub in ready and (frames := receive_now(self._sub)) is not None:
                self._keep(frames)

    def _keep(self, frames: list[bytes]) -> None:
        size = sum(map(len, frames))
        with self._lock:
            if len(self._waiting) >= self._messages_max or self._bytes + size > DROPPING_BYTES_MAX:
                self.dropped += 1
                return
            self._waiting.append(frames)
            self._bytes += size
            if len(self._waiting) == 1:
                os.eventfd_write(self.pollable, 1)


def receive_now(receiver: zmq.Socket[bytes]) -> list[bytes] | None:
    """A message that is there, or None."""
    try:
        return receiver.recv_multipart(zmq.DONTWAIT)
    except zmq.Again:
        return None
