"""The page of producers: what is amiss comes first, with what to do; a thousand are paged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from axe import assert_no_serious_findings
from playwright.sync_api import Browser, expect
from sample_reader import SampleReader
from served import Served, serving
from watched import PHONE, assert_fits, opened

from advisor.views import Check

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def reader() -> SampleReader:
    return SampleReader()


@pytest.fixture(scope="module")
def served(reader: SampleReader) -> Iterator[Served]:
    with serving(reader) as served:
        yield served


def test_what_is_amiss_comes_first_and_follows_the_service(
    chromium: Browser, served: Served, reader: SampleReader
) -> None:
    reader.check_views = [
        Check(name="source vllm", ok=False, text="connection refused by tcp://10.0.0.7:5557: is the engine running?"),
        Check(name="hook tickets", ok=True, text="12 calls, 0 failed, 0 lost for its slowness"),
    ]
    watched = opened(chromium, f"{served.url}producers", color_scheme="dark")
    page = watched.page
    rows = page.locator("#producer-rows tbody tr")
    expect(rows).to_have_count(5)
    expect(rows.nth(0)).to_contain_text("attached late; whole again at its next epoch")
    expect(rows.nth(0)).to_contain_text("give its source a replay endpoint")
    expect(rows.nth(1)).to_contain_text("kvbm · rack-2")
    expect(page.locator("#connections tbody tr").nth(0)).to_contain_text("fails")
    assert_no_serious_findings(page)
    page.get_by_label("Name or id").fill("half typed")
    elements = page.evaluate("document.querySelectorAll('*').length")
    reader.producer_views = [each.model_copy(update={"gaps": 7, "resends": 90}) for each in reader.producer_views]
    expect(rows.nth(2)).to_contain_text("90")
    expect(page.locator("#producer-figures")).to_contain_text("450 batches resent")
    assert page.evaluate("document.querySelectorAll('*').length") == elements
    expect(page.get_by_label("Name or id")).to_have_value("half typed")
    watched.assert_quiet_and_at_home()
    page.context.close()


def test_a_thousand_are_paged_and_filtered_by_keyboard_on_a_phone(
    chromium: Browser, served: Served, reader: SampleReader
) -> None:
    one = reader.producer_views[0]
    reader.producer_views = [
        one.model_copy(update={"id": f"{number:016x}", "name": f"pod-{number:04}"}) for number in range(1_000)
    ]
    page = opened(chromium, f"{served.url}producers", viewport=PHONE).page
    rows = page.locator("#producer-rows tbody tr")
    expect(rows).to_have_count(100)
    assert_fits(page)
    expect(page.locator(".pager")).to_contain_text("1 to 100 of 1\u202f000")
    page.get_by_role("link", name="Next page").press("Enter")
    expect(rows.first).to_contain_text("pod-0100")
    page.get_by_label("Name or id").fill("pod-07")
    page.get_by_label("Name or id").press("Enter")
    expect(page.locator(".pager")).to_contain_text("1 to 100 of 100")
    page.get_by_label("State").select_option("silent")
    page.get_by_role("button", name="Show").press("Enter")
    expect(page.locator("#producer-rows")).to_contain_text("No producer is like that")
    assert_no_serious_findings(page)
    page.context.close()
