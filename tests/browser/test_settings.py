"""Settings in a real browser: seen, changed after their differences were shown, and audited."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from axe import assert_no_serious_findings
from playwright.sync_api import Browser, expect
from sample_policies import SamplePolicies
from sample_reader import SampleReader
from served import Served, serving
from watched import PHONE, assert_fits, opened

from advisor.access.doorkeeper import Doorkeeper
from advisor.access.identity import Identity, Scope

pytestmark = pytest.mark.browser


@pytest.fixture
def policies() -> SamplePolicies:
    return SamplePolicies()


@pytest.fixture
def served(policies: SamplePolicies) -> Iterator[Served]:
    with serving(SampleReader(), policies=policies) as served:
        yield served


def test_a_change_is_shown_asked_about_and_sent_alone(
    chromium: Browser, served: Served, policies: SamplePolicies
) -> None:
    watched = opened(chromium, f"{served.url}settings")
    page = watched.page
    assert_no_serious_findings(page)
    page.get_by_role("button", name="Change…").click()
    expect(page.locator("#answer")).to_contain_text("Nothing differs from what is in force")
    page.get_by_label("admission", exact=True).select_option("touch-2")
    page.get_by_label("moves_per_s", exact=True).fill("30")
    page.get_by_label("dry_run", exact=True).check()
    page.get_by_label("quotas", exact=True).fill('[{"tenant": "misc", "volume": "nvme-a", "blocks": 100}]')
    expect(page.locator("tr.differs")).to_have_count(4)
    page.get_by_role("button", name="Change…").click()
    dialog = page.locator("dialog")
    for line in ("admission: auto → touch-2", "moves_per_s: 20 → 30", "dry_run: no → yes", 'quotas: [] → [{"tenant"'):
        expect(dialog).to_contain_text(line)
    expect(dialog).not_to_contain_text("eviction")
    page.get_by_role("button", name="Leave it").click()
    assert policies.asked == []
    page.get_by_label("quotas", exact=True).fill("[")
    page.get_by_role("button", name="Change…").click()
    expect(page.locator("#answer")).to_contain_text("quotas is no JSON")
    page.get_by_label("quotas", exact=True).fill("[]")
    page.get_by_role("button", name="Change…").click()
    with page.expect_navigation():
        page.get_by_role("button", name="Change them").click()
    changes = {"admission": "touch-2", "moves_per_s": 30.0, "dry_run": True}
    assert policies.asked == [("operator", changes, frozenset())]
    watched.assert_quiet_and_at_home()
    page.context.close()


def test_a_change_of_what_changed_meanwhile_or_cannot_be_is_refused_with_the_reason(
    chromium: Browser, served: Served, policies: SamplePolicies
) -> None:
    page = opened(chromium, f"{served.url}settings").page
    page.evaluate("document.getElementById('change').dataset.etag = '\"stale\"'")
    page.get_by_label("moves_per_s", exact=True).fill("30")
    page.get_by_role("button", name="Change…").click()
    page.get_by_role("button", name="Change them").click()
    expect(page.locator("#answer")).to_contain_text("the policies were changed meanwhile")
    expect(page.get_by_label("moves_per_s", exact=True)).to_have_value("30")
    page.get_by_label("budgets", exact=True).fill('[{"volume": ""}]')
    page.get_by_role("button", name="Change…").click()
    page.get_by_role("button", name="Change them").click()
    expect(page.locator("#answer")).to_contain_text("volume was ''")
    assert policies.asked == []
    page.context.close()


def test_the_audit_is_paged_filtered_and_safe(chromium: Browser, served: Served) -> None:
    watched = opened(chromium, f"{served.url}settings")
    page = watched.page
    rows = page.locator("#audit-rows tbody tr")
    expect(rows).to_have_count(20)
    expect(rows.nth(1)).to_contain_text("admission auto → touch-2; moves_per_s 0 → 20")
    page.get_by_role("link", name="Next page").click()
    page.get_by_role("link", name="Next page").click()
    expect(rows).to_have_count(5)
    expect(rows.last).to_contain_text("<script>alert(1)</script>")
    page.get_by_label("Actor").fill("ann")
    page.keyboard.press("Enter")
    expect(rows).to_have_count(2)
    page.goto(f"{served.url}settings?action=scrub")
    expect(page.locator("#audit .empty")).to_contain_text("No entry that is kept has action scrub")
    watched.assert_quiet_and_at_home()
    page.context.close()


def test_who_may_not_change_them_sees_the_settings_alone(chromium: Browser) -> None:
    door = Doorkeeper(anonymous=Identity("bob", Scope.OPERATE))
    with serving(SampleReader(), doorkeeper=door) as served:
        page = opened(chromium, f"{served.url}settings").page
        expect(page.locator("#policy")).to_contain_text("Changing them takes scope admin; yours is operate")
        expect(page.locator("#row-moves_per_s")).to_contain_text("20 moves/s")
        expect(page.locator("#policy form, #audit, #policy input, [href='/api/v1/config']")).to_have_count(0)
        page.context.close()


def test_it_fits_a_phone_in_the_dark(chromium: Browser, served: Served) -> None:
    page = opened(chromium, f"{served.url}settings", viewport=PHONE, color_scheme="dark").page
    expect(page.locator("#audit-rows tbody tr").first).to_be_visible()
    assert_fits(page)
    assert_no_serious_findings(page)
    page.context.close()
