"""A page that stays open: what it holds does not grow, however often its parts came anew."""

from __future__ import annotations

from functools import partial

import pytest
from playwright.sync_api import Browser, CDPSession, Page, expect
from sample_reader import SampleReader
from served import serving
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
        return super().summary()


def held(page: Page) -> tuple[int, int]:
    """DOM nodes and event listeners, after a sweep."""
    session: CDPSession = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    counters = session.send("Memory.getDOMCounters")
    session.detach()
    return counters["nodes"], counters["jsEventListeners"]


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
        before = held(page)
        page.evaluate(again, TIMES)
        assert page.locator("#move-rows tbody tr").first.inner_text() != shown
        assert_no_growth(before, held(page))
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
        heard_at_least(page, 10)
        before = held(page)
        heard_at_least(page, 10 + 2 * TIMES)
        assert_no_growth(before, held(page))
        watched.assert_quiet_and_at_home()
        page.context.close()
