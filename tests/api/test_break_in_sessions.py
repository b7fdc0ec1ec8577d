"""Attempts to use, to steal and to ride on the session of a browser."""

from __future__ import annotations

from http.cookies import SimpleCookie
from pathlib import Path

import pytest
from sample_door import ORIGIN, PAGE, SampleDoor

from advisor.access.identity import LOCAL, Scope
from advisor.access.sessions import IDLE_US_MAX, WHOLE_US_MAX
from advisor.api_settings import ApiSettings
from advisor.web.page_login import local_path


@pytest.fixture(scope="module")
def one_door(tmp_path_factory: pytest.TempPathFactory) -> SampleDoor:
    return SampleDoor(tmp_path_factory.mktemp("tokens"))


@pytest.fixture
def door(one_door: SampleDoor) -> SampleDoor:
    """Built once; whoever failed before is long forgiven."""
    one_door.rest()
    return one_door


def status(door: SampleDoor, headers: dict[str, str]) -> int:
    return int(door.client.get("/api/v1/identity", headers=headers).status_code)


def paused(door: SampleDoor, headers: dict[str, str]) -> int:
    return int(door.client.request("POST", "/api/v1/pause", json={}, headers=headers).status_code)


def test_a_login_gives_a_cookie_that_scripts_and_other_sites_cannot_use(door: SampleDoor) -> None:
    answer = door.log_in(door.token(Scope.READ), next="/docs")
    assert (answer.status_code, answer.headers["location"]) == (303, "/docs")
    (cookie,) = SimpleCookie(answer.headers["set-cookie"]).values()
    assert (cookie.key, len(cookie.value)) == ("kvadvisor", 43)
    assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "strict", "/")
    assert (cookie["domain"], cookie["secure"], cookie["max-age"]) == ("", "", "")
    page = door.client.get("/docs", headers={**PAGE, "Cookie": f"kvadvisor={cookie.value}"})
    assert page.status_code == 200
    assert "ann · read" in page.text


def test_over_tls_the_cookie_is_bound_to_tls_and_to_this_host(tmp_path: Path) -> None:
    door = SampleDoor(tmp_path, api=ApiSettings(login="required", behind_proxy=True))
    answer = door.log_in(door.token(), {"Origin": "https://127.0.0.1:8470"})
    assert answer.headers["set-cookie"].startswith("__Host-kvadvisor=")
    assert "; Secure" in answer.headers["set-cookie"]
    assert answer.headers["strict-transport-security"] == "max-age=31536000"
    value = answer.headers["set-cookie"].partition(";")[0].partition("=")[2]
    assert status(door, {"Cookie": f"kvadvisor={value}"}) == 401
    assert status(door, {"Cookie": f"__Host-kvadvisor={value}"}) == 200
    assert door.log_in(door.token(), {"Origin": ORIGIN}).status_code == 403


def test_a_bad_token_in_the_form_opens_no_session_and_says_so(door: SampleDoor) -> None:
    for token in ("", "kva_0", "x" * 60_000):
        answer = door.log_in(token, next="/docs")
        assert answer.status_code == 401
        assert "set-cookie" not in answer.headers
        assert "This token opens nothing" in answer.text
        door.pass_s(60)
    assert "<script>" not in door.log_in("a", next='/docs"><script>').text


@pytest.mark.parametrize(
    "wanted",
    ["//evil.example", "/\\evil.example", "\\/evil.example", "https://evil.example", "/\t/evil.example", "javascript:x",
     "/\n/evil.example", "evil.example", "", "/login", "/logout", "/%0d\u0661", "/" + "a" * 3000, "/ //evil"],
)  # fmt: skip
def test_nobody_is_sent_elsewhere_after_a_login(wanted: str) -> None:
    assert local_path(wanted) == "/"


@pytest.mark.parametrize("wanted", ["/", "/docs", "/volumes/nvme-a?limit=3&x=%2F%2Fevil#y"])
def test_a_path_of_ours_is_gone_on_to(wanted: str) -> None:
    assert local_path(wanted) == wanted


@pytest.mark.parametrize(
    "sent",
    [
        {},
        {"Origin": "null"},
        {"Origin": "http://evil.example"},
        {"Origin": "https://127.0.0.1:8470"},
        {"Origin": "http://127.0.0.1:8471"},
        {"Origin": "http://127.0.0.1:8470.evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"Origin": ORIGIN, "Sec-Fetch-Site": "cross-site"},
    ],
)
def test_what_another_site_has_a_browser_send_changes_nothing(door: SampleDoor, sent: dict[str, str]) -> None:
    session = door.session(door.token(Scope.ADMIN))
    assert paused(door, {**session, **sent}) == 403


def test_a_login_cannot_be_forged(door: SampleDoor) -> None:
    token = door.token()
    for headers in ({}, {"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        answer = door.client.request("POST", "/login", data={"token": token}, headers=headers)
        assert answer.status_code == 403
        assert "set-cookie" not in answer.headers


def test_what_our_own_page_sends_is_done(door: SampleDoor) -> None:
    session = door.session(door.token(Scope.OPERATE))
    for sent in ({"Origin": ORIGIN}, {"Sec-Fetch-Site": "same-origin"}):
        assert paused(door, {**session, **sent}) == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_what_a_form_can_send_changes_nothing(door: SampleDoor, kind: str) -> None:
    headers = {**door.session(door.token(Scope.ADMIN)), "Origin": ORIGIN, "Content-Type": kind}
    answer = door.client.request("POST", "/api/v1/pause", content="{}", headers=headers)
    assert answer.status_code == 415


def test_a_program_with_a_token_needs_no_origin(door: SampleDoor) -> None:
    assert door.ask(door.token(Scope.OPERATE), "/api/v1/pause", "POST", json={}).status_code == 200


def test_a_session_ends_with_its_token_with_a_logout_and_by_itself(door: SampleDoor) -> None:
    lasting, short = door.token(), door.token(valid_s=3600)
    first, second, third = door.session(lasting), door.session(lasting), door.session(short)
    assert [status(door, each) for each in (first, second, third)] == [200] * 3
    out = door.client.request("POST", "/logout", headers={**first, "Origin": ORIGIN})
    assert (out.status_code, out.headers["location"]) == (303, "/login")
    assert 'kvadvisor="";' in out.headers["set-cookie"]
    assert [status(door, each) for each in (first, second, third)] == [401, 200, 200]
    door.pass_s(3600)
    assert [status(door, each) for each in (second, third)] == [200, 401]
    door.tokens.revoke(lasting[4:16])
    assert status(door, second) == 401
    assert [action for _, action, _ in door.noted] == ["login", "login", "login", "logout"]
    assert {who for who, _, _ in door.noted} == {"ann"}
    assert lasting[17:] not in str(door.noted)


def test_a_session_ends_when_it_is_idle_and_after_a_day_however_it_is_used(door: SampleDoor) -> None:
    token = door.token()
    idle, used = door.session(token), door.session(token)
    step_us = IDLE_US_MAX - 1_000_000
    for passed_us in range(step_us, WHOLE_US_MAX, step_us):
        door.pass_s(step_us / 1e6)
        assert status(door, used) == 200, passed_us
    assert status(door, idle) == 401
    door.pass_s(step_us / 1e6)
    assert status(door, used) == 401


def test_a_login_gives_another_id_and_ends_the_one_before(door: SampleDoor) -> None:
    token = door.token()
    planted = {"Cookie": "kvadvisor=" + "A" * 43}
    assert door.log_in(token, planted).headers["set-cookie"].partition(";")[0] != planted["Cookie"]
    assert status(door, planted) == 401
    first = door.session(token)
    second = {"Cookie": door.log_in(token, first).headers["set-cookie"].partition(";")[0]}
    assert [status(door, each) for each in (first, second)] == [401, 200]


def test_who_is_logged_in_is_not_asked_again_and_a_late_logout_is_no_error(door: SampleDoor) -> None:
    session = door.session(door.token())
    answer = door.client.get("/login?next=/docs", headers=session)
    assert (answer.status_code, answer.headers["location"]) == (303, "/docs")
    late = door.client.request("POST", "/logout", headers={**PAGE, "Origin": ORIGIN})
    assert (late.status_code, late.headers["location"]) == (303, "/login")


def test_where_nobody_logs_in_another_site_changes_nothing_and_a_bad_token_is_still_bad(tmp_path: Path) -> None:
    door = SampleDoor(tmp_path, anonymous=LOCAL)
    assert [paused(door, sent) for sent in ({}, {"Origin": ORIGIN}, {"Sec-Fetch-Site": "same-origin"})] == [200] * 3
    for sent in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        assert paused(door, sent) == 403
    assert door.client.get("/api/v1/identity").json()["name"] == "operator"
    assert door.ask(door.token(Scope.READ, "bo")).json()["name"] == "bo"
    assert door.ask("kva_wrong").status_code == 401
    assert door.client.get("/login?next=//evil.example").headers["location"] == "/"
