"""Server-sent events over real sockets: what they say, that they end, and that they are bounded."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import httpx
import pytest
from sample_reader import SampleReader
from served import Served, serving

from advisor.api import feed as feed_module
from advisor.api.errors import TooManyStreamsError
from advisor.api.feed import LiveFeed

Event = dict[str, str]


def events_of(lines: Iterator[str]) -> Iterator[Event]:
    event: Event = {}
    for line in lines:
        if not line:
            if event:
                yield event
            event = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(": ")
            event[name] = f"{event[name]}\n{value}" if name in event else value


def test_stream_sends_each_kind_at_once_with_the_position_as_id() -> None:
    reader = SampleReader()
    with serving(reader) as served, httpx.stream("GET", f"{served.url}api/v1/stream", timeout=20) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = events_of(answer.iter_lines())
        first = [next(events) for _ in range(5)]
    assert [event["event"] for event in first] == ["summary", "volumes", "moves", "producers", "sample"]
    assert {event["id"] for event in first} == {"18204551"}
    shown = {event["event"]: json.loads(event["data"]) for event in first}
    assert shown["summary"] == reader.summary_view.model_dump()
    assert shown["volumes"] == [volume.model_dump() for volume in reader.volume_views]
    assert shown["moves"] == reader.moves_view.model_dump()
    assert shown["producers"] == [producer.model_dump() for producer in reader.producer_views]
    assert shown["sample"] == reader.sample_views[-1].model_dump()


def test_stream_follows_the_service() -> None:
    reader = SampleReader()
    with serving(reader) as served, httpx.stream("GET", f"{served.url}api/v1/stream", timeout=20) as answer:
        events = events_of(answer.iter_lines())
        assert next(events)["id"] == "18204551"
        reader.summary_view = reader.summary_view.model_copy(update={"position": 18_204_600})
        later = next(event for event in events if event["event"] == "summary" and event["id"] == "18204600")
        assert json.loads(later["data"])["position"] == 18_204_600


def test_stream_of_an_empty_service_has_no_sample() -> None:
    with (
        serving(SampleReader.empty()) as served,
        httpx.stream("GET", f"{served.url}api/v1/stream", timeout=20) as answer,
    ):
        events = events_of(answer.iter_lines())
        names = [next(events)["event"] for _ in range(5)]
    assert names == ["summary", "volumes", "moves", "producers", "summary"]


def test_page_stream_sends_only_fragments_that_changed() -> None:
    reader = SampleReader()
    with serving(reader) as served, httpx.stream("GET", f"{served.url}live", timeout=20) as answer:
        events = events_of(answer.iter_lines())
        whole = next(event for event in events if "event" not in event)["data"]
        for name in ("status", "notices", "figures", "origin", "volumes", "moves", "producers"):
            assert f'<hx-partial hx-target="#{name}" hx-swap="innerMorph">' in whole
        reader.producer_views = []
        changed = next(event for event in events if "event" not in event)["data"]
    assert changed.count("<hx-partial") == 1
    assert "Nobody has published yet" in changed


def test_stop_ends_open_streams() -> None:
    served = Served(SampleReader())
    with httpx.stream("GET", f"{served.url}api/v1/stream", timeout=20) as answer:
        events = events_of(answer.iter_lines())
        next(events)
        served.stop()
        assert all(event["event"] for event in events)


def test_streams_are_bounded_and_a_closed_one_frees_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "STREAMS_MAX", 1)
    with serving(SampleReader()) as served:
        url = f"{served.url}api/v1/stream"
        with httpx.stream("GET", url, timeout=20) as first:
            assert first.status_code == 200
            refused = httpx.get(f"{served.url}live")
            assert refused.status_code == 503
            assert refused.headers["content-type"] == "application/problem+json"
            assert refused.json()["type"] == "urn:kvadvisor:problem:too-many-streams"
            assert "close a dashboard tab" in refused.json()["detail"]
        deadline_s = time.monotonic() + 20
        status = 503
        while status == 503 and time.monotonic() < deadline_s:
            with httpx.stream("GET", url, timeout=20) as again:
                status = again.status_code
        assert status == 200


def test_pictures_are_shared_among_streams() -> None:
    async def look_together() -> int:
        reader = SampleReader()
        feed = LiveFeed(reader, interval_s=60)
        pictures = await asyncio.gather(*(feed.current() for _ in range(20)))
        assert all(picture is pictures[0] for picture in pictures)
        return reader.summaries_read

    assert asyncio.run(look_together()) == 1


def test_place_is_given_back_after_an_error() -> None:
    async def crowd() -> None:
        feed = LiveFeed(SampleReader())
        with pytest.raises(KeyError), feed.admitted():
            raise KeyError
        places = [feed.admitted() for _ in range(feed_module.STREAMS_MAX)]
        for place in places:
            place.__enter__()
        with pytest.raises(TooManyStreamsError, match="64 live streams are open"), feed.admitted():
            pass

    asyncio.run(crowd())
