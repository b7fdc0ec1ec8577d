"""Attempts to come in with a token that opens nothing."""

from __future__ import annotations

import pytest
from sample_door import PAGE, SampleDoor

from advisor.access.identity import Scope


@pytest.fixture(scope="module")
def one_door(tmp_path_factory: pytest.TempPathFactory) -> SampleDoor:
    return SampleDoor(tmp_path_factory.mktemp("tokens"))


@pytest.fixture
def door(one_door: SampleDoor) -> SampleDoor:
    """Built once; whoever failed before is long forgiven."""
    one_door.rest()
    return one_door


def test_a_token_opens_what_its_scope_says_and_names_its_owner(door: SampleDoor) -> None:
    token = door.token(Scope.PLAN, "bo", valid_s=60)
    assert door.ask(token).json() == {
        "name": "bo", "scope": "plan", "tenant": "", "expires_us": door.now_us + 60_000_000
    }  # fmt: skip
    assert door.ask(token, "/api/v1/moves/7-0/cancel", "POST", json={}).status_code == 200
    refused = door.ask(token, "/api/v1/pause", "POST", json={})
    assert (refused.status_code, refused.json()["detail"]) == (403, "bo has scope plan, this needs operate")


@pytest.mark.parametrize("path", ["/metrics", "/openapi.json", "/api/v1/summary", "/nothing", "/api/v1/pause"])
def test_without_a_token_nothing_is_told_not_even_what_there_is(door: SampleDoor, path: str) -> None:
    answer = door.client.get(path)
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, 'Bearer realm="kvadvisor"')
    assert answer.json()["detail"] == "this needs a token: send Authorization: Bearer TOKEN, or log in at /login"
    assert answer.headers["content-security-policy"].startswith("default-src 'self';")


def test_a_browser_without_a_session_is_sent_to_the_login_page(door: SampleDoor) -> None:
    answer = door.client.get("/docs?a=1", headers=PAGE)
    assert (answer.status_code, answer.headers["location"]) == (303, "/login?next=%2Fdocs%3Fa%3D1")
    assert door.client.get("/api/v1/summary", headers=PAGE).status_code == 401


def test_probes_files_and_the_login_page_are_open(door: SampleDoor) -> None:
    for path in ("/healthz", "/readyz", "/static/app.css", "/login"):
        assert door.client.get(path).status_code == 200
    for path in ("/static", "/static/../api/v1/summary", "/healthz/", "/login/", "//api/v1/summary"):
        assert door.client.get(path).status_code == 401, path


def test_what_looks_like_a_token_and_is_none_opens_nothing(door: SampleDoor) -> None:
    token = door.token(Scope.ADMIN)
    other = door.token(Scope.ADMIN)
    mixed = token[:17] + other[17:]
    for text in (mixed, token[:-1], token + "A", token.swapcase(), token.removeprefix("kva_"), "kva_", "", "ü" * 60):
        answer = door.client.get("/api/v1/identity", headers={"Authorization": f"Bearer {text}".encode()})
        assert (answer.status_code, answer.json()["type"]) == (401, "urn:kvadvisor:problem:not-admitted")
        assert answer.json()["detail"] == "this token opens nothing: it is wrong, expired or revoked; ask for another"
        door.pass_s(60)
    assert door.counted == ["bearer"] * 8


def test_a_token_shown_another_way_opens_nothing(door: SampleDoor) -> None:
    token = door.token(Scope.ADMIN)
    for headers in (
        [("Authorization", f"Basic {token}")],
        [("Authorization", token)],
        [("Authorization", f"Bearer {token}"), ("Authorization", f"Bearer {token}")],
        [("Cookie", f"kvadvisor={token}")],
    ):
        assert door.client.get("/api/v1/identity", headers=headers).status_code == 401
    assert door.client.get(f"/api/v1/identity?token={token}&access_token={token}").status_code == 401


def test_an_expired_and_a_revoked_token_open_nothing_from_that_moment(door: SampleDoor) -> None:
    short, long = door.token(valid_s=60), door.token()
    assert door.ask(short).status_code == 200
    door.pass_s(60)
    assert door.ask(short).status_code == 401
    assert door.ask(long).status_code == 200
    door.tokens.revoke(long[4:16])
    assert door.ask(long).status_code == 401


@pytest.mark.parametrize("damage", ["cut", "open to others", "a link"])
def test_a_file_of_tokens_that_cannot_be_trusted_lets_nobody_in(door: SampleDoor, damage: str) -> None:
    token = door.token(Scope.ADMIN)
    assert door.ask(token).status_code == 200
    path = door.tokens.path
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    elif damage == "open to others":
        path.chmod(0o644)
    else:
        path.symlink_to(path.rename(path.with_name("elsewhere")))
    assert door.ask(token).status_code == 401
    path.unlink()
    assert door.ask(door.token()).status_code == 200


def test_tokens_are_listed_without_what_opens_the_door(door: SampleDoor) -> None:
    admin, other = door.token(Scope.ADMIN, "root"), door.token(Scope.READ, "bo", "acme", 60)
    door.pass_s(1)
    answer = door.ask(admin, "/api/v1/tokens")
    told = [(each["id"], each["name"], each["scope"], each["tenant"], each["used_us"]) for each in answer.json()]
    assert told[-2:] == [
        (admin[4:16], "root", "admin", "", door.now_us), (other[4:16], "bo", "read", "acme", 0),
    ]  # fmt: skip
    assert admin[17:] not in answer.text
    assert "digest" not in answer.text
    assert door.ask(other, "/api/v1/tokens").status_code == 403
