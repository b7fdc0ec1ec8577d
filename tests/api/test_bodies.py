"""Bodies are bounded in bytes and time, whoever sends them."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import pytest
from direct import Direct
from sample_reader import SampleReader
from served import serving

from advisor.api import bodies


def test_a_body_that_is_too_long_is_refused_before_it_is_read_as_json() -> None:
    long = '{"volume": "' + "x" * bodies.BODY_BYTES_MAX + '"}'
    answer = Direct(SampleReader()).request(
        "POST", "/api/v1/pause", content=long, headers={"Content-Type": "application/json"}
    )
    assert (answer.status_code, answer.json()["type"]) == (413, "urn:kvadvisor:problem:long-body")
    assert f"longer than {bodies.BODY_BYTES_MAX} bytes" in answer.json()["detail"]


def test_a_body_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_S_MAX", 0.2)
    with serving(SampleReader()) as served:
        host, _, port = urlsplit(served.url).netloc.partition(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(
                b"POST /api/v1/pause HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: 1000\r\n\r\n{"
            )
            answer = connection.recv(65_536)
    assert answer.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("tenant", ["\\ud800", "a\\u0000b", "x" * 257])
def test_text_that_no_log_can_keep_is_refused_by_its_field(tenant: str) -> None:
    body = '{"quotas": [{"tenant": "' + tenant + '", "volume": "nvme-a", "blocks": 1}]}'
    answer = Direct(SampleReader()).request(
        "PATCH", "/api/v1/policies", content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 422
    assert [fault["field"] for fault in answer.json()["errors"]] == ["quotas.0.tenant"]


def test_a_refusal_quotes_no_more_than_a_sentence_holds() -> None:
    answer = Direct(SampleReader()).get(f"/api/v1/volumes/{'v' * 20_000}")
    assert answer.status_code in (404, 422)
    assert len(answer.content) < 4_096
