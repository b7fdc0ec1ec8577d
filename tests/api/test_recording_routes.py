"""The REST API's recordings and replays: who may do what, what is refused and how, files in and out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from as_tenant import entering
from direct import Direct
from sample_reader import SampleReader
from sample_recordings import SampleRecordings
from sample_replays import SampleReplays

from advisor.access.identity import Scope
from advisor.api.replays import REPORT_POLICY
from advisor.api.safety_headers import CONTENT_POLICY

DONE, RUNNING, FAILED = "r-000000000001", "r-000000000004", "r-000000000002"
OCTETS = {"Content-Type": "application/octet-stream"}


@pytest.fixture
def recordings(tmp_path: Path) -> SampleRecordings:
    (tmp_path / "evening").write_bytes(b"PAR1 the file")
    return SampleRecordings(tmp_path)


@pytest.fixture
def replays(tmp_path: Path) -> SampleReplays:
    (tmp_path / "report.html").write_text("<!doctype html><script>1</script>")
    return SampleReplays(tmp_path)


@pytest.fixture
def client(recordings: SampleRecordings, replays: SampleReplays) -> Direct:
    return Direct(SampleReader(), recordings=recordings, replays=replays)


def test_a_recording_is_started_for_a_time_and_stopped_by_who_asks(
    client: Direct, recordings: SampleRecordings
) -> None:
    started = client.request("POST", "/api/v1/recordings", json={"name": "noon", "seconds": 60, "events": 1_000})
    assert (started.status_code, started.json()["state"]) == (200, "recording")
    assert client.request("POST", "/api/v1/recordings/noon/stop", json={}).json()["state"] == "done"
    assert recordings.asked == [("record", "operator", "noon", "60.0", "1000"), ("stop", "operator", "noon")]
    listed = client.get("/api/v1/recordings?limit=2")
    assert [view["name"] for view in listed.json()] == ["noon", "now"]
    assert listed.headers["X-Total-Count"] == "4"
    detail = client.get("/api/v1/recordings/noon").json()
    assert (detail["figures"]["requests"]["blocks"], detail["figures_note"]) == (182_000, "")


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"name": "evening"}, 409, "there is a recording 'evening' already"),
        ({"name": "../x"}, 422, "name was '../x'"),
        ({"name": "x", "seconds": 0}, 422, "seconds was 0"),
        ({"name": "x", "until": 3}, 422, "until"),
        ({}, 422, "name"),
    ],
)
def test_what_cannot_be_recorded_is_refused(client: Direct, body: dict[str, Any], status: int, said: str) -> None:
    answer = client.request("POST", "/api/v1/recordings", json=body)
    assert answer.status_code == status
    assert said in answer.json()["detail"]


def test_a_full_disk_is_507(client: Direct, recordings: SampleRecordings) -> None:
    recordings.full = True
    answer = client.request("POST", "/api/v1/recordings", json={"name": "x"})
    assert (answer.status_code, "free space" in answer.json()["detail"]) == (507, True)


def test_a_file_goes_out_as_it_is(client: Direct) -> None:
    answer = client.get("/api/v1/recordings/evening/file")
    assert (answer.status_code, answer.content) == (200, b"PAR1 the file")
    assert answer.headers["content-disposition"] == 'attachment; filename="evening.parquet"'
    assert answer.headers["content-type"] == "application/octet-stream"
    assert client.get("/api/v1/recordings/now/file").status_code == 409


def test_a_file_comes_in_whole_or_leaves_nothing(client: Direct, recordings: SampleRecordings) -> None:
    sent = client.request("PUT", "/api/v1/recordings/trace", content=b'{"timestamp": 0}', headers=OCTETS)
    assert (sent.status_code, sent.json()["size_bytes"]) == (200, 16)
    garbage = client.request("PUT", "/api/v1/recordings/bad", content=b"<html>", headers=OCTETS)
    assert (garbage.status_code, garbage.json()["detail"]) == (422, "bad starts with b'<html>', like no recording")
    large = client.request("PUT", "/api/v1/recordings/large", content=b"{" * 100_001, headers=OCTETS)
    assert large.status_code == 413
    assert "at most 100,000 are taken in: raise api.upload_bytes_max" in large.json()["detail"]
    assert len(recordings.uploads) == 2
    assert [upload.discarded for upload in recordings.uploads] == [1, 1]


def test_a_file_that_does_not_say_its_size_is_cut_off_at_the_limit(
    client: Direct, recordings: SampleRecordings
) -> None:
    async def pieces() -> Any:
        for _ in range(200):
            yield b"{" * 1_000

    answer = client.request("PUT", "/api/v1/recordings/large", content=pieces(), headers=OCTETS)
    assert answer.status_code == 413
    assert recordings.uploads[0].discarded == 1


def test_a_form_of_another_site_brings_no_file_in(client: Direct, recordings: SampleRecordings) -> None:
    answer = client.request("PUT", "/api/v1/recordings/x", content=b"{}", headers={"Content-Type": "text/plain"})
    assert answer.status_code == 415
    assert recordings.uploads == []


def test_names_that_lead_elsewhere_reach_nothing(client: Direct, recordings: SampleRecordings) -> None:
    for name in ("..%2Fconfig.toml", "%2Fetc%2Fpasswd", "a%00b", ".hidden", "..", "a%2Fb"):
        for method, path in (("GET", ""), ("GET", "/file"), ("PUT", ""), ("DELETE", ""), ("POST", "/stop")):
            answer = client.request(method, f"/api/v1/recordings/{name}{path}", content=b"{}", headers=OCTETS)
            assert answer.status_code in (404, 405, 415, 422), (name, method, path)
    assert (recordings.asked, recordings.uploads) == ([], [])


def test_a_recording_is_deleted(client: Direct, recordings: SampleRecordings) -> None:
    assert client.request("DELETE", "/api/v1/recordings/night").json()["name"] == "night"
    assert client.request("DELETE", "/api/v1/recordings/night").status_code == 404
    assert recordings.asked == [("delete", "operator", "night")]


def test_a_replay_is_asked_for_looked_at_cancelled_and_deleted(client: Direct, replays: SampleReplays) -> None:
    order = {"recording": "evening", "fast_blocks": [1_000], "admissions": ["auto", "always"], "budgets": [0.1, 1.0]}
    started = client.request("POST", "/api/v1/replays", json=order).json()
    assert (started["state"], started["results_wanted"]) == ("queued", 4)
    assert client.request("POST", f"/api/v1/replays/{RUNNING}/cancel", json={}).json()["state"] == "cancelled"
    refused = client.request("POST", f"/api/v1/replays/{FAILED}/cancel", json={})
    assert (refused.status_code, "is failed" in refused.json()["detail"]) == (409, True)
    assert client.request("DELETE", f"/api/v1/replays/{RUNNING}").status_code == 200
    assert replays.asked == [
        ("replay", "operator", "evening"), ("cancel", "operator", RUNNING), ("delete", "operator", RUNNING),
    ]  # fmt: skip
    detail = client.get(f"/api/v1/replays/{DONE}").json()
    assert [row["token_hit_ratio"] for row in detail["caches"]] == [0.31, 0.48, 0.36, 0.51]
    assert detail["advice"]["capacity_blocks"] == 45_500


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ({"policies": ["nope"]}, "policy 'nope' is not known: choose one of 2q, arc"),
        ({"admissions": ["auto"]}, "admissions is of two tiers: give fast_blocks too"),
        ({"fast_blocks": [10], "capacities": [10]}, "capacities is of one tier and fast_blocks of two"),
        ({"fast_blocks": [10], "admissions": ["auto"], "evictions": ["sieve"]}, "auto has no eviction 'sieve'"),
        ({"policies": ["lru"] * 8, "capacities": [1] * 9}, "72 results are asked for, and at most 64"),
        ({"capacities": [0]}, "0"),
        ({"recording": "../x"}, "recording was '../x'"),
    ],
)
def test_what_cannot_be_replayed_is_refused(client: Direct, order: dict[str, Any], said: str) -> None:
    answer = client.request("POST", "/api/v1/replays", json={"recording": "evening"} | order)
    assert answer.status_code == 422
    assert said in answer.json()["detail"]


def test_a_report_is_in_a_sandbox_and_no_other_answer_lets_scripts_of_its_own_run(client: Direct) -> None:
    report = client.get(f"/api/v1/replays/{DONE}/report")
    policy = report.headers["Content-Security-Policy"]
    assert (report.status_code, policy) == (200, REPORT_POLICY)
    directives = dict(part.strip().partition(" ")[::2] for part in policy.split(";"))
    assert directives["sandbox"] == "allow-scripts"
    assert (directives["default-src"], directives["frame-ancestors"]) == ("'none'", "'self'")
    assert report.headers["content-type"].startswith("text/html")
    assert client.get(f"/api/v1/replays/{FAILED}/report").status_code == 404
    schema = json.loads(client.get("/openapi.json").content)
    pages = ["/", "/docs", "/replay", "/openapi.json", f"/api/v1/replays/{FAILED}/report", "/static/app.css", "/nope"]
    plain = [path for path, methods in schema["paths"].items() if "get" in methods and "{" not in path]
    for path in [*pages, *(path for path in plain if path != "/api/v1/stream")]:
        assert client.get(path).headers["Content-Security-Policy"] == CONTENT_POLICY, path
    assert "unsafe" not in CONTENT_POLICY


def test_who_may_do_what(recordings: SampleRecordings, replays: SampleReplays) -> None:
    order = {"recording": "evening"}
    writes: dict[Scope, list[tuple[str, str, Any]]] = {
        Scope.PLAN: [("POST", "/api/v1/replays", order), ("POST", f"/api/v1/replays/{RUNNING}/cancel", {})],
        Scope.OPERATE: [
            ("POST", "/api/v1/recordings", {"name": "x"}), ("POST", "/api/v1/recordings/x/stop", {}),
            ("PUT", "/api/v1/recordings/y", {}), ("DELETE", "/api/v1/recordings/x", None),
        ],
    }  # fmt: skip
    reads = ("recordings", "recordings/evening", "recordings/evening/file", "replays", f"replays/{DONE}/report")
    for scope in Scope:
        client = Direct(SampleReader(), recordings=recordings, replays=replays, **entering(scope))
        for needed, requests in writes.items():
            statuses = [client.request(method, path, json=body).status_code for method, path, body in requests]
            assert [status == 403 for status in statuses] == [scope < needed] * len(requests), (scope, requests)
        assert [client.get(f"/api/v1/{path}").status_code for path in reads] == [200] * len(reads)
    tenant = Direct(SampleReader(), recordings=recordings, replays=replays, **entering(Scope.ADMIN, "acme"))
    assert {tenant.get(f"/api/v1/{path}").status_code for path in reads} == {403}
    assert tenant.request("POST", "/api/v1/replays", json=order).status_code == 403
