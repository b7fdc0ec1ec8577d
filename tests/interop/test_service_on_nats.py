"""The advisor over NATS and JetStream, through restarts of the server and the service: each batch logged once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from advisor.reader import ServiceReader
from advisor.service import AdvisorService
from advisor.settings import AdvisorSettings, SourceSettings
from event_plane.connect import open_publisher
from event_plane.schema import EventType
from tests.contract.transports import wait_for
from tests.engine_at_work import EPOCH, PRODUCER, Engine, engine, require_each_batch_once
from tests.nats_server import NatsServer, nats_server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with nats_server(tmp_path / "server", jetstream=True) as running:
        yield running


@pytest.fixture(params=["nats", "jetstream"])
def url(request: pytest.FixtureRequest, server: NatsServer) -> str:
    return server.url("kv", request.param)


@contextmanager
def running(folder: Path, url: str) -> Iterator[AdvisorService]:
    source = SourceSettings(name="core", url=url)
    settings = AdvisorSettings(directory=folder, sources=(source,), tick_interval_s=0.2)
    with AdvisorService(settings) as service:
        yield service
        assert service.failure is None


def has_logged(service: AdvisorService, sequence: int) -> Callable[[], bool]:
    return lambda: (state := service.fold.producers.get(PRODUCER)) is not None and state.sequence >= sequence


def more_than(service: AdvisorService, engine: Engine, batches: int) -> Callable[[], bool]:
    """That so many more batches than are published now are folded."""
    return has_logged(service, engine.publisher.last_sequence + batches)


def require_all_arrives_once(folder: Path, engine: Engine, service: AdvisorService) -> None:
    engine.stop()
    wait_for(has_logged(service, engine.publisher.flush()))
    require_each_batch_once(folder, engine)


def test_server_killed_twice_under_an_engine_loses_and_doubles_nothing(
    tmp_path: Path, server: NatsServer, url: str
) -> None:
    with running(tmp_path / "advisor", url) as service, engine(url) as at_work:
        for _ in range(2):
            wait_for(more_than(service, at_work, 40))
            server.kill()
            reader = ServiceReader(service)
            wait_for(lambda: not all(check.ok for check in reader.checks() if check.name == "source core"))  # noqa: B023
            server.start()
        wait_for(more_than(service, at_work, 40))
        require_all_arrives_once(tmp_path / "advisor", at_work, service)


def test_service_stopped_and_started_under_an_engine_loses_and_doubles_nothing(
    tmp_path: Path, server: NatsServer, url: str
) -> None:
    with engine(url) as at_work:
        for _ in range(2):
            with running(tmp_path / "advisor", url) as service:
                wait_for(more_than(service, at_work, 40))
        with running(tmp_path / "advisor", url) as service:
            require_all_arrives_once(tmp_path / "advisor", at_work, service)


def test_log_restored_from_before_is_read_up_again_from_the_stream(tmp_path: Path, server: NatsServer) -> None:
    url = server.url("kv", "jetstream")
    folder = tmp_path / "advisor"
    options = {"epoch": EPOCH, "flush_events": 1, "buffer_batches": 1}
    with closing(open_publisher(url, producer=PRODUCER, **options)) as publisher:  # type: ignore[arg-type]
        at_rest = Engine(publisher)
        for block in range(1, 51):
            publisher.publish([at_rest.event(EventType.STORE, block)], flush=True)
        with running(folder, url) as service:
            wait_for(has_logged(service, 49))
        before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        for block in range(51, 101):
            publisher.publish([at_rest.event(EventType.STORE, block)], flush=True)
        with running(folder, url) as service:
            wait_for(has_logged(service, 99))
        for path in folder.iterdir():
            if path.is_file():
                path.unlink()
        for name, content in before.items():
            (folder / name).write_bytes(content)
        for checkpoint in (folder / "checkpoints").iterdir():
            checkpoint.unlink()
        with running(folder, url) as service:
            wait_for(has_logged(service, 99))
            wait_for(lambda: len(service.fold.index) == 100)
