"""Throw-away identities for a nats-server: nkeys, operator and account tokens with a credentials file, certificates."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nkeys

_ROLES = {
    "operator": nkeys.PREFIX_BYTE_OPERATOR,
    "account": nkeys.PREFIX_BYTE_ACCOUNT,
    "user": nkeys.PREFIX_BYTE_USER,
}


@dataclass(frozen=True)
class Identity:
    seed: str
    public_key: str

    def sign(self, message: bytes) -> bytes:
        return bytes(nkeys.from_seed(bytearray(self.seed.encode())).sign(message))


def identity(role: str) -> Identity:
    """A fresh key of an operator, an account or a user."""
    seed = bytes(nkeys.encode_seed(os.urandom(32), _ROLES[role]))
    return Identity(seed.decode(), nkeys.from_seed(bytearray(seed)).public_key.decode())


def token(issuer: Identity, subject: Identity, claims: dict[str, Any]) -> str:
    """A NATS JWT, version 2, in which `issuer` vouches for `subject`."""
    head = {"typ": "JWT", "alg": "ed25519-nkey"}
    body = {
        "jti": base64.b32encode(os.urandom(20)).decode().rstrip("="),
        "iat": int(time.time()),
        "iss": issuer.public_key,
        "name": claims["type"],
        "sub": subject.public_key,
        "nats": {"version": 2, **claims},
    }
    signed = ".".join(_base64url(json.dumps(part).encode()) for part in (head, body))
    return f"{signed}.{_base64url(issuer.sign(signed.encode()))}"


def _base64url(plain: bytes) -> str:
    return base64.urlsafe_b64encode(plain).decode().rstrip("=")


def operator_mode(folder: Path) -> tuple[str, Path]:
    """A server's configuration with one account, and the credentials file of a user in it."""
    operator, account, user = identity("operator"), identity("account"), identity("user")
    unlimited = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
    account_claims = {"type": "account", "limits": {**unlimited, "wildcards": True}}
    user_claims = {"type": "user", "pub": {}, "sub": {}, "subs": -1, "data": -1, "payload": -1}
    creds = folder / "user.creds"
    creds.write_text(
        f"-----BEGIN NATS USER JWT-----\n{token(account, user, user_claims)}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
    )
    configuration = (
        f"operator: {token(operator, operator, {'type': 'operator'})}\n"
        "resolver: MEMORY\n"
        f"resolver_preload: {{ {account.public_key}: {token(operator, account, account_claims)} }}\n"
    )
    return configuration, creds


@dataclass(frozen=True)
class Certificates:
    """PEM files: an authority, and a pair of each side that it signed."""

    ca: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path


def certificates(folder: Path) -> Certificates:
    """Made by the `openssl` command."""
    folder.mkdir(parents=True)
    fresh_key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    authority = "-subj /CN=authority -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign"
    _openssl(folder, f"req -x509 {fresh_key} {authority} -days 2 -keyout ca.key -out ca.pem")
    for name in ("server", "client"):
        place = f"-subj /CN={name} -addext subjectAltName=IP:127.0.0.1"
        _openssl(folder, f"req {fresh_key} {place} -keyout {name}.key -out {name}.csr")
        signed = "-CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -copy_extensions copy"
        _openssl(folder, f"x509 -req -in {name}.csr {signed} -out {name}.pem")
    files = ("ca.pem", "server.pem", "server.key", "client.pem", "client.key")
    return Certificates(*(folder / name for name in files))


def _openssl(folder: Path, arguments: str) -> None:
    made = subprocess.run(["openssl", *arguments.split()], cwd=folder, check=False, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
