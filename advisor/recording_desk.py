"""Recordings of the running service: its log recorded from here on, files taken in and given out."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from advisor.attended import NICE
from advisor.entries import OperatorEntry
from advisor.errors import ActionRefused, NothingSuch
from advisor.figure_counter import FigureCounter
from advisor.log_recording import LogRecording
from advisor.pipeline import now_us
from advisor.recording_shelf import FREE_BYTES_MIN, NoRoom, RecordingShelf, Shelved, without_place
from advisor.recording_upload import Upload
from advisor.recording_views import AdvisorUpload, RecordingDetailView, RecordingFiguresView, RecordingView
from advisor.service import AdvisorService
from event_plane.errors import RecordingError
from event_plane.parquet import ParquetRecorder

FOLDER: Final = "recordings"
"""In the service's directory."""
RECORDINGS_AT_ONCE_MAX: Final = 4
UPLOADS_AT_ONCE_MAX: Final = 2
ENDED_KEPT_MAX: Final = 100
STOP_WAIT_S: Final = 60.0

CUT: Final = (
    "what wrote it ended before it was whole, so it cannot be read: delete it. A file that was sent, send again; of a"
    " recording, export what the log still holds with `kvadvisor log export`"
)


class RecordingDesk:
    """`advisor.recording_views.AdvisorRecordings` over a running service, until it is closed."""

    def __init__(
        self, service: AdvisorService, *, free_bytes_min: int = FREE_BYTES_MIN, nice: int = NICE
    ) -> None:
        """`nice`: of the processes that count files. Raises `OSError` where the folder cannot be made."""
        self._service = service
        self._shelf = RecordingShelf(service.settings.directory / FOLDER, free_bytes_min=free_bytes_min)
        self._counter = FigureCounter(nice)
        self._counter.start()
        self._lock = threading.Lock()
        self._running: dict[str, tuple[LogRecording, RecordingView]] = {}
        """By name, each with what was known at its start."""
        self._ended: dict[str, RecordingView] = {}
        """What is known of those that ended since the start, and their files do not say."""
        self._uploads: dict[str, Upload] = {}

    @property
    def upload_bytes_max(self) -> int:
        return self._service.settings.api.upload_bytes_max

    def close(self) -> None:
        """Ends what is under way: recordings are whole then, uploads are gone. Before the service stops."""
        with self._lock:
            recordings = [recording for recording, _ in self._running.values()]
            uploads = list(self._uploads.values())
        for recording in recordings:
            recording.stopping.set()
        for upload in uploads:
            upload.discard()
        for recording in recordings:
            recording.join(STOP_WAIT_S)
        self._counter.stop()

    # -- look

    def list(self) -> Sequence[RecordingView]:
        """See `AdvisorRecordings.list`."""
        shelved = self._shelf.list()
        with self._lock:
            busy = {*self._running, *self._uploads}
            views = [live(*each) for each in self._running.values()]
            known = dict(self._ended)
        views += [self._view(each, known.get(each.name)) for each in shelved if each.name not in busy]
        there = {view.name for view in views}
        views += [view for view in known.values() if view.name not in there]
        return sorted(views, key=lambda view: (-view.changed_us, view.name))

    def get(self, name: str) -> RecordingDetailView:
        """See `AdvisorRecordings.get`."""
        shelved, view = self._find(name)
        if shelved is None or view.state in ("recording", "cut") or view.format is None:
            note = "they are counted when it has ended" if view.state == "recording" else view.note
            return RecordingDetailView(recording=view, figures=None, figures_note=note)
        figures, note = self._counter.look(shelved)
        return RecordingDetailView(recording=view, figures=figures, figures_note=note)

    def file(self, name: str) -> Path:
        """See `AdvisorRecordings.file`."""
        shelved, view = self._find(name)
        if view.state == "recording":
            raise ActionRefused(f"recording {name!r} is under way: stop it first")
        if shelved is None or shelved.is_part:
            raise ActionRefused(f"recording {name!r} cannot be read: {view.note}")
        return shelved.path

    def _find(self, name: str) -> tuple[Shelved | None, RecordingView]:
        """A recording, and its file where it has one. Raises `NothingSuch`."""
        with self._lock:
            if name in self._uploads:
                raise NothingSuch(f"recording {name!r} is being taken in: wait for its end")
            running, ended = self._running.get(name), self._ended.get(name)
        if running is not None:
            return None, live(*running)
        try:
            shelved = self._shelf.find(name)
        except NothingSuch:
            if ended is None:
                raise
            return None, ended
        return shelved, self._view(shelved, ended)

    def _view(self, shelved: Shelved, ended: RecordingView | None) -> RecordingView:
        """A file, and what else is known of it."""
        facts = self._shelf.facts(shelved)
        view = RecordingView(
            name=shelved.name,
            state="cut" if shelved.is_part else "failed" if facts.fault else "done",
            format=facts.format,
            note=CUT if shelved.is_part else facts.fault,
            size_bytes=shelved.size_bytes,
            events=facts.events,
            batches=facts.batches,
            from_position=facts.first_position,
            to_position=facts.last_position,
            missed_entries=0,
            started_us=0,
            changed_us=shelved.changed_us,
            actor="",
        )
        if ended is None or view.state != "done":
            return view
        own = ("state", "note", "missed_entries", "started_us", "actor")
        return view.model_copy(update={name: getattr(ended, name) for name in own})

    # -- record

    def start(self, actor: str, name: str, *, seconds: float | None, events: int | None) -> RecordingView:
        """See `AdvisorRecordings.start`."""
        with self._lock:
            if len(self._running) >= RECORDINGS_AT_ONCE_MAX:
                names = ", ".join(sorted(self._running))
                raise ActionRefused(f"{RECORDINGS_AT_ONCE_MAX} recordings are under way: stop one of {names}")
            path = self._shelf.require_free(name)
            log = self._service.log
            position = self._note(actor, "record", f"{name}{_until(seconds, events)}")
            try:
                recorder = ParquetRecorder(path)
            except RecordingError as error:
                raise NoRoom(without_place(str(error), path)) from error
            recording = LogRecording(
                log,
                recorder,
                position,
                seconds=seconds,
                events=events,
                require_room=self._shelf.require_room,
                ended=self._has_ended,
            )
            view = RecordingView(
                name=name,
                state="recording",
                format="parquet",
                note="",
                size_bytes=0,
                events=0,
                batches=0,
                from_position=position,
                to_position=None,
                missed_entries=0,
                started_us=now_us(),
                changed_us=now_us(),
                actor=actor,
            )
            self._ended.pop(name, None)
            self._running[name] = recording, view
            recording.start()
        return live(recording, view)

    def stop(self, actor: str, name: str) -> RecordingView:
        """See `AdvisorRecordings.stop`."""
        with self._lock:
            running, names = self._running.get(name), ", ".join(sorted(self._running)) or "none"
        if running is None:
            raise self._not_under_way(name, names)
        recording, _ = running
        self._note(actor, "stop recording", name)
        recording.stopping.set()
        recording.join(STOP_WAIT_S)
        return self._find(name)[1]

    def _not_under_way(self, name: str, names: str) -> ActionRefused:
        """What to raise for one that cannot be stopped; `names`: those that can."""
        try:
            _, view = self._find(name)
        except NothingSuch:
            return NothingSuch(f"no recording {name!r} is under way; those that are: {names}")
        return ActionRefused(f"recording {name!r} is {view.state} already: there is nothing to stop")

    def _has_ended(self, recording: LogRecording) -> None:
        """On its thread, as the last that it does."""
        name = recording.path.name
        with self._lock:
            _, started = self._running[name]
            if recording.fault:
                outcome = {"state": "failed", "note": recording.fault}
            else:
                outcome = {"state": "done", "note": _missed(recording.missed_entries)}
            self._remember(live(recording, started).model_copy(update=outcome))
            self._running.pop(name)

    def _remember(self, ended: RecordingView) -> None:
        """The caller holds the lock."""
        self._ended.pop(ended.name, None)
        self._ended[ended.name] = ended
        while len(self._ended) > ENDED_KEPT_MAX:
            self._ended.pop(next(iter(self._ended)))

    # -- files

    def upload(self, actor: str, name: str) -> AdvisorUpload:
        """See `AdvisorRecordings.upload`."""
        with self._lock:
            if len(self._uploads) >= UPLOADS_AT_ONCE_MAX:
                raise ActionRefused(f"{UPLOADS_AT_ONCE_MAX} files are being taken in: wait for the end of one")
            path = self._shelf.require_free(name)

            def keep(upload: Upload, figures: RecordingFiguresView) -> RecordingView:
                self._note(actor, "upload recording", f"{name}, {upload.size_bytes:,} bytes")
                upload.give_name()
                shelved = self._shelf.find(name)
                self._counter.know(shelved.stamp, figures)
                view = self._view(shelved, None).model_copy(update={"actor": actor})
                with self._lock:
                    self._remember(view)
                return view

            def ended(_: Upload) -> None:
                with self._lock:
                    self._uploads.pop(name, None)

            upload = Upload(path, self.upload_bytes_max, self._shelf.require_room, self._counter.count, keep, ended)
            self._uploads[name] = upload
            return upload

    def delete(self, actor: str, name: str) -> RecordingView:
        """See `AdvisorRecordings.delete`."""
        shelved, view = self._find(name)
        if view.state == "recording":
            raise ActionRefused(f"recording {name!r} is under way: stop it first")
        self._note(actor, "delete recording", name)
        if shelved is not None:
            shelved.path.unlink(missing_ok=True)
        with self._lock:
            self._ended.pop(name, None)
        return view

    def _note(self, actor: str, action: str, detail: str) -> int:
        """Logs it; its position, once it is applied."""
        return self._service.submit(OperatorEntry(actor, action, detail=detail)).result()


def live(recording: LogRecording, started: RecordingView) -> RecordingView:
    """How it stands by now."""
    return started.model_copy(
        update={
            "size_bytes": recording.size_bytes,
            "events": recording.events,
            "batches": recording.batches,
            "to_position": recording.to_position,
            "missed_entries": recording.missed_entries,
            "note": _missed(recording.missed_entries),
            "changed_us": now_us(),
        }
    )


def _missed(entries: int) -> str:
    if not entries:
        return ""
    return f"{entries:,} entries went from the log before they were recorded: raise log.retention_bytes, or record less"


def _until(seconds: float | None, events: int | None) -> str:
    limits = [f"{seconds:g} s" if seconds is not None else "", f"{events:,} events" if events is not None else ""]
    told = " or ".join(limit for limit in limits if limit)
    return f", for {told}" if told else ""
