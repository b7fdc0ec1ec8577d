"""CURVE over ZeroMQ: who may connect, and that nobody else reads along. Keys lie in files as `zmq.auth` writes them."""

from __future__ import annotations

from pathlib import Path

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from event_plane.credentials import Credentials
from event_plane.errors import TransportError

_MAKE_KEYS = "make keys with `kvadvisor keys FOLDER NAME`"


class PublisherKeys:
    """A publisher's own keys, and the subscribers that it lets in. Raises `TransportError` for keys that are none."""

    def __init__(self, credentials: Credentials) -> None:
        self._public, self._secret = _key_pair(credentials.curve_key_file)
        folder = credentials.curve_clients_folder
        if folder is None:
            raise TransportError(
                "curve_key_file is given without curve_clients_folder: name the folder that holds the public keys"
                " (NAME.key) of the subscribers to let in"
            )
        if not any(folder.glob("*.key")):
            raise TransportError(
                f"curve_clients_folder {folder} holds no public key: put there NAME.key of each subscriber to let in"
            )
        self._clients_folder = folder

    def let_in_only_clients(self, context: zmq.Context[zmq.Socket[bytes]]) -> ThreadAuthenticator:
        """Start what checks each new connection in `context`. The caller stops it before the context ends."""
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve(domain="*", location=self._clients_folder)
        return authenticator

    def secure(self, server: zmq.Socket[bytes]) -> None:
        """Have `server`, before it is bound, prove itself and ask its peers to."""
        server.curve_secretkey = self._secret
        server.curve_publickey = self._public
        server.curve_server = True


class SubscriberKeys:
    """A subscriber's own keys and its publisher's public one. Raises `TransportError` for keys that are none."""

    def __init__(self, credentials: Credentials) -> None:
        self._public, self._secret = _key_pair(credentials.curve_key_file)
        if credentials.curve_server_key_file is None:
            raise TransportError("curve_key_file is given without curve_server_key_file: name the publisher's NAME.key")
        self._server, _ = _load(credentials.curve_server_key_file, "curve_server_key_file")

    def secure(self, client: zmq.Socket[bytes]) -> None:
        """Have `client`, before it connects, prove itself and ask the publisher to."""
        client.curve_secretkey = self._secret
        client.curve_publickey = self._public
        client.curve_serverkey = self._server


def publisher_keys(credentials: Credentials) -> PublisherKeys | None:
    """None where no CURVE key is named. Raises `TransportError`."""
    named = credentials.curve_key_file is not None or credentials.curve_clients_folder is not None
    return PublisherKeys(credentials) if named else None


def subscriber_keys(credentials: Credentials) -> SubscriberKeys | None:
    """None where no CURVE key is named. Raises `TransportError`."""
    named = credentials.curve_key_file is not None or credentials.curve_server_key_file is not None
    return SubscriberKeys(credentials) if named else None


def _key_pair(file: Path | None) -> tuple[bytes, bytes]:
    if file is None:
        raise TransportError(f"CURVE needs curve_key_file, our own secret key: {_MAKE_KEYS} and name NAME.key_secret")
    public, secret = _load(file, "curve_key_file")
    if secret is None:
        raise TransportError(f"curve_key_file {file} holds no secret key: name NAME.key_secret, not NAME.key")
    return public, secret


def _load(file: Path, setting: str) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(file)
    except (OSError, ValueError) as error:
        raise TransportError(f"{setting} {file} cannot be read ({error}): {_MAKE_KEYS}") from error
