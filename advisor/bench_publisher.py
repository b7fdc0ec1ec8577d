"""The publishing side of `kvadvisor bench plane`, a process of its own: `python -m advisor.bench_publisher URL …`.

It publishes for so many seconds what `cycle` lays out, as fast as it may or at a given rate, then says on standard
output, as JSON, what it sent, and stays there to serve resends until its standard input ends.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator

import numpy as np
import structlog

from advisor.bench_stream import ChainStream
from event_plane.connect import open_publisher
from event_plane.publishing import BatchPublisher
from event_plane.schema import EventType, Namespace, Records
from event_plane.transport import Publisher

PRODUCER = 77
CYCLE_BLOCKS = 262_144
HANDED_OVER_MAX = 8_192
"""Events of one call: an engine's step brings many, whatever the size of a message."""
NAMESPACES = (Namespace(model="bench"),)
LOCATIONS = ("gpu:0",)


def cycle(blocks: int = CYCLE_BLOCKS) -> Records:
    """Stores of chains, then their removes from the tails: it can be repeated for ever."""
    stream = ChainStream()
    stream.grow(blocks)
    ids = np.arange(blocks)
    records = np.concatenate((stream.records(ids, EventType.STORE), stream.records(ids[::-1], EventType.REMOVE)))
    records["tier"] = 1
    records.flags.writeable = False
    return records


def parts(records: Records, events: int) -> Iterator[Records]:
    """`records` over and over, several messages of `events` at a time."""
    step = max(events, min(64 * events, HANDED_OVER_MAX))
    while True:
        for first in range(0, len(records), step):
            yield records[first : first + step]


def publish_for(publisher: Publisher, records: Records, events: int, seconds: float, rate: float | None) -> int:
    """Publish `records` for `seconds`, at most `rate` events/s. Returns the events published."""
    started_s = time.monotonic()
    sent = 0
    for part in parts(records, events):
        elapsed_s = time.monotonic() - started_s
        if elapsed_s >= seconds:
            return sent
        if rate is not None and sent > rate * elapsed_s:
            time.sleep((sent - rate * elapsed_s) / rate)
        publisher.publish_records(part, NAMESPACES, LOCATIONS)
        sent += len(part)
    raise AssertionError("they never end")


def attach(publisher: BatchPublisher, records: Records) -> int:
    """Publish single events until one is acknowledged: from then on nobody is outrun. Returns how many."""
    sent = 0
    while publisher.stat().acknowledged_sequence < 0:
        publisher.publish_records(records[:1], NAMESPACES, LOCATIONS, flush=True)
        sent += 1
        time.sleep(0.01)
    return sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--resend-url", default=None)
    parser.add_argument("--events", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rate", type=float, default=None)
    asked = parser.parse_args()
    # Standard output is what the parent reads.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    publisher = open_publisher(
        asked.url, asked.resend_url, producer=PRODUCER, flush_events=asked.events, window_wait_s=30.0
    )
    records = cycle()
    print("ready", flush=True)
    sys.stdin.readline()
    sent = attach(publisher, records)
    sent += publish_for(publisher, records, asked.events, asked.seconds, asked.rate)
    last = publisher.flush()
    print(json.dumps({"events": sent, "last": last}), flush=True)
    sys.stdin.readline()
    publisher.close()


if __name__ == "__main__":
    main()
