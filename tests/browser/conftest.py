"""A real Chromium, Debian's."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

# Root in a container has no user namespaces for Chromium's sandbox; the pages under test are our own.
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-default-apps", "--disable-sync", "--no-first-run", "--disable-dev-shm-usage",
]


# A module's, not the session's: while Playwright runs, this thread has an event loop and no other test may start one.
@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    executable = os.environ.get("KVADVISOR_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if executable is None:
        pytest.skip("no chromium here: apt-get install chromium, or name one in KVADVISOR_CHROMIUM")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield browser
        browser.close()
