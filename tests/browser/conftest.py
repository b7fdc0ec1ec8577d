"""A real Chromium, Debian's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

from advisor.bench_api_pages import CHROMIUM_ARGUMENTS, NO_CHROMIUM, chromium_path


# A module's, not the session's: while Playwright runs, this thread has an event loop and no other test may start one.
@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    executable = chromium_path()
    if executable is None:
        pytest.skip(NO_CHROMIUM)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(CHROMIUM_ARGUMENTS))
        yield browser
        browser.close()
