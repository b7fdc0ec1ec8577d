"""A service on each kind of log: started again, cut, backed up while it runs, refused where it would lose something."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from advisor.checkpoint import positions
from advisor.entries import OperatorEntry
from advisor.errors import LogError
from advisor.log_backup import BackupError
from advisor.log_command import LogFault, PruneError, app
from advisor.open_log import open_log, settings_at
from advisor.service import AdvisorService
from advisor.settings import AdvisorSettings, LogSettings, SourceSettings
from event_plane.connect import open_publisher
from event_plane.publishing import BatchPublisher
from event_plane.schema import EventRecord, EventType, Namespace
from tests.interop.test_service import eventually
from tests.ports import free_ports
from tests.postgres import PostgresServer

NAMESPACE = Namespace(tenant="acme", model="tiny")
LOG_BYTES = 2_000_000


def stores(hashes: range) -> list[EventRecord]:
    return [EventRecord(EventType.STORE, 1, h, NAMESPACE, "gpu", h - 1, depth=h - 1, block_size=64) for h in hashes]


@pytest.fixture
def urls() -> tuple[str, str]:
    publish, resend = free_ports(2)
    return f"zmq+tcp://127.0.0.1:{publish}", f"zmq+tcp://127.0.0.1:{resend}"


@pytest.fixture
def publisher(urls: tuple[str, str]) -> Iterator[BatchPublisher]:
    opened = open_publisher(*urls, producer=77, epoch=5, flush_events=512)
    yield opened
    opened.close()


@pytest.fixture(params=["sqlite", "segments", "postgres"])
def log_settings(request: pytest.FixtureRequest) -> LogSettings:
    if request.param == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres")
        return LogSettings(url=server.emptied_database(), password_file=server.password_file)
    return LogSettings(kind="segments" if request.param == "segments" else "sql")


def settings_for(folder: Path, urls: tuple[str, str], log: LogSettings, **more: object) -> AdvisorSettings:
    source = SourceSettings(name="core", url=urls[0], resend_url=urls[1])
    return AdvisorSettings(directory=folder, sources=(source,), tick_interval_s=0.5, log=log, **more)  # type: ignore[arg-type]


async def kinds_of(service: AdvisorService) -> list[str]:
    queries = service.open_queries()
    try:
        return [str(entry.kind) for entry in await queries.page(limit=1_000)]
    finally:
        await queries.close()


def test_service_goes_on_where_it_stopped(
    tmp_path: Path, urls: tuple[str, str], publisher: BatchPublisher, log_settings: LogSettings
) -> None:
    settings = settings_for(tmp_path, urls, log_settings)
    with AdvisorService(settings) as service:
        publisher.publish(stores(range(1, 2_001)), flush=True)
        eventually(lambda: len(service.fold.index) == 2_000, "2,000 blocks")
        service.submit(OperatorEntry("test", "pause")).result()
        assert service.term == 1
    for path in (tmp_path / "checkpoints").iterdir():
        path.unlink()
    with AdvisorService(settings) as again:
        assert again.term == 2
        assert len(again.fold.index) == 2_000
        assert "" in again.fold.paused
        publisher.publish(stores(range(2_001, 3_001)), flush=True)
        eventually(lambda: len(again.fold.index) == 3_000, "3,000 blocks")
        kinds = asyncio.run(kinds_of(again))
        assert (kinds[0], kinds.count("settings"), kinds.count("operator")) == ("settings", 2, 1)


def test_service_whose_server_goes_away_says_so_and_goes_on_after_a_start(
    tmp_path: Path, urls: tuple[str, str], publisher: BatchPublisher
) -> None:
    server = PostgresServer()
    try:
        log = LogSettings(url=server.emptied_database(), password_file=server.password_file)
        settings = settings_for(tmp_path, urls, log)
        with AdvisorService(settings) as service:
            publisher.publish(stores(range(1, 2_001)), flush=True)
            eventually(lambda: len(service.fold.index) == 2_000, "2,000 blocks")
            server.stop()
            with pytest.raises(LogError, match=r"cannot append to .*: the server cannot be reached or went away"):
                service.wait(60)
        with pytest.raises(LogError, match=r"cannot open .*: the server cannot be reached"):
            AdvisorService(settings).start()
        server.start()
        with AdvisorService(settings) as again:
            assert len(again.fold.index) == 2_000
            publisher.publish(stores(range(2_001, 2_501)), flush=True)
            eventually(lambda: len(again.fold.index) == 2_500, "2,500 blocks")
    finally:
        server.close()


def bounded_service(folder: Path, urls: tuple[str, str], kind: str) -> AdvisorSettings:
    log = LogSettings(kind=kind, retention_bytes=LOG_BYTES)  # type: ignore[arg-type]
    return settings_for(folder, urls, log, checkpoint_interval_s=3_600)


def publish_beyond_the_limit(service: AdvisorService, publisher: BatchPublisher, first: int = 1) -> int:
    """Until the log was cut; returns the next hash."""
    assert service.retention is not None

    def is_cut() -> bool:
        nonlocal first
        publisher.publish(stores(range(first, first + 2_000)), flush=True)
        first += 2_000
        return service._log is not None and service._log.first_position() > 10

    eventually(is_cut, "the log to be cut")
    return first


def test_log_is_cut_beside_its_writer_and_a_start_has_all(
    tmp_path: Path, urls: tuple[str, str], publisher: BatchPublisher
) -> None:
    settings = bounded_service(tmp_path, urls, "sql")
    with AdvisorService(settings) as service:
        end = publish_beyond_the_limit(service, publisher)
        eventually(lambda: len(service.fold.index) == end - 1, "all blocks")
        log = service._log
        assert log is not None
        eventually(lambda: log.stat().stored_bytes <= LOG_BYTES, "the log to fall below its limit")
    with closing(open_log(settings, read_only=True)) as stopped:
        first = stopped.first_position()
    assert first - 1 <= positions(settings.checkpoints_path)[1]
    with AdvisorService(settings) as again:
        assert again.passed_over == []
        assert len(again.fold.index) == end - 1
        publisher.publish(stores(range(end, end + 10)), flush=True)
        eventually(lambda: len(again.fold.index) == end + 9, "ten more")
        assert again.fold.producers[77].partial is False


def test_cut_log_without_a_good_checkpoint_is_not_folded_as_if_it_were_whole(
    tmp_path: Path, urls: tuple[str, str], publisher: BatchPublisher
) -> None:
    settings = bounded_service(tmp_path, urls, "sql")
    with AdvisorService(settings) as service:
        publish_beyond_the_limit(service, publisher)
    for path in settings.checkpoints_path.glob("*.kvc"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    with pytest.raises(LogError, match=r"was cut and begins at position \d+; .* in no checkpoint") as caught:
        AdvisorService(settings).start()
    assert str(caught.value).count("is not used") == 2
    assert "kvadvisor log restore" in str(caught.value)
    result = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert isinstance(result.exception, LogFault)
    assert "begins at position" in str(result.exception)


@pytest.mark.parametrize("kind", ["sql", "segments"])
def test_backup_of_a_running_service_is_whole(
    tmp_path: Path, urls: tuple[str, str], publisher: BatchPublisher, kind: str
) -> None:
    live = tmp_path / "live"
    run = CliRunner().invoke
    log = LogSettings(kind=kind)  # type: ignore[arg-type]
    with AdvisorService(settings_for(live, urls, log, checkpoint_interval_s=1.0)) as service:
        publisher.publish(stores(range(1, 5_001)), flush=True)
        eventually(lambda: bool(positions(live / "checkpoints")), "a checkpoint")
        publisher.publish(stores(range(5_001, 6_001)), flush=True)
        eventually(lambda: len(service.fold.index) == 6_000, "6,000 blocks")
        made = run(app, ["backup", str(live), str(tmp_path / "backup")], catch_exceptions=False)
        assert made.exit_code == 0
        assert "with the checkpoint of position" in made.stdout
        publisher.publish(stores(range(6_001, 7_001)), flush=True)
        eventually(lambda: len(service.fold.index) == 7_000, "7,000 blocks")
    note = json.loads((tmp_path / "backup" / "backup.json").read_bytes())
    restored = run(app, ["restore", str(tmp_path / "backup"), str(tmp_path / "again")], catch_exceptions=False)
    assert restored.exit_code == 0
    whole = run(app, ["verify", str(tmp_path / "again")], catch_exceptions=False)
    assert "all whole" in whole.stdout
    with AdvisorService(settings_for(tmp_path / "again", free_urls(), log)) as again:
        assert again.passed_over == []
        assert again.term == 2
        assert len(again.fold.index) == 6_000
        assert again.fold.position >= note["position"]


def free_urls() -> tuple[str, str]:
    publish, resend = free_ports(2)
    return f"zmq+tcp://127.0.0.1:{publish}", f"zmq+tcp://127.0.0.1:{resend}"


def test_backups_that_cannot_be_are_refused(tmp_path: Path, urls: tuple[str, str]) -> None:
    with AdvisorService(settings_for(tmp_path / "live", urls, LogSettings())):
        pass
    run = CliRunner().invoke
    full = tmp_path / "full"
    full.mkdir()
    (full / "something").touch()
    refused = run(app, ["backup", str(tmp_path / "live"), str(full)])
    assert isinstance(refused.exception, BackupError)
    assert "is not empty" in str(refused.exception)
    refused = run(app, ["restore", str(full), str(tmp_path / "again")])
    assert "holds no whole backup" in str(refused.exception)
    run(app, ["backup", str(tmp_path / "live"), str(tmp_path / "backup")], catch_exceptions=False)
    refused = run(app, ["restore", str(tmp_path / "backup"), str(full)])
    assert "restore into an empty directory" in str(refused.exception)
    database = tmp_path / "backup" / "log.db"
    database.write_bytes(database.read_bytes()[: 16_384 * 3])
    refused = run(app, ["restore", str(tmp_path / "backup"), str(tmp_path / "torn")])
    assert isinstance(refused.exception, BackupError | LogError)


def test_directory_with_a_log_of_another_kind_is_not_begun_anew(tmp_path: Path, urls: tuple[str, str]) -> None:
    with AdvisorService(settings_for(tmp_path, urls, LogSettings(kind="segments"))):
        pass
    with pytest.raises(LogError, match="holds this directory's log, and log"):
        AdvisorService(settings_for(tmp_path, urls, LogSettings())).start()
    assert settings_at(tmp_path).log.kind == "segments"


def test_commands_tell_cut_and_export_a_log(tmp_path: Path, urls: tuple[str, str], publisher: BatchPublisher) -> None:
    run = CliRunner().invoke
    settings = settings_for(tmp_path, urls, LogSettings())
    for end in (2_001, 4_001):
        with AdvisorService(settings) as service:
            publisher.publish(stores(range(end - 2_000, end)), flush=True)
            eventually(lambda service=service, end=end: len(service.fold.index) == end - 1, "blocks")  # type: ignore[misc]
    told = run(app, ["stat", str(tmp_path)], catch_exceptions=False).stdout
    assert "an event (newest entries)" in told
    assert "20 GB" in told
    exported = run(app, ["export", str(tmp_path), "--out", str(tmp_path / "log.jsonl")], catch_exceptions=False)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert f"{len(lines)} entries" in exported.stdout
    assert [line["position"] for line in lines] == list(range(1, len(lines) + 1))
    events = [event for line in lines for event in line.get("events", [])]
    assert [event["sequence_hash"] for event in events] == [f"{h:032x}" for h in range(1, 4_001)]
    assert events[0]["namespace"]["tenant"] == "acme"
    assert (events[0]["location"], events[0]["block_size"]) == ("gpu", 64)
    assert lines[0]["entry"]["policy_version"]
    run(app, ["export", str(tmp_path), "--out", str(tmp_path / "log.parquet")], catch_exceptions=False)
    assert (tmp_path / "log.parquet").stat().st_size > 1_000
    second = positions(settings.checkpoints_path)[1]
    refused = run(app, ["prune", str(tmp_path), "--through", str(second + 1)])
    assert isinstance(refused.exception, PruneError)
    assert f"give --through {second} or less" in str(refused.exception)
    assert isinstance(run(app, ["prune", str(tmp_path)]).exception, PruneError)
    done = run(app, ["prune", str(tmp_path), "--through", str(second)], catch_exceptions=False)
    assert f"{second} entries dropped" in done.stdout
    assert "all whole" in run(app, ["verify", str(tmp_path)], catch_exceptions=False).stdout
    with AdvisorService(settings) as again:
        assert len(again.fold.index) == 4_000
        refused = run(app, ["prune", str(tmp_path), "--keep-bytes", "1"])
        assert "is in use by" in str(refused.exception)
