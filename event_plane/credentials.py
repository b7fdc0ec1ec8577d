"""What a transport proves itself with, named by files: secrets stay out of URLs, settings, logs and memory dumps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Credentials:
    """Each field empty or None where it is not used. Files are read when a connection is opened.

    ZeroMQ takes the `curve_` ones: key files as `zmq.auth.create_certificates` writes them. NATS and JetStream take the
    others; a user needs `password_file`, a seed (`nkey_file`) and a credentials file (`creds_file`) stand alone.
    """

    curve_key_file: Path | None = None
    """Our own secret key (`NAME.key_secret`)."""
    curve_server_key_file: Path | None = None
    """A subscriber's: the publisher's public key (`NAME.key`)."""
    curve_clients_folder: Path | None = None
    """A publisher's: public keys (`*.key`) of the subscribers that it lets in."""
    user: str = ""
    password_file: Path | None = None
    nkey_file: Path | None = None
    creds_file: Path | None = None
    tls_ca_file: Path | None = None
    """Given: the server must prove itself by it, and nothing is sent unencrypted."""
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None


NO_CREDENTIALS = Credentials()
