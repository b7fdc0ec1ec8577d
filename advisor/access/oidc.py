"""JSON Web Tokens of an OpenID Connect issuer. Imported where the settings name one: PyJWT is of the extra `oidc`."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import Any, Final

import jwt
import structlog

from advisor.access.errors import NotAdmitted, OidcError
from advisor.access.identity import Identity, Scope
from advisor.access.sessions import Admission
from advisor.access.tokens import TOKEN_CHARACTERS_MAX
from advisor.api_settings import OidcSettings

REFETCH_S = 60.0
"""Keys are fetched at most once in so long, however many tokens name keys that are not known."""
KEYS_S_MAX = 3_600.0
"""Keys older than this are fetched again, so that one the issuer took back is forgotten."""
LEEWAY_S = 30.0
"""How far the issuer's clock may be from ours."""
EVERY_TENANT = "*"
_FETCH_TIMEOUT_S = 5.0
_KEYS_BYTES_MAX = 1 << 20
_NAME_CHARACTERS_MAX = 128
_KEY_TYPES: Final = frozenset({"RSA", "EC", "OKP"})
_CLAIMS: Final = ["exp", "iss", "aud"]

_log = structlog.get_logger()


class OidcKeys:
    """The issuer's public keys by id, from its URL or a file. Safe for threads."""

    def __init__(self, settings: OidcSettings, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._keys: dict[str | None, jwt.PyJWK] = {}
        self._fetched_s: float | None = None

    def key(self, key_id: str | None) -> jwt.PyJWK:
        """The key of that id; without one, the only key there is. Raises `NotAdmitted`, `OidcError`."""
        with self._lock:
            found = self._find(key_id)
            if self._may_fetch(KEYS_S_MAX if found is not None else REFETCH_S):
                self._fetch(found is not None)
                found = self._find(key_id)
        if found is None:
            raise NotAdmitted(f"no key {key_id!r} of the issuer is known")
        return found

    def _find(self, key_id: str | None) -> jwt.PyJWK | None:
        if key_id is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        return self._keys.get(key_id)

    def _may_fetch(self, age_s: float) -> bool:
        return self._fetched_s is None or self._clock_s() - self._fetched_s >= age_s

    def _fetch(self, can_wait: bool) -> None:
        self._fetched_s = self._clock_s()
        try:
            self._keys = _usable(self._read())
        except OidcError as error:
            if not can_wait:
                raise
            _log.warning("the issuer's keys are used on, though they are old", reason=str(error))

    def _read(self) -> bytes:
        place = self._settings.jwks_file or self._settings.jwks_url
        try:
            if self._settings.jwks_file is not None:
                return self._settings.jwks_file.read_bytes()
            with _OPENER.open(self._settings.jwks_url, timeout=_FETCH_TIMEOUT_S) as answer:
                content: bytes = answer.read(_KEYS_BYTES_MAX + 1)
        except (OSError, HTTPException) as error:
            raise OidcError(f"the issuer's keys cannot be read from {place} ({error}): see api.oidc") from error
        if len(content) > _KEYS_BYTES_MAX:
            raise OidcError(f"{place} answers with more than {_KEYS_BYTES_MAX} bytes, which are no keys: see api.oidc")
        return content


class OidcVerifier:
    """Says who a JSON Web Token of the issuer's is."""

    def __init__(self, settings: OidcSettings, keys: OidcKeys | None = None) -> None:
        self._settings = settings
        self._keys = keys or OidcKeys(settings)

    def admitted(self, text: str) -> Admission:
        """Blocks where keys are fetched. Raises `NotAdmitted`."""
        if len(text) > TOKEN_CHARACTERS_MAX or not text.isascii():
            raise NotAdmitted(f"{len(text)} characters that are no token of an issuer's")
        try:
            # Before any key is looked for: the header is the attacker's word.
            header = jwt.get_unverified_header(text)
            if header.get("alg") not in self._settings.algorithms:
                raise NotAdmitted(f"algorithm {header.get('alg')!r} is not one of api.oidc.algorithms")
            claims = jwt.decode(
                text, self._keys.key(header.get("kid")), algorithms=list(self._settings.algorithms),
                audience=self._settings.audience, issuer=self._settings.issuer, leeway=LEEWAY_S,
                options={"require": _CLAIMS, "strict_aud": False},
            )
        # Without a signature yet, a header may be nested as deep as it is long.
        except (jwt.PyJWTError, RecursionError) as error:
            raise NotAdmitted(f"a token of the issuer's: {error}") from error
        except OidcError as error:
            _log.warning("a token of the issuer's cannot be checked", reason=str(error))
            raise NotAdmitted(str(error)) from error
        return Admission(self._identity(claims), expires_us=int(claims["exp"]) * 1_000_000)

    def _identity(self, claims: dict[str, Any]) -> Identity:
        name = claims.get(self._settings.name_claim)
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= _NAME_CHARACTERS_MAX:
            raise NotAdmitted(f"claim {self._settings.name_claim} names nobody")
        return Identity(f"oidc:{name}", self._scope(claims), self._tenant(claims))

    def _scope(self, claims: dict[str, Any]) -> Scope:
        claimed = claims.get(self._settings.scope_claim)
        words = claimed.split() if isinstance(claimed, str) else claimed if isinstance(claimed, list) else []
        mapped = self._settings.scopes
        scopes = [Scope.named(mapped[word]) for word in words if isinstance(word, str) and word in mapped]
        if not scopes:
            raise NotAdmitted(f"nothing in claim {self._settings.scope_claim} is in api.oidc.scopes")
        return max(scopes)

    def _tenant(self, claims: dict[str, Any]) -> str:
        if not self._settings.tenant_claim:
            return ""
        tenant = claims.get(self._settings.tenant_claim)
        if not isinstance(tenant, str) or not tenant:
            raise NotAdmitted(f"claim {self._settings.tenant_claim} names no tenant")
        return "" if tenant == EVERY_TENANT else tenant


def _usable(content: bytes) -> dict[str | None, jwt.PyJWK]:
    """Public keys for signatures. What else is in the set is passed over: a shared secret (`oct`) never is a key."""
    try:
        listed = json.loads(content)["keys"]
        given = [each for each in listed if each.get("kty") in _KEY_TYPES and each.get("use", "sig") == "sig"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise OidcError(f"the issuer's keys are no JWK set ({type(error).__name__}): see api.oidc") from error
    keys: dict[str | None, jwt.PyJWK] = {}
    for each in given:
        try:
            keys[each.get("kid")] = jwt.PyJWK(each)
        except (jwt.PyJWTError, ValueError, TypeError) as error:
            _log.warning("a key of the issuer's cannot be used", key=each.get("kid"), reason=str(error))
    return keys


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Keys come from where the settings say, and from nowhere that a server sends us on to."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)
