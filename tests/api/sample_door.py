"""A door that asks for tokens, with a clock that a test turns."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from direct import Direct
from sample_reader import SampleReader

from advisor.access.doorkeeper import Doorkeeper
from advisor.access.identity import Identity, Scope
from advisor.access.token_file import TokenFile

ORIGIN = "http://127.0.0.1:8470"
"""What `Direct` asks for."""
START_US = 1_764_440_651_000_000
PAGE = {"Accept": "text/html"}


class SampleDoor:
    """`noted` and `counted`: what the doorkeeper told the service's log and metrics."""

    def __init__(
        self, directory: Path, *, issuer: Any = None, anonymous: Identity | None = None, **parts: Any
    ) -> None:
        self.now_us = START_US
        self.noted: list[tuple[str, str, str]] = []
        self.counted: list[str] = []
        self.tokens = TokenFile(directory)
        self.doorkeeper = Doorkeeper(
            anonymous=anonymous, tokens=self.tokens, issuer=issuer, note=self._note, count=self.counted.append,
            now_us=lambda: self.now_us,
        )
        self._parts = parts

    @cached_property
    def client(self) -> Direct:
        return Direct(SampleReader(), doorkeeper=self.doorkeeper, **self._parts)

    def _note(self, who: Identity, action: str, detail: str) -> None:
        self.noted.append((who.name, action, detail))

    def rest(self) -> None:
        """Between tests: nothing was noted, and whoever failed is forgiven."""
        self.pass_s(3_600)
        self.noted.clear()
        self.counted.clear()

    def pass_s(self, seconds: float) -> None:
        self.now_us += round(seconds * 1e6)

    def token(self, scope: Scope = Scope.READ, name: str = "ann", tenant: str = "", valid_s: float = 0.0) -> str:
        return self.tokens.create(name, scope, tenant, valid_s=valid_s, now_us=self.now_us)[1]

    def ask(self, token: str, path: str = "/api/v1/identity", method: str = "GET", **options: Any) -> Any:
        return self.client.request(method, path, headers={"Authorization": f"Bearer {token}"}, **options)

    def log_in(self, token: str, headers: dict[str, str] | None = None, **fields: str) -> Any:
        """The answer to the form."""
        sent = {"Origin": ORIGIN, **(headers or {})}
        return self.client.request("POST", "/login", data={"token": token, **fields}, headers=sent)

    def session(self, token: str) -> dict[str, str]:
        """The headers of a browser that is logged in."""
        answer = self.log_in(token)
        assert answer.status_code == 303
        return {"Cookie": answer.headers["set-cookie"].partition(";")[0]}
