"""Pictures for every open stream: taken at most once an interval, however many are watching."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator

from starlette.concurrency import run_in_threadpool

from advisor.api.errors import TooManyStreamsError
from advisor.api.picture import Picture, take_picture
from advisor.plan_views import AdvisorPlans
from advisor.views import AdvisorReader
from advisor.volume_views import AdvisorVolumes
from advisor.web.alerts import Alert, Noticed

STREAMS_MAX = 64
STREAMS_EACH_MAX = 16
"""Of one name: nobody takes all places."""
INTERVAL_S = 1.0
NOTICING_S = 5.0
"""How often trouble is looked for while nobody watches, so that it can be said since when it is there."""


class LiveFeed:
    """Shares one picture a second among streams; a slow stream misses pictures, it never queues them.

    Lives on one event loop.
    """

    def __init__(
        self,
        reader: AdvisorReader,
        interval_s: float = INTERVAL_S,
        plans: AdvisorPlans | None = None,
        volumes: AdvisorVolumes | None = None,
    ) -> None:
        self._reader, self._plans, self._volumes = reader, plans, volumes
        self._interval_s = interval_s
        self._closed = asyncio.Event()
        self._taking = asyncio.Lock()
        self._picture: Picture | None = None
        self._taken_s = 0.0
        self._streams: Counter[str] = Counter()
        self._noticed = Noticed()
        self._alerts: list[Alert] = []

    @contextlib.contextmanager
    def admitted(self, name: str) -> Iterator[None]:
        """Hold one of the stream places for who is called so. Raises `TooManyStreamsError`."""
        remedy = "close a dashboard tab or poll /api/v1/summary"
        if self._streams.total() >= STREAMS_MAX:
            raise TooManyStreamsError(f"{STREAMS_MAX} live streams are open, which is the most: {remedy}")
        if self._streams[name] >= STREAMS_EACH_MAX:
            raise TooManyStreamsError(
                f"{STREAMS_EACH_MAX} live streams of {name} are open, which is the most for one: {remedy}"
            )
        self._streams[name] += 1
        try:
            yield
        finally:
            self._streams[name] -= 1
            self._streams += Counter()  # names without a stream are forgotten

    async def current(self) -> Picture:
        """The newest picture, taken now if the last one is an interval old."""
        async with self._taking:
            if self._picture is None or time.monotonic() - self._taken_s >= self._interval_s * 0.9:
                self._picture = await run_in_threadpool(take_picture, self._reader, self._plans, self._volumes)
                self._taken_s = time.monotonic()
                self._alerts = self._noticed.look(self._picture.alerts, time.time_ns() // 1000)
            return self._picture

    @property
    def alerts(self) -> list[Alert]:
        """Of the newest picture, the oldest trouble first."""
        return self._alerts

    async def notice(self) -> None:
        """Look every `NOTICING_S`, until `close`."""
        while not self._closed.is_set():
            await self.current()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), NOTICING_S)

    async def pictures(self) -> AsyncIterator[Picture]:
        """One at once, then one an interval, until `close`."""
        while not self._closed.is_set():
            yield await self.current()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), self._interval_s)

    def close(self) -> None:
        """End every stream now, so that a server's shutdown need not wait for its watchers. Idempotent."""
        self._closed.set()
