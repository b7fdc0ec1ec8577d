"""ETags of answers that change seldom."""

from __future__ import annotations

import pytest
from direct import Direct
from sample_reader import SampleReader

from advisor.api.etags import etag_of, names_etag


@pytest.mark.parametrize("path", ["/openapi.json", "/api/v1/policies", "/api/v1/plan"])
def test_unchanged_answer_is_not_sent_again(path: str) -> None:
    client = Direct(SampleReader())
    first = client.get(path)
    assert first.headers["etag"] == etag_of(first.content)
    same = client.get(path, headers={"If-None-Match": first.headers["etag"]})
    assert (same.status_code, same.content) == (304, b"")
    assert same.headers["etag"] == first.headers["etag"]
    assert "content-type" not in same.headers
    assert same.headers["cache-control"] == "no-cache"
    changed = client.get(path, headers={"If-None-Match": '"0123"'})
    assert (changed.status_code, changed.content) == (200, first.content)


def test_files_of_the_pages_have_etags_too() -> None:
    client = Direct(SampleReader())
    etag = client.get("/static/app.css").headers["etag"]
    assert client.get("/static/app.css", headers={"If-None-Match": etag}).status_code == 304


def test_refusals_and_live_figures_have_none() -> None:
    client = Direct(SampleReader())
    for path in ("/api/v1/summary", "/api/v1/volumes/nowhere", "/api/v1/policies?x=1"):
        answer = client.get(path)
        assert "etag" not in answer.headers or answer.status_code == 200


@pytest.mark.parametrize(
    ("header", "named"),
    [('"a"', True), ('W/"a"', True), ('"b", "a"', True), ("*", True), ('"b"', False), ("", False), ("a", False)],
)
def test_header_names_an_etag(header: str, named: bool) -> None:
    assert names_etag(header, '"a"') is named
