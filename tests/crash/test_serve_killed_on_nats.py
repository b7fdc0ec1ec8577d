"""kill -9 of `kvadvisor serve`, fed over NATS or JetStream by an engine that goes on: the log has each batch once."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.contract.transports import wait_for
from tests.engine_at_work import Engine, engine, logged_sequences, require_each_batch_once
from tests.nats_server import nats_server

CONFIG = """
directory = "{directory}"
tick_interval_s = 0.2
[api]
port = 0
[[sources]]
name = "core"
url = "{url}"
"""


@contextmanager
def serving(config: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "advisor.cli", "serve", "--config", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as service:
        try:
            assert service.stdout is not None
            assert b"admin view" in service.stdout.readline()
            yield service
        finally:
            service.kill()


def wait_for_log(directory: Path, at_work: Engine, batches: int) -> None:
    """Until the running service's log has so many more batches than are published now."""
    wanted = at_work.publisher.last_sequence + batches
    pause = threading.Event()
    wait_for(lambda: pause.wait(0.1) or wanted in logged_sequences(directory), 90.0)


@pytest.mark.crash
@pytest.mark.parametrize("scheme", [pytest.param("nats", marks=pytest.mark.long), "jetstream"])
def test_each_batch_is_logged_once_through_a_kill_of_the_service(tmp_path: Path, scheme: str) -> None:
    directory, config = tmp_path / "state", tmp_path / "advisor.toml"
    with nats_server(tmp_path / "server", jetstream=True) as server:
        url = server.url("kv", scheme)
        config.write_text(CONFIG.format(directory=directory, url=url))
        with engine(url) as at_work:
            with serving(config) as service:
                wait_for_log(directory, at_work, 30)
                service.kill()
            with serving(config) as service:
                wait_for_log(directory, at_work, 30)
                at_work.stop()
                at_work.publisher.flush()
                wait_for_log(directory, at_work, 0)
                service.terminate()
                service.wait(100)
            require_each_batch_once(directory, at_work)
