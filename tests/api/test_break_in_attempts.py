"""Attempts to guess: slowed down, told of once a minute, and nobody else's matter."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_door import SampleDoor
from structlog.testing import capture_logs

from advisor.access.identity import Scope

WRONG = "kva_0123456789ab_" + "A" * 43


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> SampleDoor:
    return SampleDoor(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(autouse=True)
def _rested(door: SampleDoor) -> None:
    door.rest()


def test_guesses_are_told_to_wait_and_a_good_token_never_is(door: SampleDoor) -> None:
    token = door.token(Scope.READ)
    answers = [door.ask(WRONG) for _ in range(12)]
    assert [answer.status_code for answer in answers] == [401] * 10 + [429] * 2
    assert answers[-1].headers["retry-after"] == "5"
    assert answers[-1].json()["detail"] == "wait 5 s, then try again"
    assert door.ask(token).status_code == 200
    assert door.log_in(token).status_code == 303
    door.pass_s(5)
    assert [door.ask(WRONG).status_code for _ in range(2)] == [401, 429]
    assert door.counted == ["bearer"] * 14


def test_guesses_in_the_form_are_told_to_wait_too(door: SampleDoor) -> None:
    answers = [door.log_in(WRONG) for _ in range(11)]
    assert [answer.status_code for answer in answers] == [401] * 10 + [429]
    assert answers[-1].headers["retry-after"] == "5"
    assert "Too many failed attempts: wait 5 s, then try again." in answers[-1].text
    assert door.counted == ["login"] * 11


def test_a_failure_is_logged_once_a_minute_without_what_was_shown(door: SampleDoor) -> None:
    shown = WRONG.replace("A" * 43, "Planted" + "B" * 36)
    with capture_logs() as logged:
        for _ in range(8):
            door.ask(shown)
        door.pass_s(61)
        door.ask(shown)
    assert [(each["event"], each["address"], each["by"], each["reason"]) for each in logged] == [
        ("somebody was not let in", "127.0.0.1", "bearer", "no such token")
    ] * 2
    assert "Planted" not in str(logged)
    assert door.noted == []


def test_who_is_refused_is_not_told_why(door: SampleDoor, tmp_path: Path) -> None:
    expired = door.token(valid_s=1)
    door.pass_s(1)
    assert door.ask(expired).content == door.ask(WRONG).content
