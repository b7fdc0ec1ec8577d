"""axe on a page: what an automatic look at accessibility finds."""

from __future__ import annotations

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

SERIOUS = frozenset({"serious", "critical"})


def assert_no_serious_findings(page: Page) -> None:
    """Fails with each serious finding's rule, what it asks for, and the first elements that it is about."""
    found = Axe().run(page).response["violations"]
    lines = [
        f"{one['id']}: {one['help']}: {'; '.join(node['html'][:160] for node in one['nodes'][:3])}"
        for one in found
        if one["impact"] in SERIOUS
    ]
    assert not lines, "\n".join(lines)
