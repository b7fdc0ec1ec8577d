"""Pictures for every open stream: taken at most once an interval, however many are watching."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator

from starlette.concurrency import run_in_threadpool

from advisor.api.errors import TooManyStreamsError
from advisor.api.picture import Picture, take_picture
from advisor.views import AdvisorReader

STREAMS_MAX = 64
INTERVAL_S = 1.0


class LiveFeed:
    """Shares one picture a second among streams; a slow stream misses pictures, it never queues them.

    Lives on one event loop.
    """

    def __init__(self, reader: AdvisorReader, interval_s: float = INTERVAL_S) -> None:
        self._reader = reader
        self._interval_s = interval_s
        self._closed = asyncio.Event()
        self._taking = asyncio.Lock()
        self._picture: Picture | None = None
        self._taken_s = 0.0
        self._streams = 0

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Hold one of the stream places. Raises `TooManyStreamsError`."""
        if self._streams >= STREAMS_MAX:
            raise TooManyStreamsError(
                f"{STREAMS_MAX} live streams are open, which is the most: close a dashboard tab or poll /api/v1/summary"
            )
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    async def current(self) -> Picture:
        """The newest picture, taken now if the last one is an interval old."""
        async with self._taking:
            if self._picture is None or time.monotonic() - self._taken_s >= self._interval_s * 0.9:
                self._picture = await run_in_threadpool(take_picture, self._reader)
                self._taken_s = time.monotonic()
            return self._picture

    async def pictures(self) -> AsyncIterator[Picture]:
        """One at once, then one an interval, until `close`."""
        while not self._closed.is_set():
            yield await self.current()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), self._interval_s)

    def close(self) -> None:
        """End every stream now, so that a server's shutdown need not wait for its watchers. Idempotent."""
        self._closed.set()
