"""Every page with Tab alone: what has the focus is named, seen to have it, and below nothing."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, Page
from sample_reader import SampleReader
from served import serving

pytestmark = pytest.mark.browser

PATHS = (
    "", "volumes", "volumes/nvme-a", "prefixes", "blocks", "moves", "moves/plan", "producers",
    "replay?recording=evening", "settings", "docs",
)  # fmt: skip
TABS_MAX = 40
"""Then come rows that are all alike."""

FOCUSED = """() => {
    const element = document.activeElement;
    if (element === document.body) return null;
    const box = element.getBoundingClientRect();
    const top = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
    const names = [element.ariaLabel, element.labels?.[0]?.textContent, element.textContent];
    const frame = element.querySelector(".frame");
    return {
        element: element.outerHTML.slice(0, 120),
        isNamed: names.some((name) => name?.trim()),
        isMarked: getComputedStyle(element).outlineStyle !== "none"
            || (frame !== null && getComputedStyle(frame).strokeWidth !== "2px"),
        isCovered: !(element === top || element.contains(top) || top?.contains(element)),
    };
}"""


def faults(page: Page) -> list[str]:
    """Of all that Tab reaches, what cannot be told or seen."""
    found = []
    for _ in range(TABS_MAX):
        page.keyboard.press("Tab")
        focused = page.evaluate(FOCUSED)
        if focused is None:
            break
        wrong = [what for what, is_wrong in (
            ("has no name", not focused["isNamed"]), ("is not marked", not focused["isMarked"]),
            ("is covered", focused["isCovered"]),
        ) if is_wrong]  # fmt: skip
        found += [f"{page.url}: {focused['element']} {what}" for what in wrong]
    return found


def test_tab_shows_where_it_is_on_every_page(chromium: Browser) -> None:
    found = []
    with serving(SampleReader()) as served:
        page = chromium.new_page()
        # What Swagger UI draws into the page of routes is its makers'; how far it is when Tab comes is chance.
        page.route("**/swagger-ui*.js", lambda route: route.abort())
        for path in PATHS:
            page.goto(served.url + path)
            assert page.locator("h1").count() == 1
            found += faults(page)
        page.close()
    assert found == []


def test_the_link_on_top_skips_what_all_pages_have(chromium: Browser) -> None:
    with serving(SampleReader()) as served:
        page = chromium.new_page()
        page.goto(f"{served.url}moves")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.closest('main') !== null")
        page.close()
