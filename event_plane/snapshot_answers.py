"""Answers asks for a producer's whole state, at the producer's pace."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from event_plane.errors import TransportError


class SnapshotAnswers:
    """Calls `announce` when asked to, on a thread of its own and never twice at once. Thread-safe.

    Asks that come while one is answered are answered together, by one more call; calls begin at least `interval_s`
    apart. `announce` may raise `TransportError`: its publisher was closed meanwhile.
    """

    def __init__(self, announce: Callable[[], None], *, interval_s: float, name: str) -> None:
        self._announce = announce
        self._interval_s = interval_s
        self._changed = threading.Condition()
        self._asked = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Have the state announced. Returns at once."""
        with self._changed:
            self._asked = True
            self._changed.notify()

    def close(self) -> None:
        """Answer no more, and wait for the answer under way. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while self._is_asked():
            with suppress(TransportError):
                self._announce()
            with self._changed:
                self._changed.wait_for(lambda: self._closed, self._interval_s)

    def _is_asked(self) -> bool:
        """Wait for an ask and take it; False once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._asked or self._closed)
            self._asked = False
            return not self._closed
