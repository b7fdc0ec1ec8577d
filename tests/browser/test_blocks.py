"""Blocks in a real browser: found, looked at, followed back through the log."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from axe import assert_no_serious_findings
from playwright.sync_api import Browser, expect
from sample_blocks import SampleBlocks
from sample_reader import SampleReader, block_hash
from served import Served, serving
from watched import PHONE, assert_fits, opened

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(SampleReader()) as served:
        yield served


def test_a_block_is_found_by_its_first_digits_and_followed_to_the_oldest_entry(
    chromium: Browser, served: Served
) -> None:
    watched = opened(chromium, f"{served.url}blocks")
    page = watched.page
    expect(page.locator("#block-rows tbody tr")).to_have_count(100)
    page.get_by_role("link", name="Next page").click()
    expect(page.locator(".pager")).to_contain_text("100 blocks on this page")
    page.get_by_label("Hash begins with").fill(f"0x{block_hash(7)[:9].upper()}")
    page.keyboard.press("Enter")
    rows = page.locator("#block-rows tbody tr")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("agents")
    assert_no_serious_findings(page)
    rows.get_by_role("link").click()
    expect(page.get_by_label("Facts")).to_contain_text("8 uses")
    expect(page.get_by_label("Where it lies")).to_contain_text("G3 nvme-a")
    steps = page.locator("#steps > li")
    expect(steps).to_have_count(4)
    expect(steps.first).to_contain_text("everything that its producer had placed in G1 was cleared")
    page.locator("#look-back").focus()
    page.keyboard.press("Enter")
    expect(steps).to_have_count(8)
    expect(steps.nth(4)).to_be_focused()
    page.locator("#look-back").click()
    expect(steps).to_have_count(11)
    expect(steps.last).to_contain_text("stored, 16.4 kB")
    expect(steps.nth(7)).to_contain_text("planned: 3rd touch in 40 s; nvme-a has room")
    expect(page.locator("#further")).to_contain_text("This is all that the log says")
    expect(page.locator("#look-back")).to_have_count(0)
    page.get_by_label("Facts").get_by_role("link", name=re.compile(f"^{block_hash(6)[:4]}")).click()
    expect(page.locator("h1")).to_contain_text(block_hash(6))
    watched.assert_quiet_and_at_home()
    page.context.close()


def test_without_scripts_the_form_and_the_older_steps_are_links(chromium: Browser, served: Served) -> None:
    page = opened(chromium, f"{served.url}blocks?tenant=agents&touches_max=4&tier=3", java_script_enabled=False).page
    expect(page.locator("#block-rows tbody tr")).to_have_count(2)
    expect(page.get_by_label("Tenant")).to_have_value("agents")
    expect(page.get_by_label("Tier")).to_have_value("3")
    page.goto(f"{served.url}blocks/{block_hash(7)}")
    page.get_by_role("link", name="Look further back").click()
    expect(page.locator("#steps > li")).to_have_count(4)
    expect(page.locator("#steps > li").first).to_contain_text("promote: verify")
    page.get_by_role("link", name="Newest").click()
    expect(page.locator("#steps > li").first).to_contain_text("cleared")
    page.context.close()


def test_nothing_found_says_why_and_what_to_do(chromium: Browser, served: Served) -> None:
    watched = opened(chromium, f"{served.url}blocks?hash_prefix={'ab' * 16}")
    page = watched.page
    expect(page.locator(".empty")).to_contain_text("No block that lies anywhere now has all of: hash prefix abab")
    page.get_by_role("link", name="look it up in the log").click()
    expect(page.locator(".empty").first).to_contain_text("It lies nowhere now")
    expect(page.locator("#further")).to_contain_text("The log says nothing of it")
    watched.assert_quiet_and_at_home()
    page.goto(f"{served.url}blocks?older_than_s=9&newer_than_s=3&touches_min=many")
    expect(page.get_by_label("Uses, at least")).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#wrong-touches_min")).to_contain_text("valid integer")
    page.goto(f"{served.url}blocks?older_than_s=9&newer_than_s=3")
    expect(page.get_by_role("alert")).to_contain_text("no block is both: change one")
    page.context.close()


def test_a_short_page_of_ten_million_goes_on_and_an_empty_service_says_how_to_fill_it(chromium: Browser) -> None:
    reader = SampleReader()
    reader.scans_short = True
    reader.block_views = reader.block_views[:1]
    with serving(reader, blocks=SampleBlocks(reader)) as served:
        page = opened(chromium, f"{served.url}blocks?tier=3").page
        expect(page.locator(".card")).to_contain_text("Only so many blocks are looked at for one page")
        page.get_by_role("link", name="Next page").click()
        expect(page.locator(".empty")).to_contain_text("None so far")
        reader.block_views, reader.scans_short = [], False
        page.goto(f"{served.url}blocks")
        expect(page.locator(".empty")).to_contain_text("kvadvisor demo")
        page.context.close()


def test_both_pages_fit_a_phone_in_the_dark(chromium: Browser, served: Served) -> None:
    listed = f"{served.url}blocks?tenant=agents&touches_max=20"
    page = opened(chromium, listed, viewport=PHONE, color_scheme="dark").page
    expect(page.locator("#block-rows tbody tr").first).to_be_visible()
    assert_fits(page)
    page.goto(f"{served.url}blocks/{block_hash(7)}")
    expect(page.locator("#steps > li")).to_have_count(4)
    assert_fits(page)
    assert_no_serious_findings(page)
    page.context.close()
