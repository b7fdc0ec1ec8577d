"""The overview in a real browser: what an operator sees, live, in both themes, on a phone and by keyboard."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from axe import assert_no_serious_findings
from playwright.sync_api import Browser, Page, Route, expect
from sample_reader import NOW_S, SampleReader
from served import Served, serving
from watched import opened

from advisor.views import Check, OriginView, Sample

pytestmark = pytest.mark.browser


ALERTS = [
    "lustre-01 is not healthy", "The scrub of nvme-a found faults", "A producer is partial",
    "Plan 40 waits for a person",
]
"""Of the sample parts, as they link to the pages that help."""


@pytest.fixture
def reader() -> SampleReader:
    return SampleReader()


@pytest.fixture
def served(reader: SampleReader) -> Iterator[Served]:
    with serving(reader) as served:
        yield served


def test_page_shows_figures_charts_and_reasons_quietly(chromium: Browser, served: Served) -> None:
    watched = opened(chromium, served.url)
    page = watched.page
    expect(page.locator(".kpi")).to_have_count(6)
    expect(page.locator(".kpi").first).to_contain_text("2.12 k")
    expect(page.locator("#volumes li")).to_have_count(4)
    expect(page.locator("#tiers .bar rect")).to_have_count(3)
    expect(page.locator("#tiers tbody tr").nth(2)).to_contain_text("24 blocks")
    expect(page.locator("#moves tbody tr")).to_have_count(6)
    expect(page.locator("#moves")).to_contain_text("seen once; would displace hotter blocks")
    expect(page.locator("#producers")).to_contain_text("attached late; whole again at its next epoch")
    for chart in ("origin", "events", "fast"):
        expect(page.locator(f"#{chart}-chart canvas")).to_be_visible()
    shares = [page.locator(f"[data-series={source}]") for source in ("g1", "g2", "g3", "g4", "recomputed")]
    expect(shares[0]).to_have_text(re.compile(r"^\d+\.\d %$"))
    assert_no_serious_findings(page)
    assert sum(float(share.inner_text().removesuffix(" %")) for share in shares) == pytest.approx(100, abs=0.2)
    watched.assert_quiet_and_at_home()
    page.context.close()


def test_page_follows_the_service_and_keeps_focus(chromium: Browser, served: Served, reader: SampleReader) -> None:
    watched = opened(chromium, served.url)
    page = watched.page
    expect(page.locator("[data-series=events]")).not_to_have_text("–")
    page.locator("#theme").focus()
    reader.summary_view = reader.summary_view.model_copy(update={"events_per_s": 8_640.0, "position": 18_300_000})
    reader.volume_views = [reader.volume_views[0].model_copy(update={"blocks": 1_000, "fill": 1_000 / 1_024})]
    origin = OriginView(recomputed=30_000, g1=40_000, g2=20_000, g3=30_000, g4=10_000)
    reader.sample_views = [
        *reader.sample_views,
        Sample(time_s=NOW_S + 1, events_per_s=8_640.0, fast_hit_ratio=0.75, moves_per_s=0.0, queue_entries=0,
               behind_s=0.0, blocks=8_412_400, origin=origin),
    ]
    expect(page.locator(".kpi").first).to_contain_text("8.64 k")
    expect(page.locator("#status")).to_contain_text("18\u202f300\u202f000")
    expect(page.locator("#volumes li")).to_have_count(1)
    expect(page.locator("#volumes .bar rect").first).to_have_attribute("width", "97.66%")
    expect(page.locator("[data-series=events]")).to_have_text("8.64 k events/s")
    expect(page.locator("[data-series=fast]")).to_have_text("75.0 %")
    expect(page.locator("#theme")).to_be_focused()
    watched.assert_quiet_and_at_home()
    page.context.close()


def test_failing_check_is_shown_with_its_remedy_and_goes_when_mended(
    chromium: Browser, served: Served, reader: SampleReader
) -> None:
    page = opened(chromium, served.url).page
    expect(page.locator("#status .pill")).to_have_text("ready")
    whole = reader.check_views
    reader.check_views = [Check(name="log", ok=False, text="the disk is full since 18:02:11: free 1 GB")]
    expect(page.locator("#notices")).to_contain_text("the disk is full since 18:02:11: free 1 GB")
    expect(page.locator("#status .pill")).to_have_text("not ready")
    reader.check_views = whole
    expect(page.locator("#notices")).not_to_contain_text("the disk is full")
    expect(page.locator("#notices a")).to_have_text(ALERTS)
    expect(page.locator("#notices a").first).to_have_attribute("href", "/volumes/lustre-01")
    page.context.close()


def test_lost_stream_says_since_when_and_recovers(chromium: Browser, reader: SampleReader) -> None:
    first = Served(reader)
    page = opened(chromium, first.url).page
    expect(page.locator("#events-chart canvas")).to_be_visible()
    first.stop()
    lost = page.locator("#lost")
    expect(lost).to_be_visible()
    expect(lost).to_contain_text(re.compile(r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"))
    expect(lost).to_contain_text(first.url.rstrip("/"))
    expect(page.locator("#offline")).to_be_visible()
    expect(page.locator("#status .pill")).to_be_hidden()
    again = Served(reader, port=urlsplit(first.url).port or 0)
    try:
        expect(lost).to_be_hidden()
        expect(page.locator("#status .pill")).to_have_text("ready")
    finally:
        page.context.close()
        again.stop()


def test_script_that_comes_late_still_opens_the_stream(
    chromium: Browser, served: Served, reader: SampleReader
) -> None:
    context = chromium.new_context()
    context.set_default_timeout(60_000)
    page = context.new_page()
    late: list[Route] = []
    page.route("**/hx-sse.min.js", lambda route: late.append(route))
    page.goto(served.url, wait_until="commit")
    expect(page.locator(".kpi").first).to_contain_text("2.12 k")
    while not late:
        page.wait_for_timeout(50)
    page.wait_for_timeout(300)
    late[0].continue_()
    reader.summary_view = reader.summary_view.model_copy(update={"events_per_s": 8_640.0})
    expect(page.locator(".kpi").first).to_contain_text("8.64 k")
    context.close()


def test_stream_refused_at_first_is_opened_later(chromium: Browser, served: Served) -> None:
    context = chromium.new_context()
    context.set_default_timeout(60_000)
    page = context.new_page()
    page.route("**/live", lambda route: route.fulfill(status=503, body=""))
    page.goto(served.url)
    expect(page.locator("#lost")).to_be_visible()
    page.unroute("**/live")
    expect(page.locator("#lost")).to_be_hidden()
    context.close()


def test_empty_service_says_what_will_appear(chromium: Browser) -> None:
    with serving(SampleReader.empty()) as served:
        watched = opened(chromium, served.url)
        page = watched.page
        for part in ("volumes", "moves", "producers", "shadow", "origin-chart", "events-chart", "fast-chart"):
            expect(page.locator(f"#{part} .empty")).to_be_visible()
        expect(page.locator("#producers")).to_contain_text("vllm serve MODEL --kv-events-config")
        expect(page.locator("canvas")).to_have_count(0)
        watched.assert_quiet_and_at_home()
        page.context.close()


def test_shadow_section_compares_policies_and_is_read_by_keyboard(
    chromium: Browser, served: Served, reader: SampleReader
) -> None:
    watched = opened(chromium, served.url)
    page = watched.page
    rows = page.locator("#shadow tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.nth(1)).to_contain_text("second-touch")
    expect(rows.nth(1)).to_contain_text("66.0 %")
    expect(rows.nth(1)).to_contain_text("+4.0 points")
    expect(rows.nth(2)).to_contain_text("−5.0 points")
    expect(page.locator("#shadow-chart canvas")).to_be_visible()
    readout = page.locator("#shadow-read")
    expect(readout).to_have_text("18:24:11 UTC · live 66.3 % · second-touch 70.3 % · calm 61.3 %")
    page.locator("#shadow-chart").focus()
    page.keyboard.press("Home")
    expect(readout).to_have_text(re.compile("^17:24:31 UTC · live 62.0 % · "))
    page.keyboard.press("Escape")
    expect(readout).to_have_text(re.compile("^18:24:11 UTC"))
    policies = reader.comparison_view.policies
    crowded = policies[1].model_copy(update={"left_out": 3_000})
    reader.comparison_view = reader.comparison_view.model_copy(update={"policies": [policies[0], crowded]})
    expect(rows).to_have_count(2)
    expect(rows.nth(1)).to_contain_text("no room for 3.00 k blocks: raise its blocks_max")
    watched.assert_quiet_and_at_home()
    page.context.close()


def background(page: Page) -> str:
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


def test_theme_follows_the_system_until_one_is_chosen_and_is_kept(chromium: Browser, served: Served) -> None:
    light, dark = "rgb(246, 247, 249)", "rgb(15, 20, 27)"
    page = opened(chromium, served.url, color_scheme="dark").page
    assert background(page) == dark
    toggle = page.locator("#theme")
    expect(toggle).to_have_text("Theme: auto")
    toggle.click()
    expect(toggle).to_have_text("Theme: light")
    assert background(page) == light
    page.reload()
    expect(toggle).to_have_text("Theme: light")
    assert background(page) == light
    toggle.click()
    assert background(page) == dark
    page.context.close()


@pytest.mark.parametrize("width", [320, 360, 820])
def test_narrow_page_has_no_sideways_scroll(chromium: Browser, served: Served, width: int) -> None:
    page = opened(chromium, served.url, viewport={"width": width, "height": 800}).page
    expect(page.locator("#origin-chart canvas")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    expect(page.locator("#moves")).to_contain_text("3rd touch in 40 s; nvme-a has room")
    page.context.close()


def test_keyboard_reaches_everything_visibly_and_reads_charts(chromium: Browser, served: Served) -> None:
    page = opened(chromium, served.url).page
    expect(page.locator("#events-chart canvas")).to_be_visible()
    pages = page.locator("header nav a").all_inner_texts()
    reached = []
    while "fast-chart" not in reached and len(reached) < 60:
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert reached == [
        "Skip to the content", "kvadvisor", *pages, "theme", *ALERTS, "origin-chart",
        "Volumes", "nvme-a", "nvme-b", "lustre-01", "s3-archive", "events-chart", "fast-chart",
    ]
    newest = page.locator("[data-series=fast]").inner_text()
    page.keyboard.press("Home")
    expect(page.locator("[data-time=fast]")).to_have_text("at 18:19:12 UTC")
    page.keyboard.press("ArrowRight")
    expect(page.locator("[data-time=fast]")).to_have_text("at 18:19:13 UTC")
    page.keyboard.press("Escape")
    expect(page.locator("[data-series=fast]")).to_have_text(newest)
    expect(page.locator("[data-time=fast]")).to_have_text("")
    page.context.close()


def test_docs_list_the_routes_without_another_host(chromium: Browser, served: Served) -> None:
    watched = opened(chromium, f"{served.url}docs")
    page = watched.page
    with urllib.request.urlopen(f"{served.url}openapi.json") as answer:
        routes = sum(len(methods) for methods in json.load(answer)["paths"].values())
    expect(page.locator(".opblock")).to_have_count(routes)
    blocks = page.locator(".opblock:has([data-path='/api/v1/blocks'])")
    blocks.locator(".opblock-summary-control").click()
    expect(blocks).to_contain_text("next_cursor")
    watched.assert_quiet_and_at_home()
    page.context.close()
