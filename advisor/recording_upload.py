"""A recording or trace that is being taken in: it has its name only when all of it has been read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from advisor.errors import ActionRefused
from advisor.recording_shelf import NoRoom, TooLarge, facts_of, without_place
from advisor.recording_views import RecordingFiguresView, RecordingView
from event_plane.errors import RecordingError
from event_plane.part_file import PartFile, part_of


class Upload:
    """`advisor.recording_views.AdvisorUpload`. `discard` may be called from any thread, also while `finish` runs."""

    def __init__(
        self,
        path: Path,
        bytes_max: int,
        require_room: Callable[[], None],
        count: Callable[[Path, Callable[[], bool]], RecordingFiguresView],
        keep: Callable[[Upload, RecordingFiguresView], RecordingView],
        ended: Callable[[Upload], None],
    ) -> None:
        """`count` reads all of a file, until it is told that nobody wants it any more. `keep` gives a whole one its
        name; `ended` is called once, whatever became of it. Raises `NoRoom`."""
        self.path = path
        self.size_bytes = 0
        self._bytes_max = bytes_max
        self._require_room = require_room
        self._count = count
        self._keep = keep
        self._ended = ended
        self._unwanted = threading.Event()
        self._turn = threading.Lock()
        self._is_open = True
        try:
            self._part = PartFile(path)
        except RecordingError as error:
            raise self._no_room(error) from error

    def write(self, content: bytes) -> None:
        """See `AdvisorUpload.write`."""
        self.size_bytes += len(content)
        if self.size_bytes > self._bytes_max:
            raise TooLarge(
                f"{self.path.name} has more than {self._bytes_max:,} bytes: raise api.upload_bytes_max, or copy it into"
                " the folder recordings of the advisor's directory"
            )
        self._require_room()
        with self._turn:
            self._require_open()
            try:
                self._part.file.write(content)
            except OSError as error:
                raise self._no_room(self._part.unwritable(error)) from error

    def finish(self) -> RecordingView:
        """See `AdvisorUpload.finish`."""
        part = part_of(self.path)
        with self._turn:
            self._require_open()
            try:
                self._part.file.flush()
                if fault := facts_of(part).fault:
                    raise RecordingError(fault)
                figures = self._count(part, self._unwanted.is_set)
                self._require_open()
                return self._keep(self, figures)
            except OSError as error:
                raise self._no_room(self._part.unwritable(error)) from error
            except RecordingError as error:
                raise RecordingError(without_place(str(error), self.path)) from error
            finally:
                self._close()

    def give_name(self) -> None:
        """Durable, and no part of a file any more. Raises `NoRoom`."""
        try:
            self._part.finish(self.size_bytes)
        except RecordingError as error:
            raise self._no_room(error) from error

    def discard(self) -> None:
        """See `AdvisorUpload.discard`."""
        self._unwanted.set()
        with self._turn:
            self._close()

    def _close(self) -> None:
        """What has its name by now keeps it."""
        if self._is_open:
            self._is_open = False
            self._part.discard()
            self._ended(self)

    def _require_open(self) -> None:
        if not self._is_open or self._unwanted.is_set():
            raise ActionRefused(
                f"{self.path.name} is not taken in any more: its sender left, or the advisor stops; send it again"
            )

    def _no_room(self, error: RecordingError) -> NoRoom:
        return NoRoom(without_place(str(error), self.path))
