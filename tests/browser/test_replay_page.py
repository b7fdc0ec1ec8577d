"""A replay's page in a real browser: alone, in both themes, on a phone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from advisor.cli import main
from advisor.simulation.workload import TenantLoad, Workload
from advisor.simulation.writing import write_simulation

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replayed")
    chats = TenantLoad(name="a", sessions_per_minute=40, system_tokens=1024, own_tokens=900, turns_mean=3, think_s=9)
    write_simulation(folder / "t.jsonl", Workload(minutes=3, tenants=(chats,)), 1, engine_blocks=1)
    options = ["--policy", "lru", "--policy", "s3-fifo", "--capacity", "30", "--capacity", "300"]
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(folder / "t.jsonl"), *options, "--html", str(folder / "r.html")])
    assert ended.value.code in (0, None)
    return folder / "r.html"


@pytest.fixture(scope="module")
def two_tiers(replayed: Path) -> Path:
    options = ["--fast", "30", "--fast", "90", "--admission", "touch-2", "--admission", "always", "--budget", "0.1"]
    page = replayed.with_name("two.html")
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(replayed.with_name("t.jsonl")), *options, "--html", str(page)])
    assert ended.value.code in (0, None)
    return page


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 1280), ("light", 390)])
def test_the_page_draws_by_itself_and_fits(chromium: Browser, replayed: Path, theme: str, width: int) -> None:
    page = chromium.new_page(
        viewport={"width": width, "height": 900}, color_scheme="dark" if theme == "dark" else "light"
    )
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(replayed.as_uri())
    expect(page.locator(".chart .uplot")).to_have_count(4)
    expect(page.locator(".chart .uplot").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert (said, asked) == ([], [replayed.as_uri()])
    page.close()


def test_a_page_of_two_tiers_draws_hits_by_bytes_by_size_and_over_time(chromium: Browser, two_tiers: Path) -> None:
    page = chromium.new_page(viewport={"width": 390, "height": 900})
    page.goto(two_tiers.as_uri())
    expect(page.locator(".chart .uplot")).to_have_count(5)
    for chart in ("moves", "capacity", "course"):
        expect(page.locator(f"[id='0-{chart}'] .uplot")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.close()


def test_pointing_at_a_curve_tells_its_values_and_a_name_hides_it(chromium: Browser, replayed: Path) -> None:
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    page.goto(replayed.as_uri())
    names = page.locator("[id='0-capacity-names'] button")
    expect(names).to_have_text(["lru", "s3-fifo", "belady-leaf"])
    plot = page.locator(".chart.high .u-over").first
    plot.hover()
    expect(names.nth(0)).to_have_text(re.compile(r"lru\d.* %"))
    names.nth(0).click()
    expect(names.nth(0)).to_have_attribute("aria-pressed", "false")
    page.close()
