"""Replays of the running service: commands as child processes, in turn, ended when nobody wants them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from advisor.attended import run_command
from advisor.entries import EntryKind, OperatorEntry, decode_control
from advisor.errors import ActionRefused, NothingSuch
from advisor.recording_desk import FOLDER as RECORDINGS
from advisor.recording_desk import RecordingDesk
from advisor.replay_desk import FOLDER, KEPT_MAX, ReplayDesk
from advisor.replay_orders import ReplayOrder
from advisor.replay_views import ReplayState, ReplayView
from advisor.service import AdvisorService
from advisor.settings import AdvisorSettings

ONE = ReplayOrder(recording="chats", policies=["lru"], capacities=[2], advise=False)


def eventually(holds: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdvisorService]:
    with AdvisorService(AdvisorSettings(directory=tmp_path_factory.mktemp("advisor"))) as running:
        yield running


@pytest.fixture(scope="module")
def recordings(service: AdvisorService) -> Iterator[RecordingDesk]:
    with closing(RecordingDesk(service, nice=0)) as opened:
        lines = [
            {"timestamp": turn * 1_000, "input_length": 2_048, "output_length": 1, "hash_ids": [1, 2, 3, turn]}
            for turn in range(4, 34)
        ]
        chats = service.settings.directory / RECORDINGS / "chats"
        chats.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        yield opened


@pytest.fixture
def desk(service: AdvisorService, recordings: RecordingDesk) -> Iterator[ReplayDesk]:
    with closing(ReplayDesk(service, recordings, nice=0)) as opened:
        yield opened
        for view in opened.list():
            opened.delete("test", view.id)


def children() -> list[int]:
    """Processes of ours that run a command."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"advisor.attended" in words and str(os.getpid()).encode() in words:
            found.append(int(process.name))
    return found


def test_a_replay_gives_results_a_report_and_what_to_choose(service: AdvisorService, desk: ReplayDesk) -> None:
    order = ReplayOrder(recording="chats", fast_blocks=[4, 40], admissions=["touch-2", "always"], budgets=[1.0])
    started = desk.start("ann", order)
    assert (started.state, started.results_wanted) == ("queued", 4)
    eventually(lambda: desk.get(started.id).replay.state not in ("queued", "running"), "the end")
    detail = desk.get(started.id)
    run = detail.replay
    assert (run.state, run.note, run.results, run.has_report) == ("done", "", 4, True)
    assert run.requested_us <= run.started_us <= run.ended_us
    assert (detail.requests, detail.input_tokens) == (30, 30 * 2_048)
    assert [(row.admission, row.fast_blocks) for row in detail.tierings] == [
        ("touch-2", 4), ("always", 4), ("touch-2", 40), ("always", 40),
    ]  # fmt: skip
    # Of 30 requests the first finds nothing, and what comes at the first use is there for the others.
    assert detail.tierings[3].token_hit_ratio == pytest.approx(29 * 3 / (30 * 4))
    assert detail.advice is not None
    assert detail.advice.words[0].startswith("chats: 30 requests in 29 s")
    assert detail.advice.capacity_blocks >= 1
    assert desk.report(started.id).read_text().startswith("<!doctype html>")
    entries = [decode_control(each.payload) for each in service.log.read() if each.kind is EntryKind.OPERATOR]
    assert OperatorEntry("ann", "replay", detail=f"{started.id} of chats") in entries


def test_eight_wait_and_the_one_that_runs_ends_when_it_is_cancelled(desk: ReplayDesk) -> None:
    first = desk.start("ann", ONE)
    eventually(lambda: desk.get(first.id).replay.state == "running" and bool(children()), "a child process")
    waiting = [desk.start("ann", ONE) for _ in range(8)]
    with pytest.raises(ActionRefused, match="8 replays wait already: cancel one"):
        desk.start("ann", ONE)
    for view in waiting:
        assert desk.cancel("bob", view.id).state == "cancelled"
    running = children()
    assert desk.cancel("bob", first.id).state == "cancelled"
    eventually(lambda: not set(running) & set(children()), "the end of the child process")
    with pytest.raises(NothingSuch, match="has no report: it was cancelled"):
        desk.report(first.id)
    with pytest.raises(ActionRefused, match="is cancelled: there is nothing to cancel"):
        desk.cancel("bob", first.id)
    assert [view.state for view in desk.list()] == ["cancelled"] * 9


def test_closing_ends_what_runs_and_the_next_start_tells_of_it(
    service: AdvisorService, recordings: RecordingDesk
) -> None:
    with closing(ReplayDesk(service, recordings, nice=0)) as closed:
        first, second = closed.start("ann", ONE), closed.start("ann", ONE)
        eventually(lambda: bool(children()), "a child process")
    assert children() == []
    folder = service.settings.directory / FOLDER
    # As a kill leaves it: still running, by its file.
    torn = json.loads((folder / second.id / "replay.json").read_bytes()) | {"state": "running", "note": ""}
    (folder / second.id / "replay.json").write_text(json.dumps(torn))
    (folder / "odd").mkdir()
    with closing(ReplayDesk(service, recordings, nice=0)) as again:
        assert {view.id: (view.state, view.note) for view in again.list()} == {
            each.id: ("failed", "the advisor stopped meanwhile: start it again") for each in (first, second)
        }
        assert again.delete("ann", first.id).id == first.id
        assert again.delete("ann", second.id).id == second.id
        assert not (folder / first.id).exists()
        with pytest.raises(NothingSuch, match="there is no replay"):
            again.get(first.id)
    (folder / "odd").rmdir()


def test_a_replay_of_what_is_gone_is_refused_or_fails_in_a_sentence(
    service: AdvisorService, desk: ReplayDesk, recordings: RecordingDesk
) -> None:
    with pytest.raises(NothingSuch, match="there is no recording 'nothing'"):
        desk.start("ann", ReplayOrder(recording="nothing"))
    path = service.settings.directory / RECORDINGS / "short"
    path.write_bytes(b"{}\n")
    blocking = desk.start("ann", ONE)
    view = desk.start("ann", ReplayOrder(recording="short"))
    recordings.delete("ann", "short")
    desk.cancel("ann", blocking.id)
    eventually(lambda: desk.get(view.id).replay.state == "failed", "its failure")
    assert desk.get(view.id).replay.note == "there is no recording 'short': GET /api/v1/recordings lists them"


def test_the_last_fifty_are_kept(service: AdvisorService, recordings: RecordingDesk) -> None:
    folder = service.settings.directory / FOLDER
    for number in range(KEPT_MAX):
        view = ReplayView(
            id=f"r-{number:012x}", state=ReplayState.DONE, order=ONE, actor="ann", note="", requested_us=number,
            started_us=1, ended_us=2, results=1, results_wanted=1, has_report=False,
        )  # fmt: skip
        (folder / view.id).mkdir()
        (folder / view.id / "replay.json").write_text(view.model_dump_json())
    with closing(ReplayDesk(service, recordings, nice=0)) as desk:
        newest = desk.start("ann", ONE)
        kept = [view.id for view in desk.list()]
        assert kept == [newest.id, *(f"r-{number:012x}" for number in range(KEPT_MAX - 1, 0, -1))]
        assert not (folder / f"r-{0:012x}").exists()


def test_a_command_that_fails_says_so() -> None:
    ended = run_command(["nonsense"], deadline_s=120, is_unwanted=lambda: False, nice=0)
    assert ended.fault.startswith("kvadvisor nonsense failed")


def test_a_command_past_its_deadline_is_ended() -> None:
    ended = run_command(["bench"], deadline_s=0.0, is_unwanted=lambda: False, nice=0)
    assert ended.fault == "kvadvisor bench was ended after 0 s: ask for less, or run it by hand"
    assert children() == []
