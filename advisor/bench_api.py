"""`kvadvisor bench api`: the five busiest routes under load, while events come in; what ingest loses meanwhile.

Three processes on this machine: the service, a publisher at a steady rate, and this one, which asks with as many
connections as `CLIENTS`, each the next question as soon as it has its answer. First the publisher runs alone: what is
applied then is what it is compared with.
"""

from __future__ import annotations

import http.client
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from advisor.bench_stream import BLOCK_TOKENS, ChainStream
from advisor.bench_throughput import place_of
from event_plane.figures import Figure, at_most

RATE_EVENTS_S = 200_000
CLIENTS = 4
SIZES = {"1 M": 1_000_000, "10 M": 10_000_000}
P99_MS_MAX = 50.0
LOSS_MAX = 0.1
PROMPT_BLOCKS = 64
_SETTLE_S = 2.0

Latencies = dict[str, list[float]]
"""By route, seconds of each answer, its last byte included."""


@dataclass(frozen=True, slots=True)
class Question:
    route: str
    method: str
    path: str
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Measured:
    """`alone`, `beside`: events applied a second without and with the questions."""

    latencies: Latencies
    seconds: float
    alone: float
    beside: float
    behind_s_max: float


def run(quick: bool) -> list[Figure]:
    """About two minutes; `quick` leaves 10 M blocks out."""
    figures = []
    for name, blocks in SIZES.items():
        if quick and blocks > SIZES["1 M"]:
            figures += _rows(name, None, "not in --quick")
        else:
            figures += _rows(name, measure(blocks, 5.0 if quick else 15.0))
    return figures


def measure(blocks: int, seconds: float) -> Measured:
    """Run service, publisher and questions with so many blocks in the index."""
    with running(blocks) as (address, publish):
        questions = list(_questions(blocks))
        with publish(seconds + _SETTLE_S):
            alone, _ = _applied_in(address, seconds)
        latencies: Latencies = defaultdict(list)
        ending = threading.Event()
        clients = [
            threading.Thread(target=_ask, args=(address, questions, number, latencies, ending))
            for number in range(CLIENTS)
        ]
        with publish(seconds + _SETTLE_S):
            for client in clients:
                client.start()
            beside, behind_s = _applied_in(address, seconds)
            ending.set()
            for client in clients:
                client.join()
        return Measured(latencies, seconds, alone, beside, behind_s)


def _questions(blocks: int) -> Iterator[Question]:
    """What engines, dashboards and control planes ask, over and over: each of the five as often as the others."""
    stream = ChainStream()
    stream.grow(blocks)
    for number in range(64):
        path = stream.path(int(stream.starts[-2 - number * 7] - 1))[:PROMPT_BLOCKS]
        hashes = [f"{int(high):016x}{int(low):016x}" for low, high in stream.hashes(path)]
        body = {"hashes": hashes, "block_tokens": BLOCK_TOKENS, "prefill_tokens_per_s": 8000}
        yield Question("advice/load", "POST", "/api/v1/advice/load", json.dumps(body).encode())
        yield Question("summary", "GET", "/api/v1/summary")
        yield Question("volumes", "GET", "/api/v1/volumes")
        yield Question("blocks", "GET", f"/api/v1/blocks?limit=100&volume=slow&after={blocks * number // 64}")
        yield Question("moves", "GET", "/api/v1/moves")


def _ask(
    address: str, questions: list[Question], client: int, latencies: Latencies, ending: threading.Event
) -> None:
    connection = http.client.HTTPConnection(address, timeout=60)
    for question in itertools.cycle(questions[client * 16 :] + questions[: client * 16]):
        if ending.is_set():
            break
        started_s = time.perf_counter()
        answer = _answer(connection, question)
        latencies[question.route].append(time.perf_counter() - started_s)
        if not answer:
            raise RuntimeError(f"{question.path} had no answer")
    connection.close()


def _answer(connection: http.client.HTTPConnection, question: Question) -> bytes:
    headers = {"Content-Type": "application/json"} if question.body else {}
    connection.request(question.method, question.path, question.body or None, headers)
    response = connection.getresponse()
    body = response.read()
    if response.status != 200:
        raise RuntimeError(f"{question.method} {question.path} was answered with {response.status}: {body[:200]!r}")
    return body


def _applied_in(address: str, seconds: float) -> tuple[float, float]:
    """Events applied a second, and the most that the fold was behind, over so many seconds from now on."""
    connection = http.client.HTTPConnection(address, timeout=60)
    summary = Question("summary", "GET", "/api/v1/summary")

    def look() -> dict[str, Any]:
        shown: dict[str, Any] = json.loads(_answer(connection, summary))
        return shown

    time.sleep(_SETTLE_S / 2)
    began_s, before = time.monotonic(), look()["events_total"]
    behind_s = 0.0
    while (elapsed_s := time.monotonic() - began_s) < seconds:
        time.sleep(min(0.25, seconds - elapsed_s))
        after = look()
        behind_s = max(behind_s, after["behind_s"])
    rate = (after["events_total"] - before) / (time.monotonic() - began_s)
    connection.close()
    return rate, behind_s


@contextmanager
def running(blocks: int) -> Iterator[tuple[str, Any]]:
    """`host:port` of a service with so many blocks, and what has a publisher run beside it for so many seconds."""
    with tempfile.TemporaryDirectory(prefix="kvadvisor-bench-") as made:
        folder = Path(made)
        with place_of("zmq+tcp", folder) as (url, resend_url):
            command = [sys.executable, "-m", "advisor.bench_api_service", str(blocks), str(folder / "state")]
            with _piped([*command, url, resend_url]) as service:
                assert service.stdin is not None
                assert service.stdout is not None
                said = service.stdout.readline()
                if not said:
                    raise RuntimeError(f"the service ended with status {service.wait()}")

                @contextmanager
                def publish(seconds: float) -> Iterator[None]:
                    command = [sys.executable, "-m", "advisor.bench_publisher", url, "--resend-url", resend_url]
                    command += ["--rate", str(RATE_EVENTS_S), "--seconds", str(seconds)]
                    with _piped(command) as publisher:
                        assert publisher.stdin is not None
                        assert publisher.stdout is not None
                        publisher.stdout.readline()
                        publisher.stdin.write("go\n")
                        publisher.stdin.flush()
                        yield
                        publisher.stdout.readline()
                        publisher.stdin.close()

                yield urlsplit(json.loads(said)["url"]).netloc, publish
                service.stdin.close()


def _piped(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _rows(size: str, measured: Measured | None, note: str = "") -> list[Figure]:
    routes = f"{size} blocks, {RATE_EVENTS_S:,} events/s, {CLIENTS} clients"
    if measured is None:
        return [
            at_most(f"{routes}: worst p99 of the five routes", None, "ms", P99_MS_MAX, note),
            at_most(f"{routes}: share of ingest lost", None, "", LOSS_MAX, note),
        ]
    figures = []
    p99 = 0.0
    for route, seconds in sorted(measured.latencies.items()):
        cuts = statistics.quantiles(seconds, n=100)
        p99 = max(p99, cuts[98])
        row = f"{size} blocks, {route}"
        figures += [
            Figure(f"{row}: answers a second", len(seconds) / measured.seconds, "/s").placed(row, "answers/s"),
            Figure(f"{row}: p50", cuts[49] * 1000, "ms").placed(row, "p50 ms"),
            Figure(f"{row}: p99", cuts[98] * 1000, "ms").placed(row, "p99 ms"),
        ]
    return [
        *figures,
        Figure(f"{size} blocks: events applied without questions", measured.alone, "/s"),
        Figure(f"{size} blocks: events applied beside them", measured.beside, "/s"),
        Figure(f"{size} blocks: most that the fold was behind", measured.behind_s_max * 1000, "ms"),
        at_most(f"{routes}: worst p99 of the five routes", p99 * 1000, "ms", P99_MS_MAX),
        at_most(f"{routes}: share of ingest lost", 1 - measured.beside / measured.alone, "", LOSS_MAX),
    ]
