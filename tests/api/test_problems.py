"""Refusals are problem+json, name the value and say what to do."""

from __future__ import annotations

import pytest
from direct import Direct
from sample_reader import SampleReader

from advisor.views import Summary


@pytest.fixture(scope="module")
def client() -> Direct:
    return Direct(SampleReader())


@pytest.mark.parametrize(
    ("path", "status", "kind", "named"),
    [
        ("/api/v1/blocks?limit=0", 422, "bad-parameter", ["limit was '0'", "greater than or equal to 1"]),
        ("/api/v1/blocks?limit=1001", 422, "bad-parameter", ["limit was '1001'", "less than or equal to 1000"]),
        ("/api/v1/volumes?limit=x", 422, "bad-parameter", ["limit was 'x'", "it must be a valid integer"]),
        ("/api/v1/moves?limit=-1", 422, "bad-parameter", ["limit was '-1'"]),
        ("/api/v1/blocks?tier=5", 422, "bad-parameter", ["tier was '5'", "less than or equal to 4"]),
        ("/api/v1/blocks?hash_prefix=XY", 422, "bad-parameter", ["hash_prefix was 'XY'"]),
        ("/api/v1/blocks?limt=5", 422, "bad-parameter", ["limt is not a parameter of this route", "/docs"]),
        ("/api/v1/blocks?after=junk", 400, "refused", ["after was 'junk'", "next_cursor of the page before"]),
        ("/api/v1/events?kind=nonsense", 422, "bad-parameter", ["kind was 'nonsense'", "'batch', 'tick'"]),
        ("/api/v1/events?from_position=0", 422, "bad-parameter", ["from_position was '0'"]),
        ("/api/v1/events?from_position=99999999999999999999", 422, "bad-parameter", ["from_position was"]),
        ("/api/v1/samples?seconds=3601", 422, "bad-parameter", ["seconds was '3601'", "3600"]),
        ("/api/v2/blocks", 404, "not-found", ["/api/v2/blocks", "/docs lists the routes"]),
        ("/static/nothing.js", 404, "not-found", ["/static/nothing.js"]),
    ],
)
def test_refusal_names_value_and_remedy(
    client: Direct, path: str, status: int, kind: str, named: list[str]
) -> None:
    answer = client.get(path)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert set(body) == {"type", "title", "status", "detail"} | ({"errors"} if status == 422 else set())
    assert body["status"] == status
    assert body["type"] == f"urn:kvadvisor:problem:{kind}"
    for words in named:
        assert words in body["detail"]


@pytest.mark.parametrize(
    ("path", "body", "field", "value", "remedy"),
    [
        ("/api/v1/pause", {"volume": 7}, "volume", "7", "it must be a valid string"),
        ("/api/v1/pause", {"volumes": ""}, "volumes", "''", "leave it out; /docs lists those there are"),
        ("/api/v1/advice/load", {"hashes": ["1", "xy"], "block_tokens": 16}, "hashes.1", "'xy'", "string should match"),
        ("/api/v1/advice/load", {"hashes": ["1"]}, "block_tokens", "", "it is required: give it"),
        ("/api/v1/pause", [], "body", "[]", "it must be a valid dictionary"),
    ],
)
def test_unusable_body_names_the_field_the_value_and_the_remedy(
    client: Direct, path: str, body: object, field: str, value: str, remedy: str
) -> None:
    answer = client.request("POST", path, json=body)
    assert answer.status_code == 422
    (fault,) = answer.json()["errors"]
    assert (fault["field"], fault["value"]) == (field, value)
    assert remedy in fault["remedy"]
    assert fault["remedy"] in answer.json()["detail"]


def test_body_that_is_no_json_is_told_where(client: Direct) -> None:
    sent = {"content-type": "application/json"}
    answer = client.request("POST", "/api/v1/pause", content=b'{"volume": }', headers=sent)
    assert answer.status_code == 422
    (fault,) = answer.json()["errors"]
    assert fault["field"] == "body"
    assert "at character 11" in fault["remedy"]


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        (b"[" * 100_000, "send JSON that nests less deep"),
        (b'{"volume": "\xff"}', "send JSON in UTF-8: byte 0xff at 12 is none there"),
        (b'{"volume": %s}' % (b"7" * 5_000), "one has thousands of digits"),
    ],
)
def test_body_that_json_cannot_say_is_told_why(client: Direct, content: bytes, remedy: str) -> None:
    answer = client.request("POST", "/api/v1/pause", content=content, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["type"]) == (422, "urn:kvadvisor:problem:bad-parameter")
    (fault,) = answer.json()["errors"]
    assert fault["field"] == "body"
    assert remedy in fault["remedy"]


@pytest.mark.parametrize(
    "body",
    [
        {"token": "hunter2"}, {"password": "hunter2"}, {"volume": {"authorization": "hunter2"}},
        {"volume": [{"secret_key": "hunter2"}]},
    ],
)
def test_what_may_be_a_secret_is_never_echoed(client: Direct, body: object) -> None:
    answer = client.request("POST", "/api/v1/pause", json=body)
    assert answer.status_code == 422
    assert "hunter2" not in answer.text
    assert answer.json()["errors"][0]["value"] == "(not shown)"


def test_faults_told_are_bounded(client: Direct) -> None:
    answer = client.request("POST", "/api/v1/advice/load", json={"hashes": ["x"] * 9_000, "block_tokens": 1})
    assert answer.status_code == 422
    assert len(answer.json()["errors"]) == 20


def test_writing_method_is_refused_and_the_right_one_named(client: Direct) -> None:
    answer = client.request("POST", "/api/v1/summary")
    assert answer.status_code == 405
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["allow"] == "GET"
    assert "use GET" in answer.json()["detail"]


@pytest.mark.parametrize("name", ["x" * 100_000, "\\ud800"])
def test_a_field_of_a_name_that_nobody_would_give_is_refused_in_few_words(client: Direct, name: str) -> None:
    sent = {"content-type": "application/json"}
    for path, body in (
        ("/api/v1/pause", f'{{"{name}": 1}}'),
        ("/api/v1/volumes", f'{{"agent": "host-7", "descriptor": {{"{name}": 1}}}}'),
    ):
        answer = client.request("POST", path, content=body, headers=sent)
        assert answer.status_code == 422
        assert len(answer.content) < 4_096


def test_long_value_is_cut_in_the_answer(client: Direct) -> None:
    answer = client.get("/api/v1/blocks", params={"tier": "9" * 5000})
    assert answer.status_code == 422
    assert len(answer.json()["detail"]) < 300


def test_fault_of_the_service_is_a_problem_without_its_message() -> None:
    class Faulty(SampleReader):
        def summary(self) -> Summary:
            raise RuntimeError("secret path")

    answer = Direct(Faulty(), raises=False).get("/api/v1/summary")
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    assert "RuntimeError" in answer.json()["detail"]
    assert "secret" not in answer.text
