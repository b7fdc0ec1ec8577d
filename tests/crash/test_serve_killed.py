"""Acknowledged means logged: kill -9 and full disks under `kvadvisor serve`, with a real publisher that goes on."""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from advisor.fold import Fold
from advisor.log import SqlLog
from advisor.service import AdvisorService
from advisor.settings import AdvisorSettings, SourceSettings
from event_plane.connect import open_publisher
from event_plane.errors import TransportError
from event_plane.publishing import BatchPublisher
from event_plane.schema import EventRecord, EventType, Namespace
from tests.disks import disk_of
from tests.ports import free_ports

NAMESPACE = Namespace(tenant="acme")
PRODUCER = 77
CONFIG = """
directory = "{directory}"
tick_interval_s = 0.2
# Several commits fit on a small disk: something is acknowledged before it is full.
commit_batches_max = 8
[api]
port = 0
[[sources]]
name = "core"
url = "{url}"
resend_url = "{resend_url}"
"""


@pytest.fixture
def urls() -> tuple[str, str]:
    publish, resend = free_ports(2)
    return f"zmq+tcp://127.0.0.1:{publish}", f"zmq+tcp://127.0.0.1:{resend}"


def stored(number: int) -> EventRecord:
    return EventRecord(EventType.STORE, 1, number, NAMESPACE, "gpu", block_size=64, block_tokens=16)


@contextmanager
def publishing(urls: tuple[str, str], epoch: int, records: int = 20) -> Iterator[BatchPublisher]:
    """A publisher, and a thread that has it publish blocks as fast as it can until the end."""
    # It can send all again from its first batch on, however long the service takes to start.
    publisher = open_publisher(
        *urls, producer=PRODUCER, epoch=epoch, flush_events=records, buffer_batches=65_536, window_batches=16,
        window_wait_s=30.0,
    )  # fmt: skip
    ending = threading.Event()

    def publish() -> None:
        with contextlib.suppress(TransportError):  # closed while it waited for its window
            for first in itertools.count(1, records):
                publisher.publish([stored(number) for number in range(first, first + records)])
                # Before anyone acknowledges, nothing else holds a publisher back.
                if publisher.stat().acknowledging_subscribers == 0 and ending.wait(0.02):
                    return

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield publisher
    finally:
        ending.set()
        publisher.close()
        thread.join()


def eventually(holds: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.2)  # some conditions read the whole log


def serve(config: Path, limit_blocks: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "advisor.cli", "serve", "--config", str(config)]
    if limit_blocks:
        command = ["sh", "-c", f'ulimit -f {limit_blocks}; exec "$@"', "sh", *command]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def write_config(folder: Path, directory: Path, urls: tuple[str, str]) -> Path:
    config = folder / "advisor.toml"
    config.write_text(CONFIG.format(directory=directory, url=urls[0], resend_url=urls[1]))
    return config


def logged(directory: Path, epoch: int) -> list[int]:
    """Sequences of one life of the publisher, in log order."""
    log = SqlLog(directory / "log.db", read_only=True)
    try:
        return [e.sequence for e in log.read() if e.sequence is not None and e.epoch == epoch]
    finally:
        log.close()


@pytest.mark.crash
def test_whatever_was_acknowledged_before_a_kill_is_in_the_log(tmp_path: Path, urls: tuple[str, str]) -> None:
    config = write_config(tmp_path, tmp_path / "state", urls)
    for epoch, wanted in ((1, 1), (2, 200)):
        with publishing(urls, epoch) as publisher, serve(config) as service:
            eventually(lambda: publisher.stat().acknowledged_sequence >= wanted, "acknowledgements")  # noqa: B023
            service.kill()
            service.communicate()
            acknowledged = publisher.stat().acknowledged_sequence
        assert acknowledged >= wanted
        in_log = logged(tmp_path / "state", epoch)
        assert in_log == list(range(len(in_log)))
        assert len(in_log) > acknowledged


@pytest.mark.crash
@pytest.mark.timeout(400)
def test_full_disk_ends_the_service_with_a_sentence_and_with_room_it_goes_on(
    tmp_path: Path, urls: tuple[str, str]
) -> None:
    with disk_of(tmp_path / "disk", 3) as disk, publishing(urls, 1, records=500) as publisher:
        config = write_config(tmp_path, disk / "state", urls)
        require_full_disk_is_survived(
            config, disk / "state", publisher, serve(config), "the disk is full: free space there",
            lambda: subprocess.run(["mount", "-o", "remount,size=200m", disk], check=True),
        )  # fmt: skip


@pytest.mark.crash
@pytest.mark.timeout(400)
def test_limit_on_file_size_ends_the_service_with_a_sentence_and_without_it_goes_on(
    tmp_path: Path, urls: tuple[str, str]
) -> None:
    with publishing(urls, 1, records=500) as publisher:
        config = write_config(tmp_path, tmp_path / "state", urls)
        limited = serve(config, limit_blocks=4_000)
        require_full_disk_is_survived(
            config, tmp_path / "state", publisher, limited, "the disk failed: check it", lambda: None
        )


def require_full_disk_is_survived(
    config: Path,
    directory: Path,
    publisher: BatchPublisher,
    service: subprocess.Popen[str],
    words: str,
    make_room: Callable[[], object],
) -> None:
    _, errors = service.communicate(timeout=150)
    acknowledged = publisher.stat().acknowledged_sequence
    assert errors.startswith(f"kvadvisor: cannot append to {directory / 'log.db'}: {words}"), errors
    assert len(errors.splitlines()) == 1
    assert service.returncode == 2
    in_log = logged(directory, 1)
    assert in_log == list(range(len(in_log)))
    assert len(in_log) > acknowledged > 0
    make_room()
    with serve(config) as again:
        eventually(lambda: publisher.stat().last_sequence > acknowledged + 60, "the publisher goes on")
        eventually(lambda: len(logged(directory, 1)) > acknowledged + 60, "the log goes on")
        again.terminate()
        again.communicate()
    in_log = logged(directory, 1)
    assert in_log == list(range(len(in_log))), "nothing was lost between"


@pytest.mark.crash
def test_nothing_is_acknowledged_while_a_commit_is_held_up(tmp_path: Path, urls: tuple[str, str]) -> None:
    source = SourceSettings(name="core", url=urls[0], resend_url=urls[1])
    settings = AdvisorSettings(directory=tmp_path, sources=(source,), tick_interval_s=3_600)
    with AdvisorService(settings) as service, publishing(urls, 1) as publisher:
        eventually(lambda: publisher.stat().acknowledged_sequence > 5, "acknowledgements")
        other = sqlite3.connect(tmp_path / "log.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")  # the service's next commit waits for this
        try:
            eventually(lambda: publisher.stat().last_sequence > publisher.stat().acknowledged_sequence + 10, "a row")
            durable = logged(tmp_path, 1)
            time.sleep(0.3)
            assert logged(tmp_path, 1) == durable
            assert publisher.stat().acknowledged_sequence <= durable[-1]
        finally:
            other.execute("ROLLBACK")
            other.close()
        eventually(lambda: publisher.stat().acknowledged_sequence > durable[-1] + 10, "more acknowledgements")
        assert service.failure is None
    fold = Fold()
    log = SqlLog(tmp_path / "log.db", read_only=True)
    for entry in log.read():
        fold.apply(entry)
    log.close()
    assert fold.digest() == service.fold.digest()
