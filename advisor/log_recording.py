"""One recording of the running log: its batches from a position on, into a Parquet file."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from advisor.entries import EntryKind, EventLog
from advisor.errors import AdvisorError
from advisor.recorder import Limits
from advisor.recording_shelf import without_place
from event_plane import wire
from event_plane.errors import EventPlaneError
from event_plane.parquet import ParquetRecorder

LOOK_S: Final = 0.2
"""Between looks at what the log has more."""
CHUNK_ENTRIES: Final = 4_096
"""Read at a time: what is being read is not dropped by retention, and a slow disk must not hold the log up."""


class LogRecording(threading.Thread):
    """Follows `log` from `from_position` until it is told to stop, or has so many events or seconds.

    Reads on a thread of its own what the log holds, whoever appends meanwhile. The figures are written by this thread
    alone. The file is whole when the thread has ended, but where `fault` says that it is not.
    """

    def __init__(
        self,
        log: EventLog,
        recorder: ParquetRecorder,
        from_position: int,
        *,
        seconds: float | None = None,
        events: int | None = None,
        require_room: Callable[[], None] = lambda: None,
        ended: Callable[[LogRecording], None] = lambda _: None,
    ) -> None:
        """`require_room` raises `AdvisorError` where no more may be written. `ended` is called as the thread's last."""
        super().__init__(name="kvadvisor-recording", daemon=True)
        self.stopping = threading.Event()
        self.from_position = from_position
        self.to_position: int | None = None
        """Of the last batch that was taken."""
        self.missed_entries = 0
        """That retention dropped from the log before they were read."""
        self.fault = "it ended by a fault of the advisor, whose log has the traceback: report it with that"
        self._log = log
        self._recorder = recorder
        self._limits = Limits(events, seconds, self.stopping)
        self._events = events
        self._next = from_position
        self._require_room = require_room
        self._ended = ended

    @property
    def path(self) -> Path:
        return self._recorder.path

    @property
    def size_bytes(self) -> int:
        """See `ParquetRecorder.size_bytes`."""
        return self._recorder.size_bytes

    @property
    def events(self) -> int:
        return self._recorder.events

    @property
    def batches(self) -> int:
        return self._recorder.batches

    def run(self) -> None:
        try:
            self.fault = self._record()
        finally:
            self._ended(self)

    def _record(self) -> str:
        """Until its end, which is that of the file; says why it was an early one."""
        fault = ""
        try:
            self._follow()
        except (AdvisorError, EventPlaneError) as error:
            fault = str(error)
        try:
            self._recorder.close()
        except EventPlaneError as error:
            fault = fault or str(error)
        return without_place(fault, self.path)

    def _follow(self) -> None:
        is_last = False
        while not is_last:
            # Asked before the log: what was appended before the stop belongs to the recording.
            is_last = self._limits.reached(self.events)
            last = self._log.last_position()
            while self._next <= last and not self._is_enough():
                self._require_room()
                self._take(min(last, self._next + CHUNK_ENTRIES - 1))
            if not is_last:
                self.stopping.wait(LOOK_S)

    def _is_enough(self) -> bool:
        return self._events is not None and self.events >= self._events

    def _take(self, through: int) -> None:
        """Entries up to `through`, or fewer where those are events enough."""
        for entry in self._log.read(self._next, through):
            self.missed_entries += entry.position - self._next
            self._next = entry.position + 1
            if entry.kind is not EntryKind.BATCH:
                continue
            self._recorder.write(
                wire.decode(entry.payload), entry.source, received_us=entry.recorded_us, position=entry.position
            )
            self.to_position = entry.position
            if self._is_enough():
                return
        self.missed_entries += max(0, through + 1 - self._next)
        self._next = max(self._next, through + 1)
