"""Tells the log of corrupt blocks: of the first with its reason, of many that follow with their number."""

from __future__ import annotations

import threading
import time
from math import inf

import structlog

from storage_agent.port import BlockKey

_log = structlog.get_logger()
QUIET_S = 5.0
"""A volume has one line in this time at most."""


class CorruptionLog:
    """Of one volume. Thread-safe."""

    def __init__(self, volume: str) -> None:
        self._volume = volume
        self._lock = threading.Lock()
        self._quiet_until_s = -inf
        self._last: tuple[BlockKey, str] | None = None
        """What was found since the last line, and how much."""
        self._untold = 0

    def found(self, key: BlockKey, reason: str) -> None:
        """Of a block whose bytes are not those that were put."""
        with self._lock:
            self._last = key, reason
            self._untold += 1
            if time.monotonic() >= self._quiet_until_s:
                self._tell()

    def close(self) -> None:
        """Tell of those that no line has told of."""
        with self._lock:
            self._tell()

    def _tell(self) -> None:
        if self._last is None:
            return
        key, reason = self._last
        _log.warning(
            "corrupt block, its copy is not used",
            volume=self._volume,
            hash=f"{key.sequence_hash:032x}",
            reason=reason,
            blocks=self._untold,
        )
        self._last, self._untold = None, 0
        self._quiet_until_s = time.monotonic() + QUIET_S
