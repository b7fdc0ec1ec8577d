"""Every request is counted and timed under its route; no hash becomes a label."""

from __future__ import annotations

from direct import Direct
from sample_reader import SampleReader

from advisor.metrics import Metrics


def test_requests_are_counted_by_route_method_and_status() -> None:
    told: list[tuple[str, str, int]] = []
    client = Direct(SampleReader(), observe=lambda route, method, status, seconds: told.append((route, method, status)))
    client.get("/api/v1/summary")
    client.get("/api/v1/deletions/0123456789abcdef0123456789abcdef")
    client.get("/static/app.css")
    client.get("/nothing/0123456789abcdef")
    client.get("/healthz", headers={"host": "evil.example"})
    client.request("PURGE", "/api/v1/summary")
    assert told == [
        ("/api/v1/summary", "GET", 200),
        ("/api/v1/deletions/{deletion_id}", "GET", 404),
        ("/static", "GET", 200),
        ("other", "GET", 404),
        ("other", "GET", 421),
        ("/api/v1/summary", "other", 405),
    ]


def test_answers_are_shown_by_their_seconds() -> None:
    metrics = Metrics()
    metrics.observe_request("/api/v1/summary", "GET", 200, 0.004)
    text = metrics.render().decode()
    assert 'kvadvisor_http_requests_total{method="GET",route="/api/v1/summary",status="200"} 1.0' in text
    assert 'kvadvisor_http_request_seconds_bucket{le="0.005",route="/api/v1/summary"} 1.0' in text
    assert 'kvadvisor_http_request_seconds_bucket{le="0.0025",route="/api/v1/summary"} 0.0' in text
