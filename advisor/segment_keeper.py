"""The thread beside a segment log's writer: has the next file ready, seals full segments, keeps the catalogue."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from advisor.errors import LogError
from advisor.log_faults import os_fault
from advisor.log_folder import sync_folder
from advisor.segment_catalogue import Catalogue
from advisor.segment_files import TEMPORARY_SUFFIX, seal
from advisor.segment_shelf import Segment, Shelf

NICENESS = 10
"""It waits behind the threads that ingest; what it does can wait for longest."""
RETRY_S = 10.0
SEALED_BYTES_PER_S_MAX = 32_000_000
"""A log that grows faster is sealed once it is slower: that takes a core, and the interpreter's lock from ingest."""

_log = structlog.get_logger()


class Keeper(threading.Thread):
    """Ends with `close`. What it cannot do is said and tried again: the log is whole without it."""

    def __init__(self, shelf: Shelf, catalogue: Catalogue, segment_bytes: int) -> None:
        super().__init__(name="kvadvisor-keeper", daemon=True)
        self._shelf = shelf
        self._catalogue = catalogue
        self._segment_bytes = segment_bytes
        self._prepared: Path | None = None
        self._prepared_count = 0
        """Each has a name of its own: one that was taken is not yet renamed when the next is made."""
        self._work = threading.Event()
        self._ending = threading.Event()
        self._preparing = threading.Lock()
        self._told = ""
        self._pace_s = segment_bytes / SEALED_BYTES_PER_S_MAX
        self._full_s = time.monotonic() - self._pace_s

    def take_prepared(self) -> Path:
        """An empty file with room reserved, durable but for its name. Raises `OSError` where the disk is full."""
        with self._preparing:
            path = self._prepared if self._prepared is not None else self._prepare()
            self._prepared = None
        return path

    def wake(self) -> None:
        """A segment became full."""
        self._full_s = time.monotonic()
        self._work.set()

    def close(self) -> None:
        """Wait for what it is doing; the rest is done after the next start."""
        self._ending.set()
        self._work.set()
        if self.is_alive():
            self.join()
        with self._preparing:
            if self._prepared is not None:
                self._prepared.unlink(missing_ok=True)
                self._prepared = None

    def run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        self._work.set()
        while not self._ending.is_set():
            quiet_in_s = self._quiet_in_s()
            if not self._work.wait(quiet_in_s or RETRY_S) and not quiet_in_s:
                self._told = ""
            self._work.clear()
            self._attempt(self._have_prepared)
            while self._may_seal() and (segment := self._shelf.unsealed()) is not None:
                if not self._attempt(lambda segment=segment: self._seal(segment)):  # type: ignore[misc]
                    break
                self._attempt(self._have_prepared)

    def _quiet_in_s(self) -> float:
        """Until the log has grown no faster than it may be sealed at."""
        return max(0.0, self._full_s + self._pace_s - time.monotonic())

    def _may_seal(self) -> bool:
        return not self._ending.is_set() and not self._quiet_in_s()

    def _attempt(self, step: Callable[[], None]) -> bool:
        try:
            step()
        except (OSError, LogError) as fault:
            told = str(fault if isinstance(fault, LogError) else os_fault(self._shelf.folder, "keep", fault))
            if told != self._told:
                self._told = told
                _log.warning("segments are kept as they are for now", reason=told)
            return False
        return True

    def _have_prepared(self) -> None:
        with self._preparing:
            if self._prepared is None and not self._ending.is_set():
                self._prepared = self._prepare()

    def _prepare(self) -> Path:
        self._prepared_count += 1
        path = self._shelf.folder / f"prepared-{self._prepared_count}{TEMPORARY_SUFFIX}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(descriptor, 0, self._segment_bytes)
            os.fsync(descriptor)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        return path

    def _seal(self, segment: Segment) -> None:
        try:
            temporary, _ = seal(segment.path, segment.first)
        except FileNotFoundError:
            if segment in self._shelf.segments():
                raise
            return
        if self._shelf.seal(segment, temporary):
            self._catalogue.record(segment)
        else:
            temporary.unlink(missing_ok=True)
            sync_folder(self._shelf.folder)
