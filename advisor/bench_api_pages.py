"""First paint of every page, as `kvadvisor bench api` has it: in a real Chromium, while events come in.

Each visit is a browser's first: a context of its own, which has nothing cached and no connection. Measured is from the
begin of the navigation to the first paint of text or a picture.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from advisor.web.pages import NAVIGATION
from event_plane.figures import Figure, at_most

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PAINT_MS_MAX = 1000.0
# Root in a container has no user namespaces for Chromium's sandbox; the pages that it opens are our own.
CHROMIUM_ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-default-apps", "--disable-sync", "--no-first-run", "--disable-dev-shm-usage",
)  # fmt: skip
NO_CHROMIUM = "no chromium here: apt-get install chromium, or name one in KVADVISOR_CHROMIUM"
PICTURE_WAIT_S = 120.0
_SETTLE_S = 1.0
_FIRST_PAINT_MS = """() => new Promise((resolve) => {
    new PerformanceObserver((list) => {
        for (const entry of list.getEntriesByName("first-contentful-paint")) resolve(entry.startTime);
    }).observe({ type: "paint", buffered: true });
})"""


@dataclass(frozen=True, slots=True)
class Paints:
    """By page, ms of each visit's first paint. `note` says why there are none."""

    by_page_ms: dict[str, list[float]] = field(default_factory=dict)
    note: str = ""


def chromium_path() -> str | None:
    """Debian's, or the one named in KVADVISOR_CHROMIUM."""
    return os.environ.get("KVADVISOR_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


def first_paints(
    address: str, publish: Callable[[float], AbstractContextManager[None]], seconds: float, *, volume: str
) -> Paints:
    """Visit the pages of the service at `address` in turn for `seconds`, each once at least, beside a publisher.

    Of volumes and blocks one each: `volume`, and a block on it.
    """
    executable = chromium_path()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return Paints(note="no Playwright here: pip install playwright")
    if executable is None:
        return Paints(note=NO_CHROMIUM)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(CHROMIUM_ARGUMENTS))
        pages = _pages(browser, f"http://{address}", volume)
        # Not counted: it starts the browser's own processes and has it read its fonts.
        _first_paint_ms(browser, pages[NAVIGATION[0].label])
        due = itertools.cycle(pages.items())
        by_page_ms: dict[str, list[float]] = defaultdict(list)
        while len(by_page_ms) < len(pages):
            with publish(seconds + _SETTLE_S):
                time.sleep(_SETTLE_S / 2)
                ends_s = time.monotonic() + seconds
                while time.monotonic() < ends_s:
                    page, url = next(due)
                    by_page_ms[page].append(_first_paint_ms(browser, url))
        browser.close()
    return Paints(dict(by_page_ms))


def _pages(browser: Browser, url: str, volume: str) -> dict[str, str]:
    """Addresses by name: what the navigation has, one block, its place in the prefix tree, one volume, the plan.

    The prefix tree's first picture is waited for: without it the page has little to paint.
    """
    context = browser.new_context()
    block = context.request.get(f"{url}/api/v1/blocks?limit=1&volume={volume}").json()["blocks"][0]
    give_up_s = time.monotonic() + PICTURE_WAIT_S
    while "refresh" in context.request.get(f"{url}/prefixes").headers:
        if time.monotonic() > give_up_s:
            raise RuntimeError(f"the prefix tree has no picture after {PICTURE_WAIT_S:g} s")
        time.sleep(0.5)
    context.close()
    at = f"namespace_id={block['namespace_id']}&group={block['group']}&hash={block['hash']}"
    pages = {entry.label: url + entry.path for entry in NAVIGATION}
    return pages | {
        "One prefix": f"{url}/prefixes?{at}",
        "One block": f"{url}/blocks/{block['hash']}",
        "One volume": f"{url}/volumes/{volume}",
        "Plan": f"{url}/moves/plan",
    }


def _first_paint_ms(browser: Browser, url: str) -> float:
    context = browser.new_context()
    page = context.new_page()
    answer = page.goto(url)
    if answer is None or not answer.ok:
        raise RuntimeError(f"{url} was answered with {'nothing' if answer is None else answer.status}")
    painted_ms = float(page.evaluate(_FIRST_PAINT_MS))
    context.close()
    return painted_ms


def paint_rows(size: str, paints: Paints) -> list[Figure]:
    """One row a page, and the slowest page's median, which has the goal."""
    goal = f"{size} blocks: first paint of the slowest page, median of its visits"
    if not paints.by_page_ms:
        return [at_most(goal, None, "ms", PAINT_MS_MAX, paints.note)]
    figures = []
    for page, painted_ms in paints.by_page_ms.items():
        row = f"{size} blocks, page {page}"
        figures += [
            Figure(f"{row}: first paint, median", statistics.median(painted_ms), "ms").placed(row, "first paint ms"),
            Figure(f"{row}: first paint, slowest", max(painted_ms), "ms").placed(row, "slowest ms"),
            Figure(f"{row}: visits", len(painted_ms), "").placed(row, "visits"),
        ]
    slowest_ms = max(statistics.median(painted_ms) for painted_ms in paints.by_page_ms.values())
    return [*figures, at_most(goal, slowest_ms, "ms", PAINT_MS_MAX)]
