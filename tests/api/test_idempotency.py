"""A write with an Idempotency-Key is done once, however often it is sent; over a restart too."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import httpx
import pytest
from as_tenant import entering
from direct import Direct
from sample_actions import SampleActions
from sample_door import ORIGIN, SampleDoor
from sample_parts import sample_parts
from sample_reader import SampleReader

from advisor.access.identity import Scope
from advisor.api.app import create_app
from advisor.api.errors import ApiError
from advisor.api.remembered import Entry, State
from advisor.api.remembered_file import RememberedFile
from advisor.views import PauseView

PAUSE = "/api/v1/pause"


def sent(client: Direct, key: str, body: object, path: str = PAUSE) -> httpx.Response:
    return client.request("POST", path, json=body, headers={"Idempotency-Key": key})


def test_same_key_and_body_is_done_once_and_answered_alike() -> None:
    actions = SampleActions()
    client = Direct(SampleReader(), actions=actions)
    first = sent(client, "k1", {"volume": "nvme-a"})
    actions.paused = set()
    again = sent(client, "k1", {"volume": "nvme-a"})
    assert len(actions.asked) == 1
    assert (again.status_code, again.content) == (first.status_code, first.content)
    assert again.headers["content-type"] == "application/json"
    assert again.headers["idempotency-replayed"] == "true"
    assert "idempotency-replayed" not in first.headers
    sent(client, "k2", {"volume": "nvme-a"})
    assert len(actions.asked) == 2


def test_a_refusal_takes_no_place_and_is_looked_at_anew() -> None:
    client = Direct(SampleReader())
    first, again = (sent(client, "k1", {"volume": "nowhere"}) for _ in range(2))
    assert first.status_code == again.status_code == 404
    assert again.json() == first.json()
    assert "idempotency-replayed" not in again.headers
    assert sent(client, "k1", {"volume": "nvme-a"}).status_code == 200


def test_same_key_with_another_request_is_refused() -> None:
    actions = SampleActions()
    client = Direct(SampleReader(), actions=actions)
    sent(client, "k1", {"volume": "nvme-a"})
    for body, path in (({"volume": ""}, PAUSE), ({"volume": "nvme-a"}, "/api/v1/resume")):
        other = sent(client, "k1", body, path)
        assert other.status_code == 422
        assert other.json()["type"] == "urn:kvadvisor:problem:idempotency"
        assert "make a key for each request" in other.json()["detail"]
    assert len(actions.asked) == 1


def test_keys_of_two_identities_do_not_meet(tmp_path: Path) -> None:
    actions = SampleActions()
    for name in ("ann", "bob"):
        who = entering(Scope.OPERATE, name=name)
        sent(Direct(SampleReader(), actions=actions, answers_file=tmp_path / "answers", **who), "k1", {})
    assert [actor for _, actor, _ in actions.asked] == ["ann", "bob"]


def test_two_tokens_of_one_name_and_scope_share_no_answer(tmp_path: Path) -> None:
    actions = SampleActions()
    door = SampleDoor(tmp_path, actions=actions)
    first, other = door.token(Scope.OPERATE), door.token(Scope.OPERATE)
    headers = {"Idempotency-Key": "k1"}
    answers = [
        door.client.request("POST", PAUSE, json={}, headers={"Authorization": f"Bearer {token}", **headers})
        for token in (first, other, first)
    ]
    assert ["idempotency-replayed" in answer.headers for answer in answers] == [False, False, True]
    in_page = door.client.request("POST", PAUSE, json={}, headers={**door.session(first), "Origin": ORIGIN, **headers})
    assert in_page.headers["idempotency-replayed"] == "true"
    assert len(actions.asked) == 2


def test_answer_survives_a_restart_and_no_key_is_on_the_disk(tmp_path: Path) -> None:
    file, actions = tmp_path / "answers", SampleActions()
    first = sent(Direct(SampleReader(), actions=actions, answers_file=file), "a-telling-key", {"volume": "nvme-a"})
    again = sent(Direct(SampleReader(), actions=actions, answers_file=file), "a-telling-key", {"volume": "nvme-a"})
    assert again.headers["idempotency-replayed"] == "true"
    assert again.content == first.content
    assert len(actions.asked) == 1
    assert b"a-telling-key" not in file.read_bytes()
    assert file.stat().st_mode & 0o777 == 0o600


class Interrupted(SampleActions):
    def pause(self, actor: str, volume: str = "") -> PauseView:
        super().pause(actor, volume)
        raise SystemExit  # as a kill in the middle of it


def test_what_was_cut_short_is_not_done_again_but_said_to_be_unknown(tmp_path: Path) -> None:
    file = tmp_path / "answers"
    with pytest.raises(SystemExit):
        sent(Direct(SampleReader(), actions=Interrupted(), answers_file=file), "k1", {})
    (kept,) = RememberedFile(file).load()
    assert kept.state is State.UNDER_WAY
    actions = SampleActions()
    again = sent(Direct(SampleReader(), actions=actions, answers_file=file), "k1", {})
    assert again.status_code == 409
    assert "GET /api/v1/audit" in again.json()["detail"]
    assert actions.asked == []


class Failing(SampleActions):
    def __init__(self) -> None:
        super().__init__()
        self.failures = 1

    def pause(self, actor: str, volume: str = "") -> PauseView:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("a fault")
        return super().pause(actor, volume)


def test_a_fault_is_not_kept(tmp_path: Path) -> None:
    actions = Failing()
    client = Direct(SampleReader(), raises=False, actions=actions, answers_file=tmp_path / "answers")
    assert sent(client, "k1", {}).status_code == 500
    assert sent(client, "k1", {}).status_code == 200
    assert len(actions.asked) == 1


def test_refusal_of_who_asks_is_not_kept(tmp_path: Path) -> None:
    reading = Direct(SampleReader(), answers_file=tmp_path / "answers", **entering(Scope.READ))
    assert sent(reading, "k1", {}).status_code == 403
    operating = Direct(SampleReader(), answers_file=tmp_path / "answers", **entering(Scope.OPERATE))
    assert sent(operating, "k1", {}).status_code == 200


def test_repeat_of_a_request_under_way_is_told_to_wait() -> None:
    class Slow(SampleActions):
        begun, go = threading.Event(), threading.Event()

        def pause(self, actor: str, volume: str = "") -> PauseView:
            self.begun.set()
            assert self.go.wait(60)
            return super().pause(actor, volume)

    actions = Slow()

    async def meet() -> tuple[httpx.Response, httpx.Response]:
        transport = httpx.ASGITransport(create_app(sample_parts(actions=actions)))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            options = {"json": {}, "headers": {"Idempotency-Key": '"k1"'}}
            first = asyncio.create_task(client.post(PAUSE, **options))  # type: ignore[arg-type]
            await asyncio.to_thread(actions.begun.wait, 60)
            second = await client.post(PAUSE, **options)  # type: ignore[arg-type]
            actions.go.set()
            return await first, second

    first, second = asyncio.run(meet())
    assert first.status_code == 200
    assert second.status_code == 409
    assert second.headers["retry-after"] == "1"
    assert len(actions.asked) == 1


def test_key_that_is_none_is_refused_with_its_value() -> None:
    client = Direct(SampleReader())
    for key in ("", " ", "two words", "x" * 256, "ü"):
        answer = client.request("POST", PAUSE, json={}, headers={"Idempotency-Key": key.encode()})
        assert answer.status_code == 422
        assert "1 to 255 visible ASCII characters" in answer.json()["detail"]


def test_body_too_long_to_remember_is_refused_before_anything_is_done() -> None:
    actions = SampleActions()
    answer = sent(Direct(SampleReader(), actions=actions), "k1", {"volume": "x" * (1 << 20)})
    assert answer.status_code == 413
    assert actions.asked == []


def test_question_that_is_a_post_is_asked_anew() -> None:
    client = Direct(SampleReader())
    question = {"hashes": ["1"], "block_tokens": 16}
    answers = [sent(client, "k1", question, "/api/v1/advice/load") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert "idempotency-replayed" not in answers[1].headers


def test_file_that_is_no_database_is_refused_in_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "answers"
    file.write_bytes(b"no database at all, but long enough to be read as the header of one" * 9)
    with pytest.raises(ApiError, match="move it away"):
        RememberedFile(file)


def test_dropped_entries_leave_the_file(tmp_path: Path) -> None:
    file = RememberedFile(tmp_path / "answers")
    for slot in (b"1", b"2"):
        file.put(Entry(slot, b"", 5, State.UNKNOWN))
    file.put(Entry(b"3", b"", 6, State.UNDER_WAY), dropped=[b"1"])
    assert [entry.slot for entry in file.load()] == [b"2", b"3"]
