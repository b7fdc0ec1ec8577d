"""Server-sent events over real sockets: what they say, that they end, and that they are bounded."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import httpx
import pytest
from direct import Direct
from sample_reader import SampleReader
from served import Served, serving

from advisor.api import feed as feed_module
from advisor.api import follower as follower_module
from advisor.api.errors import TooManyStreamsError
from advisor.api.feed import LiveFeed
from advisor.api.follower import LogFollower, StreamGap
from advisor.views import EventView

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
    with serving(reader) as served, httpx.stream("GET", f"{served.url}api/v1/stream", timeout=60) as answer:
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
    with serving(reader) as served, httpx.stream("GET", f"{served.url}api/v1/stream", timeout=60) as answer:
        events = events_of(answer.iter_lines())
        assert next(events)["id"] == "18204551"
        reader.summary_view = reader.summary_view.model_copy(update={"position": 18_204_600})
        later = next(event for event in events if event["event"] == "summary" and event["id"] == "18204600")
        assert json.loads(later["data"])["position"] == 18_204_600


def test_stream_of_an_empty_service_has_no_sample() -> None:
    with (
        serving(SampleReader.empty()) as served,
        httpx.stream("GET", f"{served.url}api/v1/stream", timeout=60) as answer,
    ):
        events = events_of(answer.iter_lines())
        names = [next(events)["event"] for _ in range(5)]
    assert names == ["summary", "volumes", "moves", "producers", "summary"]


def test_page_stream_sends_only_fragments_that_changed() -> None:
    reader = SampleReader()
    with serving(reader) as served, httpx.stream("GET", f"{served.url}live", timeout=60) as answer:
        events = events_of(answer.iter_lines())
        whole = next(event for event in events if "event" not in event)["data"]
        for name in ("status", "notices", "figures", "origin", "volumes", "moves", "producers"):
            assert f'<hx-partial hx-target="#{name}" hx-swap="innerMorph">' in whole
        reader.producer_views = reader.producer_views[3:4]
        changed = next(event for event in events if "event" not in event)["data"]
    assert changed.count("<hx-partial") == 1
    assert "sglang · pod-9" in changed
    assert "vllm · pod-3" not in changed


def test_stop_ends_open_streams() -> None:
    served = Served(SampleReader())
    with httpx.stream("GET", f"{served.url}api/v1/stream", timeout=60) as answer:
        events = events_of(answer.iter_lines())
        next(events)
        served.stop()
        assert all(event["event"] for event in events)


def test_streams_are_bounded_and_a_closed_one_frees_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "STREAMS_MAX", 1)
    with serving(SampleReader()) as served:
        url = f"{served.url}api/v1/stream"
        with httpx.stream("GET", url, timeout=60) as first:
            assert first.status_code == 200
            refused = httpx.get(f"{served.url}live", timeout=60)
            assert refused.status_code == 503
            assert refused.headers["content-type"] == "application/problem+json"
            assert refused.json()["type"] == "urn:kvadvisor:problem:too-many-streams"
            assert "close a dashboard tab" in refused.json()["detail"]
        deadline_s = time.monotonic() + 60
        status = 503
        while status == 503 and time.monotonic() < deadline_s:
            with httpx.stream("GET", url, timeout=60) as again:
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
        with pytest.raises(KeyError), feed.admitted("ann"):
            raise KeyError
        each = feed_module.STREAMS_EACH_MAX
        places = [feed.admitted(name) for name in ("ann", "bo", "cy", "di") for _ in range(each)]
        for place in places[:each]:
            place.__enter__()
        with pytest.raises(TooManyStreamsError, match="16 live streams of ann are open"), feed.admitted("ann"):
            pass
        for place in places[each:]:
            place.__enter__()
        with pytest.raises(TooManyStreamsError, match="64 live streams are open"), feed.admitted("ed"):
            pass

    asyncio.run(crowd())


def entry(position: int, kind: str) -> EventView:
    return EventView(
        position=position, recorded_us=5, kind=kind, source="", producer="", epoch="", sequence=None, text="told"
    )


def moved_on(reader: SampleReader, position: int, *entries: EventView) -> None:
    reader.event_views = [*reader.event_views, *entries]
    reader.summary_view = reader.summary_view.model_copy(update={"position": position})


def quiet_log(first: int, last: int) -> SampleReader:
    """A service whose log holds ticks alone, and whose samples are one a position."""
    reader = SampleReader()
    reader.event_views = [entry(position, "tick") for position in range(first, last + 1)]
    reader.summary_view = reader.summary_view.model_copy(update={"position": last})
    reader.sample_views = [
        reader.sample_views[0].model_copy(update={"time_s": 1_000 + position, "position": position})
        for position in range(first, last + 1)
    ]
    return reader


def until_shown(events: Iterator[Event], position: int) -> list[Event]:
    """Up to the end of a picture of this position."""
    told = []
    for event in events:
        told.append(event)
        if event["event"] == "producers" and event["id"] == str(position):
            return told
    raise AssertionError("the stream ended")


def test_stream_tells_entries_as_they_are_logged() -> None:
    reader = quiet_log(1, 40)
    with serving(reader) as served, httpx.stream("GET", f"{served.url}api/v1/stream", timeout=60) as answer:
        events = events_of(answer.iter_lines())
        assert "entry" not in {event["event"] for event in until_shown(events, 40)}
        moved_on(reader, 44, entry(41, "move"), entry(42, "tick"), entry(43, "operator"), entry(44, "volume"))
        told = [event for event in until_shown(events, 44) if event["event"] == "entry"]
        assert [event["id"] for event in told] == ["41", "43", "44"]
        assert json.loads(told[0]["data"]) == reader.event_views[40].model_dump()
        moved_on(reader, 400, *(entry(position, "move") for position in range(45, 401)))
        burst = [event for event in until_shown(events, 400) if event["event"] in ("entry", "gap")]
    assert [event["id"] for event in burst] == [*(str(position) for position in range(45, 145)), "400"]
    assert json.loads(burst[-1]["data"]) == {
        "from_position": 145, "through_position": 400, "reason": "more than 100 entries came at once"
    }


def test_reconnected_stream_first_tells_what_was_missed() -> None:
    reader = quiet_log(1, 40)
    with serving(reader) as served:
        url = f"{served.url}api/v1/stream"
        with httpx.stream("GET", url, timeout=60) as answer:
            seen = until_shown(events_of(answer.iter_lines()), 40)[-1]["id"]
        missed = [entry(41, "move"), entry(42, "batch"), entry(43, "settings"), entry(44, "operator")]
        moved_on(reader, 44, *missed)
        reader.sample_views = quiet_log(1, 44).sample_views
        with httpx.stream("GET", url, timeout=60, headers={"Last-Event-ID": seen}) as answer:
            events = events_of(answer.iter_lines())
            told = until_shown(events, 44)
            moved_on(reader, 45, entry(45, "move"))
            assert next(event for event in events if event["event"] == "entry")["id"] == "45"
    assert [event["event"] for event in told[:4]] == ["sample"] * 4
    assert [json.loads(event["data"])["position"] for event in told[:4]] == [41, 42, 43, 44]
    assert not any("id" in event for event in told[:4])
    assert [event["id"] for event in told if event["event"] == "entry"] == ["41", "43", "44"]
    assert "gap" not in {event["event"] for event in told}


def test_what_a_reconnected_stream_cannot_tell_is_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "MISSED_ENTRIES_MAX", 600)

    async def missed(reader: SampleReader, after: int, through: int) -> list[EventView | StreamGap]:
        return [told async for told in LogFollower(reader).missed(after, through)]

    reader = quiet_log(21, 30)
    moved_on(reader, 2_030, *(entry(position, "move") for position in range(31, 2_031)))
    cut, *entries, many = asyncio.run(missed(reader, 5, 2_030))
    assert cut == StreamGap(from_position=6, through_position=20, reason="the log does not hold them any more")
    assert [told.position for told in entries if isinstance(told, EventView)] == list(range(31, 631))
    assert many == StreamGap(from_position=631, through_position=2_030, reason="more than 600 entries were missed")
    assert asyncio.run(missed(reader, 2_030, 2_030)) == []
    (ahead,) = asyncio.run(missed(reader, 9_999, 2_030))
    assert isinstance(ahead, StreamGap)
    assert "this is another log" in ahead.reason


def test_stream_that_is_far_behind_the_others_is_told_of_its_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "LOOKS_KEPT_MAX", 5)

    async def follow() -> list[EventView | StreamGap]:
        reader = quiet_log(1, 10)
        follower = LogFollower(reader)
        assert await follower.live(10, 10) == []
        for last in (15, 20):
            moved_on(reader, last, *(entry(position, "move") for position in range(last - 4, last + 1)))
            assert len(await follower.live(last - 5, last)) == 5
        return await follower.live(10, 20)

    gap, *entries = asyncio.run(follow())
    assert gap == StreamGap(from_position=11, through_position=15, reason="this stream was read too slowly")
    assert [told.position for told in entries if isinstance(told, EventView)] == [16, 17, 18, 19, 20]


@pytest.mark.parametrize("last", ["x", "-1", "1" * 30])
def test_last_event_id_that_is_no_position_is_refused(last: str) -> None:
    answer = Direct(SampleReader()).get("/api/v1/stream", headers={"Last-Event-ID": last})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "Last-Event-ID"
