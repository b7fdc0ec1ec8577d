"""A browser that goes to an address is told on a page what was wrong; everybody else gets the problem as JSON."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from direct import Direct
from sample_door import SampleDoor
from sample_reader import SampleReader

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture(scope="module")
def client() -> Direct:
    return Direct(SampleReader())


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/volumes/gone", 404, "Volume &#39;gone&#39; is not registered: name one of"),
        ("/nothing", 404, "Nothing is at /nothing"),
        ("/producers?state=odd", 422, "State was &#39;odd&#39;"),
        ("/moves?after=%3Cb%3E", 400, "After was &#39;&lt;b&gt;&#39;"),
    ],
)
def test_browser_is_told_on_a_page(client: Direct, path: str, status: int, says: str) -> None:
    answer = client.get(path, headers=BROWSER)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "text/html; charset=utf-8")
    assert says in answer.text
    assert '<nav aria-label="Pages">' in answer.text
    assert answer.headers["content-security-policy"].startswith("default-src 'self'")


def test_who_is_not_known_is_shown_no_way_further_than_the_login(tmp_path: Path) -> None:
    answer = SampleDoor(tmp_path).client.get("/static/nothing", headers=BROWSER)
    assert answer.status_code == 404
    assert "<nav" not in answer.text
    assert re.findall(r'href="(/[^"]*)"', answer.text.partition("<body>")[2]) == ["/", "/login"]


@pytest.mark.parametrize("path", ["/volumes/gone", "/api/v1/volumes/gone"])
def test_programs_get_json(client: Direct, path: str) -> None:
    assert client.get(path).headers["content-type"] == "application/problem+json"
    assert client.get(f"/api/v1{path.removeprefix('/api/v1')}", headers=BROWSER).json()["status"] == 404


def test_a_filtered_list_that_is_refused_leads_back_to_itself(client: Direct) -> None:
    assert '<a class="button" href="/moves">' in client.get("/moves?kind=odd", headers=BROWSER).text


def test_a_fault_of_the_advisor_is_a_page_too_and_says_no_more_than_its_class() -> None:
    reader = SampleReader()

    def broken() -> None:
        raise RuntimeError("/secret/path")

    reader.producers = broken  # type: ignore[method-assign,assignment]
    answer = Direct(reader, raises=False).get("/producers", headers=BROWSER)
    assert answer.status_code == 500
    assert "RuntimeError" in answer.text
    assert "/secret/path" not in answer.text
    assert "content-security-policy" in answer.headers
