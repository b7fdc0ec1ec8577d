"""End to end for `kvadvisor bench plane`: published, received, logged with its fsync, acknowledged, applied."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from advisor.bench_publisher import PRODUCER, attach, cycle, publish_for
from advisor.service import AdvisorService
from advisor.settings import AdvisorSettings, LogSettings, SourceSettings
from event_plane.connect import open_publisher

PATIENCE_S = 120.0
SAMPLE_S = 0.02
ATTACHED_EVENTS = 1_000
"""More than attaching takes: what comes after them is the stream."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """What was applied after its commit, a second."""

    events_per_s: float
    batches_per_s: float


class NoServer(Exception):
    """There is no nats-server on this machine."""


def measure(transport: str, log: str, events: int, seconds: float) -> Throughput:
    """Run one advisor and one publisher for `seconds`. `transport` is a URL's scheme, `log` a kind of log."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvadvisor-bench-")))
        url, resend_url = stack.enter_context(place_of(transport, folder))
        settings = AdvisorSettings(
            directory=folder / "state",
            log=LogSettings(kind="segments" if log == "segments" else "sql"),
            sources=(SourceSettings(name="bench", url=url, resend_url=resend_url),),
        )
        with AdvisorService(settings) as service:
            if transport == "memory":
                return _in_process(service, url, events, seconds)
            return _across_processes(service, url, resend_url, events, seconds)


def _across_processes(service: AdvisorService, url: str, resend_url: str, events: int, seconds: float) -> Throughput:
    command = [sys.executable, "-m", "advisor.bench_publisher", url, "--events", str(events)]
    command += ["--seconds", str(seconds)] + (["--resend-url", resend_url] if resend_url else [])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as publisher:
        assert publisher.stdin is not None
        assert publisher.stdout is not None
        publisher.stdout.readline()
        print("go", file=publisher.stdin, flush=True)
        told = Thread(target=lambda: lines.append(publisher.stdout.readline() if publisher.stdout else ""))
        lines: list[str] = []
        told.start()
        result = _watch(service, lambda: json.loads(lines[0]) if lines else None)
        told.join()
        print("end", file=publisher.stdin, flush=True)
    return result


def _in_process(service: AdvisorService, url: str, events: int, seconds: float) -> Throughput:
    publisher = open_publisher(url, producer=PRODUCER, flush_events=events, window_wait_s=30.0)
    done: list[dict[str, int]] = []

    def publish() -> None:
        records = cycle()
        sent = attach(publisher, records) + publish_for(publisher, records, events, seconds, None)
        done.append({"events": sent, "last": publisher.flush()})

    thread = Thread(target=publish)
    thread.start()
    try:
        return _watch(service, lambda: done[0] if done else None)
    finally:
        thread.join()
        publisher.close()


def _watch(service: AdvisorService, finished: object) -> Throughput:
    """From the first full part of the stream applied to the last event sent."""
    assert callable(finished)
    deadline_s = time.monotonic() + PATIENCE_S
    while service.fold.events_total < ATTACHED_EVENTS and finished() is None:
        _check(service, deadline_s)
        time.sleep(0.001)
    started_s, before = time.monotonic(), service.fold.events_total
    while (sent := finished()) is None or service.fold.events_total < sent["events"]:
        _check(service, deadline_s)
        time.sleep(SAMPLE_S)
    took_s = time.monotonic() - started_s
    return Throughput((sent["events"] - before) / took_s, (sent["last"] + 1) / took_s)


def _check(service: AdvisorService, deadline_s: float) -> None:
    if service.failure is not None:
        raise service.failure
    if time.monotonic() > deadline_s:
        raise TimeoutError(f"only {service.fold.events_total:,} events were applied within {PATIENCE_S:g} s")


@contextmanager
def place_of(transport: str, folder: Path) -> Iterator[tuple[str, str]]:
    """URL and resend URL of a transport, with its server where it needs one."""
    match transport:
        case "memory":
            yield f"memory://bench-{os.getpid()}", ""
        case "zmq+ipc":
            yield f"zmq+ipc://{folder}/events", ""
        case "zmq+tcp":
            yield f"zmq+tcp://127.0.0.1:{free_port()}", f"zmq+tcp://127.0.0.1:{free_port()}"
        case _:
            with nats_server(folder) as port:
                yield f"{transport}://127.0.0.1:{port}/bench", ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def nats_server(folder: Path) -> Iterator[int]:
    """A server of our own with its files in `folder`. Raises `NoServer` where none is installed."""
    binary = shutil.which("nats-server", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    if binary is None:
        raise NoServer
    port = free_port()
    command = [binary, "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(folder / "nats")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            deadline_s = time.monotonic() + PATIENCE_S
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    if server.poll() is not None or time.monotonic() > deadline_s:
                        raise
                    time.sleep(0.02)
            yield port
        finally:
            server.terminate()
