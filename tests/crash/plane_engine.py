"""An engine as a process: publishes for as long as it lives, and says what it holds when its standard input closes."""

from __future__ import annotations

import itertools
import json
import random
import sys
import threading
import time

import structlog

from event_plane.connect import open_publisher
from event_plane.schema import EventRecord, EventType, Namespace

NAMESPACE = Namespace(tenant="acme", model="tiny")
KEPT_MAX = 500
PERIOD_S = 0.005


def event(kind: EventType, block: int) -> EventRecord:
    return EventRecord(kind, 1, block, NAMESPACE, "gpu", depth=0, block_size=64, block_tokens=16)


class Engine:
    """Blocks come and go at random; now and then it states all it holds, or that it lost count."""

    def __init__(self, url: str, resend_url: str | None, producer: int) -> None:
        self._blocks: set[int] = set()
        self._lock = threading.Lock()
        self._chance = random.Random()
        self._publisher = open_publisher(
            url, resend_url, producer=producer, flush_events=10, flush_interval_s=0.05, window_wait_s=0.5,
            heartbeat_s=0.3, buffer_batches=64, snapshot_interval_s=0.1, on_snapshot=self._state_all,
        )  # fmt: skip

    def _state_all(self) -> None:
        with self._lock:
            self._publisher.publish_snapshot([event(EventType.STORE, block) for block in sorted(self._blocks)])

    def work(self, ending: threading.Event) -> None:
        self._state_all()
        for number in itertools.count():
            if ending.wait(PERIOD_S):
                return
            with self._lock:
                self._publisher.publish([*self._stores(), *self._removes()])
                if number % 400 == 399:
                    self._publisher.publish_lost("a queue overflowed")
            if number % 400 == 399:
                self._state_all()

    def _stores(self) -> list[EventRecord]:
        came = {self._chance.randrange(1, 5_000) for _ in range(5)}
        self._blocks |= came
        return [event(EventType.STORE, block) for block in came]

    def _removes(self) -> list[EventRecord]:
        gone = self._chance.sample(sorted(self._blocks), max(len(self._blocks) - KEPT_MAX, 0))
        self._blocks.difference_update(gone)
        return [event(EventType.REMOVE, block) for block in gone]

    def told(self) -> str:
        sequence = self._publisher.flush()
        with self._lock:
            return json.dumps({"epoch": self._publisher.epoch, "sequence": sequence, "blocks": sorted(self._blocks)})


def main() -> None:
    url, resend_url, producer = sys.argv[1:]
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # standard output is for answers
    ending = threading.Event()
    engine = Engine(url, resend_url or None, int(producer))
    working = threading.Thread(target=engine.work, args=(ending,), daemon=True)
    working.start()
    for line in sys.stdin:
        if line.startswith("quiet"):
            ending.set()
            working.join()
        # A snapshot may still be asked for: the last word is what was told last.
        print(engine.told(), flush=True)
    time.sleep(0.1)


if __name__ == "__main__":
    main()
