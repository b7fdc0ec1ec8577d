"""Attempts to come in with JSON Web Tokens that are not the issuer's, not for us, or not any more."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import ECAlgorithm, RSAAlgorithm
from sample_door import SampleDoor

from advisor.access.errors import NotAdmitted
from advisor.access.identity import Identity, Scope
from advisor.access.oidc import KEYS_S_MAX, REFETCH_S, OidcKeys, OidcVerifier
from advisor.api_settings import OidcSettings

ISSUER, AUDIENCE = "https://issuer.example", "kvadvisor"
RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
OTHER_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)


def public(kid: str, key: Any, **more: str) -> dict[str, Any]:
    algorithm = RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else ECAlgorithm
    return {**json.loads(algorithm.to_jwk(key.public_key())), "kid": kid, **more}


class KeysServer:
    """The issuer's keys over real HTTP; `asked` counts who came for them."""

    def __init__(self) -> None:
        self.keys: list[dict[str, Any]] = [public("rsa", RSA_KEY), public("ec", EC_KEY)]
        self.asked = 0
        self.redirected = ""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/keys"

    def _handler(server) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - `self` is the handler's
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.asked += 1
                if server.redirected:
                    self.send_response(302)
                    self.send_header("Location", server.redirected)
                    self.end_headers()
                    return
                content = json.dumps({"keys": server.keys}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                """Nothing."""

        return Handler

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[KeysServer]:
    server = KeysServer()
    yield server
    server.stop()


def settings(url: str, **more: Any) -> OidcSettings:
    scopes = {"kv-operators": "operate", "kv-readers": "read"}
    return OidcSettings.model_validate(
        {"issuer": ISSUER, "audience": AUDIENCE, "jwks_url": url, "scopes": scopes, **more}
    )


def claims(**more: Any) -> dict[str, Any]:
    now = int(time.time())
    told = {"iss": ISSUER, "aud": AUDIENCE, "sub": "ann", "exp": now + 600, "iat": now, "groups": ["kv-operators"]}
    return {name: value for name, value in {**told, **more}.items() if value is not None}


def signed(kid: str | None = "rsa", key: Any = RSA_KEY, algorithm: str = "RS256", **more: Any) -> str:
    return jwt.encode(claims(**more), key, algorithm, headers={"kid": kid} if kid else None)


def test_tokens_of_the_issuers_two_keys_say_who_it_is_and_what_they_may(server: KeysServer) -> None:
    verifier = OidcVerifier(settings(server.url))
    for text in (signed(), signed("ec", EC_KEY, "ES256")):
        admission = verifier.admitted(text)
        assert admission.identity == Identity("oidc:ann", Scope.OPERATE)
        assert admission.expires_us == jwt.decode(text, options={"verify_signature": False})["exp"] * 1_000_000
    assert verifier.admitted(signed(groups="other kv-readers")).identity.scope is Scope.READ
    assert verifier.admitted(signed(groups=["kv-readers", "kv-operators"])).identity.scope is Scope.OPERATE
    assert verifier.admitted(signed(aud=["other", AUDIENCE])).identity.name == "oidc:ann"
    assert server.asked == 1


def test_a_claim_binds_it_to_its_tenant(server: KeysServer) -> None:
    verifier = OidcVerifier(settings(server.url, tenant_claim="org"))
    assert verifier.admitted(signed(org="acme")).identity.tenant == "acme"
    assert verifier.admitted(signed(org="*")).identity.tenant == ""
    for org in (None, "", 7, ["acme"]):
        with pytest.raises(NotAdmitted):
            verifier.admitted(signed(org=org))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"aud": "other"}, "Audience doesn't match"),
        ({"aud": None}, '"aud" claim'),
        ({"iss": "https://evil.example"}, "Invalid issuer"),
        ({"iss": None}, '"iss" claim'),
        ({"exp": 1}, "Signature has expired"),
        ({"exp": None}, '"exp" claim'),
        ({"nbf": 1 << 40}, "not yet valid"),
        ({"iat": 1 << 40}, "not yet valid"),
        ({"groups": ["other"]}, "nothing in claim groups"),
        ({"groups": None}, "nothing in claim groups"),
        ({"groups": {"kv-operators": 1}}, "nothing in claim groups"),
        ({"groups": [["kv-operators"], 7]}, "nothing in claim groups"),
        ({"sub": ""}, "names nobody"),
        ({"sub": None}, "names nobody"),
        ({"sub": "a\nb"}, "names nobody"),
        ({"sub": "a" * 129}, "names nobody"),
        ({"key": OTHER_KEY}, "Signature verification failed"),
        ({"kid": "other"}, "no key 'other'"),
        ({"kid": None}, "no key None"),
        ({"algorithm": "PS256"}, "algorithm 'PS256' is not one of"),
    ],
)
def test_a_token_that_is_not_for_us_now_is_refused_for_its_reason(
    server: KeysServer, more: dict[str, Any], reason: str
) -> None:
    with pytest.raises(NotAdmitted) as refused:
        OidcVerifier(settings(server.url)).admitted(signed(**more))
    assert reason in refused.value.reason
    assert str(refused.value) == "this token opens nothing: it is wrong, expired or revoked; ask for another"


def encoded(content: Any) -> str:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def test_no_signature_and_the_public_key_as_a_shared_secret_open_nothing(server: KeysServer) -> None:
    verifier = OidcVerifier(settings(server.url))
    pem = RSA_KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    for algorithm in ("none", "None", "NONE", "HS256", "", None, ["RS256"]):
        head = f"{encoded({'alg': algorithm, 'kid': 'rsa', 'typ': 'JWT'})}.{encoded(claims())}"
        mac = hmac.new(pem, head.encode(), hashlib.sha256).digest()
        for signature in (b"", mac):
            with pytest.raises(NotAdmitted):
                verifier.admitted(f"{head}.{encoded(signature)}")
    assert server.asked == 0


def test_a_shared_secret_among_the_keys_and_a_key_in_the_token_are_no_keys(server: KeysServer) -> None:
    server.keys = [{"kty": "oct", "kid": "rsa", "k": encoded(b"secret" * 8)}, public("enc", RSA_KEY, use="enc")]
    verifier = OidcVerifier(settings(server.url))
    own = {"kid": "mine", "jwk": public("mine", OTHER_KEY), "jku": server.url}
    texts = [
        jwt.encode(claims(), b"secret" * 8, "HS256", headers={"kid": "rsa"}),
        signed("enc"),
        jwt.encode(claims(), OTHER_KEY, "RS256", headers=own),
    ]
    for text in texts:
        with pytest.raises(NotAdmitted):
            verifier.admitted(text)


NESTED = encoded(b'{"alg": "RS256", "x": ' + b"[" * 11_000)
LISTED = f"{encoded({'alg': 'RS256', 'kid': ['rsa']})}.{encoded({})}.AA"


@pytest.mark.parametrize(
    "text", ["", "a.b", "a.b.c", "e30.e30.", "ey" * 9_000, "\ud800", "é.é.é", f"{NESTED}.e30.AA", LISTED]
)
def test_what_is_no_token_at_all_is_refused(server: KeysServer, text: str) -> None:
    with pytest.raises(NotAdmitted):
        OidcVerifier(settings(server.url)).admitted(text)


def test_unknown_keys_are_fetched_at_most_once_a_minute_and_old_ones_each_hour(server: KeysServer) -> None:
    now = [0.0]
    keys = OidcKeys(settings(server.url), clock_s=lambda: now[0])
    for number in range(20):
        with pytest.raises(NotAdmitted):
            keys.key(f"unknown-{number}")
    assert server.asked == 1
    server.keys.append(public("next", OTHER_KEY))
    now[0] += REFETCH_S
    assert keys.key("next").key_id == "next"
    server.keys = [public("next", OTHER_KEY)]
    assert keys.key("rsa").key_id == "rsa"
    now[0] += KEYS_S_MAX
    with pytest.raises(NotAdmitted):
        keys.key("rsa")
    assert server.asked == 3


def test_an_issuer_that_is_away_keeps_nobody_out_who_is_known(server: KeysServer) -> None:
    now = [0.0]
    keys = OidcKeys(settings(server.url), clock_s=lambda: now[0])
    assert keys.key("rsa").key_id == "rsa"
    server.redirected = "http://127.0.0.1:1/elsewhere"
    now[0] += KEYS_S_MAX
    assert keys.key("rsa").key_id == "rsa"
    with pytest.raises(NotAdmitted):
        OidcVerifier(settings(server.url)).admitted(signed())


def test_keys_of_a_file_and_the_door_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [public("rsa", RSA_KEY), {"kty": "RSA", "kid": "bad"}, {"kid": "worse"}]}))
    door = SampleDoor(tmp_path, issuer=OidcVerifier(settings("", jwks_file=file)))
    told = door.ask(signed())
    assert (told.status_code, told.json()["name"], told.json()["scope"]) == (200, "oidc:ann", "operate")
    assert door.ask(signed(exp=1)).status_code == 401
    assert door.ask(door.token(Scope.READ)).json()["name"] == "ann"
    assert door.client.get("/api/v1/identity", headers=door.session(signed())).json()["name"] == "oidc:ann"
    assert door.noted[-1] == ("oidc:ann", "login", "from 127.0.0.1, by a token of the issuer's")
