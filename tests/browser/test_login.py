"""Logging in and out in a real browser: with and without scripts, by keyboard, on a phone, in both themes."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from axe import assert_no_serious_findings
from playwright.sync_api import Browser, expect
from sample_door import SampleDoor
from sample_reader import SampleReader
from served import Served, serving
from watched import PHONE, assert_fits, opened

from advisor.access.identity import Scope

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> SampleDoor:
    return SampleDoor(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def served(door: SampleDoor) -> Iterator[Served]:
    with serving(SampleReader(), doorkeeper=door.doorkeeper) as served:
        yield served


def test_a_browser_is_asked_to_log_in_and_goes_on_to_what_it_wanted(
    chromium: Browser, served: Served, door: SampleDoor
) -> None:
    watched = opened(chromium, f"{served.url}?shown=1", color_scheme="dark")
    page = watched.page
    expect(page.get_by_role("heading", name="Log in")).to_be_visible()
    expect(page.get_by_label("Token")).to_be_focused()
    assert_no_serious_findings(page)
    page.keyboard.type(door.token(Scope.READ))
    page.keyboard.press("Enter")
    page.wait_for_url(f"{served.url}?shown=1")
    expect(page.locator(".who")).to_have_text("ann · read")
    assert page.evaluate("document.cookie") == ""
    watched.assert_quiet_and_at_home()
    page.get_by_role("button", name="Log out").click()
    page.wait_for_url(f"{served.url}login")
    page.goto(served.url)
    expect(page).to_have_url(re.compile(r"/login\?next=%2F$"))
    page.context.close()


def test_without_scripts_on_a_phone_a_wrong_token_is_said_and_a_right_one_lets_in(
    chromium: Browser, served: Served, door: SampleDoor
) -> None:
    page = opened(chromium, f"{served.url}login", java_script_enabled=False, viewport=PHONE).page
    page.get_by_label("Token").fill("kva_wrong")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_have_text(re.compile(r"^This token opens nothing: it is wrong, expired"))
    page.get_by_label("Token").fill(door.token(Scope.ADMIN))
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(served.url)
    expect(page.locator(".who")).to_have_text("ann · admin")
    page.context.close()


def test_the_page_fits_a_phone_in_the_light_and_holds_to_axe(chromium: Browser, served: Served) -> None:
    watched = opened(chromium, f"{served.url}login?next=//evil.example", color_scheme="light", viewport=PHONE)
    page = watched.page
    assert_fits(page)
    assert page.locator("input[name=next]").get_attribute("value") == "/"
    assert_no_serious_findings(page)
    watched.assert_quiet_and_at_home()
    page.context.close()
