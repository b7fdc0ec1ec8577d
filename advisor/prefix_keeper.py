"""One picture for all who look: taken in the background when somebody asks, kept while somebody does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from advisor.errors import PictureBeingMade

Picture = TypeVar("Picture")

FRESH_S = 10.0
"""A younger picture is not made again."""
STALE_S = 30.0
"""An older one is not answered with, where the next can be had in time."""
WAIT_S = 0.4
"""The longest wait for a picture."""
IDLE_S = 120.0
"""A picture is let go where nobody asks for the next one as long."""
REST = 10
"""After a picture that took long, a rest of so many times that: a tenth of one core goes into pictures at most."""


class PictureKeeper(Generic[Picture]):
    """Thread-safe. `take` runs in a thread of the keeper's, which ends when nobody asks any more."""

    def __init__(
        self,
        take: Callable[[], Picture],
        *,
        takes_s: Callable[[], float] = lambda: 0.0,
        fresh_s: float = FRESH_S,
        wait_s: float = WAIT_S,
        idle_s: float = IDLE_S,
    ) -> None:
        """`takes_s`: how long a picture may take, about."""
        self._take = take
        self._takes_s = takes_s
        self._fresh_s, self._wait_s, self._idle_s = fresh_s, wait_s, idle_s
        self._changed = threading.Condition()
        self._picture: Picture | None = None
        self._taken_s = 0.0
        self._began_s = 0.0
        self._rests_until_s = 0.0
        self._is_wanted = False
        self._is_at_work = False
        self._problem = ""

    def newest(self) -> Picture:
        """The newest picture; waits up to `wait_s` where there is none or it is stale. Raises `PictureBeingMade`."""
        with self._changed:
            now_s = time.monotonic()
            if self._picture is None or now_s >= self._rests_until_s:
                self._want()
            if self._picture is None or now_s - self._taken_s > STALE_S:
                self._changed.wait_for(lambda: not self._is_wanted, self._wait_s)
            if self._picture is None:
                raise self._being_made()
            return self._picture

    def _being_made(self) -> PictureBeingMade:
        now_s = time.monotonic()
        if self._problem and not self._is_wanted:
            return PictureBeingMade(self._problem, self._rests_until_s - now_s)
        reason = "the first picture of prefixes is being taken, which takes a second for some million blocks"
        return PictureBeingMade(reason, self._takes_s() - (now_s - self._began_s))

    def _want(self) -> None:
        self._is_wanted = True
        if not self._is_at_work:
            self._is_at_work = True
            self._began_s = time.monotonic()
            threading.Thread(target=self._work, name="prefix-picture", daemon=True).start()
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            began_s = time.monotonic()
            picture, problem = None, ""
            try:
                picture = self._take()
            except MemoryError:
                problem = "there is not enough memory for a picture of prefixes: it takes 45 bytes a block"
            ended_s = time.monotonic()
            with self._changed:
                self._picture, self._problem = picture, problem
                self._taken_s = ended_s
                self._rests_until_s = ended_s + max(self._fresh_s, REST * (ended_s - began_s))
                self._is_wanted = False
                self._changed.notify_all()
                if not self._changed.wait_for(lambda: self._is_wanted, self._idle_s):
                    self._picture = None
                    self._is_at_work = False
                    return
