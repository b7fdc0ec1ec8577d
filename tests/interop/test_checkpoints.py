"""A service that starts from a checkpoint: the same state as from the whole log, whatever became of the files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from advisor.entries import EntryKind, OperatorEntry
from advisor.fold import Fold
from advisor.log import SqlLog
from advisor.reader import ServiceReader
from advisor.service import AdvisorService
from advisor.settings import AdvisorSettings, SourceSettings
from event_plane.connect import open_publisher
from event_plane.publishing import BatchPublisher
from event_plane.schema import EventRecord, EventType, Namespace
from tests.interop.test_service import RawPublisher, eventually, our_batch, send_until
from tests.ports import free_ports

NAMESPACE = Namespace(tenant="acme", model="tiny")
PRODUCER = 77


def stores(hashes: range) -> list[EventRecord]:
    return [EventRecord(EventType.STORE, 1, h, NAMESPACE, "gpu", h - 1, depth=h - 1, block_size=64) for h in hashes]


@pytest.fixture
def urls() -> tuple[str, str]:
    publish, resend = free_ports(2)
    return f"zmq+tcp://127.0.0.1:{publish}", f"zmq+tcp://127.0.0.1:{resend}"


@pytest.fixture
def publisher(urls: tuple[str, str]) -> Iterator[BatchPublisher]:
    opened = open_publisher(*urls, producer=PRODUCER, epoch=5, flush_events=10)
    yield opened
    opened.close()


def settings_for(folder: Path, urls: tuple[str, str], **more: object) -> AdvisorSettings:
    source = SourceSettings(name="core", url=urls[0], resend_url=urls[1])
    return AdvisorSettings(directory=folder, sources=(source,), tick_interval_s=0.1, **more)  # type: ignore[arg-type]


def digest_of_whole_log(folder: Path) -> str:
    log, fold = SqlLog(folder / "log.db", read_only=True), Fold()
    for entry in log.read():
        fold.apply(entry)
    log.close()
    return fold.digest()


def run_to(folder: Path, urls: tuple[str, str], publisher: BatchPublisher, first: int, end: int) -> AdvisorService:
    with AdvisorService(settings_for(folder, urls)) as service:
        publisher.publish(stores(range(first, end)), flush=True)
        eventually(lambda: len(service.fold.index) == end - 1, f"{end - 1} blocks")
        service.submit(OperatorEntry("test", "pause")).result()
    return service


def checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").glob("*.kvc"))


def test_start_folds_only_what_came_after_the_newest_checkpoint(
    tmp_path: Path, urls: tuple[str, str], publisher: BatchPublisher
) -> None:
    first = run_to(tmp_path, urls, publisher, 1, 51)
    (saved,) = checkpoints(tmp_path)
    assert int(saved.stem) == first.fold.position
    with AdvisorService(settings_for(tmp_path, urls)) as again:
        assert again.passed_over == []
        assert len(again.fold.index) == 50
        publisher.publish(stores(range(51, 81)), flush=True)
        eventually(lambda: len(again.fold.index) == 80, "80 blocks")
        assert again.fold.producers[PRODUCER].partial is False
        assert "" in again.fold.paused
        again.fold.index.check()
    assert again.fold.digest() == digest_of_whole_log(tmp_path)
    assert len(checkpoints(tmp_path)) == 2


def test_third_checkpoint_takes_the_place_of_the_first(
    tmp_path: Path, urls: tuple[str, str], publisher: BatchPublisher
) -> None:
    names = []
    for first, end in ((1, 11), (11, 21), (21, 31)):
        run_to(tmp_path, urls, publisher, first, end)
        names.append(checkpoints(tmp_path)[-1].name)
    assert [path.name for path in checkpoints(tmp_path)] == names[1:]


@pytest.mark.parametrize("damaged", [1, 2], ids=["the newest", "both"])
def test_damaged_checkpoint_is_passed_over_and_said_so(
    tmp_path: Path, urls: tuple[str, str], publisher: BatchPublisher, damaged: int
) -> None:
    run_to(tmp_path, urls, publisher, 1, 31)
    run_to(tmp_path, urls, publisher, 31, 61)
    for path in checkpoints(tmp_path)[-damaged:]:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    with AdvisorService(settings_for(tmp_path, urls)) as again:
        assert len(again.passed_over) == damaged
        assert all("is not used" in sentence for sentence in again.passed_over)
        assert len(again.fold.index) == 60
        (told,) = [check.text for check in ServiceReader(again).checks() if check.name == "checkpoint"]
        assert all(sentence in told for sentence in again.passed_over)
    assert len(list((tmp_path / "checkpoints").glob("*.refused"))) == damaged
    assert again.fold.digest() == digest_of_whole_log(tmp_path)


def test_half_written_checkpoint_of_a_killed_service_is_ignored(
    tmp_path: Path, urls: tuple[str, str], publisher: BatchPublisher
) -> None:
    run_to(tmp_path, urls, publisher, 1, 31)
    (whole,) = checkpoints(tmp_path)
    (whole.parent / f"{9_999:020d}.kvc.tmp").write_bytes(whole.read_bytes()[:500])
    with AdvisorService(settings_for(tmp_path, urls)) as again:
        assert again.passed_over == []
        assert len(again.fold.index) == 30


def test_checkpoint_ahead_of_its_log_is_not_used(
    tmp_path: Path, urls: tuple[str, str], publisher: BatchPublisher
) -> None:
    run_to(tmp_path, urls, publisher, 1, 31)
    for path in tmp_path.glob("log.db*"):
        path.unlink()
    with AdvisorService(settings_for(tmp_path, urls)) as again:
        assert "the log ends at 0" in again.passed_over[0]
        assert checkpoints(tmp_path) == []
        eventually(lambda: len(again.fold.index) == 30, "the publisher's buffer, from its beginning")


def test_old_batches_stay_duplicates_and_closed_epochs_closed_after_a_checkpoint(
    tmp_path: Path, urls: tuple[str, str]
) -> None:
    raw = RawPublisher(urls[0])
    try:
        with AdvisorService(settings_for(tmp_path, urls)) as service:
            batches = [(s, our_batch(s, range(1 + 10 * s, 11 + 10 * s))) for s in range(3)]
            send_until(raw, batches, lambda: len(service.fold.index) == 30, "30 blocks")
        with AdvisorService(settings_for(tmp_path, urls)) as again:

            def duplicates() -> int:
                return sum(again.log_thread.intake.duplicates.values()) if again.log_thread is not None else 0

            send_until(raw, batches, lambda: duplicates() >= 3, "duplicates")
            assert again.fold.events_total == 30
    finally:
        raw.close()


def test_silent_restart_of_an_engine_is_told_by_a_checksum_kept_in_the_checkpoint(
    tmp_path: Path, urls: tuple[str, str]
) -> None:
    def stored(hashes: list[int], at: float) -> bytes:
        event = {
            "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None,
            "token_ids": list(range(16 * len(hashes))), "block_size": 16, "medium": "GPU",
        }  # fmt: skip
        return msgspec.msgpack.encode([at, [event], 0])

    raw = RawPublisher(urls[0])
    try:
        with AdvisorService(settings_for(tmp_path, urls)) as service:
            send_until(raw, [(0, stored([1, 2, 3], 1.0))], lambda: len(service.fold.index) == 3, "first life")
        with AdvisorService(settings_for(tmp_path, urls)) as again:
            send_until(raw, [(0, stored([8, 9], 2.0))], lambda: len(again.fold.index) == 2, "second life")
    finally:
        raw.close()


def test_checkpoint_is_made_while_the_service_runs_and_shown(
    tmp_path: Path, urls: tuple[str, str], publisher: BatchPublisher
) -> None:
    with AdvisorService(settings_for(tmp_path, urls, checkpoint_interval_s=1.0)) as service:
        publisher.publish(stores(range(1, 31)), flush=True)
        eventually(lambda: bool(checkpoints(tmp_path)), "a checkpoint")
        reader = ServiceReader(service)
        eventually(lambda: any(c.name == "checkpoint" and "position" in c.text for c in reader.checks()), "its check")


def test_full_index_refuses_what_is_not_there_and_keeps_serving(
    tmp_path: Path, urls: tuple[str, str], publisher: BatchPublisher
) -> None:
    with AdvisorService(settings_for(tmp_path, urls, index_memory_bytes_max=1 << 20)) as service:
        publisher.publish(stores(range(1, 20_001)), flush=True)
        eventually(lambda: service.fold.events_total == 20_000, "20,000 events")
        with service.lock:  # the last batch is folded whole
            held = len(service.fold.index)
            assert 0 < held < 20_000
            assert service.fold.skipped["the index is full"] == 20_000 - held
        publisher.publish([EventRecord(EventType.REMOVE, 1, held, NAMESPACE, "gpu")], flush=True)
        eventually(lambda: len(service.fold.index) == held - 1, "a remove")
        service.fold.index.check()
        assert ServiceReader(service).summary().skipped_records["the index is full"] == 20_000 - held
        assert any(check.name == "index" and "is full" in check.text for check in ServiceReader(service).checks())
    log = SqlLog(tmp_path / "log.db", read_only=True)
    assert sum(1 for entry in log.read() if entry.kind is EntryKind.BATCH) >= 2_000
    log.close()
    with AdvisorService(settings_for(tmp_path, urls)) as larger:
        assert "smaller index limit" in larger.passed_over[0]
        assert len(larger.fold.index) == 19_999
