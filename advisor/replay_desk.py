"""Replays of recordings for the admin view: `kvadvisor replay` and `advise` as child processes, one at a time."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import structlog
from pydantic import ValidationError

from advisor.attended import NICE, Ended, run_command
from advisor.entries import OperatorEntry
from advisor.errors import ActionRefused, AdvisorError, NothingSuch
from advisor.outputs import replace_json
from advisor.pipeline import now_us
from advisor.recording_shelf import NoRoom, without_place
from advisor.recording_views import AdvisorRecordings
from advisor.replay_orders import ReplayOrder, advise_arguments, replay_arguments
from advisor.replay_results import advice_of, caches_of, first_file, tierings_of
from advisor.replay_steps import ReplayTrigger, is_open, stepped
from advisor.replay_views import ReplayDetailView, ReplayState, ReplayView
from advisor.service import AdvisorService

FOLDER: Final = "replays"
"""In the service's directory: a folder for each replay."""
QUEUED_MAX: Final = 8
KEPT_MAX: Final = 50
REPLAY_S_MAX: Final = 3_600.0
ADVISE_S_MAX: Final = 900.0

_STATE, _RESULTS, _REPORT, _ADVICE = "replay.json", "results.json", "report.html", "advice.json"
_STOPPED: Final = "the advisor stopped meanwhile: start it again"
_END_WAIT_S: Final = 30.0

_log = structlog.get_logger()


@dataclass(slots=True)
class _Replay:
    """One replay; `view` is changed under the desk's lock. `has_left`: nothing runs for it any more."""

    view: ReplayView
    folder: Path
    unwanted: threading.Event = field(default_factory=threading.Event)
    has_left: threading.Event = field(default_factory=threading.Event)


class ReplayDesk:
    """`advisor.replay_views.AdvisorReplays`, until it is closed. What was under way then has failed."""

    def __init__(self, service: AdvisorService, recordings: AdvisorRecordings, *, nice: int = NICE) -> None:
        """Takes up the replays of former starts. `nice`: of its processes. Raises `OSError` where the folder cannot be
        made."""
        self._nice = nice
        self._service = service
        self._recordings = recordings
        self._folder = (service.settings.directory / FOLDER).absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._replays = {each.view.id: each for each in _former(self._folder)}
        """By id, oldest first."""
        self._queue: deque[_Replay] = deque()
        self._is_stopping = False
        # The children end with the thread that began them, so that it lives as long as the desk.
        self._worker = threading.Thread(target=self._work, name="kvadvisor-replays", daemon=True)
        self._worker.start()

    def close(self) -> None:
        """Kills what runs. Idempotent."""
        with self._changed:
            self._is_stopping = True
            for replay in self._replays.values():
                self._step(replay, ReplayTrigger.FAIL, _STOPPED)
                replay.unwanted.set()
            self._changed.notify_all()
        self._worker.join()

    # -- look

    def list(self) -> Sequence[ReplayView]:
        """See `AdvisorReplays.list`."""
        with self._lock:
            replays = list(self._replays.values())
        return [_shown(replay) for replay in reversed(replays)]

    def get(self, replay_id: str) -> ReplayDetailView:
        """See `AdvisorReplays.get`."""
        replay = self._find(replay_id)
        results = _read(replay.folder / _RESULTS)
        read = first_file(results)
        return ReplayDetailView(
            replay=_shown(replay),
            requests=read.get("requests", 0),
            input_tokens=read.get("input_tokens", 0),
            caches=caches_of(read),
            tierings=tierings_of(read),
            advice=advice_of(_read(replay.folder / _ADVICE)),
        )

    def report(self, replay_id: str) -> Path:
        """See `AdvisorReplays.report`."""
        replay = self._find(replay_id)
        path = replay.folder / _REPORT
        if is_open(replay.view) or not path.is_file():
            why = "it is still to come" if is_open(replay.view) else replay.view.note or "it was cancelled"
            raise NothingSuch(f"replay {replay_id!r} has no report: {why}")
        return path

    def _find(self, replay_id: str) -> _Replay:
        with self._lock:
            replay = self._replays.get(replay_id)
        if replay is None:
            raise NothingSuch(f"there is no replay {replay_id!r}: GET /api/v1/replays lists them")
        return replay

    # -- do

    def start(self, actor: str, order: ReplayOrder) -> ReplayView:
        """See `AdvisorReplays.start`."""
        self._recordings.file(order.recording)
        replay_id = f"r-{uuid4().hex[:12]}"
        with self._changed:
            if len(self._queue) >= QUEUED_MAX:
                raise ActionRefused(f"{QUEUED_MAX} replays wait already: cancel one, or wait for one to begin")
            self._note(actor, "replay", f"{replay_id} of {order.recording}")
            folder = self._folder / replay_id
            try:
                folder.mkdir()
            except OSError as error:
                raise NoRoom(f"a replay's folder cannot be made ({error.strerror}): free space") from error
            view = ReplayView(
                id=replay_id,
                state=ReplayState.QUEUED,
                order=order,
                actor=actor,
                note="",
                requested_us=now_us(),
                started_us=0,
                ended_us=0,
                results=0,
                results_wanted=order.runs,
                has_report=False,
            )
            replay = _Replay(view, folder)
            _write(replay)
            self._replays[replay_id] = replay
            self._queue.append(replay)
            self._drop_oldest()
            self._changed.notify_all()
        return view

    def cancel(self, actor: str, replay_id: str) -> ReplayView:
        """See `AdvisorReplays.cancel`."""
        replay = self._find(replay_id)
        if not is_open(replay.view):
            raise ActionRefused(f"replay {replay_id} is {replay.view.state}: there is nothing to cancel")
        self._note(actor, "cancel replay", replay_id)
        self._end(replay)
        return _shown(replay)

    def delete(self, actor: str, replay_id: str) -> ReplayView:
        """See `AdvisorReplays.delete`."""
        replay = self._find(replay_id)
        self._note(actor, "delete replay", replay_id)
        self._end(replay)
        with self._lock:
            self._replays.pop(replay_id, None)
        shutil.rmtree(replay.folder, ignore_errors=True)
        return _shown(replay)

    def _end(self, replay: _Replay) -> None:
        """It is cancelled, unless it has ended by itself; nothing runs for it when this returns."""
        with self._lock:
            self._step(replay, ReplayTrigger.CANCEL)
            if replay in self._queue:
                self._queue.remove(replay)
                replay.has_left.set()
        replay.unwanted.set()
        replay.has_left.wait(_END_WAIT_S)

    def _drop_oldest(self) -> None:
        """Of those that have ended, with their files."""
        ended = [each for each in self._replays.values() if not is_open(each.view) and each.has_left.is_set()]
        for replay in ended[: max(0, len(self._replays) - KEPT_MAX)]:
            del self._replays[replay.view.id]
            shutil.rmtree(replay.folder, ignore_errors=True)

    def _step(self, replay: _Replay, trigger: ReplayTrigger, note: str = "") -> None:
        """One that has ended takes no more. The lock is held."""
        if not is_open(replay.view):
            return
        replay.view = _counted(replay.folder, stepped(replay.view, trigger, now_us(), note))
        _write(replay)

    def _note(self, actor: str, action: str, detail: str) -> None:
        self._service.submit(OperatorEntry(actor, action, detail=detail)).result()

    # -- run

    def _work(self) -> None:
        while (replay := self._next()) is not None:
            fault, note = "the advisor failed, whose log has the traceback: report it with that", ""
            try:
                fault, note = self._run(replay)
            except (AdvisorError, OSError) as error:
                fault = str(error)
            finally:
                with self._lock:
                    self._step(replay, ReplayTrigger.FAIL if fault else ReplayTrigger.FINISH, fault or note)
                replay.has_left.set()

    def _next(self) -> _Replay | None:
        """The next one, begun; None when the desk is closed."""
        with self._changed:
            while not self._is_stopping:
                if self._queue:
                    replay = self._queue.popleft()
                    self._step(replay, ReplayTrigger.BEGIN)
                    return replay
                self._changed.wait()
        return None

    def _run(self, replay: _Replay) -> tuple[str, str]:
        """Why it failed, and why there is no advice; both empty where all is well."""
        order, folder = replay.view.order, replay.folder
        recording = self._recordings.file(order.recording)
        ended = run_command(
            replay_arguments(order, recording, folder / _RESULTS, folder / _REPORT),
            deadline_s=REPLAY_S_MAX,
            is_unwanted=replay.unwanted.is_set,
            nice=self._nice,
        )
        if ended.fault or ended.is_unwanted or not order.advise:
            return _told(ended, recording, folder), ""
        ended = run_command(
            advise_arguments(recording, folder / _ADVICE),
            deadline_s=ADVISE_S_MAX,
            is_unwanted=replay.unwanted.is_set,
            nice=self._nice,
        )
        fault = _told(ended, recording, folder)
        return "", f"there is no advice: {fault}" if fault else ""


def _told(ended: Ended, recording: Path, folder: Path) -> str:
    return without_place(ended.fault, recording).replace(f"{folder}/", "")


def _shown(replay: _Replay) -> ReplayView:
    """With the results that there are by now."""
    view = replay.view
    return _counted(replay.folder, view) if view.state is ReplayState.RUNNING else view


def _counted(folder: Path, view: ReplayView) -> ReplayView:
    """With what its files say."""
    results = len(first_file(_read(folder / _RESULTS)).get("results", []))
    return view.model_copy(
        update={
            "results": results,
            "results_wanted": max(view.results_wanted, results),
            "has_report": not is_open(view) and (folder / _REPORT).is_file(),
        }
    )


def _read(path: Path) -> dict[str, Any]:
    """Empty where there is none, or none that can be read."""
    try:
        read = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def _write(replay: _Replay) -> None:
    """A full disk must not keep a replay from ending: the next start then takes it for one that was cut off."""
    with contextlib.suppress(AdvisorError):
        replace_json(replay.folder / _STATE, replay.view.model_dump(mode="json"))


def _former(folder: Path) -> list[_Replay]:
    """Those of former starts, oldest first. What was open then has failed."""
    found: list[_Replay] = []
    for place in folder.iterdir():
        try:
            view = ReplayView.model_validate_json((place / _STATE).read_bytes())
        except (OSError, ValidationError) as error:
            _log.warning("a former replay cannot be read, and is left as it is", place=place.name, reason=str(error))
            continue
        replay = _Replay(view, place)
        replay.has_left.set()
        if is_open(view):
            replay.view = _counted(place, stepped(view, ReplayTrigger.FAIL, now_us(), _STOPPED))
            _write(replay)
        found.append(replay)
    return sorted(found, key=lambda each: each.view.requested_us)
