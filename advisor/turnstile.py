"""A lock that nobody is starved of."""

from __future__ import annotations

from threading import Lock, get_ident


class Turnstile:
    """A reentrant lock behind a gate, for a writer that takes it again and again beside readers that seldom do.

    Python's lock is unfair: who releases it and asks again at once mostly gets it. Here whoever waits holds the gate,
    so the writer, asking again, queues behind one reader at least.
    """

    __slots__ = ("_depth", "_gate", "_lock", "_owner")

    def __init__(self) -> None:
        self._gate = Lock()
        self._lock = Lock()
        self._owner = 0
        self._depth = 0

    def __enter__(self) -> Turnstile:
        me = get_ident()
        if self._owner != me:
            with self._gate:
                self._lock.acquire()
            self._owner = me
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = 0
            self._lock.release()
