"""Sessions of pages: who is logged in, in memory alone. Pure: time is given, in µs since the epoch."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

from advisor.access.identity import Identity

IDLE_US_MAX = 8 * 3_600_000_000
WHOLE_US_MAX = 24 * 3_600_000_000
SESSIONS_MAX = 1_024
SESSIONS_EACH_MAX = 16
"""Of one identity: past it, its session that was used longest ago ends."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Who came in, by which token (its id; empty: by an issuer's), and until when (µs; 0: for ever)."""

    identity: Identity
    token_id: str = ""
    expires_us: int = 0


@dataclass(slots=True)
class _Session:
    admission: Admission
    ends_us: int
    seen_us: int


class Sessions:
    """By the SHA-256 of their ids: who reads this memory has no session by it."""

    def __init__(self) -> None:
        # Insertion order is the order of last use.
        self._sessions: dict[bytes, _Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, admission: Admission, now_us: int) -> str:
        """The id of a session that ends with its token, or a day from now. 256 random bits."""
        self._make_room(admission.identity)
        session_id = secrets.token_urlsafe(32)
        ends_us = now_us + WHOLE_US_MAX
        if admission.expires_us:
            ends_us = min(ends_us, admission.expires_us)
        self._sessions[_digest(session_id)] = _Session(admission, ends_us, now_us)
        return session_id

    def find(self, session_id: str, now_us: int) -> Admission | None:
        """Whose it is, and that it was used now; None where it has ended or never was."""
        digest = _digest(session_id)
        session = self._sessions.pop(digest, None)
        if session is None or now_us >= session.ends_us or now_us - session.seen_us >= IDLE_US_MAX:
            return None
        session.seen_us = max(now_us, session.seen_us)
        self._sessions[digest] = session
        return session.admission

    def close(self, session_id: str) -> Admission | None:
        """Whose it was."""
        session = self._sessions.pop(_digest(session_id), None)
        return session.admission if session is not None else None

    def _make_room(self, identity: Identity) -> None:
        own = [digest for digest, session in self._sessions.items() if session.admission.identity == identity]
        for digest in own[: max(0, len(own) - SESSIONS_EACH_MAX + 1)]:
            del self._sessions[digest]
        while len(self._sessions) >= SESSIONS_MAX:
            del self._sessions[next(iter(self._sessions))]


def _digest(session_id: str) -> bytes:
    return hashlib.sha256(session_id.encode(errors="surrogateescape")).digest()
