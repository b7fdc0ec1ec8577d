"""What `Credentials` mean to a NATS server: options of nats-py's `Client.connect`, read from the files they name."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TypedDict

import nkeys
from nats.aio.client import RawCredentials

from event_plane.credentials import Credentials
from event_plane.errors import TransportError

_JWT_MARK = "BEGIN NATS USER JWT"
_SEED_MARK = "BEGIN USER NKEY SEED"


class ConnectOptions(TypedDict, total=False):
    """The options of `Client.connect` that tell who we are and whom we trust."""

    user: str
    password: str
    nkeys_seed_str: str
    user_credentials: RawCredentials
    tls: ssl.SSLContext


def wants_tls(credentials: Credentials) -> bool:
    """Whether nothing may be sent unencrypted."""
    return bool(credentials.tls_ca_file or credentials.tls_cert_file)


def connect_options(credentials: Credentials) -> ConnectOptions:
    """Read the files. Raises `TransportError` naming the one that cannot be used, or what of a pair is missing."""
    options = ConnectOptions()
    if credentials.user:
        if credentials.password_file is None:
            raise TransportError(f"user {credentials.user!r} has no password: name a password_file beside it")
        options["user"] = credentials.user
        options["password"] = _read(credentials.password_file, "password_file").strip()
    if credentials.nkey_file is not None:
        options["nkeys_seed_str"] = _seed(credentials.nkey_file)
    if credentials.creds_file is not None:
        options["user_credentials"] = RawCredentials(_creds(credentials.creds_file))
    if wants_tls(credentials):
        options["tls"] = _tls(credentials)
    return options


def _seed(path: Path) -> str:
    seed = _read(path, "nkey_file").strip()
    try:
        nkeys.from_seed(bytearray(seed.encode())).wipe()
    except nkeys.NkeysError as error:
        raise TransportError(f"nkey_file {path} holds no nkey seed: give one as `nk -gen user` prints it") from error
    return seed


def _creds(path: Path) -> str:
    creds = _read(path, "creds_file")
    if _JWT_MARK not in creds or _SEED_MARK not in creds:
        # nats-py would look for the marks for ever.
        raise TransportError(f"creds_file {path} lacks its JWT or its seed: give one as `nsc generate creds` writes it")
    return creds


def _read(path: Path, setting: str) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise TransportError(f"{setting} {path} cannot be read: {error}") from error


def _tls(credentials: Credentials) -> ssl.SSLContext:
    ca, cert, key = credentials.tls_ca_file, credentials.tls_cert_file, credentials.tls_key_file
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise TransportError(f"tls_ca_file {ca} cannot be used: {error}; give certificates as PEM") from error
    if cert is not None:
        try:
            context.load_cert_chain(cert, key)
        except OSError as error:
            raise TransportError(
                f"tls_cert_file {cert} with tls_key_file {key} cannot be used: {error}; give a pair as PEM"
            ) from error
    return context
