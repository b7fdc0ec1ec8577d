"""Adaptive batching for `kvadvisor bench plane`: messages a second and the longest wait, from 1 to 1 M events/s.

The rule runs in simulated time, five seconds of each load; then a real publisher says what a million events a second
and a lone event come to in real time.
"""

from __future__ import annotations

import time
from itertools import pairwise

import zmq

from advisor.bench_publisher import LOCATIONS, NAMESPACES, PRODUCER, cycle, publish_for
from event_plane.batching import MESSAGES_PER_S_MAX, Batcher, Columns, adaptive_rule
from event_plane.connect import open_publisher, open_subscriber
from event_plane.figures import Figure, at_most
from event_plane.schema import RECORD_COUNT_MAX
from event_plane.transport import Message

LOADS = (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)
INTERVAL_S = 1.0
SIMULATED_S = 5
SLICE_US = 1_000
LIVE_S = 2.0
MESSAGES_PER_S_GOAL = MESSAGES_PER_S_MAX + LOADS[-1] // RECORD_COUNT_MAX + 2
"""What the rule promises at the highest load (docs/transports.md)."""
WAIT_GOAL_S = INTERVAL_S + 0.25
"""The interval and what a thread may be late on a busy machine."""


def batching_rows() -> list[Figure]:
    figures: list[Figure] = []
    rates: list[float] = []
    waits_s: list[float] = []
    for load in LOADS:
        rate, wait_s = _simulate(load)
        rates.append(rate)
        waits_s.append(wait_s)
        figures.append(Figure(f"batching, simulated, {load:,} events/s: messages", rate, "1/s"))
        figures.append(Figure(f"batching, simulated, {load:,} events/s: longest wait", wait_s * 1e3, "ms"))
    figures.append(
        at_most("batching, simulated: most messages, 1 to 1 M events/s", max(rates), "1/s", MESSAGES_PER_S_GOAL)
    )
    figures.append(at_most("batching, simulated: longest wait, 1 to 1 M events/s", max(waits_s) * 1e3, "ms", 1_000))
    rate, live_load = _live_rate()
    name = f"batching, real time, {live_load / 1e6:.2g} M events/s: messages"
    figures.append(at_most(name, rate, "1/s", MESSAGES_PER_S_GOAL))
    figures.append(at_most("batching, real time: wait of a lone event", _live_wait_s() * 1e3, "ms", WAIT_GOAL_S * 1e3))
    return figures


def _simulate(load: int) -> tuple[float, float]:
    """Messages a second, and the longest wait of an event in seconds, under evenly spread events."""
    batcher = Batcher(adaptive_rule(round(INTERVAL_S * 1e6)), producer=PRODUCER, epoch=1)
    records = cycle(1_024)[:2_048]
    times_us = [round(number * 1e6 / load) for number in range(min(load, 1_000) * SIMULATED_S)]
    if load > 1_000:
        times_us = list(range(0, SIMULATED_S * 1_000_000, SLICE_US))
    each = max(1, load * SLICE_US // 1_000_000)
    closed = 0
    longest_us = 0
    waiting_since_us = 0
    for now_us, next_us in pairwise([*times_us, SIMULATED_S * 1_000_000]):
        at_us = now_us
        if batcher.due_us is None:
            waiting_since_us = now_us
        batches = batcher.add_columns(Columns(records[:each].copy(), NAMESPACES, LOCATIONS), now_us)
        while True:
            if batches:
                longest_us = max(longest_us, at_us - waiting_since_us)
                closed += len(batches)
                waiting_since_us = now_us
            due_us = batcher.due_us
            if due_us is None or due_us >= next_us:
                break
            at_us = due_us
            batches = batcher.tick(due_us)
    return closed / SIMULATED_S, longest_us / 1e6


def _live_rate() -> tuple[float, float]:
    """Messages and events a second of a real publisher asked for a million events a second."""
    publisher = open_publisher(f"memory://bench-batching-{time.monotonic_ns()}", producer=PRODUCER)
    try:
        started_s = time.monotonic()
        sent = publish_for(publisher, cycle(), 4_096, LIVE_S, LOADS[-1])
        took_s = time.monotonic() - started_s
        return (publisher.flush() + 1) / took_s, sent / took_s
    finally:
        publisher.close()


def _live_wait_s() -> float:
    """From the publishing of a lone event to its receipt."""
    url = f"memory://bench-batching-{time.monotonic_ns()}"
    publisher = open_publisher(url, producer=PRODUCER, flush_interval_s=INTERVAL_S)
    subscriber = open_subscriber("bench", url)
    try:
        started_s = time.monotonic()
        publisher.publish_records(cycle(1_024)[:1], NAMESPACES, LOCATIONS)
        while not any(isinstance(each, Message) for each in subscriber.receive(1)):
            zmq.select(subscriber.pollables(), [], [], 1.0)
        return time.monotonic() - started_s
    finally:
        subscriber.close()
        publisher.close()
