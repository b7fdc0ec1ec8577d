"""Tokens: what they look like, and which of those that were made are good.

A token is `kva_`, 12 hex digits that name it, `_`, and 256 random bits. Only the SHA-256 of the bits is kept: they
cannot be guessed, so that a slow hash would guard nothing more.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

import msgspec

from advisor.access.errors import NotAdmitted
from advisor.access.identity import LOCAL, Identity, Scope

PREFIX = "kva_"
TOKEN_CHARACTERS_MAX = 16_384
"""Of any token, an issuer's too."""
_FORM = re.compile(r"kva_([0-9a-f]{12})_([A-Za-z0-9_-]{43})", re.ASCII)
_NOBODYS_DIGEST = hashlib.sha256(secrets.token_bytes(32)).hexdigest()

TokenId = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{12}\Z")]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}\Z")]


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is kept of one. Times in µs since the epoch; `expires_us` 0: never."""

    id: TokenId
    name: Name
    scope: Literal["read", "plan", "operate", "admin"]
    digest: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    created_us: int
    expires_us: int = 0
    tenant: Annotated[str, msgspec.Meta(max_length=256)] = ""

    @property
    def identity(self) -> Identity:
        return Identity(self.name, Scope.named(self.scope), self.tenant)

    def is_expired(self, now_us: int) -> bool:
        return self.expires_us != 0 and now_us >= self.expires_us


def make_token(name: str, scope: Scope, tenant: str, *, now_us: int, expires_us: int) -> tuple[Token, str]:
    """What is kept, and the text that is shown once. Raises `ValueError` for a name that cannot be one."""
    token_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    if name == LOCAL.name:
        raise ValueError(f"the name {name!r} is whoever uses a service without login: choose another")
    kept = {
        "id": token_id, "name": name, "scope": scope.word, "digest": _digest(secret), "created_us": now_us,
        "expires_us": expires_us, "tenant": tenant,
    }  # fmt: skip
    if not tenant.isprintable():
        raise ValueError(f"the tenant {tenant[:80]!r} has characters that cannot be printed: leave them out")
    try:
        token = msgspec.convert(kept, Token)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"the name {name!r} cannot be a token's: use up to 64 letters, digits, dots, @, - and _"
            if "$.name" in str(error)
            else f"the tenant {tenant[:80]!r} cannot be one: {error}"
        ) from error
    return token, f"{PREFIX}{token_id}_{secret}"


class TokenBook:
    """The tokens there are at one moment."""

    def __init__(self, tokens: Iterable[Token]) -> None:
        self._tokens = {token.id: token for token in tokens}

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[Token]:
        return iter(self._tokens.values())

    def admitted(self, text: str, now_us: int) -> Token:
        """The token that `text` is. Takes the same time for any that is none. Raises `NotAdmitted`."""
        form = _FORM.fullmatch(text)
        token = self._tokens.get(form[1]) if form else None
        digest = _digest(form[2] if form else "")
        is_same = hmac.compare_digest(digest, token.digest if token is not None else _NOBODYS_DIGEST)
        if token is None or not is_same:
            raise NotAdmitted("no such token")
        if token.is_expired(now_us):
            raise NotAdmitted(f"token {token.id} of {token.name} has expired")
        return token

    def named(self, name: str, now_us: int) -> list[Token]:
        """Those of that name that are good, oldest first."""
        return [token for token in self if token.name == name and not token.is_expired(now_us)]

    def holds(self, token_id: str, now_us: int) -> bool:
        """Whether the token of that id is still good."""
        token = self._tokens.get(token_id)
        return token is not None and not token.is_expired(now_us)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
