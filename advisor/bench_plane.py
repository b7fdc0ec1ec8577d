"""`kvadvisor bench plane`: dialects from wire to columns, transports from publish to applied, batching under load."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

from advisor.bench_batching import batching_rows
from advisor.bench_decode import decode_rows
from advisor.bench_flat import RETENTION_BYTES
from advisor.bench_throughput import NoServer, measure
from advisor.index.warm import warm
from event_plane.figures import Figure, at_least, at_most

MILLION = 1_000_000
TRANSPORTS = ("memory", "zmq+ipc", "zmq+tcp", "nats", "jetstream")
MESSAGE_EVENTS = (1, 64, 512, 4096)
GOALS = {"sql": 1.0, "segments": 2.0}
"""M events/s over ZeroMQ at 512 events a message, by kind of log."""
LOG_NAMES = {"sql": "SQLite", "segments": "segments"}
GOAL_ROUNDS = 3
FLAT_SECONDS = 600.0
FLAT_GROWTH_MAX = 0.1
FLAT_LOG_SHARE_MAX = 1.25
"""Of the retention: a log drops in pieces, and only behind a checkpoint."""


def run(quick: bool) -> list[Figure]:
    """About fifteen minutes, ten of them for whether memory and log stay flat; `quick` leaves those out."""
    warm()
    seconds = 1.0 if quick else 4.0
    figures = decode_rows(quick) + batching_rows()
    for kind, goal in GOALS.items():
        figures.append(_goal_row(kind, goal, seconds, 1 if quick else GOAL_ROUNDS))
    transports = ("zmq+tcp", "jetstream") if quick else TRANSPORTS
    sizes = (512,) if quick else MESSAGE_EVENTS
    for transport in transports:
        for events in sizes:
            figures += _rows(transport, events, seconds)
    return figures + _flat_rows(quick)


def _goal_row(kind: str, goal: float, seconds: float, rounds: int) -> Figure:
    rates = [measure("zmq+tcp", kind, 512, seconds).events_per_s for _ in range(rounds)]
    name = f"ZeroMQ, 512 events a message, logged in {LOG_NAMES[kind]} and applied"
    return at_least(name, statistics.median(rates) / MILLION, "M events/s", goal)


def _rows(transport: str, events: int, seconds: float) -> list[Figure]:
    rows = []
    for kind in GOALS:
        name = f"{transport}, {events:,} events a message, {LOG_NAMES[kind]}"
        try:
            measured = measure(transport, kind, events, seconds)
        except NoServer:
            return [Figure(name, None, "events/s", note="no nats-server here")]
        rows.append(Figure(name, measured.events_per_s, "events/s"))
    return rows


def _flat_rows(quick: bool) -> list[Figure]:
    """Both kinds of log at once, each in its process."""
    if quick:
        note = "not in --quick"
        return [row for kind in GOALS for row in _flatness(kind, None, None, note)]
    commands = {
        kind: [sys.executable, "-m", "advisor.bench_flat", kind, "--seconds", str(FLAT_SECONDS)] for kind in GOALS
    }
    running = {
        kind: subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for kind, command in commands.items()
    }
    rows = []
    for kind, process in running.items():
        text, _ = process.communicate()
        if process.returncode:
            rows += _flatness(kind, None, None, f"ended with status {process.returncode}")
            continue
        flat = json.loads(text)
        rows += _flatness(kind, flat["resident_growth"], flat["log_bytes_max"] / RETENTION_BYTES)
    return rows


def _flatness(kind: str, growth: float | None, share: float | None, note: str = "") -> list[Figure]:
    name = f"ten minutes at 100 k events/s, {LOG_NAMES[kind]}"
    return [
        at_most(f"{name}: growth of memory", growth, "", FLAT_GROWTH_MAX, note),
        at_most(f"{name}: log on disk over its retention", share, "", FLAT_LOG_SHARE_MAX, note),
    ]
