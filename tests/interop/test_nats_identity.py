"""Who may connect to a NATS server: passwords, nkeys, credentials files and TLS, each on a server that asks for it."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from event_plane.connect import open_publisher, open_subscriber
from event_plane.credentials import Credentials
from event_plane.errors import TransportError
from tests.contract.transports import attach_live, stores, wait_for
from tests.nats_identities import Certificates, certificates, identity, operator_mode
from tests.nats_server import NatsServer, nats_server
from tests.stopping import stop

SECRET = "correct-horse"
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
Serve = Callable[..., NatsServer]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    with ExitStack() as stack:
        yield lambda configuration="": stack.enter_context(nats_server(tmp_path / "server", configuration))


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates(tmp_path_factory.mktemp("tls") / "pems")


def require_batches_pass(server: NatsServer, credentials: Credentials) -> None:
    url = server.url("kv")
    with (
        closing(open_publisher(url, producer=7, epoch=3, credentials=credentials)) as publisher,
        closing(open_subscriber("engine", url, credentials=credentials)) as subscriber,
    ):
        attach_live(publisher, subscriber)
        assert subscriber.connection().connected


def require_refusal(server: NatsServer, credentials: Credentials, words: str) -> None:
    url = server.url("kv")
    with closing(open_subscriber("engine", url, credentials=credentials)) as subscriber:
        wait_for(lambda: subscriber.connection().connected is False)
        problem = subscriber.connection().problem
        assert words in problem
        assert SECRET not in problem
        assert "\n" not in problem


def written(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


def test_user_with_the_right_password_is_let_in(tmp_path: Path, serve: Serve) -> None:
    server = serve(f'authorization {{ user: "kv", password: "{SECRET}" }}')
    right = Credentials(user="kv", password_file=written(tmp_path / "right", f"{SECRET}\n"))
    require_batches_pass(server, right)


def test_wrong_password_is_a_clear_problem_for_either_side(tmp_path: Path, serve: Serve) -> None:
    server = serve(f'authorization {{ user: "kv", password: "{SECRET}" }}')
    wrong = Credentials(user="kv", password_file=written(tmp_path / "wrong", "battery-staple"))
    require_refusal(server, wrong, "does not let us in")
    require_refusal(server, Credentials(), "does not let us in")
    with pytest.raises(TransportError, match=r"cannot publish on .* does not let us in .*check user"):
        open_publisher(server.url("kv"), producer=7, credentials=wrong)


def test_nkey_is_let_in_and_another_is_not(tmp_path: Path, serve: Serve) -> None:
    user, other = identity("user"), identity("user")
    server = serve(f"authorization {{ users: [ {{ nkey: {user.public_key} }} ] }}")
    require_batches_pass(server, Credentials(nkey_file=written(tmp_path / "user.nk", user.seed)))
    require_refusal(server, Credentials(nkey_file=written(tmp_path / "other.nk", other.seed)), "does not let us in")


def test_credentials_file_is_let_in_and_that_of_another_operator_is_not(tmp_path: Path, serve: Serve) -> None:
    (tmp_path / "other").mkdir()
    configuration, creds = operator_mode(tmp_path)
    _, other = operator_mode(tmp_path / "other")
    server = serve(configuration)
    require_batches_pass(server, Credentials(creds_file=creds))
    require_refusal(server, Credentials(creds_file=other), "does not let us in")


@needs_openssl
def test_server_that_proves_itself_is_spoken_to_encrypted(serve: Serve, pems: Certificates) -> None:
    server = serve(f'tls {{ cert_file: "{pems.server}", key_file: "{pems.server_key}" }}')
    require_batches_pass(server, Credentials(tls_ca_file=pems.ca))
    # The machine's own authorities do not vouch for it.
    require_refusal(server, Credentials(), "TLS certificates")


@needs_openssl
def test_encrypted_connection_to_a_server_that_is_frozen_is_closed_all_the_same(
    serve: Serve, pems: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(f'tls {{ cert_file: "{pems.server}", key_file: "{pems.server_key}" }}')
    left: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: left.append(str(unraisable.exc_value)))
    subscriber = open_subscriber("engine", server.url("kv"), credentials=Credentials(tls_ca_file=pems.ca))
    wait_for(lambda: subscriber.connection().connected)
    stop(server.pid)
    try:
        subscriber.close()
        gc.collect()
    finally:
        os.kill(server.pid, signal.SIGCONT)

    assert left == []


@needs_openssl
def test_server_that_asks_for_a_certificate_gets_ours(serve: Serve, pems: Certificates) -> None:
    server = serve(
        f'tls {{ cert_file: "{pems.server}", key_file: "{pems.server_key}", ca_file: "{pems.ca}", verify: true }}'
    )
    ours = Credentials(tls_ca_file=pems.ca, tls_cert_file=pems.client, tls_key_file=pems.client_key)
    require_batches_pass(server, ours)
    require_refusal(server, Credentials(tls_ca_file=pems.ca), str(server.port))


@needs_openssl
def test_server_of_another_authority_is_not_trusted(tmp_path: Path, serve: Serve, pems: Certificates) -> None:
    server = serve(f'tls {{ cert_file: "{pems.server}", key_file: "{pems.server_key}" }}')
    other = certificates(tmp_path / "other")
    require_refusal(server, Credentials(tls_ca_file=other.ca), "TLS certificates")


@needs_openssl
def test_password_is_never_sent_in_the_clear_where_tls_is_wanted(
    tmp_path: Path, serve: Serve, pems: Certificates
) -> None:
    server = serve(f'authorization {{ user: "kv", password: "{SECRET}" }}\ntrace: true\nlogfile: "{tmp_path}/trace"')
    wanted = Credentials(user="kv", password_file=written(tmp_path / "right", SECRET), tls_ca_file=pems.ca)
    require_refusal(server, wanted, "offers no TLS and nothing is sent unencrypted")
    assert "CONNECT" not in (tmp_path / "trace").read_text()


@pytest.mark.parametrize(
    ("setting", "content", "words"),
    [
        ("nkey_file", "SUNOSEED", "holds no nkey seed"),
        ("creds_file", "-----BEGIN NATS USER JWT-----\n", "lacks its JWT or its seed"),
        ("tls_ca_file", "no certificate", "cannot be used"),
        ("tls_cert_file", "no certificate", "cannot be used"),
        ("nkey_file", None, "cannot be read"),
        ("creds_file", None, "cannot be read"),
        ("tls_ca_file", None, "cannot be used"),
    ],
)
def test_file_that_cannot_be_used_is_named_at_once(
    tmp_path: Path, setting: str, content: str | None, words: str
) -> None:
    file = tmp_path / "identity"
    if content is not None:
        file.write_text(content)
    credentials = Credentials(**{setting: file})
    for opened in (
        lambda: open_subscriber("engine", "nats://127.0.0.1:1/kv", credentials=credentials),
        lambda: open_publisher("jetstream://127.0.0.1:1/kv", producer=7, credentials=credentials),
    ):
        with pytest.raises(TransportError, match=f"{setting} .*identity.* {words}") as refused:
            opened()
        assert "SUNOSEED" not in str(refused.value)


def test_user_without_a_password_file_is_told_what_lacks() -> None:
    with pytest.raises(TransportError, match="user 'kv' has no password: name a password_file"):
        open_subscriber("engine", "nats://127.0.0.1:1/kv", credentials=Credentials(user="kv"))


def test_permission_that_lacks_is_a_clear_problem(tmp_path: Path, serve: Serve) -> None:
    user = f'user: "kv", password: "{SECRET}", permissions: {{ subscribe: "_INBOX.>" }}'
    server = serve(f"authorization {{ users: [ {{ {user} }} ] }}")
    credentials = Credentials(user="kv", password_file=written(tmp_path / "right", SECRET))
    require_refusal(server, credentials, "does not let us do what we must")


def test_publisher_waits_for_no_server_and_says_that_it_is_away(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "server", "", jetstream=False, monitor=False)
    with closing(open_publisher(server.url("kv"), producer=7)) as publisher:
        publisher.publish(stores(1), flush=True)
        assert publisher.last_sequence == 0
