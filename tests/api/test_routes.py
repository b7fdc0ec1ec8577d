"""Every JSON route answers with its model, filtered and bounded as asked."""

from __future__ import annotations

import pytest
from direct import Direct
from pydantic import BaseModel, TypeAdapter
from sample_parts import METRICS
from sample_reader import SampleReader, block_hash

from advisor.views import (
    BlockPage,
    Check,
    CompactionsView,
    EventsPage,
    MovesView,
    ProducerView,
    Sample,
    Summary,
    VolumeView,
)


@pytest.fixture
def reader() -> SampleReader:
    return SampleReader()


@pytest.fixture
def client(reader: SampleReader) -> Direct:
    return Direct(reader)


@pytest.mark.parametrize(
    ("path", "model", "attribute"),
    [
        ("/api/v1/summary", Summary, "summary_view"),
        ("/api/v1/volumes", list[VolumeView], "volume_views"),
        ("/api/v1/moves", MovesView, "moves_view"),
        ("/api/v1/compactions", CompactionsView, "compactions_view"),
        ("/api/v1/producers", list[ProducerView], "producer_views"),
        ("/api/v1/samples", list[Sample], "sample_views"),
    ],
)
def test_route_answers_with_what_the_reader_says(
    client: Direct, reader: SampleReader, path: str, model: type[BaseModel], attribute: str
) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert TypeAdapter(model).validate_json(answer.content) == getattr(reader, attribute)


def test_list_routes_cut_to_the_limit_and_say_how_many_there_are(client: Direct) -> None:
    for path, total in (("/api/v1/volumes", 4), ("/api/v1/producers", 5)):
        answer = client.get(path, params={"limit": 2})
        assert len(answer.json()) == 2
        assert answer.headers["x-total-count"] == str(total)
    assert len(client.get("/api/v1/moves", params={"limit": 3}).json()["moves"]) == 3
    assert len(client.get("/api/v1/samples", params={"seconds": 9}).json()) == 9


def test_block_pages_join_to_the_whole_list(client: Direct, reader: SampleReader) -> None:
    found, after = [], None
    while True:
        params = {"limit": "100"} | ({"after": after} if after else {})
        page = BlockPage.model_validate_json(client.get("/api/v1/blocks", params=params).content)
        found += page.blocks
        after = page.next_cursor
        if after is None:
            break
    assert found == reader.block_views


def test_block_filters_reach_the_reader(client: Direct) -> None:
    wanted = {"hash_prefix": block_hash(7)[:12], "volume": "nvme-a", "tier": 3}
    page = client.get("/api/v1/blocks", params=wanted).json()
    assert [block["hash"] for block in page["blocks"]] == [block_hash(7)]
    assert client.get("/api/v1/blocks", params={"tenant": "nobody"}).json() ["blocks"] == []
    assert client.get("/api/v1/blocks", params={"tier": 4}).json()["blocks"] == []


def test_events_page_forward_from_a_position(client: Direct) -> None:
    first = EventsPage.model_validate_json(client.get("/api/v1/events?from_position=10&limit=5").content)
    assert [event.position for event in first.events] == [10, 11, 12, 13, 14]
    assert first.next_position == 15
    ticks = client.get("/api/v1/events?kind=tick&limit=2").json()["events"]
    assert [event["position"] for event in ticks] == [295, 300]


def test_healthz_answers_while_not_ready(client: Direct, reader: SampleReader) -> None:
    reader.check_views = [Check(name="log", ok=False, text="the disk is full since 18:02:11: free 1 GB")]
    assert client.get("/healthz").json() == {"status": "ok"}


def test_readyz_lists_failing_checks_with_503(client: Direct, reader: SampleReader) -> None:
    ready = client.get("/readyz")
    assert ready.status_code == 200
    assert ready.json()["ready"] is True
    assert len(ready.json()["checks"]) == 2
    fault = Check(name="log", ok=False, text="the disk is full since 18:02:11: free 1 GB")
    reader.check_views = [*reader.check_views, fault]
    refused = client.get("/readyz")
    assert refused.status_code == 503
    assert refused.json() == {"ready": False, "checks": [fault.model_dump()]}


def test_metrics_are_the_given_bytes_as_prometheus_text(client: Direct) -> None:
    answer = client.get("/metrics")
    assert answer.content == METRICS
    assert answer.headers["content-type"].startswith("text/plain; version=")


def test_overview_is_rendered_whole_without_scripts(client: Direct) -> None:
    page = client.get("/").text
    for shown in ("2.12 k", "nvme-a", "3rd touch in 40 s; nvme-a has room", "sglang · pod-9", "80.0 %", "48.2 GB"):
        assert shown in page


def test_overview_escapes_what_engines_and_tenants_wrote(client: Direct, reader: SampleReader) -> None:
    wicked = reader.producer_views[0].model_copy(update={"name": "<script>alert(1)</script>", "id": '" onload="x'})
    reader.producer_views = [wicked]
    page = client.get("/").text
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert 'onload="x' not in page


def test_empty_overview_says_how_to_fill_it() -> None:
    page = Direct(SampleReader.empty()).get("/").text
    for hint in ("[[agents]]", "[[sources]]", "--kv-events-config", "kvadvisor demo", "a plan is made at every tick"):
        assert hint in page
