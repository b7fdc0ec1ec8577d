"""What a button does: asks first, sends once with a key, says the answer, and shows the part anew."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from axe import assert_no_serious_findings
from playwright.sync_api import Browser, Locator, Page, Route, expect
from sample_actions import SampleActions
from sample_reader import SampleReader
from served import Served, serving
from watched import opened

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def actions() -> SampleActions:
    return SampleActions()


@pytest.fixture(scope="module")
def served(actions: SampleActions) -> Iterator[Served]:
    with serving(SampleReader(), actions=actions) as served:
        yield served


def with_button(page: Page, send: str, body: str = "{}", **data: str) -> Locator:
    page.evaluate(
        """([send, body, data]) => {
            const button = Object.assign(document.createElement("button"), {id: "pressed", textContent: "Pause"});
            Object.assign(button.dataset, {send, body, ...data});
            document.querySelector("main").prepend(button);
        }""",
        [send, body, data],
    )
    return page.locator("#pressed")


def test_button_asks_sends_once_with_a_key_and_says_the_answer(
    chromium: Browser, served: Served, actions: SampleActions
) -> None:
    watched = opened(chromium, served.url)
    page = watched.page
    keys = []
    page.on("request", lambda sent: keys.append(sent.headers.get("idempotency-key")) if sent.method == "POST" else None)
    button = with_button(
        page, "POST /api/v1/pause", '{"volume": "nvme-a"}', confirm="No move begins on nvme-a.", refresh="#volumes"
    )
    dialog = page.locator("dialog")
    button.focus()
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("No move begins on nvme-a.")
    expect(page.get_by_role("button", name="Leave it")).to_be_focused()
    assert_no_serious_findings(page)
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(button).to_be_focused()
    assert (keys, actions.asked) == ([], [])
    page.keyboard.press("Enter")
    dialog.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("status").filter(has_text="Pause: done.")).to_be_visible()
    assert [(action, volume) for action, _, volume in actions.asked] == [("pause", "nvme-a")]
    assert [len(key or "") for key in keys] == [32]
    expect(button).to_be_enabled()
    watched.assert_quiet_and_at_home()
    page.context.close()


def test_refusal_is_said_with_its_reason(chromium: Browser, served: Served) -> None:
    page = opened(chromium, served.url).page
    with_button(page, "POST /api/v1/pause", '{"volume": "gone"}').click()
    said = "Pause: refused. volume 'gone' is not registered: name one of nvme-a"
    expect(page.locator("#answer")).to_contain_text(said)
    page.locator("#answer button").click()
    expect(page.locator("#answer")).to_be_hidden()
    page.context.close()


def test_request_without_an_answer_is_sent_again_with_its_key(chromium: Browser, served: Served) -> None:
    page = opened(chromium, served.url).page
    keys: list[str | None] = []

    def fail_once(route: Route) -> None:
        keys.append(route.request.headers.get("idempotency-key"))
        if len(keys) == 1:
            route.abort()
        else:
            route.continue_()

    page.route("**/api/v1/pause", fail_once)
    button = with_button(page, "POST /api/v1/pause", refresh="#volumes")
    button.click()
    expect(page.locator("#answer")).to_contain_text("no answer came, so it may be done or not")
    button.click()
    expect(page.locator("#answer")).to_contain_text("Pause: done.")
    assert keys[0] == keys[1]
    page.context.close()


def test_a_session_that_ended_sends_to_the_login(chromium: Browser, served: Served) -> None:
    page = opened(chromium, served.url).page
    page.route("**/api/v1/pause", lambda route: route.fulfill(status=401, json={"detail": "log in"}))
    button = with_button(page, "POST /api/v1/pause")
    with page.expect_request("**/login?next=%2F"):
        button.click()
    page.context.close()


def test_a_form_sends_its_fields_by_their_types(chromium: Browser, served: Served) -> None:
    page = opened(chromium, served.url).page
    bodies: list[object] = []

    def told(route: Route) -> None:
        bodies.append(route.request.post_data_json)
        route.fulfill(json={})

    page.route("**/api/v1/settings", told)
    page.evaluate(
        """() => {
            const form = document.createElement("form");
            form.dataset.send = "PATCH /api/v1/settings";
            form.dataset.refresh = "#volumes";
            form.innerHTML = `<input name="blocks" type="number" value="12"><input name="dry" type="checkbox" checked>
                <input name="word" value="auto"><input name="left" value="">
                <input name="list" data-type="json" value="[1]">
                <button>Save</button>`;
            document.querySelector("main").prepend(form);
        }"""
    )
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#answer")).to_contain_text("Save: done.")
    assert bodies == [{"blocks": 12, "dry": True, "word": "auto", "list": [1]}]
    page.context.close()
