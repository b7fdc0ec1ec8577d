"""Keys over ZeroMQ: who gets in, who is told why not, and what is refused before anything opens."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from event_plane.credentials import Credentials
from event_plane.errors import TransportError
from event_plane.keys_command import keys, make_keys
from event_plane.transport import Reconnected
from event_plane.zmq_transport import ZmqPublisher, ZmqSubscriber
from tests.contract.transports import attach_live, resend, stores, wait_for
from tests.ports import free_ports

ANY_PORT = "zmq+tcp://127.0.0.1:0"
Subscribe = Callable[[ZmqPublisher, Credentials], ZmqSubscriber]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Keys of a publisher, of a subscriber that it lets in, and of a stranger."""
    for name in ("publisher", "advisor", "stranger"):
        make_keys(tmp_path, name)
    (tmp_path / "clients").mkdir()
    shutil.copy(tmp_path / "advisor.key", tmp_path / "clients")
    return tmp_path


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def subscribe(opened: ExitStack) -> Subscribe:
    def subscribe(publisher: ZmqPublisher, credentials: Credentials) -> ZmqSubscriber:
        place = str(publisher.url), str(publisher.resend_url)
        return opened.enter_context(closing(ZmqSubscriber("engine", *place, credentials=credentials)))

    return subscribe


def publish(folder: Path, url: str = ANY_PORT, resend_url: str = ANY_PORT, **options: Any) -> ZmqPublisher:
    credentials = Credentials(
        curve_key_file=folder / "publisher.key_secret", curve_clients_folder=folder / "clients"
    )
    return ZmqPublisher(url, resend_url, producer=7, epoch=3, flush_events=1, credentials=credentials, **options)


def client(folder: Path, name: str = "advisor", server: str = "publisher") -> Credentials:
    return Credentials(curve_key_file=folder / f"{name}.key_secret", curve_server_key_file=folder / f"{server}.key")


def problem(subscriber: ZmqSubscriber) -> str:
    subscriber.receive(64)
    return subscriber.connection().problem


def test_live_batches_resends_and_requests_travel_encrypted(
    folder: Path, opened: ExitStack, subscribe: Subscribe
) -> None:
    publisher = opened.enter_context(closing(publish(folder)))
    subscriber = subscribe(publisher, client(folder))
    first = attach_live(publisher, subscriber)
    assert [batch.sequence for batch in resend(subscriber, 0)][: first + 1] == list(range(first + 1))
    subscriber.acknowledge(7, 3, first)
    wait_for(lambda: publisher.stat().acknowledged_sequence == first)
    assert subscriber.connection().connected is True


@pytest.mark.parametrize(
    ("credentials", "said"),
    [
        (lambda folder: client(folder, name="stranger"), "refuses our CURVE key: put our public key into"),
        (lambda folder: client(folder, server="stranger"), "check that curve_server_key_file is its public key"),
        (lambda folder: Credentials(), "asks for CURVE keys and none are set here"),
    ],
    ids=["key that is not let in", "another publisher's key", "no keys"],
)
def test_subscriber_that_does_not_get_in_says_why(
    credentials: Callable[[Path], Credentials], said: str, folder: Path, opened: ExitStack, subscribe: Subscribe
) -> None:
    publisher = opened.enter_context(closing(publish(folder)))
    subscriber = subscribe(publisher, credentials(folder))
    wait_for(lambda: said in problem(subscriber))
    publisher.publish(stores(1), flush=True)
    assert subscriber.receive(8) == []
    assert subscriber.connection().connected is False


def test_subscriber_with_keys_says_that_its_publisher_has_none(
    folder: Path, opened: ExitStack, subscribe: Subscribe
) -> None:
    publisher = opened.enter_context(closing(ZmqPublisher(ANY_PORT, ANY_PORT, producer=7)))
    subscriber = subscribe(publisher, client(folder))
    wait_for(lambda: "and that it uses CURVE" in problem(subscriber))


def test_subscriber_that_is_let_in_later_gets_in_by_itself(
    folder: Path, opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("event_plane.zmq_transport._REFUSED_RETRY_S", 0.05)
    events, resends = free_ports(2)
    place = f"zmq+tcp://127.0.0.1:{events}", f"zmq+tcp://127.0.0.1:{resends}"
    subscriber = opened.enter_context(closing(ZmqSubscriber("engine", *place, credentials=client(folder, "stranger"))))
    with closing(publish(folder, *place)):
        wait_for(lambda: "refuses our CURVE key" in problem(subscriber))
    shutil.copy(folder / "stranger.key", folder / "clients")
    publisher = opened.enter_context(closing(publish(folder, *place)))
    wait_for(lambda: Reconnected("engine") in subscriber.receive(8))
    attach_live(publisher, subscriber)
    assert {batch.producer for batch in resend(subscriber, 0)} == {7}
    assert subscriber.connection().problem == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_publisher_with_keys_binds_beyond_this_machine(host: str, folder: Path, opened: ExitStack) -> None:
    publisher = opened.enter_context(closing(publish(folder, f"zmq+tcp://{host}:0", f"zmq+tcp://{host}:0")))
    place = f"zmq+tcp://127.0.0.1:{publisher.url.port}", f"zmq+tcp://127.0.0.1:{publisher.resend_url.port}"
    subscriber = opened.enter_context(closing(ZmqSubscriber("engine", *place, credentials=client(folder))))
    attach_live(publisher, subscriber)
    assert {batch.producer for batch in resend(subscriber, 0)} == {7}


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"curve_clients_folder": "clients"}, "CURVE needs curve_key_file, our own secret key: make keys with"),
        ({"curve_key_file": "publisher.key_secret"}, "given without curve_clients_folder"),
        ({"curve_key_file": "publisher.key", "curve_clients_folder": "clients"}, r"publisher\.key holds no secret key"),
        ({"curve_key_file": "absent", "curve_clients_folder": "clients"}, "absent cannot be read"),
        ({"curve_key_file": "publisher.key_secret", "curve_clients_folder": "none"}, "none holds no public key"),
    ],
)
def test_publishers_keys_that_cannot_be_used_are_named(named: dict[str, str], said: str, folder: Path) -> None:
    credentials = Credentials(**{field: folder / name for field, name in named.items()})
    with pytest.raises(TransportError, match=said):
        ZmqPublisher(ANY_PORT, ANY_PORT, producer=7, credentials=credentials)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"curve_key_file": "advisor.key_secret"}, r"name the publisher's NAME\.key"),
        ({"curve_server_key_file": "publisher.key"}, "CURVE needs curve_key_file"),
        (
            {"curve_key_file": "advisor.key_secret", "curve_server_key_file": "absent"},
            "curve_server_key_file .*absent cannot be read",
        ),
    ],
)
def test_subscribers_keys_that_cannot_be_used_are_named(named: dict[str, str], said: str, folder: Path) -> None:
    credentials = Credentials(**{field: folder / name for field, name in named.items()})
    with pytest.raises(TransportError, match=said):
        ZmqSubscriber("engine", "zmq+tcp://127.0.0.1:5557", credentials=credentials)


# `kvadvisor keys`


def run_keys(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(keys)
    return CliRunner().invoke(app, list(arguments))


def test_keys_are_made_once_and_the_secret_is_its_owners(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    result = run_keys(str(folder), "advisor-1")
    assert result.exit_code == 0
    assert {file.name for file in folder.iterdir()} == {"advisor-1.key", "advisor-1.key_secret"}
    assert stat.S_IMODE((folder / "advisor-1.key_secret").stat().st_mode) == 0o600
    assert "advisor-1.key_secret: secret" in result.output
    before = (folder / "advisor-1.key_secret").read_bytes()
    again = run_keys(str(folder), "advisor-1")
    assert "exists: delete it if its keys are used nowhere" in str(again.exception)
    assert (folder / "advisor-1.key_secret").read_bytes() == before


@pytest.mark.parametrize("name", ["", "../x", "a/b", "-x"])
def test_key_name_that_is_no_files_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="cannot be a file's"):
        make_keys(tmp_path, name)


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TransportError, match=r"keys cannot be made in .*file/keys"):
        make_keys(tmp_path / "file" / "keys", "a")
