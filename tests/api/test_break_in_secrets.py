"""Secrets of the settings and of those who come in are nowhere to be read."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from direct import Direct
from sample_reader import SampleReader

from advisor.access.doorkeeper import Doorkeeper
from advisor.access.identity import LOCAL, Identity, Scope
from advisor.access.masking import masked
from advisor.cli import main

PLANTED = "planted"
"""In every secret there is."""
PATIENCE_S = 90


def test_the_settings_in_force_are_shown_without_their_secrets() -> None:
    told: dict[str, Any] = {
        "log": {"url": f"postgresql://kv:{PLANTED}@db/kv?sslmode=require&password={PLANTED}", "password_file": "/pw"},
        "sources": [{"url": f"nats://u:p{PLANTED}/{PLANTED}@h/s"}, {"url": f"https://h/x?api_key={PLANTED}&a=1"}],
        "vendor": {"token": PLANTED, "client_secret": [PLANTED], "password": "", "block_tokens": 16},
        "note": f"kva_0123456789ab_{PLANTED} and eyJhbGciOiJub25lIn0.eyJzdWIiOiJ4In0.{PLANTED}",
    }
    shown = {
        "log": {"url": "postgresql://kv:***@db/kv?sslmode=require&password=***", "password_file": "/pw"},
        "sources": [{"url": "nats://u:***@h/s"}, {"url": "https://h/x?api_key=***&a=1"}],
        "vendor": {"token": "***", "client_secret": "***", "password": "", "block_tokens": 16},
        "note": "kva_0123456789ab_*** and ***",
    }
    assert masked(told) == shown
    assert Direct(SampleReader(), config=lambda: told).get("/api/v1/config").json() == shown
    for scope, status in ((Scope.OPERATE, 403), (Scope.ADMIN, 200)):
        client = Direct(SampleReader(), config=lambda: told, doorkeeper=Doorkeeper(anonymous=Identity("a", scope)))
        assert client.get("/api/v1/config").status_code == status
    assert LOCAL.may(Scope.ADMIN)


def command(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What `kvadvisor` prints."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code in (0, None), capsys.readouterr().err
    return capsys.readouterr().out


class Running:
    """`kvadvisor serve`, its address, and in the end all that it said."""

    def __init__(self, config: Path) -> None:
        command = [sys.executable, "-m", "advisor.cli", "serve", "--config", str(config)]
        # Errors to a file: nobody reads a pipe while the test asks.
        self._errors = (config.parent / "errors").open("w+")
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._errors, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found = re.search(r"at (http://\S+)/ ", line)
        assert found, line + self._said()
        self.url = found[1]

    def _said(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def stop(self) -> str:
        self._process.send_signal(signal.SIGTERM)
        output, _ = self._process.communicate(timeout=PATIENCE_S)
        said = self._said()
        self._errors.close()
        assert self._process.returncode == 0, said
        return output + said


@contextmanager
def asking(url: str, token: str = "") -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with httpx.Client(base_url=url, headers=headers, timeout=PATIENCE_S) as client:
        yield client


def test_a_service_lets_in_who_has_a_token_and_shows_no_secret_anywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "password").write_text(f"{PLANTED}-in-a-file")
    (tmp_path / "a.toml").write_text(
        'directory = "state"\n[api]\nport = 0\nlogin = "required"\n[log]\npassword_file = "password"\n'
        '[[sources]]\nname = "n"\nurl = "nats://127.0.0.1:1/kv"\nuser = "kv"\npassword_file = "password"\n'
    )  # fmt: skip
    config = ("--config", str(tmp_path / "a.toml"))
    token = command("token", "create", "--name", "ann", "--scope", "admin", *config, capsys=capsys).strip()
    secrets = [PLANTED, token[17:]]
    service = Running(tmp_path / "a.toml")
    try:
        with asking(service.url, token) as client:
            told = [client.get(f"/api/v1/{what}") for what in ("identity", "config", "tokens", "events", "audit")]
            told += [client.get("/metrics"), client.get("/readyz"), client.get(f"/api/v1/blocks?tokn={PLANTED[:3]}")]
            assert told[0].json()["name"] == "ann"
            assert told[1].json()["sources"][0]["password_file"] == str(tmp_path / "password")
        with asking(service.url) as browser:
            assert browser.get("/api/v1/summary").status_code == 401
            browser.post("/login", data={"token": f"kva_0123456789ab_{PLANTED}"}, headers={"Origin": service.url})
            form = browser.post("/login", data={"token": token}, headers={"Origin": service.url})
            assert form.status_code == 303
            secrets.append(browser.cookies["kvadvisor"])
            told += [browser.get("/"), browser.get("/metrics"), browser.get("/api/v1/events")]
            assert 'kvadvisor_refused_attempts_total{by="login"} 1.0' in told[-2].text
            events = told[-1].json()["events"]
            assert any("ann: login" in each["text"] for each in events), events
            listed = command("token", "list", *config, capsys=capsys)
            assert token[4:16] in listed
            command("token", "revoke", token[4:16], *config, capsys=capsys)
            assert browser.get("/api/v1/summary").status_code == 401
        for answer in told:
            for secret in secrets:
                assert secret not in answer.text, answer.url
    finally:
        said = service.stop()
    assert "somebody was not let in" in said
    kept = [file.read_bytes() for file in (tmp_path / "state").rglob("*") if file.is_file()]
    for secret in secrets:
        assert secret not in said
        assert secret not in listed
        assert not any(secret.encode() in content for content in kept)


def test_a_service_does_not_start_with_tokens_that_others_may_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.toml").write_text('directory = "state"\n[api]\nport = 0\nlogin = "required"\n')
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "tokens.json").write_text(json.dumps({"version": 1, "tokens": []}))
    (tmp_path / "state" / "tokens.json").chmod(0o666)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--config", str(tmp_path / "a.toml")])
    assert ended.value.code == 2
    assert "mode 666, open to others: chmod 600 it" in capsys.readouterr().err
