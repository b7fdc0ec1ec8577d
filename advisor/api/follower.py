"""Entries of the log for open streams: what was missed since a position, and what comes, read once for all of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from advisor.entries import EntryKind
from advisor.views import AdvisorReader, EventView, View

KINDS = (EntryKind.MOVE, EntryKind.OPERATOR, EntryKind.SETTINGS, EntryKind.VOLUME)
"""What streams tell of: not batches, ticks and measurements, of which there are thousands."""
LIVE_ENTRIES_MAX = 100
"""Told at a look, which is every second."""
LOOKS_KEPT_MAX = 1_000
"""Entries and gaps kept for streams that are a little behind."""
MISSED_ENTRIES_MAX = 10_000
PAGE_ENTRIES = 250


class StreamGap(View):
    """Entries that a stream does not tell: `GET /api/v1/events?from_position=…` has those that the log still holds."""

    from_position: int
    through_position: int
    reason: str


Told = EventView | StreamGap


class LogFollower:
    """Shares what it reads among streams. Lives on one event loop."""

    def __init__(self, reader: AdvisorReader) -> None:
        self._reader = reader
        self._reading = asyncio.Lock()
        self._kept: deque[Told] = deque()
        self._floor = 0
        """All that is told of positions after it is in `_kept`."""
        self._followed: int | None = None

    async def missed(self, after: int, through: int) -> AsyncIterator[Told]:
        """What lies after one position up to another, oldest first, with gaps for what cannot be told."""
        if after > through:
            reason = f"position {after} is after the newest, {through}: this is another log, or one that was restored"
            yield StreamGap(from_position=after, through_position=through, reason=reason)
            return
        if after == through:
            return
        oldest = (await self._reader.events(from_position=after + 1, limit=1)).events
        if oldest and oldest[0].position > after + 1:
            last = min(through, oldest[0].position - 1)
            reason = "the log does not hold them any more"
            yield StreamGap(from_position=after + 1, through_position=last, reason=reason)
        count = 0
        async for entry in self._entries(after + 1, through):
            if count == MISSED_ENTRIES_MAX:
                reason = f"more than {MISSED_ENTRIES_MAX} entries were missed"
                yield StreamGap(from_position=entry.position, through_position=through, reason=reason)
                return
            count += 1
            yield entry

    async def live(self, after: int, through: int) -> list[Told]:
        """What lies after the position of the picture before, up to that of this one. The first call begins it."""
        async with self._reading:
            if self._followed is None:
                self._floor = self._followed = through
            if through > self._followed:
                self._keep(await self._look(self._followed + 1, through))
                self._followed = through
        told = [one for one in self._kept if _position(one) > after and _first(one) <= through]
        if after < self._floor:
            reason = "this stream was read too slowly"
            told.insert(0, StreamGap(from_position=after + 1, through_position=self._floor, reason=reason))
        return told

    async def _look(self, first: int, through: int) -> list[Told]:
        """The first entries after those of the look before; a gap stands for the others."""
        told: list[Told] = []
        async for entry in self._entries(first, through, page=LIVE_ENTRIES_MAX + 1):
            if len(told) == LIVE_ENTRIES_MAX:
                reason = f"more than {LIVE_ENTRIES_MAX} entries came at once"
                told.append(StreamGap(from_position=entry.position, through_position=through, reason=reason))
                break
            told.append(entry)
        return told

    def _keep(self, told: list[Told]) -> None:
        self._kept.extend(told)
        while len(self._kept) > LOOKS_KEPT_MAX:
            self._floor = _position(self._kept.popleft())

    async def _entries(self, first: int, through: int, page: int = PAGE_ENTRIES) -> AsyncIterator[EventView]:
        """Entries of `KINDS` in order of position; at most a page of each is held."""
        pages = {kind: _KindPages(self._reader, kind, first, through, page) for kind in KINDS}
        for each in pages.values():
            await each.fill()
        while heads := [each for each in pages.values() if each.held]:
            foremost = min(heads, key=lambda each: each.held[0].position)
            yield foremost.held.popleft()
            await foremost.fill()


class _KindPages:
    """Entries of one kind, a page at a time."""

    def __init__(self, reader: AdvisorReader, kind: EntryKind, first: int, through: int, page: int) -> None:
        self._reader = reader
        self._kind = kind
        self._next = first
        self._through = through
        self._page = page
        self._ended = False
        self.held: deque[EventView] = deque()

    async def fill(self) -> None:
        """Read on if all that was read is taken. A page may be empty and go on."""
        while not self.held and not self._ended:
            await self._read()

    async def _read(self) -> None:
        page = await self._reader.events(
            from_position=self._next, limit=self._page, kind=self._kind.value, until_position=self._through
        )
        self.held.extend(page.events)
        self._ended = page.next_position is None
        self._next = page.next_position or self._next


def _first(told: Told) -> int:
    return told.position if isinstance(told, EventView) else told.from_position


def _position(told: Told) -> int:
    return told.position if isinstance(told, EventView) else told.through_position
