"""A page that stays open: what it holds does not grow, however often its parts came anew."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from urllib.request import urlopen

import pytest
from playwright.sync_api import Browser, CDPSession, Page, expect
from sample_reader import SampleReader
from served import Served, serving
from watched import opened

from advisor.api import app as app_module
from advisor.api.feed import LiveFeed
from advisor.views import Summary

pytestmark = pytest.mark.browser

TIMES = 15
"""At a change a second or two this is a quarter of a minute; each is a whole round of asking, parsing and swapping."""
NODES_SPARE = 200
"""Of a page of some thousands: what the browser has not swept yet."""


class Restless(SampleReader):
    """Something is different at each look."""

    def summary(self) -> Summary:
        self.summary_view = self.summary_view.model_copy(update={"position": self.summary_view.position + 1})
        first, *others = self.moves_view.moves
        moved = first.model_copy(update={"reason": f"look {self.summary_view.position}"})
        self.moves_view = self.moves_view.model_copy(update={"moves": [moved, *others]})
        last = self.sample_views[-1]
        second = last.model_copy(update={"time_s": last.time_s + 1, "blocks": last.blocks + 1})
        self.sample_views = [*self.sample_views[1:], second]
        return super().summary()


def held(page: Page) -> tuple[int, int]:
    """DOM nodes and event listeners, after a sweep."""
    session: CDPSession = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    counters = session.send("Memory.getDOMCounters")
    session.detach()
    return counters["nodes"], counters["jsEventListeners"]


def looks(page: Page) -> tuple[list[int], list[int]]:
    """DOM nodes and event listeners at several moments, sorted."""
    seen = []
    for _ in range(6):
        seen.append(held(page))
        page.wait_for_timeout(60)
    return sorted(nodes for nodes, _ in seen), sorted(listeners for _, listeners in seen)


def held_usually(page: Page) -> tuple[int, int]:
    """Just after a swap the new part has no listeners yet, and in the middle of one the old part is there, too."""
    nodes, listeners = looks(page)
    return nodes[len(nodes) // 2], listeners[len(listeners) // 2]


def held_at_least(page: Page) -> tuple[int, int]:
    nodes, listeners = looks(page)
    return nodes[0], listeners[0]


def heard_at_least(page: Page, times: int) -> None:
    while page.evaluate("window.heard") < times:
        page.wait_for_timeout(50)


def assert_no_growth(before: tuple[int, int], after: tuple[int, int]) -> None:
    assert after[0] <= before[0] + NODES_SPARE
    assert after[1] <= before[1]


def test_parts_taken_anew_leave_nothing_behind(chromium: Browser) -> None:
    with serving(Restless()) as served:
        watched = opened(chromium, f"{served.url}moves")
        page = watched.page
        again = """async (times) => {
            for (let time = 0; time < times; time += 1) await refresh("#move-rows");
        }"""
        page.evaluate(again, 5)
        # Looked at first: Playwright listens, too, from its first look on.
        shown = page.locator("#move-rows tbody tr").first.inner_text()
        before = held_usually(page)
        page.evaluate(again, TIMES)
        assert page.locator("#move-rows tbody tr").first.inner_text() != shown
        assert_no_growth(before, held_at_least(page))
        watched.assert_quiet_and_at_home()
        page.context.close()


def test_the_overviews_stream_leaves_nothing_behind(chromium: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "LiveFeed", partial(LiveFeed, interval_s=0.05))
    reader = Restless()
    with serving(reader) as served:
        watched = opened(chromium, served.url)
        page = watched.page
        expect(page.locator("#shadow-chart canvas")).to_be_visible()
        page.evaluate("""() => {
            window.heard = 0;
            document.addEventListener("htmx:sse:after:message", () => { window.heard += 1; });
        }""")
        heard_at_least(page, 2 * TIMES)
        before = held_usually(page)
        heard_at_least(page, 4 * TIMES)
        assert_no_growth(before, held_at_least(page))
        watched.assert_quiet_and_at_home()
        page.context.close()


HOUR = 1_800
"""Changes of an hour, one every two seconds."""
WARM = 100
"""Changes before the first look, which fill what is cached on both sides."""
HEAP_SPARE_BYTES = 1 << 20
MEMORY_SPARE = 3_000
"""Less than two a change."""
TASKS_SPARE = 4
"""Each request under way has some."""
FILES_SPARE = 8
"""The browser keeps some connections and may open more."""


@dataclass(frozen=True, slots=True)
class Held:
    """By a page, and by the server of it: what must not grow while the page is open."""

    nodes: int
    listeners: int
    heap_bytes: int
    streams: int
    tasks: int
    files: int
    memory: int
    """Pieces of memory of the server's process, which is this one."""

    @classmethod
    def now(cls, page: Page, served: Served) -> Held:
        nodes, listeners = held(page)
        session: CDPSession = page.context.new_cdp_session(page)
        heap_bytes = session.send("Runtime.getHeapUsage")["usedSize"]
        session.detach()
        gc.collect()
        memory = sys.getallocatedblocks()
        files = len(os.listdir("/proc/self/fd"))
        return cls(nodes, listeners, heap_bytes, served.streams(), served.tasks(), files, memory)

    def assert_no_growth_since(self, before: Held) -> None:
        assert_no_growth((before.nodes, before.listeners), (self.nodes, self.listeners))
        assert self.heap_bytes <= before.heap_bytes + HEAP_SPARE_BYTES
        assert self.streams == before.streams
        assert self.tasks <= before.tasks + TASKS_SPARE
        assert self.files <= before.files + FILES_SPARE
        assert self.memory <= before.memory + MEMORY_SPARE


def left_open_an_hour(chromium: Browser, served: Served, path: str, change: Callable[[Page, int], None]) -> None:
    """`change` has the page take so many changes. Nothing grows meanwhile, and nothing is left when it is closed."""
    urlopen(f"{served.url}healthz").close()  # from then on its own tasks run
    idle = served.tasks()
    context = chromium.new_context()
    page = context.new_page()
    page.goto(served.url + path)
    change(page, WARM)
    before = Held.now(page, served)
    change(page, HOUR)
    Held.now(page, served).assert_no_growth_since(before)
    context.close()
    for _ in range(200):
        if (served.streams(), served.tasks()) == (0, idle):
            break
        time.sleep(0.1)
    assert (served.streams(), served.tasks()) == (0, idle)


@pytest.mark.long
@pytest.mark.timeout(1_200)
def test_moves_left_open_for_an_hour_leak_nothing(chromium: Browser) -> None:
    def change(page: Page, times: int) -> None:
        for _ in range(0, times, 40):
            page.evaluate("""async () => {
                for (let time = 0; time < 40; time += 1) await refresh("#move-rows");
            }""")

    with serving(Restless()) as served:
        left_open_an_hour(chromium, served, "moves", change)


@pytest.mark.long
@pytest.mark.timeout(1_200)
def test_the_overview_left_open_for_an_hour_leaks_nothing(chromium: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "LiveFeed", partial(LiveFeed, interval_s=0.01))

    def change(page: Page, times: int) -> None:
        page.evaluate("""() => {
            if (window.heard === undefined) {
                document.addEventListener("htmx:sse:after:message", () => { window.heard += 1; });
                window.told = new EventSource("/api/v1/stream");
            }
            window.heard = 0;
        }""")
        heard_at_least(page, times)

    with serving(Restless()) as served:
        left_open_an_hour(chromium, served, "", change)
