"""A lock that goes to whoever waited longest, so that a long row of batches lets others in between."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class FifoLock:
    """Mutual exclusion in order of arrival. `threading.Lock` may be won back by the thread that just released it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held = False
        self._waiting: deque[threading.Lock] = deque()

    @property
    def is_held(self) -> bool:
        return self._held

    def __enter__(self) -> None:
        with self._guard:
            if not self._held:
                self._held = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            turn.acquire()
        except BaseException:  # an interrupt while waiting must not leave a turn that nobody takes
            with self._guard:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                    raise
            self._pass_on()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False
