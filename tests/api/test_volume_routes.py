"""`/api/v1/volumes/…`: answers, refusals, and who may do what."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from direct import Direct
from sample_reader import NOW_US, SampleReader
from sample_volumes import SampleVolumes

from advisor.access.doorkeeper import Doorkeeper
from advisor.access.identity import Identity, Scope

DESCRIPTOR = {"id": "nvme-c", "path": "/srv/kv/nvme-c.slab", "capacity_blocks": 100, "block_bytes_max": 4_096}
ORDERS: list[tuple[str, str, Any, Scope]] = [
    ("GET", "/nvme-a", None, Scope.READ),
    ("GET", "/nvme-a/scrub", None, Scope.READ),
    ("PATCH", "/nvme-a", {"capacity_blocks": 2_048}, Scope.OPERATE),
    ("POST", "/nvme-a/drain", {}, Scope.OPERATE),
    ("POST", "/nvme-a/undrain", {}, Scope.OPERATE),
    ("POST", "/nvme-a/scrub", {}, Scope.OPERATE),
    ("POST", "/nvme-a/pause", {}, Scope.OPERATE),
    ("POST", "/nvme-a/resume", {}, Scope.OPERATE),
    ("POST", "", {"agent": "host-7", "descriptor": DESCRIPTOR}, Scope.ADMIN),
    ("DELETE", "/nvme-a?force=true", None, Scope.ADMIN),
]


@pytest.fixture
def volumes() -> SampleVolumes:
    return SampleVolumes()


@pytest.fixture
def client(volumes: SampleVolumes) -> Direct:
    return Direct(SampleReader(), volumes=volumes)


@pytest.fixture(scope="module")
def unchanged() -> Iterator[Direct]:
    """For requests that are all refused."""
    volumes = SampleVolumes()
    yield Direct(SampleReader(), volumes=volumes)
    assert volumes.asked == []


def ask(client: Direct, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    answer = client.request(method, f"/api/v1/volumes{path}", **({} if body is None else {"json": body}))
    read: dict[str, Any] = answer.json()
    return answer.status_code, read


@pytest.mark.parametrize("scope", list(Scope))
def test_orders_need_their_scope_and_bear_the_name_of_who_asks(scope: Scope, volumes: SampleVolumes) -> None:
    rita = Identity("rita", scope)
    client = Direct(SampleReader(), volumes=volumes, doorkeeper=Doorkeeper(anonymous=rita))
    statuses = {(method, path): ask(client, method, path, body)[0] for method, path, body, _ in ORDERS}
    allowed = {(method, path) for method, path, _, needed in ORDERS if scope >= needed}
    assert {order for order, status in statuses.items() if status in (200, 202)} == allowed
    assert {status for order, status in statuses.items() if order not in allowed} <= {403}
    assert {actor for _, actor, _ in volumes.asked} <= {"rita"}


def test_a_volume_is_registered_as_its_descriptor_says(client: Direct, volumes: SampleVolumes) -> None:
    status, view = ask(client, "POST", "", {"agent": "host-7", "descriptor": DESCRIPTOR})
    assert (status, view["volume"]["id"], view["volume"]["capacity_blocks"]) == (200, "nvme-c", 100)
    assert volumes.asked == [("register", "operator", "nvme-c")]
    status, refusal = ask(client, "POST", "", {"agent": "host-9", "descriptor": DESCRIPTOR})
    assert (status, refusal["detail"]) == (404, "agent 'host-9' is not in the settings: name one of host-7")
    status, refusal = ask(client, "POST", "", {"agent": "host-7", "descriptor": {**DESCRIPTOR, "id": "nvme-a"}})
    assert status == 409
    assert "registered already" in refusal["detail"]


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"secret_key": "planted-secret"}, ".secret_key", "descriptor has no field 'secret_key'; give id, kind, path"),
        ({"url": "http://169.254.169.254/planted-secret"}, ".url", "descriptor has no field 'url'"),
        ({"capacity_blocks": "planted-secret"}, ".capacity_blocks", "Expected `int`, got `str`"),
        ({"capacity_blocks": 0}, ".capacity_blocks", "capacity_blocks is 0; set it between 1 and"),
        ({"id": "../up"}, ".id", "an id is 1 to 64 of a-z, 0-9 and '-'"),
        ({"path": "/srv/kv/a\nb"}, ".path", "has characters that cannot be printed"),
        ({"low_watermark": 0.95}, ".low_watermark", "must satisfy 0 < low < high <= 1"),
        ({"retention_s": float(10**12)}, ".retention_s", "retention_s is"),
        ({"kind": "\ud800"}, "", "surrogates not allowed; correct it"),
        ({"options": {"slots": 10**30}}, "", "can't serialize ints"),
    ],
)
def test_a_descriptor_that_cannot_be_is_refused_by_its_field(
    unchanged: Direct, fields: dict[str, Any], field: str, said: str
) -> None:
    body = json.dumps({"agent": "host-7", "descriptor": {**DESCRIPTOR, **fields}})
    answer = unchanged.request("POST", "/api/v1/volumes", content=body, headers={"content-type": "application/json"})
    refusal = answer.json()
    assert answer.status_code == 422
    assert said in refusal["detail"]
    assert "planted-secret" not in str(refusal)
    assert refusal["type"] == "urn:kvadvisor:problem:bad-parameter"
    assert [fault["field"] for fault in refusal["errors"]] == [f"descriptor{field}"]
    assert refusal["errors"][0]["remedy"]


def test_a_volume_that_holds_blocks_is_unregistered_by_force_alone(client: Direct) -> None:
    status, refusal = ask(client, "DELETE", "/nvme-a")
    assert status == 409
    assert "holds 835 blocks" in refusal["detail"]
    assert "drain it first" in refusal["detail"]
    status, gone = ask(client, "DELETE", "/nvme-a?force=true")
    assert (status, gone) == (
        200, {"volume": "nvme-a", "agent": "host-7", "blocks": 835, "block_bytes": 835 * 16_384}
    )  # fmt: skip
    assert ask(client, "DELETE", "/nvme-a?force=perhaps")[0] == 422


def test_a_drain_is_shown_and_taken_back(client: Direct) -> None:
    assert ask(client, "POST", "/nvme-a/undrain", {})[0] == 409
    status, view = ask(client, "POST", "/nvme-a/drain", {})
    assert (status, view["volume"]["draining"], view["drain"]["blocks_left"]) == (200, True, 835)
    assert not ask(client, "POST", "/nvme-a/undrain", {})[1]["volume"]["draining"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "nothing is to be changed"),
        ({"capacity_blocks": 0}, "capacity_blocks was 0"),
        ({"high_watermark": 1.5}, "high_watermark was 1.5"),
        ({"low_watermark": 0.8, "high_watermark": 0.7}, "low_watermark 0.8 is not below high_watermark 0.7"),
        ({"speed_rank": 1}, "speed_rank is not a parameter"),
    ],
)
def test_a_change_that_makes_no_sense_is_refused(unchanged: Direct, body: dict[str, Any], said: str) -> None:
    status, refusal = ask(unchanged, "PATCH", "/nvme-a", body)
    assert status == 422
    assert said in refusal["detail"]


def test_watermarks_and_capacity_are_changed(client: Direct) -> None:
    status, view = ask(client, "PATCH", "/nvme-a", {"high_watermark": 0.95, "capacity_blocks": 2_048})
    assert status == 200
    assert (view["volume"]["high_watermark"], view["volume"]["capacity_blocks"]) == (0.95, 2_048)
    assert view["volume"]["low_watermark"] == 0.8


def test_figures_of_another_moment_say_of_which(client: Direct) -> None:
    assert ask(client, "GET", "/nvme-a")[1]["layout"]["as_of_us"] == NOW_US - 75_000_000
    page = client.get("/volumes/nvme-a").text
    layout = page[page.index('<section id="layout"') :]
    assert re.search(r"as of <time [^>]*>[^<]*</time> UTC, told again when it has changed by 2 %", layout)


def test_one_scrub_at_a_time(client: Direct) -> None:
    assert ask(client, "GET", "/nvme-b/scrub")[0] == 404
    status, view = ask(client, "POST", "/nvme-b/scrub", {})
    assert (status, view["state"], view["ended_us"]) == (202, "running", None)
    status, refusal = ask(client, "POST", "/nvme-b/scrub", {})
    assert (status, refusal["detail"]) == (
        409, "volume nvme-b is being scrubbed for operator: wait for its end"
    )  # fmt: skip
    assert ask(client, "GET", "/nvme-b/scrub")[1]["actor"] == "operator"


@pytest.mark.parametrize(("method", "path", "body"), [(m, p, b) for m, p, b, _ in ORDERS if p])
def test_a_volume_that_there_is_none_of_is_not_found(unchanged: Direct, method: str, path: str, body: Any) -> None:
    status, refusal = ask(unchanged, method, path.replace("nvme-a", "tape"), body)
    assert status == 404
    assert "'tape' is not registered: name one of" in refusal["detail"]
