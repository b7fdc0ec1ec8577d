"""Who a request comes from, by what it shows: a token, an issuer's token, or a session."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import structlog
from starlette.concurrency import run_in_threadpool

from advisor.access.attempts import ADDRESSES_MAX, Attempts, network_of
from advisor.access.errors import NotAdmitted, TokensError
from advisor.access.identity import Identity
from advisor.access.sessions import Admission, Sessions
from advisor.access.token_file import TokenFile
from advisor.access.tokens import PREFIX, Token, TokenBook

TOLD_EACH_S = 60.0
"""Of failures from one address, one in so long is logged."""

_log = structlog.get_logger()


class Issuer(Protocol):
    """`advisor.access.oidc.OidcVerifier`."""

    def admitted(self, text: str) -> Admission:
        """Raises `NotAdmitted`."""


@dataclass(frozen=True, slots=True)
class TokenUse:
    """A token, and when it was last shown in this life of the service (µs; 0: not yet)."""

    token: Token
    used_us: int


def _nothing(_who: Identity, _action: str, _detail: str) -> None:
    """Where there is no log."""


class Doorkeeper:
    """Lives on one event loop. Nothing here tells whoever is refused why."""

    def __init__(
        self,
        *,
        anonymous: Identity | None = None,
        tokens: TokenFile | None = None,
        issuer: Issuer | None = None,
        note: Callable[[Identity, str, str], None] = _nothing,
        count: Callable[[str], None] = lambda _by: None,
        now_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        """`anonymous`: who comes in without showing anything; None: nobody does. `note` logs who did what (`login`,
        `logout`) and with what; `count` counts a refusal by what was shown (`bearer`, `login`)."""
        self.anonymous = anonymous
        self._tokens = tokens
        self._issuer = issuer
        self._note = note
        self._count = count
        self._now_us = now_us
        self._sessions = Sessions()
        self._attempts = Attempts()
        self._used_us: dict[str, int] = {}
        self._told_s: dict[str, float] = {}

    async def admitted(self, text: str) -> Admission:
        """Whose token `text` is. Raises `NotAdmitted`."""
        if self._issuer is not None and not text.startswith(PREFIX):
            return await run_in_threadpool(self._issuer.admitted, text)
        token = self._book().admitted(text, self._now_us())
        self._used_us[token.id] = self._now_us()
        return Admission(token.identity, token.id, token.expires_us)

    def refused(self, address: str, by: str, error: NotAdmitted) -> float:
        """Count, and log now and then, that something bad was shown. Answers with the seconds to wait; 0: none."""
        self._count(by)
        now_s = self._now_us() / 1e6
        network = network_of(address)
        last_s = self._told_s.pop(network, None)
        if last_s is None or now_s - last_s >= TOLD_EACH_S:
            _log.warning("somebody was not let in", address=address, by=by, reason=error.reason)
            last_s = now_s
        self._told_s[network] = last_s
        if len(self._told_s) > ADDRESSES_MAX:
            del self._told_s[next(iter(self._told_s))]
        return self._attempts.failed(address, now_s)

    def log_in(self, admission: Admission, address: str, former: str | None) -> str:
        """The id of a session; the one that the browser had before, `former`, ends."""
        if former is not None:
            self._sessions.close(former)
        session_id = self._sessions.open(admission, self._now_us())
        by = f"token {admission.token_id}" if admission.token_id else "a token of the issuer's"
        self._note(admission.identity, "login", f"from {address}, by {by}")
        return session_id

    def log_out(self, session_id: str, address: str) -> None:
        """Idempotent."""
        admission = self._sessions.close(session_id)
        if admission is not None:
            self._note(admission.identity, "logout", f"from {address}")

    def by_session(self, session_id: str) -> Admission | None:
        """Whose session it is; None where it has ended, or its token has."""
        admission = self._sessions.find(session_id, self._now_us())
        if admission is not None and not self.is_good(admission):
            self._sessions.close(session_id)
            return None
        return admission

    def is_good(self, admission: Admission) -> bool:
        """Whether it would be given again: its token is neither expired nor revoked."""
        now_us = self._now_us()
        if admission.expires_us and now_us >= admission.expires_us:
            return False
        try:
            return not admission.token_id or self._book().holds(admission.token_id, now_us)
        except NotAdmitted:
            return False

    def tokens(self) -> list[TokenUse]:
        """Those there are, oldest first. Raises `TokensError`."""
        book = self._tokens.book() if self._tokens is not None else TokenBook([])
        ids = {token.id for token in book}
        self._used_us = {token_id: used_us for token_id, used_us in self._used_us.items() if token_id in ids}
        return [TokenUse(token, self._used_us.get(token.id, 0)) for token in book]

    def _book(self) -> TokenBook:
        if self._tokens is None:
            raise NotAdmitted("no tokens are taken here")
        try:
            return self._tokens.book()
        except TokensError as error:
            raise NotAdmitted(str(error)) from error


NOBODY = Doorkeeper()
"""Lets nobody in."""
