"""The whole advisor service on real sockets and a real log: publisher to folded state, through restarts."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from advisor.entries import EntryKind, OperatorEntry
from advisor.exposition import render_metrics
from advisor.fold import Fold
from advisor.log import SqlLog
from advisor.reader import ServiceReader, event_view
from advisor.service import AdvisorService
from advisor.settings import AdvisorSettings, PolicySettings, SourceSettings
from advisor.views import Check
from event_plane import wire
from event_plane.connect import open_publisher
from event_plane.publishing import BatchPublisher
from event_plane.schema import BatchKind, EventRecord, EventType, Namespace
from tests.ports import free_ports

NAMESPACE = Namespace(tenant="acme", model="tiny")
PRODUCER = 77


def eventually(holds: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def stores(hashes: range) -> list[EventRecord]:
    return [
        EventRecord(EventType.STORE, 1, h, NAMESPACE, "gpu", h - 1, depth=h - 1, block_size=64, block_tokens=16)
        for h in hashes
    ]


@pytest.fixture
def urls() -> tuple[str, str]:
    publish, resend = free_ports(2)
    return f"zmq+tcp://127.0.0.1:{publish}", f"zmq+tcp://127.0.0.1:{resend}"


@pytest.fixture
def publisher(urls: tuple[str, str]) -> Iterator[BatchPublisher]:
    opened = open_publisher(*urls, producer=PRODUCER, epoch=5, flush_events=10, flush_interval_s=1.0)
    yield opened
    opened.close()


def settings_for(folder: Path, urls: tuple[str, str], **more: object) -> AdvisorSettings:
    source = SourceSettings(name="core", url=urls[0], resend_url=urls[1])
    return AdvisorSettings(directory=folder, sources=(source,), tick_interval_s=0.1, **more)  # type: ignore[arg-type]


def fold_log(folder: Path, *, only: EntryKind | None = None) -> Fold:
    log, fold = SqlLog(folder / "log.db", read_only=True), Fold()
    for entry in log.read():
        if only is None or entry.kind is only:
            fold.apply(entry)
    log.close()
    return fold


def test_published_blocks_are_folded_shown_and_acknowledged(
    tmp_path: Path, urls: tuple[str, str], publisher: BatchPublisher
) -> None:
    with AdvisorService(settings_for(tmp_path, urls)) as service:
        publisher.publish(stores(range(1, 101)))
        last = publisher.flush()
        eventually(lambda: len(service.fold.index) == 100, "100 blocks")
        eventually(lambda: publisher.stat().acknowledged_sequence == last, "acknowledgement of the last batch")
        reader = ServiceReader(service)
        (heard,) = [check.text for check in reader.checks() if check.name == "source core"]
        assert re.fullmatch(r"last message \d+ s ago", heard)
        summary = reader.summary()
        assert (summary.blocks, summary.block_bytes, summary.tiers[0].blocks, summary.ready) == (100, 6400, 100, True)
        assert [(p.name, p.state, p.sequence, p.blocks) for p in reader.producers()] == [("core", "live", last, 100)]
        page = reader.blocks(limit=60, tenant="acme")
        rest = reader.blocks(limit=60, after=page.next_cursor)
        assert len(page.blocks) == 60
        assert len(rest.blocks) == 40
        assert rest.next_cursor is None
        assert {block.placements[0].place for block in page.blocks} == {"core/gpu"}
        match = service.fold.index.match(NAMESPACE.namespace_id, 0, list(range(1, 120)))
    assert match == 100


def source_check(service: AdvisorService) -> Check:
    (check,) = [check for check in ServiceReader(service).checks() if check.name == "source core"]
    return check


def test_source_that_stands_and_was_never_heard_of_is_ready_and_says_what_to_look_at(
    tmp_path: Path, urls: tuple[str, str], publisher: BatchPublisher
) -> None:
    with AdvisorService(settings_for(tmp_path, urls)) as service:
        eventually(lambda: source_check(service).ok, "the connection")
        text = source_check(service).text
    assert text == f"nothing received yet from {urls[0]}: is the engine running with KV events on?"
    assert publisher.last_sequence == -1


def test_source_that_is_away_is_not_ready_and_says_why_until_it_is_back(
    tmp_path: Path, urls: tuple[str, str]
) -> None:
    with AdvisorService(settings_for(tmp_path, urls)) as service:
        reader = ServiceReader(service)
        eventually(lambda: not source_check(service).ok, "nobody answers")
        assert source_check(service).text.startswith(f"{urls[0]} does not answer")
        assert not reader.summary().ready
        assert b'kvadvisor_source_connected{source="core"} 0.0' in render_metrics(service, reader)
        publisher = open_publisher(*urls, producer=PRODUCER, epoch=5)
        try:
            eventually(lambda: source_check(service).ok, "the publisher")
            shown = render_metrics(service, reader)
        finally:
            publisher.close()
        for sample in (b"connected", b"gaps_open", b"snapshots_asked_total", b"heartbeats_total"):
            assert b'kvadvisor_source_%b{source="core"}' % sample in shown
        assert b'kvadvisor_source_connected{source="core"} 1.0' in shown
        eventually(lambda: not source_check(service).ok, "the publisher gone")


def test_what_was_published_before_the_service_came_is_asked_for_again(
    tmp_path: Path, urls: tuple[str, str], publisher: BatchPublisher
) -> None:
    publisher.publish(stores(range(1, 101)))
    publisher.flush()
    with AdvisorService(settings_for(tmp_path, urls)) as service:
        eventually(lambda: len(service.fold.index) == 100, "100 blocks")
        assert not service.fold.producers[PRODUCER].partial


def test_restart_folds_the_log_to_the_same_state_and_takes_up_what_it_missed(
    tmp_path: Path, urls: tuple[str, str], publisher: BatchPublisher
) -> None:
    with AdvisorService(settings_for(tmp_path, urls)) as service:
        publisher.publish(stores(range(1, 51)))
        publisher.flush()
        eventually(lambda: len(service.fold.index) == 50, "50 blocks")
        service.submit(OperatorEntry("test", "pause")).result()
    before = service.fold.digest()
    assert fold_log(tmp_path).digest() == before
    publisher.publish(stores(range(51, 81)))
    publisher.flush()
    with AdvisorService(settings_for(tmp_path, urls)) as again:
        eventually(lambda: len(again.fold.index) == 80, "80 blocks")
        assert again.term == service.term + 1
        assert "" in again.fold.paused
        assert not again.fold.producers[PRODUCER].partial
    assert fold_log(tmp_path).digest() == again.fold.digest()


def test_publishers_new_life_clears_what_the_old_one_placed(tmp_path: Path, urls: tuple[str, str]) -> None:
    with AdvisorService(settings_for(tmp_path, urls)) as service:
        for epoch, hashes in ((1, range(1, 31)), (2, range(1, 11))):
            publisher = open_publisher(*urls, producer=PRODUCER, epoch=epoch, flush_events=10)
            publisher.publish(stores(hashes))

            def placed(publisher: BatchPublisher = publisher, count: int = len(hashes)) -> bool:
                # One more batch each time: what the reconnecting subscriber missed shows as a gap only then.
                publisher.publish(stores(range(1, 2)), flush=True)
                return len(service.fold.index) == count

            eventually(placed, f"blocks of epoch {epoch}")
            publisher.close()
        assert service.fold.producers[PRODUCER].epochs_closed == 1


def test_settings_changes_and_ticks_are_in_the_log(tmp_path: Path, urls: tuple[str, str]) -> None:
    for admission in ("touch-2", "touch-3"):
        changed = settings_for(tmp_path, urls, policy=PolicySettings(admission=admission))
        with AdvisorService(changed) as service:
            eventually(lambda: service.fold.now_us > 0, "a tick")
    fold = fold_log(tmp_path)
    assert fold.limits.admission == "touch-3"
    assert fold.digest() == service.fold.digest()


class RawPublisher:
    """A PUB socket that sends what it is told, in any order, and answers no resend."""

    def __init__(self, url: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.bind(url.removeprefix("zmq+"))

    def send(self, sequence: int, payload: bytes, topic: bytes = b"kv-events") -> None:
        self._socket.send_multipart((topic, sequence.to_bytes(8, "big"), payload))

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


@pytest.fixture
def raw(urls: tuple[str, str]) -> Iterator[RawPublisher]:
    opened = RawPublisher(urls[0])
    yield opened
    opened.close()


def our_batch(sequence: int, hashes: range) -> bytes:
    from event_plane.schema import Batch, BatchTables, to_records

    tables = BatchTables()
    records = to_records(stores(hashes), tables, sequence * 100)
    return wire.encode(
        Batch(
            PRODUCER, 5, sequence, records, namespaces=tuple(tables.namespaces), locations=tuple(tables.locations)
        )
    )


def send_until(raw: RawPublisher, messages: list[tuple[int, bytes]], holds: Callable[[], bool], what: str) -> None:
    """A subscriber that joins late misses the first sends: send again until `holds`, which doubles are no harm to."""

    def sent() -> bool:
        for sequence, payload in messages:
            raw.send(sequence, payload)
        time.sleep(0.05)
        return holds()

    eventually(sent, what)


def test_doubled_and_reordered_batches_change_nothing(tmp_path: Path, urls: tuple[str, str], raw: RawPublisher) -> None:
    batches = [(s, our_batch(s, range(1 + 10 * s, 11 + 10 * s))) for s in range(6)]
    shuffled = [batches[i] for i in (2, 0, 0, 1, 5, 3, 2, 4, 0, 5)]
    with AdvisorService(settings_for(tmp_path, urls)) as service:
        send_until(raw, shuffled, lambda: len(service.fold.index) == 60, "60 blocks")
        send_until(raw, shuffled, lambda: sum(service.log_thread.intake.duplicates.values()) > 20, "duplicates")  # type: ignore[union-attr]
        assert service.fold.events_total == 60
        assert {block.touches for block in service.fold.index.page(limit=1_000)[0]} == {1}
    batches_only = fold_log(tmp_path, only=EntryKind.BATCH)
    assert batches_only.producers[PRODUCER].batches == 6
    assert not batches_only.producers[PRODUCER].partial


def stored(hashes: list[int], at: float) -> bytes:
    event = {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None,
        "token_ids": list(range(16 * len(hashes))), "block_size": 16, "medium": "GPU",
    }  # fmt: skip
    return msgspec.msgpack.encode([at, [event], 0])


def test_foreign_gap_that_nobody_fills_clears_the_producer_and_marks_it_partial(
    tmp_path: Path, urls: tuple[str, str], raw: RawPublisher
) -> None:
    with AdvisorService(settings_for(tmp_path, urls)) as service:
        send_until(raw, [(0, stored([1, 2], 0.0))], lambda: len(service.fold.index) == 2, "2 blocks")
        raw.send(3, stored([41, 42, 43], 3.0))
        (state,) = service.fold.producers.values()
        eventually(lambda: state.partial and len(service.fold.index) == 3, "the gap given up")
        assert state.note.startswith("batches 1–2 could not be had")
        assert {b.key.sequence_hash for b in service.fold.index.page(limit=1_000)[0]} == {41, 42, 43}
    log = SqlLog(tmp_path / "log.db", read_only=True)
    batches = [entry for entry in log.read() if entry.kind is EntryKind.BATCH]
    log.close()
    assert [event_view(entry).text for entry in batches] == ["2 store", "lost: batches 1–2", "3 store"]
    lost = [wire.decode(entry.payload) for entry in batches if entry.sequence == 1]
    assert [(b.kind, b.snapshot.through if b.snapshot else None) for b in lost] == [(BatchKind.LOST, 2)]


def test_gap_older_than_the_buffer_is_healed_by_the_producers_snapshot(
    tmp_path: Path, urls: tuple[str, str]
) -> None:
    held = stores(range(1, 61))
    core = open_publisher(
        *urls, producer=PRODUCER, epoch=5, flush_events=10, buffer_batches=2, heartbeat_s=0.2,
        on_snapshot=lambda: core.publish_snapshot(held),
    )  # fmt: skip
    try:
        for first in range(1, 61, 10):
            core.publish(stores(range(first, first + 10)), flush=True)
        with AdvisorService(settings_for(tmp_path, urls)) as service:
            eventually(lambda: len(service.fold.index) == 60, "the snapshot")
            with service.lock:  # its end is folded whole
                state = service.fold.producers[PRODUCER]
                assert (state.snapshots, state.partial, state.gaps) == (1, False, 0)
            thread = service.log_thread
            assert thread is not None
            assert thread.intake.snapshots[PRODUCER] >= 1
            assert service.fold.recomputed == 0
            core.publish(stores(range(61, 71)), flush=True)
            eventually(lambda: len(service.fold.index) == 70, "what follows the snapshot")
            eventually(lambda: core.stat().acknowledged_sequence == core.last_sequence, "acknowledgement")
            eventually(lambda: thread.intake.heartbeats["core"] > 0, "a heartbeat")
    finally:
        core.close()
    assert fold_log(tmp_path).digest() == service.fold.digest()


def test_garbage_is_counted_and_the_stream_goes_on(tmp_path: Path, urls: tuple[str, str], raw: RawPublisher) -> None:
    good = our_batch(0, range(1, 11))
    flipped = bytearray(our_batch(1, range(11, 21)))
    flipped[200] ^= 1
    garbage = [(0, good), (1, bytes(flipped)), (1, b"KVE1"), (1, b"\xc1\xff"), (1, our_batch(1, range(11, 21)))]
    with AdvisorService(settings_for(tmp_path, urls)) as service:
        send_until(raw, garbage, lambda: len(service.fold.index) == 20, "20 blocks")
        refused = {"undecodable batch", "undecodable message"}
        eventually(lambda: set(service.log_thread.intake.refused) == refused, "the garbage")  # type: ignore[union-attr]
        assert service.failure is None


def test_foreign_engine_that_restarts_silently_is_a_new_life(
    tmp_path: Path, urls: tuple[str, str], raw: RawPublisher
) -> None:
    first, second = [(0, stored([1, 2, 3], 1.0))], [(0, stored([8, 9], 2.0))]
    with AdvisorService(settings_for(tmp_path, urls)) as service:
        send_until(raw, first, lambda: len(service.fold.index) == 3, "first life")
        send_until(raw, second, lambda: len(service.fold.index) == 2, "second life")
        (state,) = service.fold.producers.values()
        assert state.epochs_closed >= 1
        assert {block.key.sequence_hash for block in service.fold.index.page()[0]} == {8, 9}
    assert fold_log(tmp_path).digest() == service.fold.digest()
