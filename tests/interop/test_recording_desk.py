"""Recordings of a running service: the log from here on, files taken in, and names that lead nowhere else."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from advisor.api_settings import ApiSettings
from advisor.entries import EntryKind, OperatorEntry, decode_control
from advisor.errors import ActionRefused, FieldRefused, NothingSuch
from advisor.recording_desk import FOLDER, RecordingDesk
from advisor.recording_shelf import NoRoom, TooLarge
from advisor.service import AdvisorService
from advisor.settings import AdvisorSettings, SourceSettings
from event_plane.connect import open_publisher
from event_plane.errors import RecordingError
from event_plane.parquet import read_parquet
from event_plane.publishing import BatchPublisher
from event_plane.schema import EventRecord, EventType, Namespace
from tests.ports import free_ports

NAMESPACE = Namespace(tenant="acme", model="tiny")
UPLOAD_BYTES_MAX = 100_000
TRACE = "".join(
    f"{json.dumps({'timestamp': turn * 1_000, 'input_length': 1_024, 'output_length': 1, 'hash_ids': [1, turn]})}\n"
    for turn in range(2, 12)
).encode()


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


@pytest.fixture(scope="module")
def urls() -> list[str]:
    return [f"zmq+tcp://127.0.0.1:{port}" for port in free_ports(2)]


@pytest.fixture(scope="module")
def publisher(urls: list[str]) -> Iterator[BatchPublisher]:
    opened = open_publisher(*urls, producer=77, epoch=5, flush_events=10, flush_interval_s=1.0)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, urls: list[str]) -> Iterator[AdvisorService]:
    settings = AdvisorSettings(
        directory=tmp_path_factory.mktemp("advisor"),
        sources=(SourceSettings(name="core", url=urls[0], resend_url=urls[1]),),
        tick_interval_s=0.1,
        api=ApiSettings(upload_bytes_max=UPLOAD_BYTES_MAX),
    )
    with AdvisorService(settings) as running:
        yield running


@pytest.fixture(scope="module")
def desk(service: AdvisorService) -> Iterator[RecordingDesk]:
    with closing(RecordingDesk(service, nice=0)) as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(service: AdvisorService) -> Path:
    return service.settings.directory / FOLDER


def noted(service: AdvisorService) -> list[tuple[str, str, str]]:
    """Operator actions in the log: actor, action, detail."""
    entries = [decode_control(each.payload) for each in service.log.read() if each.kind is EntryKind.OPERATOR]
    return [(each.actor, each.action, each.detail) for each in entries if isinstance(each, OperatorEntry)]


def publish(service: AdvisorService, publisher: BatchPublisher, hashes: range) -> None:
    publisher.publish(stores(hashes))
    publisher.flush()
    eventually(lambda: service.fold.index.match(NAMESPACE.namespace_id, 0, [hashes[-1]]) == 1, f"block {hashes[-1]}")


def test_the_log_is_recorded_from_the_start_to_the_stop_and_both_are_logged(
    service: AdvisorService, desk: RecordingDesk, publisher: BatchPublisher, folder: Path
) -> None:
    publish(service, publisher, range(1, 31))
    started = desk.start("ann", "evening", seconds=None, events=None)
    assert (started.state, started.actor, started.format) == ("recording", "ann", "parquet")
    publish(service, publisher, range(31, 61))
    eventually(lambda: [view.events for view in desk.list()] == [30], "30 events recorded")
    (so_far,) = desk.list()
    assert so_far.size_bytes > 30 * 100
    with pytest.raises(ActionRefused, match="'evening' is under way: stop it first"):
        desk.delete("ann", "evening")
    with pytest.raises(ActionRefused, match="already: delete it, or choose another name"):
        desk.start("ann", "evening", seconds=None, events=None)
    done = desk.stop("bob", "evening")
    assert (done.state, done.events, done.note, done.missed_entries) == ("done", 30, "", 0)
    blocks = [int(low) for each in read_parquet(folder / "evening") for low in each.batch.records["sequence_hash_lo"]]
    assert blocks == list(range(31, 61))
    assert started.from_position is not None
    assert done.from_position is not None
    assert done.from_position > started.from_position
    assert noted(service)[-2:] == [("ann", "record", "evening"), ("bob", "stop recording", "evening")]
    with pytest.raises(ActionRefused, match="'evening' is done already: there is nothing to stop"):
        desk.stop("bob", "evening")
    assert [view.name for view in desk.list()] == ["evening"]
    assert done.size_bytes == (folder / "evening").stat().st_size
    eventually(lambda: desk.get("evening").figures is not None, "figures")
    figures = desk.get("evening").figures
    assert figures is not None
    assert (figures.events, figures.types["store"], figures.namespaces) == (30, {"G1": 30}, {"acme/tiny": 30})
    assert (figures.requests.blocks, figures.requests.block_tokens, figures.requests.block_bytes) == (30, 16, 64)
    assert figures.producers[0].producer == f"{77:016x}"


def test_as_many_recordings_as_may_be_and_no_more(desk: RecordingDesk) -> None:
    for number in range(4):
        desk.start("ann", f"r{number}", seconds=None, events=None)
    with pytest.raises(ActionRefused, match="4 recordings are under way: stop one of r0, r1, r2, r3"):
        desk.start("ann", "r4", seconds=None, events=None)
    for number in range(4):
        assert desk.stop("ann", f"r{number}").state == "done"
        desk.delete("ann", f"r{number}")
    with pytest.raises(NothingSuch, match="no recording 'r0' is under way; those that are: none"):
        desk.stop("ann", "r0")


@pytest.mark.parametrize(
    "name",
    ["../log.db", "/etc/passwd", "a/b", "a\0b", "", ".hidden", "UPPER", "x.part", "x.toml", "x\n", "é", "a" * 65],
)
def test_no_name_leads_out_of_the_folder(desk: RecordingDesk, folder: Path, name: str) -> None:
    before = sorted(folder.parent.rglob("*"))
    for begin in (lambda each: desk.start("mallory", each, seconds=None, events=None), partial(desk.upload, "mallory")):
        with pytest.raises(FieldRefused) as refused:
            begin(name)
        assert (refused.value.field, refused.value.value) == ("name", repr(name[:80]))
    for act in (desk.get, desk.file, lambda each: desk.delete("mallory", each)):
        with pytest.raises(NothingSuch):
            act(name)
    assert {path for path in folder.parent.rglob("*") if path.parent == folder} == {
        path for path in before if path.parent == folder
    }


def test_a_link_in_the_folder_is_not_there_and_nothing_is_written_through_it(
    desk: RecordingDesk, folder: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(TRACE)
    for name in ("linked", "half.part"):
        (folder / name).symlink_to(secret)
    try:
        assert {"linked", "half"}.isdisjoint(view.name for view in desk.list())
        for act in (desk.get, desk.file, lambda each: desk.delete("mallory", each)):
            with pytest.raises(NothingSuch):
                act("linked")
        for name in ("linked", "half"):
            with pytest.raises(ActionRefused, match="already"):
                desk.upload("mallory", name)
        assert secret.read_bytes() == TRACE
    finally:
        for name in ("linked", "half.part"):
            (folder / name).unlink()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "bad is empty: give a capture"),
        (b"<html>no</html>", "bad starts with b'<html>no', like no capture, recording or trace"),
        (b"SQLite format 3\x00" + bytes(100), "bad starts with b'SQLite f'"),
        (b"PAR1" + bytes(50) + b"PAR1", "bad cannot be read (Couldn't deserialize"),
        (TRACE + b"{no json\n", "bad, line 11 is no request"),
    ],
)
def test_garbage_is_refused_naming_what_is_wrong_and_nothing_is_left(
    desk: RecordingDesk, folder: Path, content: bytes, said: str
) -> None:
    before = sorted(folder.iterdir())
    upload = desk.upload("ann", "bad")
    upload.write(content)
    with pytest.raises(RecordingError) as refused:
        upload.finish()
    assert str(refused.value).startswith(said)
    assert str(folder) not in str(refused.value)
    assert sorted(folder.iterdir()) == before
    with pytest.raises(NothingSuch):
        desk.get("bad")


def test_more_bytes_than_are_taken_and_an_upload_that_ends_early_leave_nothing(
    desk: RecordingDesk, folder: Path
) -> None:
    before = sorted(folder.iterdir())
    upload = desk.upload("ann", "large")
    with pytest.raises(TooLarge, match=r"large has more than 100,000 bytes: raise api\.upload_bytes_max"):
        upload.write(bytes(UPLOAD_BYTES_MAX + 1))
    upload.discard()
    left, second = desk.upload("ann", "left"), desk.upload("ann", "second")
    with pytest.raises(ActionRefused, match="2 files are being taken in"):
        desk.upload("ann", "third")
    left.discard()
    second.discard()
    with pytest.raises(ActionRefused, match="not taken in any more"):
        left.write(TRACE)
    assert sorted(folder.iterdir()) == before


def test_an_upload_that_is_given_up_while_it_is_read_ends_at_once_and_leaves_nothing(
    desk: RecordingDesk, folder: Path
) -> None:
    before = sorted(folder.iterdir())
    upload = desk.upload("ann", "trace")
    upload.write(TRACE)
    with ThreadPoolExecutor(1) as other:
        finished = other.submit(upload.finish)
        eventually(lambda: not finished.running() or bool(list(folder.glob("trace.part"))), "its reading")
        upload.discard()
        assert isinstance(finished.exception(timeout=60), (RecordingError, ActionRefused))
    assert sorted(folder.iterdir()) == before


def test_who_sent_a_file_is_known(desk: RecordingDesk) -> None:
    upload = desk.upload("bob", "sent")
    upload.write(TRACE)
    assert upload.finish().actor == "bob"
    assert [(view.name, view.actor, view.size_bytes) for view in desk.list() if view.name == "sent"] == [
        ("sent", "bob", len(TRACE))
    ]
    desk.delete("ann", "sent")
    assert "sent" not in {view.name for view in desk.list()}


def test_a_disk_with_little_room_takes_nothing_and_says_so(service: AdvisorService) -> None:
    with closing(RecordingDesk(service, free_bytes_min=1 << 60)) as full:
        with pytest.raises(NoRoom, match="are left to the event log: free space, or delete recordings"):
            full.start("ann", "r", seconds=None, events=None)
        with pytest.raises(NoRoom):
            full.upload("ann", "r")
        assert "r" not in {view.name for view in full.list()}


def test_what_a_killed_recorder_left_is_listed_as_cut_and_can_be_deleted(desk: RecordingDesk, folder: Path) -> None:
    (folder / "night.part").write_bytes(b"PAR1 and no footer")
    (cut,) = [view for view in desk.list() if view.name == "night"]
    assert (cut.state, cut.size_bytes) == ("cut", 18)
    assert "it cannot be read: delete it. A file that was sent, send again" in cut.note
    with pytest.raises(ActionRefused, match="'night' is cut already"):
        desk.stop("ann", "night")
    with pytest.raises(ActionRefused, match="'night' cannot be read"):
        desk.file("night")
    with pytest.raises(ActionRefused, match="already"):
        desk.start("ann", "night", seconds=None, events=None)
    desk.delete("ann", "night")
    assert not (folder / "night.part").exists()


def test_closing_ends_recordings_whole(service: AdvisorService, publisher: BatchPublisher, folder: Path) -> None:
    with closing(RecordingDesk(service, nice=0)) as closed:
        closed.start("ann", "last", seconds=None, events=None)
        publish(service, publisher, range(61, 71))
    assert sum(len(each.batch.records) for each in read_parquet(folder / "last")) == 10
