"""`kvadvisor bench api`: the five busiest routes under load, while events come in; what ingest loses meanwhile.

Three processes on this machine: the service, a publisher at a steady rate, and this one, which asks over as many
connections as `CLIENTS`. First the publisher runs alone: what is applied then is what it is compared with. Then
questions come at a steady rate, `ASKED_S` in all, whether or not the one before is answered, and each is timed from
when it was due: an answer that is late makes those behind it late, as it would for those who wait. Then, for the most
that is answered, each connection asks as soon as it has its answer. Last, a browser visits the pages.
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
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from advisor.bench_api_pages import Paints, first_paints, paint_rows
from advisor.bench_stream import BLOCK_TOKENS, ChainStream
from advisor.bench_throughput import place_of
from event_plane.figures import Figure, at_most

RATE_EVENTS_S = 200_000
CLIENTS = 4
ASKED_S = 100
SIZES = {"1 M": 1_000_000, "10 M": 10_000_000}
P99_MS_MAX = 50.0
LOSS_MAX = 0.1
PROMPT_BLOCKS = 64
_SETTLE_S = 2.0

Latencies = dict[str, list[float]]
"""By route, seconds of each answer, from when it was due to its last byte."""


class Publish(Protocol):
    """Has a publisher run beside for so many seconds."""

    def __call__(self, seconds: float) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True)
class Question:
    route: str
    method: str
    path: str
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Measured:
    """`alone`, `beside`: events applied a second without and with the questions that come steadily.

    `at_once`: the answers where each connection asks as soon as it has one, and `beside_at_once` the events.
    """

    latencies: Latencies
    at_once: Latencies
    seconds: float
    alone: float
    beside: float
    beside_at_once: float
    behind_s_max: float
    paints: Paints


def run(quick: bool) -> list[Figure]:
    """About four minutes; `quick` leaves 10 M blocks and the pages out."""
    figures = []
    for name, blocks in SIZES.items():
        if quick and blocks > SIZES["1 M"]:
            figures += _rows(name, None, "not in --quick") + paint_rows(name, Paints(note="not in --quick"))
        else:
            measured = measure(blocks, 5.0 if quick else 15.0, 0.0 if quick else 40.0)
            figures += _rows(name, measured) + paint_rows(name, measured.paints)
    return figures


def measure(blocks: int, seconds: float, pages_s: float) -> Measured:
    """Run service, publisher and questions with so many blocks in the index, then visit its pages for `pages_s`."""
    with running(blocks) as (address, publish):
        questions = list(_questions(blocks))
        with publish(seconds + _SETTLE_S):
            alone, _ = _applied_in(address, seconds)
        latencies, beside, behind_s = _asked(address, publish, questions, seconds, ASKED_S)
        at_once, beside_at_once, _ = _asked(address, publish, questions, seconds, None)
        paints = Paints(note="not in --quick")
        if pages_s:
            paints = first_paints(address, publish, pages_s, volume="slow")
        return Measured(latencies, at_once, seconds, alone, beside, beside_at_once, behind_s, paints)


def _asked(
    address: str, publish: Publish, questions: list[Question], seconds: float, rate_s: float | None
) -> tuple[Latencies, float, float]:
    """The answers, the events applied a second beside them, and the most that the fold was behind."""
    latencies: Latencies = defaultdict(list)
    ending = threading.Event()
    with publish(seconds + _SETTLE_S):
        started_s = time.perf_counter() + _SETTLE_S / 2
        clients = []
        for number in range(CLIENTS):
            due: Iterator[float] = itertools.repeat(0.0)
            if rate_s is not None:
                due = (started_s + turn / rate_s for turn in itertools.count(number, CLIENTS))
            asking = (address, questions[number * 16 :] + questions[: number * 16], due, latencies, ending)
            clients.append(threading.Thread(target=_ask, args=asking))
        for client in clients:
            client.start()
        beside, behind_s = _applied_in(address, seconds)
        ending.set()
        for client in clients:
            client.join()
    return latencies, beside, behind_s


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
    address: str, questions: list[Question], due: Iterator[float], latencies: Latencies, ending: threading.Event
) -> None:
    """Until it ends; a question that was due before the last answer came is asked at once."""
    connection = http.client.HTTPConnection(address, timeout=60)
    for question, due_s in zip(itertools.cycle(questions), due, strict=False):
        if ending.wait(max(0.0, due_s - time.perf_counter())):
            break
        started_s = due_s or time.perf_counter()
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
def running(blocks: int) -> Iterator[tuple[str, Publish]]:
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
    routes = f"{size} blocks, {RATE_EVENTS_S:,} events/s, {ASKED_S} requests/s"
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
        at_once = measured.at_once[route]
        figures += [
            Figure(f"{row}: p50", cuts[49] * 1000, "ms").placed(row, "p50 ms"),
            Figure(f"{row}: p99", cuts[98] * 1000, "ms").placed(row, "p99 ms"),
            Figure(f"{row}: answers a second, asked without a pause", len(at_once) / measured.seconds, "/s").placed(
                row, "at most /s"
            ),
            Figure(f"{row}: p99, asked without a pause", statistics.quantiles(at_once, n=100)[98] * 1000, "ms").placed(
                row, "p99 ms then"
            ),
        ]
    # More than was sent: it had been behind before.
    sent = min(measured.alone, RATE_EVENTS_S)
    beside_at_once = f"{size} blocks: events applied beside questions asked without a pause"
    return [
        *figures,
        Figure(f"{size} blocks: events applied without questions", measured.alone, "/s"),
        Figure(f"{size} blocks: events applied beside them", measured.beside, "/s"),
        Figure(beside_at_once, measured.beside_at_once, "/s"),
        Figure(f"{size} blocks: most that the fold was behind", measured.behind_s_max * 1000, "ms"),
        at_most(f"{routes}: worst p99 of the five routes", p99 * 1000, "ms", P99_MS_MAX),
        at_most(f"{routes}: share of ingest lost", 1 - measured.beside / sent, "", LOSS_MAX),
    ]
