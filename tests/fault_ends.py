"""The ends between which `tests.faults` disturbs: producers that know what they placed, and the advisor's pipeline."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import zmq

from advisor.entries import EntryKind
from advisor.fold import Fold
from advisor.index import ArrayIndex
from advisor.intake import Intake, SourceFacts
from advisor.memory_log import MemoryLog
from advisor.pipeline import FoldThread, Group, LogThread
from advisor.replay import live_blocks
from advisor.turnstile import Turnstile
from event_plane.connect import open_publisher, open_subscriber
from event_plane.publishing import RESEND_END, BatchPublisher, PublisherOptions
from event_plane.schema import EventRecord, EventType, Namespace
from event_plane.sequence import SequenceGate
from tests.contract.transports import PATIENCE_S
from tests.faults import ZmqProxy

NAMESPACE: Final = Namespace(tenant="acme", model="tiny")
PROBE_INTERVAL_S: Final = 0.2
ENGINE_TOPIC: Final = b"kv-events"


class Core:
    """A producer of ours: a publisher and the blocks that it placed, which it lists when a snapshot is asked for.

    What it does follows from `seed`. Used by one thread; the publisher's own thread asks for snapshots.
    """

    def __init__(self, producer: int, url: str, resend_url: str | None, seed: int, options: PublisherOptions) -> None:
        self.producer = producer
        self.snapshots = 0
        self._place = (url, resend_url)
        self._options = options
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._placed: dict[int, EventRecord] = {}
        self._lives = 0
        self._next = 1
        self.publisher = self._open()

    @property
    def blocks(self) -> list[int]:
        """Hashes placed now, sorted."""
        return sorted(self._placed)

    def store(self, count: int) -> None:
        """Place blocks, each below one that is there or at the root."""
        with self._lock:
            events = []
            for _ in range(count):
                parent = self._random.choice([0, *self._placed])
                event = EventRecord(EventType.STORE, 1, self._next, NAMESPACE, "gpu", parent, block_size=64)
                self._placed[self._next] = event
                self._next += 1
                events.append(event)
            self.publisher.publish(events)
        self.publisher.flush()

    def remove(self, count: int) -> None:
        with self._lock:
            gone = self._random.sample(list(self._placed), min(count, len(self._placed)))
            self.publisher.publish([self._removed(self._placed.pop(block)) for block in gone])
        self.publisher.flush()

    def clear(self) -> None:
        with self._lock:
            self._placed = {}
            self.publisher.publish([EventRecord(EventType.CLEAR, tier=0)])
        self.publisher.flush()

    def list_all(self) -> None:
        """Publish a snapshot."""
        with self._lock:
            self.snapshots += 1
            self.publisher.publish_snapshot(list(self._placed.values()))

    def restart(self, *, keep: bool) -> None:
        """Begin another life on the same ports: with nothing placed, or with what was and a snapshot that says so."""
        self.publisher.close()
        self._placed = self._placed if keep else {}
        self.publisher = self._open()
        if keep:
            self.list_all()

    def close(self) -> None:
        self.publisher.close()

    def _open(self) -> BatchPublisher:
        self._lives += 1
        options: PublisherOptions = {**self._options, "epoch": self._lives, "on_snapshot": self.list_all}
        return open_publisher(*self._place, producer=self.producer, **options)

    def _removed(self, placed: EventRecord) -> EventRecord:
        return EventRecord(EventType.REMOVE, placed.tier, placed.sequence_hash, placed.namespace, placed.location)


def stored(hashes: Sequence[int], parent: int | None = None, **more: object) -> dict[str, object]:
    """vLLM's event of that; `more` says what differs."""
    return {
        "type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": parent,
        "token_ids": list(range(16 * len(hashes))), "block_size": 16, "medium": "GPU",
    } | more  # fmt: skip


def removed(hashes: Sequence[int], **more: object) -> dict[str, object]:
    """vLLM's event of that; `more` says what differs."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"} | more


class Engine:
    """A foreign producer with vLLM's frames: numbers from 0 in each life, a ROUTER that resends what its buffer holds.

    What it does follows from `seed`. Nothing marks a restart.
    """

    def __init__(self, ports: tuple[int, int], seed: int, buffer_batches: int) -> None:
        self.last = -1
        self.holed_resends = 0
        """How many resends to come leave every second batch out, and say that they are whole."""
        self._ports = ports
        self._random = random.Random(seed)
        self._placed: set[int] = set()
        self._next = 1
        self._clock = 0.0
        self._lock = threading.Lock()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_batches)
        self._open()

    @property
    def blocks(self) -> list[int]:
        """Hashes placed now, sorted."""
        return sorted(self._placed)

    def store(self, count: int) -> None:
        """Store a chain of blocks."""
        hashes = list(range(self._next, self._next + count))
        self._next += count
        parent = self._random.choice([None, *self._placed])
        self._placed.update(hashes)
        self.publish(stored(hashes, parent))

    def remove(self, count: int) -> None:
        gone = self._random.sample(sorted(self._placed), min(count, len(self._placed)))
        self._placed.difference_update(gone)
        self.publish(removed(gone))

    def clear(self) -> None:
        self._placed = set()
        self.publish({"type": "AllBlocksCleared"})

    def publish(self, *events: dict[str, object], rank: int = 0, sequence: int | None = None) -> None:
        """One message of these events; `sequence` where the rank counts its own."""
        self._clock += 0.001
        payload = msgspec.msgpack.encode([self._clock, events, rank])
        self.last = self.last + 1 if sequence is None else sequence
        with self._lock:
            self._buffer.append((self.last, payload))
        self._pub.send_multipart([ENGINE_TOPIC, self.last.to_bytes(8, "big"), payload])

    def stop(self) -> None:
        """End this life: what it placed is gone with it."""
        self._stopping.set()
        self._serving.join()
        self._context.destroy(linger=0)

    def start(self) -> None:
        """Begin the next one, on the same ports."""
        self._placed = set()
        self._buffer.clear()
        self.last = -1
        self._open()

    close = stop

    def _open(self) -> None:
        self._context = zmq.Context()
        self._pub, self._router = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        for each, port in zip((self._pub, self._router), self._ports, strict=True):
            each.bind(f"tcp://127.0.0.1:{port}")
        self._stopping = threading.Event()
        self._serving = threading.Thread(target=self._serve, name="engine")
        self._serving.start()

    def _serve(self) -> None:
        while not self._stopping.is_set():
            if self._router.poll(20):
                peer, empty, start = self._router.recv_multipart()
                with self._lock:
                    held = [each for each in self._buffer if each[0] >= int.from_bytes(start, "big")]
                    if self.holed_resends:
                        self.holed_resends -= 1
                        held = held[::2]
                for sequence, payload in [*held, (RESEND_END, b"")]:
                    self._router.send_multipart([peer, empty, ENGINE_TOPIC, sequence.to_bytes(8, "big"), payload])


class Advisor:
    """The service's intake, log and fold on a log in memory, with a gate that soon asks again."""

    def __init__(
        self,
        url: str,
        resend_url: str | None,
        facts: SourceFacts,
        probe_interval_s: float = PROBE_INTERVAL_S,
        wait_s: float = 0.1,
    ) -> None:
        """`wait_s`: for each resend; what does not come in a few times that is given up, also on a crowded machine."""
        self.log = MemoryLog()
        self.lock = Turnstile()
        self.fold = Fold(ArrayIndex(lock=self.lock))
        wait_us = round(wait_s * 1_000_000)
        gate = SequenceGate(resend_wait_us=wait_us, snapshot_wait_us=3 * wait_us)
        self.intake = Intake([facts], gate)
        self.faults: list[BaseException] = []
        self._stopping = threading.Event()
        groups: queue.Queue[Group] = queue.Queue(maxsize=64)
        subscriber = open_subscriber(facts.name, url, resend_url)
        log_thread = LogThread(
            self.log,
            self.intake,
            [subscriber],
            groups,
            batches_max=16,
            stopping=self._stopping,
            fail=self._fail,
            probe_interval_s={facts.name: probe_interval_s},
        )
        fold_thread = FoldThread(
            self.fold,
            self.lock,
            Intake([facts]),
            groups,
            log_thread.unapplied,
            ended=log_thread.ended,
            fail=self._fail,
            applied=lambda _: None,
        )
        self._threads: list[threading.Thread] = [log_thread, fold_thread]
        for thread in self._threads:
            thread.start()

    def wait_for(self, condition: Callable[[], bool], what: Callable[[], str]) -> None:
        """Until `condition` holds under the fold's lock; fails the test after a long time, or at once with a thread."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with self.lock:
                if condition():
                    return
                assert time.monotonic() < deadline, what()
            assert not self.faults, self.faults
            time.sleep(0.005)

    def wait_for_all_of(self, core: Core) -> None:
        """Until the fold has come to the last batch of `core` and holds what it placed."""

        def caught_up() -> bool:
            state = self.fold.producers.get(core.producer)
            last = (core.publisher.epoch, core.publisher.last_sequence)
            return state is not None and (state.epoch, state.sequence) == last and self.blocks() == core.blocks

        self.wait_for(caught_up, lambda: described(self.fold, core.blocks))

    def blocks(self) -> list[int]:
        return live_blocks(self.fold)

    def close(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def check_log(self) -> None:
        """After `close`: each batch is in the log once, and folding it again ends in the same state."""
        assert not self.faults, self.faults
        entries = list(self.log.read())
        batches = Counter((e.producer, e.epoch, e.sequence) for e in entries if e.kind is EntryKind.BATCH)
        assert [key for key, count in batches.items() if count > 1] == []
        again = Fold()
        for entry in entries:
            again.apply(entry)
        assert again.digest() == self.fold.digest()
        self.fold.index.check()

    def _fail(self, fault: BaseException) -> None:
        self.faults.append(fault)
        self._stopping.set()


def attach(lanes: ZmqProxy, publish: Callable[[], None]) -> None:
    """Publish until a batch comes by and somebody listens: faults before would only be a late start."""
    deadline = time.monotonic() + PATIENCE_S
    while not lanes.attached.wait(0.01):
        assert time.monotonic() < deadline
        publish()


def described(fold: Fold, expected: Sequence[int]) -> str:
    """What differs, for a test that waited in vain."""
    live = live_blocks(fold)
    missing, left = sorted(set(expected) - set(live)), sorted(set(live) - set(expected))
    return f"missing {missing[:20]}, left over {left[:20]}; producers {list(fold.producers.values())}"
