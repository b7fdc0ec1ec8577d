"""The prefix explorer: walked by mouse, by keyboard and without a script; its states; on a phone."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from axe import assert_no_serious_findings
from playwright.sync_api import Browser, Page, expect
from sample_prefixes import SamplePrefixes
from sample_reader import SampleReader, block_hash
from served import Served, serving
from watched import PHONE, assert_fits, opened

from advisor.web.formats import short_hash

pytestmark = pytest.mark.browser

AGENTS, BOT, TOOLS, FIRST_TURN = (block_hash(number) for number in (1_000, 2_000, 1_064, 1_200))


@pytest.fixture(scope="module")
def prefixes() -> SamplePrefixes:
    return SamplePrefixes()


@pytest.fixture(scope="module")
def served(prefixes: SamplePrefixes) -> Iterator[Served]:
    with serving(SampleReader(), prefixes=prefixes) as served:
        yield served


def is_at(page: Page, block: str) -> None:
    expect(page.locator("#here code")).to_have_text(short_hash(block))
    expect(page).to_have_url(re.compile(block))


def test_the_tree_is_walked_by_click_and_keyboard_and_says_what_it_shows(chromium: Browser, served: Served) -> None:
    watched = opened(chromium, f"{served.url}prefixes", color_scheme="dark")
    page = watched.page
    expect(page.locator("#explorer tbody tr")).to_have_count(3)
    first = page.locator("a.box").first
    expect(first).to_have_attribute("aria-label", re.compile("^Prefix .* of tenant agents: 240 blocks, 3.93 MB, G1 "))
    assert_no_serious_findings(page)
    first.click()
    is_at(page, AGENTS)
    expect(page.locator("a.box").first).to_be_focused()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    is_at(page, TOOLS)
    expect(page.locator("#walked")).to_have_text(re.compile("32 in a row, then 46 branches"))
    expect(page.locator("#explorer")).to_contain_text("40 smaller branches")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("[...document.querySelectorAll('a.box')].map((box) => box.tabIndex)")[:3] == [-1, 0, -1]
    page.keyboard.press("Escape")
    is_at(page, AGENTS)
    page.go_back()
    is_at(page, TOOLS)
    page.locator(".crumbs").get_by_text("All groups").click()
    expect(page.locator("#here")).to_have_text("All groups")
    page.get_by_role("link", name="heat", exact=True).click()
    expect(page.locator(".icicle rect.heat3")).not_to_have_count(0)
    expect(page.locator(".icicle rect.g1")).to_have_count(0)
    page.get_by_role("link", name="last use", exact=True).click()
    expect(page.locator(".legend")).to_contain_text("longer, or never")
    page.get_by_role("link", name="heat", exact=True).click()
    expect(page.locator(".legend")).to_contain_text("uses a block")
    page.locator("#explorer tbody a").nth(2).click()
    is_at(page, BOT)
    assert "colour=heat" in page.url
    assert_no_serious_findings(page)
    watched.assert_quiet_and_at_home()
    page.context.close()


def test_the_focus_stays_on_its_prefix_when_the_order_changes(
    chromium: Browser, served: Served, prefixes: SamplePrefixes
) -> None:
    page = opened(chromium, f"{served.url}prefixes").page
    bot = page.locator(f"a.box[id$='{BOT}']")
    page.locator("a.box[tabindex='0']").focus()
    page.keyboard.press("ArrowRight")
    expect(bot).to_be_focused()
    prefixes.group_views.reverse()
    try:
        page.evaluate("refresh('#explorer')")
        expect(page.locator("a.box").last).to_have_attribute("data-row", "2")
        expect(bot).to_be_focused()
        expect(page.locator("a.box[tabindex='0']")).to_have_id(re.compile(BOT))
    finally:
        prefixes.group_views.reverse()
    page.context.close()


def test_on_a_phone_without_a_script_it_is_a_table_of_links(chromium: Browser, served: Served) -> None:
    watched = opened(chromium, f"{served.url}prefixes", viewport=PHONE, java_script_enabled=False)
    page = watched.page
    page.locator("#explorer tbody a").first.click()
    is_at(page, AGENTS)
    page.locator("#explorer tbody a").first.click()
    page.locator("#explorer tbody a").first.click()
    is_at(page, FIRST_TURN)
    expect(page.locator("#explorer")).to_contain_text("Nothing follows")
    page.get_by_role("searchbox", name="Tenant").fill("support-bot")
    page.get_by_role("button", name="Show").click()
    expect(page.locator("#here")).to_have_text("Groups of support-bot")
    expect(page.locator("#explorer tbody tr")).to_have_count(2)
    page.context.close()


def test_states_are_said_and_followed_on_a_phone(
    chromium: Browser, served: Served, prefixes: SamplePrefixes
) -> None:
    prefixes.is_being_made = True
    try:
        watched = opened(chromium, f"{served.url}prefixes", viewport=PHONE)
        page = watched.page
        expect(page.locator("#explorer")).to_contain_text("the first picture of prefixes is being taken")
        assert_fits(page)
    finally:
        prefixes.is_being_made = False
    expect(page.locator("#explorer tbody tr")).to_have_count(3)
    assert_fits(page)
    assert_no_serious_findings(page)
    page.goto(f"{served.url}prefixes?namespace_id=00000000000000f1&hash={block_hash(77)}")
    expect(page.locator("#explorer")).to_contain_text("This prefix is not there")
    groups, prefixes.group_views = prefixes.group_views, []
    try:
        page.locator("#explorer .empty a").click()
        expect(page.locator("#explorer")).to_contain_text("appears here with the first Store events")
    finally:
        prefixes.group_views = groups
    watched.assert_quiet_and_at_home()
    page.context.close()
