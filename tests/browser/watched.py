"""Pages in a browser, with everything they said and asked for."""

from __future__ import annotations

from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, expect

PHONE = {"width": 360, "height": 780}

expect.set_options(timeout=60_000)


class Watched:
    """A page with everything it said and asked for."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url = page, url
        self.complaints: list[str] = []
        self.requested: list[str] = []
        page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requested.append(request.url))

    def assert_quiet_and_at_home(self) -> None:
        assert self.complaints == []
        assert {urlsplit(url).netloc for url in self.requested if not url.startswith("data:")} == {
            urlsplit(self.url).netloc
        }


def opened(browser: Browser, url: str, **options: object) -> Watched:
    """A page of a context of its own: close `page.context`. `options` are the context's."""
    context = browser.new_context(**options)  # type: ignore[arg-type]
    context.set_default_timeout(60_000)
    watched = Watched(context.new_page(), url)
    watched.page.goto(url)
    return watched


def assert_fits(page: Page) -> None:
    """No sideways scroll."""
    assert page.evaluate("document.documentElement.scrollWidth") <= page.evaluate("innerWidth")
