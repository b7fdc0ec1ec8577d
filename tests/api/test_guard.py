"""Only this machine's names get in; every answer carries the safety headers."""

from __future__ import annotations

import re

import pytest
from direct import Direct
from sample_reader import SampleReader

from advisor.access.doorkeeper import NOBODY
from advisor.views import Summary


@pytest.fixture(scope="module")
def client() -> Direct:
    return Direct(SampleReader())


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8470", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:8470", "LOCALHOST"]
)
def test_local_host_is_served(client: Direct, host: str) -> None:
    assert client.get("/healthz", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8470", "evil.example@127.0.0.1", "", "[::1",
     "127.0.0.1:8470:1", "127.0.0.1:", "192.168.1.5:8470", "::1"],
)
@pytest.mark.parametrize("path", ["/", "/api/v1/summary", "/static/app.css", "/nothing"])
def test_foreign_host_is_refused_everywhere(client: Direct, host: str, path: str) -> None:
    answer = client.get(path, headers={"host": host})
    assert answer.status_code == 421
    assert answer.headers["content-type"] == "application/problem+json"
    assert "open the page as 127.0.0.1" in answer.json()["detail"]
    assert "Content-Security-Policy" in answer.headers


@pytest.mark.parametrize(
    "path", ["/", "/docs", "/api/v1/summary", "/static/app.css", "/nothing", "/api/v1/blocks?limit=0"]
)
def test_every_answer_carries_the_safety_headers(client: Direct, path: str) -> None:
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"
    assert headers["cache-control"] == "no-cache"


def test_a_fault_carries_the_safety_headers_too() -> None:
    class Faulty(SampleReader):
        def summary(self) -> Summary:
            raise RuntimeError("planted")

    headers = Direct(Faulty(), raises=False).get("/api/v1/summary").headers
    assert headers["content-security-policy"].startswith("default-src 'self';")
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/", "/docs", "/login"])
def test_pages_hold_nothing_the_policy_would_block(client: Direct, path: str) -> None:
    page = (client if path != "/login" else Direct(SampleReader(), doorkeeper=NOBODY)).get(path).text
    assert "</html>" in page
    assert not re.search(r"<script(?![^>]*\bsrc=)", page)
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=", page)
    assert not re.search(r"(?:src|href)=\"(?!/|#)", page)
