"""The pages of volumes: looked at, paused, drained, scrubbed, changed, registered; by keyboard, on a phone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from axe import assert_no_serious_findings
from playwright.sync_api import Browser, Page, expect
from sample_actions import SampleActions
from sample_reader import SampleReader
from sample_volumes import SampleVolumes
from served import Served, serving
from watched import PHONE, assert_fits, opened

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def volumes() -> SampleVolumes:
    return SampleVolumes()


@pytest.fixture(scope="module")
def actions() -> SampleActions:
    return SampleActions()


@pytest.fixture(scope="module")
def served(volumes: SampleVolumes, actions: SampleActions) -> Iterator[Served]:
    with serving(SampleReader(), volumes=volumes, actions=actions) as served:
        yield served


def pressed(page: Page, name: str, says: str) -> None:
    """Press a button by keyboard, read what it asks, go on, and read the answer."""
    page.get_by_role("button", name=name, exact=True).press("Enter")
    expect(page.locator("#confirm-what")).to_contain_text(says)
    page.locator("#confirm-go").press("Enter")


def test_a_volume_shows_everything_and_is_paused_drained_and_scrubbed(
    chromium: Browser, served: Served, volumes: SampleVolumes, actions: SampleActions
) -> None:
    watched = opened(chromium, f"{served.url}volumes", color_scheme="dark")
    page = watched.page
    expect(page.locator("#volume-rows tbody tr")).to_have_count(4)
    page.get_by_role("link", name="nvme-a").press("Enter")
    expect(page.locator("#capacity")).to_contain_text("low 80.0 %, high 92.0 %")
    expect(page.locator("#access")).to_contain_text("31.0 % of its endurance of 1.00 TB a day")
    expect(page.locator("#health")).to_contain_text("1 corrupt")
    expect(page.get_by_role("row", name="128 and more")).to_contain_text("0.146 %")
    assert_no_serious_findings(page)
    pressed(page, "Pause", "No move is planned or begun on nvme-a until you resume.")
    expect(page.locator("#answer")).to_contain_text("Pause: done.")
    assert actions.asked[-1] == ("pause", "operator", "nvme-a")
    pressed(page, "Drain", "All that nvme-a holds, 835 blocks, leaves it")
    expect(page.locator("#drain")).to_contain_text("Held up: the budget of 20 moves/s is spent.")
    pressed(page, "Stop draining", "Blocks stay on nvme-a")
    expect(page.locator("#drain .notice")).to_have_count(0)
    pressed(page, "Scrub", "Blocks that are found corrupt are freed.")
    expect(page.locator("#health")).to_contain_text("running, begun by operator")
    expect(page.get_by_role("button", name="Scrub")).to_have_count(0)
    assert volumes.asked == [("drain", "operator", "nvme-a"), ("undrain", "operator", "nvme-a"),
                             ("scrub", "operator", "nvme-a")]
    watched.assert_quiet_and_at_home()
    page.context.close()


def test_watermarks_are_changed_and_a_refused_unregistering_says_why_on_a_phone(
    chromium: Browser, served: Served, volumes: SampleVolumes
) -> None:
    page = opened(chromium, f"{served.url}volumes/lustre-01", viewport=PHONE).page
    assert_fits(page)
    page.get_by_label("High watermark, share").fill("0.9")
    pressed(page, "Change", "lustre-01 is given the capacity and watermarks of the form.")
    expect(page.locator("#capacity")).to_contain_text("high 90.0 %")
    assert volumes.views["lustre-01"].capacity_blocks == 96_000
    pressed(page, "Unregister", "This is refused while it holds blocks: drain it first.")
    expect(page.locator("#answer")).to_contain_text("refused. volume lustre-01 holds 41000 blocks")
    assert_no_serious_findings(page)
    page.goto(f"{served.url}volumes")
    assert_fits(page)
    page.context.close()


def test_a_volume_is_registered_and_what_is_no_json_is_said(
    chromium: Browser, served: Served, volumes: SampleVolumes
) -> None:
    page = opened(chromium, f"{served.url}volumes").page
    page.get_by_text("Register a volume").press("Enter")
    descriptor = page.get_by_label("Descriptor, as JSON")
    written = descriptor.input_value()
    descriptor.fill("{")
    pressed(page, "Register", "The agent opens or makes this volume")
    expect(page.locator("#answer")).to_contain_text("descriptor is no JSON")
    descriptor.fill(written)
    pressed(page, "Register", "The agent opens or makes this volume")
    expect(page.locator("#answer")).to_contain_text("The volume is registered.")
    assert volumes.asked[-1] == ("register", "operator", "nvme-c")
    assert_no_serious_findings(page)
    page.context.close()
