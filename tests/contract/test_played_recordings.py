"""What is played on a transport and recorded there again is the same recording, on each of the real transports."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from advisor.foreign import SourceFacts
from advisor.recorder import Limits, record_batches, record_messages
from event_plane.connect import open_carrier, open_subscriber
from event_plane.credentials import NO_CREDENTIALS
from event_plane.memory_transport import MemoryCarrier
from event_plane.parquet import ParquetRecorder, read_parquet
from event_plane.played import Played, read_played
from event_plane.playing import Player
from event_plane.publishing import Ask, Carrier, Request
from event_plane.recording import CaptureRecorder
from event_plane.schema import RECORD_DTYPE, Batch, BatchKind, Namespace, SnapshotRange
from event_plane.subject_carrier import SubjectCarrier
from event_plane.transport import ResendEnd, parse_url
from event_plane.wire import encode
from tests.contract.transports import PATIENCE_S, Place, batches_of, receive_until
from tests.nats_server import NatsServer


def batch_of(producer: int, epoch: int, sequence: int, events: int = 3, **facts: object) -> Batch:
    records = np.zeros(events, RECORD_DTYPE)
    records["event_type"], records["tier"], records["sequence_hash_lo"] = 1, 3, np.arange(events) + sequence * 10
    fields = {"namespaces": (Namespace(model="m"),), "locations": ("nvme0",), "timestamp_us": 1_000 + sequence} | facts
    return Batch(producer, epoch, sequence, records, **fields)  # type: ignore[arg-type]


def write(path: Path, batches: list[Batch]) -> Path:
    with ParquetRecorder(path) as recorder:
        for batch in batches:
            recorder.write(batch, "engine")
    return path


def by_producer(path: Path) -> dict[int, list[bytes]]:
    found: dict[int, list[bytes]] = {}
    for recorded in read_parquet(path):
        found.setdefault(recorded.batch.producer, []).append(encode(recorded.batch))
    return found


@contextmanager
def in_thread(work: Callable[[], object]) -> Iterator[None]:
    """Raises what `work` raised."""
    faults: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as fault:  # noqa: BLE001 -- raised again below
            faults.append(fault)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join(2 * PATIENCE_S)
    assert not thread.is_alive()
    if faults:
        raise faults[0]


def record_parquet(place: Place, out: Path, events: int | None, stopping: threading.Event | None = None) -> None:
    subscriber = open_subscriber("engine", *place)
    with ParquetRecorder(out) as recorder:
        limits = Limits(events, PATIENCE_S, stopping or threading.Event())
        record_batches(subscriber, SourceFacts("engine"), recorder, limits, lambda _: None)


def play(place: Place, played: list[Played]) -> None:
    def opening(each: Played) -> Carrier:
        return open_carrier(*place, producer=each.producer or 0, epoch=each.epoch)

    shared = not place[0].startswith(("nats", "jetstream"))
    with Player(opening, shared=shared) as player:
        assert player.wait_subscriber(played[0], PATIENCE_S)
        for each in played:
            player.send(each)
        player.finish(0.5)


def test_played_recording_is_recorded_again_to_the_byte(place: Place, tmp_path: Path) -> None:
    first = [batch_of(7, 3, sequence) for sequence in range(40)]
    first.insert(20, batch_of(8, 1, 0, kind=BatchKind.SNAPSHOT_BEGIN, events=0, snapshot=SnapshotRange()))
    first.insert(30, batch_of(8, 1, 1, kind=BatchKind.SNAPSHOT_END, events=0, snapshot=SnapshotRange()))
    next_life = [batch_of(7, 9, sequence, extra=({"lora": sequence},)) for sequence in range(20)]
    recording = write(tmp_path / "played.parquet", first + next_life)
    out = tmp_path / "again.parquet"
    with in_thread(lambda: record_parquet(place, out, 180)):
        play(place, list(read_played(recording)))
    assert by_producer(out) == by_producer(recording)


class WatchedCarrier(MemoryCarrier):
    """Tells when batch 5 is asked for."""

    def __init__(self, name: str, asked: threading.Event) -> None:
        super().__init__(name)
        self._asked = asked

    def wait(self, timeout_s: float | None) -> list[Request]:
        requests = super().wait(timeout_s)
        if any(isinstance(request, Ask) and request.from_sequence == 5 for request in requests):
            self._asked.set()
        return requests


@pytest.mark.parametrize("place", ["memory"], indirect=True)
def test_what_a_recorder_declared_lost_is_missed_again(place: Place, tmp_path: Path) -> None:
    lost = Batch(7, 3, 5, np.empty(0, RECORD_DTYPE), BatchKind.LOST, snapshot=SnapshotRange(through=8))
    before, after = [batch_of(7, 3, n) for n in range(5)], [batch_of(7, 3, n) for n in range(9, 12)]
    recording = write(tmp_path / "played.parquet", [*before, lost, *after])
    played = list(read_played(recording))
    assert [each.sequence for each in played] == [0, 1, 2, 3, 4, 9, 10, 11]
    out = tmp_path / "again.parquet"
    asked, stopping = threading.Event(), threading.Event()
    with in_thread(lambda: record_parquet(place, out, None, stopping)):
        name = parse_url(place[0]).path
        with Player(lambda _: WatchedCarrier(name, asked), shared=True) as player:
            assert player.wait_subscriber(played[0], PATIENCE_S)
            for each in played:
                player.send(each)
            deadline = time.monotonic() + PATIENCE_S
            while not asked.is_set() and time.monotonic() < deadline:
                player.serve(0.01)
        stopping.set()
    assert by_producer(out) == by_producer(recording)


@pytest.mark.parametrize("place", ["zmq+tcp", "memory", "nats"], indirect=True)
def test_subscriber_that_comes_late_is_sent_what_it_missed(place: Place) -> None:
    messages = [Played(0, encode(batch_of(7, 3, n)), n, 7, 3) for n in range(200)]
    sent, done = threading.Event(), threading.Event()

    def serve() -> None:
        with Player(lambda each: open_carrier(*place, producer=7, epoch=3), shared=True) as player:
            for each in messages:
                player.send(each)
            sent.set()
            deadline = time.monotonic() + PATIENCE_S
            while not done.is_set() and time.monotonic() < deadline:
                player.serve(0.02)

    with in_thread(serve):
        assert sent.wait(PATIENCE_S)
        subscriber = open_subscriber("engine", *place)
        try:
            assert subscriber.ask_resend(50, 1, 7)
            received = receive_until(subscriber, lambda got: ResendEnd("engine", 1) in got)
        finally:
            done.set()
            subscriber.close()
    # The server may still be handing out what was published when the subscriber came.
    assert [batch.sequence for batch in batches_of(received)][-150:] == list(range(50, 200))


def vllm_messages(count: int) -> list[list[bytes]]:
    event = {"type": "BlockStored", "block_hashes": [2**63 + 5], "parent_block_hash": None, "token_ids": [1] * 16,
             "block_size": 16, "medium": "GPU"}  # fmt: skip
    return [
        [b"kv@pod-%d" % (n % 3), struct.pack(">Q", n // 3), msgspec.msgpack.encode([1.0 + n, [event], 0])]
        for n in range(count)
    ]


def write_capture(path: Path, messages: list[list[bytes]]) -> Path:
    with CaptureRecorder(path) as recorder:
        for frames in messages:
            recorder.write(frames)
    return path


def record_capture(place: Place, out: Path, messages: int, *, numbered: bool) -> None:
    subscriber = open_subscriber("engine", *place)
    with CaptureRecorder(out) as recorder:
        limits = Limits(messages, PATIENCE_S, threading.Event())
        record_messages(subscriber, recorder, limits, lambda _: None, numbered=numbered)


@pytest.mark.parametrize("place", ["zmq+tcp", "zmq+ipc"], indirect=True)
def test_messages_of_an_engine_are_played_and_recorded_verbatim(place: Place, tmp_path: Path) -> None:
    capture = write_capture(tmp_path / "engine.cap", vllm_messages(300))
    out = tmp_path / "again.cap"
    with in_thread(lambda: record_capture(place, out, 300, numbered=True)):
        play(place, list(read_played(capture)))
    assert out.read_bytes() == capture.read_bytes()


def test_messages_of_nats_go_to_their_own_subjects(server: NatsServer, tmp_path: Path) -> None:
    event = {"publisher_id": 5, "sequence": 0, "published_at": 1, "topic": "kv", "payload": msgspec.msgpack.encode([])}
    messages = [
        [b"namespace.n%d.component.c.endpoint.e.kv-events" % (n % 2), msgspec.msgpack.encode(event | {"sequence": n})]
        for n in range(100)
    ]
    capture = write_capture(tmp_path / "dynamo.cap", messages)
    out = tmp_path / "again.cap"
    place = (server.url("namespace.*.component.c.endpoint.e.kv-events"), None)
    standing = threading.Event()

    def record() -> None:
        subscriber = open_subscriber("engine", *place)
        deadline = time.monotonic() + PATIENCE_S
        while not subscriber.connection().connected and time.monotonic() < deadline:
            time.sleep(0.01)
        standing.set()
        with CaptureRecorder(out) as recorder:
            limits = Limits(100, PATIENCE_S, threading.Event())
            record_messages(subscriber, recorder, limits, lambda _: None, numbered=False)

    with in_thread(record):
        assert standing.wait(PATIENCE_S)
        url = parse_url(server.url("any"))
        with Player(lambda _: SubjectCarrier(url, NO_CREDENTIALS), shared=True) as player:
            for each in read_played(capture):
                player.send(each)
    assert out.read_bytes() == capture.read_bytes()
