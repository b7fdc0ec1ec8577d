"""An engine that publishes for as long as a test needs it, and what its log must then hold."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from advisor.entries import EntryKind
from advisor.fold import Fold
from advisor.log import SqlLog
from event_plane.connect import open_publisher
from event_plane.publishing import BatchPublisher
from event_plane.schema import EventRecord, EventType, Namespace

NAMESPACE = Namespace(tenant="acme", model="tiny")
PRODUCER, EPOCH = 77, 5
KEPT = 300
"""Blocks that the engine keeps at a time."""


class Engine:
    """Stores blocks and removes old ones for as long as it runs; `blocks` is what it keeps."""

    def __init__(self, publisher: BatchPublisher) -> None:
        self.publisher = publisher
        self.blocks: set[int] = set()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Engine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        for first in itertools.count(1, 5):
            # Before a subscriber acknowledges, nothing else holds a publisher back.
            if self._ending.wait(0.01 if self.publisher.stat().acknowledging_subscribers else 0.05):
                return
            events = [self.event(EventType.STORE, block) for block in range(first, first + 5)]
            gone = range(max(first - KEPT, 1), max(first - KEPT + 5, 1))
            self.publisher.publish(events + [self.event(EventType.REMOVE, block) for block in gone])

    def event(self, kind: EventType, block: int) -> EventRecord:
        (self.blocks.add if kind is EventType.STORE else self.blocks.discard)(block)
        return EventRecord(kind, 1, block, NAMESPACE, "gpu", depth=0, block_size=64, block_tokens=16)


@contextmanager
def engine(url: str) -> Iterator[Engine]:
    options = {"epoch": EPOCH, "flush_events": 10, "flush_interval_s": 0.05, "window_wait_s": 0.5, "heartbeat_s": 0.5}
    with (
        closing(open_publisher(url, producer=PRODUCER, **options)) as publisher,  # type: ignore[arg-type]
        Engine(publisher) as running,
    ):
        yield running


def logged_sequences(folder: Path) -> list[int | None]:
    """Of the batches in the log of an advisor's folder, in its order."""
    with closing(SqlLog(folder / "log.db", read_only=True)) as log:
        return [entry.sequence for entry in log.read() if entry.kind is EntryKind.BATCH]


def require_each_batch_once(folder: Path, engine: Engine) -> None:
    """The log holds each batch exactly once, in order, and folds to what the engine, now stopped, keeps."""
    with closing(SqlLog(folder / "log.db", read_only=True)) as log:
        entries = list(log.read())
    sequences = [entry.sequence for entry in entries if entry.kind is EntryKind.BATCH]
    assert sequences == list(range(engine.publisher.last_sequence + 1))
    fold = Fold()
    for entry in entries:
        fold.apply(entry)
    wanted = sorted(engine.blocks)
    assert len(fold.index) == len(wanted) > 0
    assert [block for block in wanted if fold.index.match(NAMESPACE.namespace_id, 0, [block]) != 1] == []
    assert not fold.producers[PRODUCER].partial
