"""The pages of moves: a plan is approved, a move cancelled and retried, all paused; by keyboard, on a phone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from axe import assert_no_serious_findings
from playwright.sync_api import Browser, Locator, Page, expect
from sample_actions import SampleActions
from sample_plans import SamplePlans
from sample_reader import SampleReader
from served import Served, serving
from watched import PHONE, assert_fits, opened

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def reader() -> SampleReader:
    reader = SampleReader()
    moves = reader.moves_view.moves
    renamed = [
        move.model_copy(update={"id": {"verified": "7-0", "aborted": "7-2"}.get(move.state, move.id)}) for move in moves
    ]
    reader.moves_view = reader.moves_view.model_copy(update={"moves": renamed})
    return reader


@pytest.fixture(scope="module")
def plans() -> SamplePlans:
    return SamplePlans()


@pytest.fixture(scope="module")
def actions() -> SampleActions:
    return SampleActions()


@pytest.fixture(scope="module")
def served(reader: SampleReader, plans: SamplePlans, actions: SampleActions) -> Iterator[Served]:
    with serving(reader, plans=plans, actions=actions) as served:
        yield served


def confirmed(page: Page, button: Locator) -> None:
    """Press it by keyboard, and go on in the dialog."""
    button.press("Enter")
    page.locator("#confirm-go").press("Enter")


def test_a_plan_that_waits_is_approved(chromium: Browser, served: Served, plans: SamplePlans) -> None:
    watched = opened(chromium, f"{served.url}moves", color_scheme="dark")
    page = watched.page
    pending = page.locator("#pending")
    expect(pending).to_contain_text("Plan 40 waits for you")
    expect(pending).to_contain_text("2nd touch in 8 s, est. 2.1 ms saved a hit")
    expect(pending).to_contain_text("nvme-a is full of blocks that are used more")
    assert_no_serious_findings(page)
    confirmed(page, page.get_by_role("button", name="Approve"))
    expect(page.locator("#answer")).to_contain_text("The plan is approved: its moves are below.")
    expect(pending).not_to_contain_text("Plan 40")
    expect(page.locator("#answer")).to_be_focused()
    assert plans.asked[-1] == ("approve", "operator", "40")
    watched.assert_quiet_and_at_home()
    page.context.close()


def test_moves_are_filtered_cancelled_and_tried_again(
    chromium: Browser, served: Served, plans: SamplePlans, actions: SampleActions
) -> None:
    watched = opened(chromium, f"{served.url}moves")
    page = watched.page
    rows = page.locator("#move-rows tbody tr")
    page.get_by_label("State").select_option("open")
    page.get_by_label("What").select_option("demote")
    page.get_by_role("button", name="Show").press("Enter")
    expect(rows).to_have_count(1)
    confirmed(page, page.get_by_role("button", name="Cancel move 7-0"))
    expect(page.locator("#answer")).to_contain_text("Cancel: done.")
    assert actions.asked[-1] == ("cancel", "operator", "7-0")
    page.goto(f"{served.url}moves?state=aborted")
    confirmed(page, page.get_by_role("button", name="Retry move 7-2"))
    expect(page.locator("#answer")).to_contain_text("Retry: done.")
    assert plans.asked[-1] == ("retry", "operator", "7-2")
    page.goto(f"{served.url}moves?kind=delete")
    expect(page.locator("#move-rows")).to_contain_text("No move is like that")
    watched.assert_quiet_and_at_home()
    page.context.close()


def test_everything_is_paused_and_resumed(
    chromium: Browser, served: Served, reader: SampleReader, actions: SampleActions
) -> None:
    page = opened(chromium, f"{served.url}moves").page
    page.get_by_role("button", name="Pause all").press("Enter")
    expect(page.locator("#confirm-what")).to_contain_text("No move is planned or begun on any volume")
    reader.summary_view = reader.summary_view.model_copy(update={"paused": True})
    page.locator("#confirm-go").press("Enter")
    expect(page.locator("#answer")).to_contain_text("Pause all: done.")
    expect(page.locator("#move-figures")).to_contain_text("paused")
    page.get_by_role("button", name="Resume all").press("Enter")
    expect(page.locator("#confirm-what")).not_to_be_empty()
    # Only now: the page would show the other button as soon as it hears of it.
    reader.summary_view = reader.summary_view.model_copy(update={"paused": False})
    page.locator("#confirm-go").press("Enter")
    expect(page.locator("#answer")).to_contain_text("Resume all: done.")
    expect(page.get_by_role("button", name="Pause all")).to_be_visible()
    assert [asked[0] for asked in actions.asked[-2:]] == ["pause", "resume"]
    page.context.close()


def test_the_plan_of_this_moment_is_looked_at_and_applied_on_a_phone(
    chromium: Browser, served: Served, plans: SamplePlans
) -> None:
    page = opened(chromium, f"{served.url}moves/plan", viewport=PHONE).page
    expect(page.locator("main")).to_contain_text("3rd touch in 40 s")
    assert_fits(page)
    assert_no_serious_findings(page)
    confirmed(page, page.get_by_role("button", name="Apply"))
    expect(page.locator("#answer")).to_contain_text("The plan was applied")
    assert plans.asked[-1][0] == "apply"
    page.get_by_role("link", name="All moves").press("Enter")
    expect(page.locator("#move-rows tbody tr").first).to_be_visible()
    assert_fits(page)
    page.context.close()
