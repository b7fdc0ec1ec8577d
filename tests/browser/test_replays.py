"""The page of replays: a file is sent, run through policies by the real command, and its report is read; states."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from axe import assert_no_serious_findings
from playwright.sync_api import Browser, expect
from sample_reader import SampleReader
from sample_recordings import SampleRecordings
from sample_replays import SampleReplays
from served import Served, serving
from watched import PHONE, assert_fits, opened

from advisor.recording_desk import RecordingDesk
from advisor.replay_desk import ReplayDesk
from advisor.service import AdvisorService
from advisor.settings import AdvisorSettings

pytestmark = pytest.mark.browser

PATIENCE_MS = 120_000
"""Of a command that begins and runs on a busy machine."""


@pytest.fixture(scope="module")
def recordings() -> SampleRecordings:
    return SampleRecordings()


@pytest.fixture(scope="module")
def replays(tmp_path_factory: pytest.TempPathFactory) -> SampleReplays:
    folder = tmp_path_factory.mktemp("replay")
    (folder / "report.html").write_text("<!doctype html><title>r</title>")
    return SampleReplays(folder)


@pytest.fixture(scope="module")
def served(recordings: SampleRecordings, replays: SampleReplays) -> Iterator[Served]:
    with serving(SampleReader(), recordings=recordings, replays=replays) as served:
        yield served


def trace_of_chats(path: Path) -> None:
    """40 chats of up to 8 turns over one system prompt: 32 requests of them are of a prefix that was there before."""
    chance = random.Random(7)
    lines, chats = [], {chat: [1, 2] for chat in range(40)}
    for turn in range(320):
        blocks = chats[chance.randrange(40)]
        blocks.append(1_000 + turn)
        line = {"timestamp": turn * 500, "input_length": len(blocks) * 512, "output_length": 9, "hash_ids": blocks}
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines))


def test_a_trace_is_sent_replayed_and_its_report_read_in_a_sandbox(chromium: Browser, tmp_path: Path) -> None:
    trace_of_chats(tmp_path / "My chats.jsonl")
    settings = AdvisorSettings(directory=tmp_path / "advisor")
    with (
        AdvisorService(settings) as service,
        closing(RecordingDesk(service, nice=0)) as desk,
        closing(ReplayDesk(service, desk, nice=0)) as runs,
        serving(SampleReader(), recordings=desk, replays=runs) as served,
    ):
        watched = opened(chromium, f"{served.url}replay", color_scheme="dark")
        page = watched.page
        expect(page.locator("#recordings")).to_contain_text("Nothing is recorded yet")
        expect(page.locator("#replays")).to_contain_text("Choose a recording and press Run")
        page.locator("#upload input").set_input_files(tmp_path / "My chats.jsonl")
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#facts")).to_contain_text("different ones", timeout=PATIENCE_MS)
        assert page.url.endswith("/replay?recording=my-chats.jsonl")
        expect(page.locator("[data-of=capacities]")).to_have_value("20 40 80 161")
        page.get_by_label("sieve").check()
        page.locator("[data-of=capacities]").fill("20, 80")
        page.get_by_label("Say what to choose").uncheck()
        page.get_by_role("button", name="Run").click()
        expect(page.locator("#result")).to_contain_text("Results: my-chats.jsonl")
        expect(page.locator("#result tbody tr")).to_have_count(6, timeout=PATIENCE_MS)
        report = page.frame_locator("iframe.report")
        expect(report.locator(".chart .uplot").first).to_be_visible(timeout=PATIENCE_MS)
        expect(page.locator("#result")).to_contain_text("320 requests")
        expect(page.locator("#replays tbody tr")).to_contain_text("6 of 6")
        assert page.frames[1].evaluate("origin") == "null"
        assert_no_serious_findings(page)
        watched.assert_quiet_and_at_home()
        page.context.close()
        kept = desk.file("my-chats.jsonl")
        assert kept.read_bytes() == (tmp_path / "My chats.jsonl").read_bytes()
        (run,) = runs.list()
        assert (run.actor, run.state, run.has_report) == ("operator", "done", True)


def test_the_log_is_recorded_and_stopped_by_keyboard_and_a_bad_name_says_why(
    chromium: Browser, served: Served, recordings: SampleRecordings
) -> None:
    page = opened(chromium, f"{served.url}replay").page
    page.get_by_label("Name").fill("evening")
    page.get_by_label("For, s").fill("600")
    page.keyboard.press("Enter")
    expect(page.locator("#answer")).to_contain_text("there is a recording 'evening' already")
    page.get_by_label("Name").fill("noon")
    page.keyboard.press("Enter")
    row = page.locator("#recording-noon")
    expect(row).to_contain_text("recording")
    row.get_by_role("button", name="Stop noon").press("Enter")
    expect(row).to_contain_text("done")
    assert recordings.asked == [("record", "operator", "noon", "600.0", "None"), ("stop", "operator", "noon")]
    page.context.close()


def test_two_tiers_are_ordered_with_what_was_chosen_and_nonsense_is_not_sent(
    chromium: Browser, served: Served, replays: SampleReplays
) -> None:
    page = opened(chromium, f"{served.url}replay?recording=evening").page
    page.get_by_label("What is compared").select_option("two")
    page.get_by_label("Sizes of the fast volume").fill("many")
    before = len(replays.views)
    page.get_by_role("button", name="Run").click()
    field = page.get_by_label("Sizes of the fast volume")
    assert field.evaluate("field => field.validationMessage").startswith("Give whole numbers with spaces between")
    field.fill("1000 2000")
    page.get_by_label("Budgets").fill("")
    page.get_by_role("button", name="Run").click()
    expect(page.locator("#answer")).to_contain_text("The replay waits for its turn")
    assert len(replays.views) == before + 1
    order = replays.views[0].order
    assert (order.fast_blocks, order.admissions, order.budgets) == ([1_000, 2_000], ["auto", "touch-2"], [])
    assert (order.policies, order.capacities, order.advise) == ([], [], True)
    expect(page.locator("#result")).to_contain_text("It waits for its turn")
    page.context.close()


def test_states_say_what_is_and_what_to_do_on_a_phone(chromium: Browser, served: Served) -> None:
    watched = opened(chromium, f"{served.url}replay?replay=r-000000000002", viewport=PHONE)
    page = watched.page
    expect(page.locator("#result .notice")).to_contain_text("row group 3 (positions 9 to 12) is damaged")
    page.get_by_label("What is compared").select_option("two")
    assert_fits(page)
    for query, said in (
        ("recording=night", "night cannot be read"),
        ("recording=now", "It is being recorded"),
        ("recording=gone&replay=gone", "There is no replay gone"),
        ("replay=r-000000000004", "1 of 4 results are there"),
        ("replay=r-000000000003", "Keep 95.4 GB (45,500 blocks) on the fast volume"),
    ):
        page.goto(f"{served.url}replay?{query}")
        expect(page.locator("#main")).to_contain_text(said)
        assert_fits(page)
    assert_no_serious_findings(page)
    watched.assert_quiet_and_at_home()
    page.context.close()
