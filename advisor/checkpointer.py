"""The thread that makes checkpoints while everything else goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from advisor.checkpoint import CheckpointError, Taken
from advisor.fold import Fold
from advisor.intake import Intake
from advisor.turnstile import Turnstile
from advisor.wording import bytes_text, duration_text

_log = structlog.get_logger()


POLL_S = 0.25
RETRY_S = 10.0
"""After one that could not be written."""


class Checkpointer(threading.Thread):
    """Makes one every `interval_s` in which something was folded, and when `ask`ed to.

    A failed one is said, and tried again later.
    """

    def __init__(
        self,
        fold: Fold,
        lock: Turnstile,
        cursors: Intake,
        folder: Path,
        *,
        interval_s: float,
        stopping: threading.Event,
        fail: Callable[[BaseException], None],
    ) -> None:
        super().__init__(name="kvadvisor-checkpoint", daemon=True)
        self.problem = ""
        """Why the last one could not be written, else empty."""
        self.position = fold.position
        """Of the last one written or read."""
        self._fold = fold
        self._lock = lock
        self._cursors = cursors
        self._folder = folder
        self._interval_s = interval_s
        self._stopping = stopping
        self._fail = fail
        self._written = ""
        self._wanted = 0

    def ask(self, position: int) -> None:
        """Make one as soon as `position` is folded, unless the last one is there or past it. From any thread."""
        self._wanted = position

    def text(self) -> str:
        """One sentence about the last one."""
        return self.problem or self._written or f"none since the start at position {self.position}"

    def run(self) -> None:
        try:
            due_s = time.monotonic() + self._interval_s
            retry_s = 0.0
            while not self._stopping.wait(min(POLL_S, self._interval_s)):
                asked = self.position < self._wanted <= self._fold.position and time.monotonic() >= retry_s
                if asked or time.monotonic() >= due_s:
                    self._make()
                    due_s = time.monotonic() + self._interval_s
                    retry_s = time.monotonic() + RETRY_S if self.problem else 0.0
        except Exception as fault:  # noqa: BLE001 -- reported by the service, which stops everything
            self._fail(fault)

    def write_last(self) -> None:
        """One more, once nothing is folded any more."""
        self._make()

    def _make(self) -> None:
        with self._lock:
            if self._fold.position == self.position:
                return
            taken = Taken(self._fold, self._cursors.cursors())
        started_s = time.monotonic()
        try:
            size = taken.write(self._folder)
        except CheckpointError as fault:
            self.problem = str(fault)
            _log.warning(self.problem)
            return
        self.problem = ""
        self.position = taken.position
        took = duration_text(time.monotonic() - started_s)
        self._written = f"position {taken.position}, {bytes_text(size)} in {took}"
