"""The stream of server-sent events, and how it goes on where it was cut."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Header
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool

from advisor.access.identity import Scope
from advisor.api.access import needs
from advisor.api.feed import LiveFeed
from advisor.api.follower import LogFollower, StreamGap, Told
from advisor.api.picture import Picture
from advisor.api.problems import documented
from advisor.api.queries import MOVES_ROWS, SAMPLES_SECONDS_MAX
from advisor.api.stream_route import StreamRoute, stream_place
from advisor.views import AdvisorReader

LastEventId = Annotated[
    int | None,
    Header(alias="Last-Event-ID", ge=0, le=2**63 - 1, description="Position that was shown last: it goes on after it."),
]


def stream_routes(reader: AdvisorReader, feed: LiveFeed) -> APIRouter:
    """`/api/v1/stream`."""
    routes = APIRouter(prefix="/api/v1", tags=["advisor"], route_class=StreamRoute)
    follower = LogFollower(reader)

    @routes.get(
        "/stream",
        summary="Server-sent events, every second",
        response_class=EventSourceResponse,
        responses=documented(422, 503),
        dependencies=[Depends(needs(Scope.READ)), Depends(stream_place(feed))],
    )
    async def stream(resumed: LastEventId = None) -> AsyncIterator[ServerSentEvent]:
        """Events `summary`, `volumes`, `moves`, `producers` and `sample`, each with the JSON of the route of that name,
        and `entry` for each move, operator, settings and volume entry of the log, as `events` has it.

        The id of an event is the log position it shows. With `Last-Event-ID` the samples and entries since then come
        first. What is not told is named by `gap`: more than 100 entries in a second, 10,000 when it goes on, entries
        that the log does not hold any more. A watcher that is slow gets the newest figures, never a backlog.
        """
        after, sampled_s = None, 0
        async for picture in feed.pictures():
            position = picture.summary.position
            # The first call begins to follow, before what was missed is looked for.
            live = await follower.live(position if after is None else after, position)
            if after is None and resumed is not None:
                for sample in await run_in_threadpool(reader.samples, SAMPLES_SECONDS_MAX):
                    if sample.position > resumed:
                        sampled_s = sample.time_s
                        # Without an id: whoever is cut here has the entries still to come.
                        yield ServerSentEvent(event="sample", data=sample)
                async for told in follower.missed(resumed, position):
                    yield _told(told)
            for told in live:
                yield _told(told)
            after = position
            for event in _figures(picture, sampled_s):
                yield event
            sampled_s = picture.samples[-1].time_s if picture.samples else sampled_s

    return routes


def _told(told: Told) -> ServerSentEvent:
    if isinstance(told, StreamGap):
        return ServerSentEvent(event="gap", data=told, id=str(told.through_position))
    return ServerSentEvent(event="entry", data=told, id=str(told.position))


def _figures(picture: Picture, sampled_s: int) -> list[ServerSentEvent]:
    """Everything of a picture; its newest sample only where that was not told before."""
    position = str(picture.summary.position)
    moves = picture.moves.first(MOVES_ROWS)
    figures = {"summary": picture.summary, "volumes": picture.volumes, "moves": moves, "producers": picture.producers}
    if picture.samples and picture.samples[-1].time_s > sampled_s:
        figures["sample"] = picture.samples[-1]
    return [ServerSentEvent(event=name, data=data, id=position) for name, data in figures.items()]
