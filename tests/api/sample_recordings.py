"""`AdvisorRecordings` over plain values: one that is whole, one under way, one that was cut, one of garbage."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from advisor.errors import ActionRefused, NothingSuch
from advisor.recording_shelf import NoRoom, TooLarge
from advisor.recording_views import (
    RecordingDetailView,
    RecordingFiguresView,
    RecordingState,
    RecordingView,
    RequestsView,
)
from event_plane.errors import RecordingError

STARTED_US = 1_764_500_000_000_000


def recording(name: str, state: RecordingState = "done", **others: object) -> RecordingView:
    return RecordingView(
        name=name, state=state, format="parquet", note="", size_bytes=48_200_000, events=1_460_000, batches=2_852,
        from_position=71_203, to_position=74_118, missed_entries=0, started_us=STARTED_US,
        changed_us=STARTED_US + 600_000_000, actor="ann",
    ).model_copy(update={"state": state, **others})  # fmt: skip


FIGURES = RecordingFiguresView(
    batches=2_852, events=1_460_000, wire_bytes=150_000_000, first_us=STARTED_US, last_us=STARTED_US + 600_000_000,
    kinds={"events": 2_852}, types={"store": {"G1": 1_000_000, "G2": 60_000}, "remove": {"G1": 400_000}},
    locations={"gpu": 1_460_000}, namespaces={"acme/llama": 1_460_000}, producers=[], producers_untold=0, missing=3,
    duplicates=0, not_used={},
    requests=RequestsView(
        requests=21_400, accesses=1_040_000, blocks=182_000, input_tokens=16_600_000, block_tokens=16,
        block_bytes=2_097_152, span_s=600.0,
    ),
)  # fmt: skip


class SampleUpload:
    def __init__(self, recordings: SampleRecordings, name: str) -> None:
        self._recordings = recordings
        self._name = name
        self._content = b""
        self.discarded = 0
        self.unwanted = threading.Event()

    def write(self, content: bytes) -> None:
        self._content += content
        if len(self._content) > self._recordings.upload_bytes_max:
            raise TooLarge(f"{self._name} has more than {self._recordings.upload_bytes_max:,} bytes")

    def finish(self) -> RecordingView:
        if not self._content.startswith(b"{"):
            raise RecordingError(f"{self._name} starts with {self._content[:8]!r}, like no recording")
        if self._recordings.reads_s and self.unwanted.wait(self._recordings.reads_s):
            raise ActionRefused(f"{self._name} is not taken in any more")
        view = recording(self._name, format="trace", size_bytes=len(self._content), events=None, batches=None)
        self._recordings.views.append(view)
        return view

    def discard(self) -> None:
        self.discarded += 1
        self.unwanted.set()


class SampleRecordings:
    upload_bytes_max = 100_000

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: where the files are that are given out."""
        self.views = [
            recording("now", "recording", to_position=74_100),
            recording("evening"),
            recording("night", "cut", format=None, events=None, batches=None, note="it cannot be read: delete it"),
        ]
        self.folder = folder
        self.reads_s = 0.0
        """What reading the whole of an upload takes."""
        self.full = False
        self.asked: list[tuple[str, ...]] = []
        self.uploads: list[SampleUpload] = []

    def list(self) -> Sequence[RecordingView]:
        return self.views

    def _find(self, name: str) -> RecordingView:
        for view in self.views:
            if view.name == name:
                return view
        raise NothingSuch(f"there is no recording {name!r}: GET /api/v1/recordings lists them")

    def get(self, name: str) -> RecordingDetailView:
        view = self._find(name)
        figures = FIGURES if view.state == "done" else None
        note = "" if figures else "they are counted when it has ended"
        return RecordingDetailView(recording=view, figures=figures, figures_note=note)

    def start(self, actor: str, name: str, *, seconds: float | None, events: int | None) -> RecordingView:
        if self.full:
            raise NoRoom("the disk of the recordings has 7 bytes left: free space, or delete recordings")
        if any(view.name == name for view in self.views):
            raise ActionRefused(f"there is a recording {name!r} already: delete it, or choose another name")
        self.asked.append(("record", actor, name, f"{seconds}", f"{events}"))
        self.views.insert(0, recording(name, "recording", events=0, batches=0, size_bytes=4, actor=actor))
        return self.views[0]

    def stop(self, actor: str, name: str) -> RecordingView:
        self._find(name)
        self.asked.append(("stop", actor, name))
        return self._ended(name)

    def _ended(self, name: str) -> RecordingView:
        self.views = [view.model_copy(update={"state": "done"}) if view.name == name else view for view in self.views]
        return self._find(name)

    def file(self, name: str) -> Path:
        if self._find(name).state != "done" or self.folder is None:
            raise ActionRefused(f"recording {name!r} is under way: stop it first")
        return self.folder / name

    def upload(self, actor: str, name: str) -> SampleUpload:
        self.asked.append(("upload", actor, name))
        self.uploads.append(SampleUpload(self, name))
        return self.uploads[-1]

    def delete(self, actor: str, name: str) -> RecordingView:
        gone = self._find(name)
        self.asked.append(("delete", actor, name))
        self.views.remove(gone)
        return gone
