"""A lock that nobody is starved of, whose holder may let readers in while it only thinks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, Lock, get_ident

_LOOK_S = 0.002
"""How often a reader that waits looks whether the holder has let readers in."""


class Turnstile:
    """A reentrant lock behind a gate, for a writer that takes it again and again beside readers that seldom do.

    Python's lock is unfair: who releases it and asks again at once mostly gets it. Here whoever waits holds the gate,
    so the writer, asking again, queues behind one reader at least.

    A holder that changes nothing for a while (`open_to_readers`) lets in those that only read (`shared`), one at a
    time: what they read may keep notes of its own.
    """

    __slots__ = ("_depth", "_door", "_gate", "_lock", "_open", "_owner", "_visitor")

    def __init__(self) -> None:
        self._gate = Lock()
        self._lock = Lock()
        self._owner = 0
        self._depth = 0
        self._door = Condition(Lock())
        """Of what follows."""
        self._open = False
        self._visitor = 0
        """The thread that reads beside a holder that thinks; 0: none. What it takes meanwhile, it has already."""

    def __enter__(self) -> Turnstile:
        me = get_ident()
        if self._owner != me:
            if self._visitor == me:
                return self
            with self._gate:
                self._lock.acquire()
            self._owner = me
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        if self._owner != get_ident():
            return
        self._depth -= 1
        if not self._depth:
            self._owner = 0
            self._lock.release()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """For one that changes nothing: alone, or beside a holder that thinks. Reentrant."""
        me = get_ident()
        if me in (self._owner, self._visitor):
            yield
        elif self._visits(me):
            try:
                yield
            finally:
                with self._door:
                    self._visitor = 0
                    self._door.notify_all()
        else:
            try:
                yield
            finally:
                self.__exit__()

    def _visits(self, me: int) -> bool:
        """Waits until the holder thinks, or there is none: then it holds the lock, and False is returned."""
        while True:
            with self._door:
                if self._open and self._visitor:
                    self._door.wait(_LOOK_S)
                if self._open and not self._visitor:
                    self._visitor = me
                    return True
            if self._gate.acquire(timeout=_LOOK_S):
                try:
                    if self._lock.acquire(timeout=_LOOK_S):
                        self._owner, self._depth = me, 1
                        return False
                finally:
                    self._gate.release()

    @contextmanager
    def open_to_readers(self) -> Iterator[None]:
        """The holder changes nothing that readers see until this ends; it ends when the reader inside has left."""
        with self._door:
            self._open = True
        try:
            yield
        finally:
            with self._door:
                self._open = False
                while self._visitor:
                    self._door.wait()
