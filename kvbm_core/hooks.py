"""Hooks: every step of every block's life, told to whoever listens. For an engine's integration, and for tests.

A pool notes its steps under its lock and has them told after it has let the lock go, so that a hook may call the pool.
Steps are told one at a time in the order in which they happened, by whichever thread comes first. Without a hook
nothing is noted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

import structlog

from kvbm_core.identity import BlockIdentity

_log = structlog.get_logger()


class LifeStep(StrEnum):
    ALLOCATED = "allocated"
    INITIALISED = "initialised"
    """A sequence was started in it."""
    COMMITTED = "committed"
    REGISTERED = "registered"
    DUPLICATE = "duplicate"
    """Its key was there before: it is a second copy, or is reset next where the pool rejects duplicates."""
    MATCHED = "matched"
    """A registered block was found and is held: by match, scan or acquire, or for a duplicate of it."""
    FORGOTTEN = "forgotten"
    """Its bytes turned out wrong: nobody finds it any more, and its last guard resets it."""
    RELEASED = "released"
    """A guard of it was let go."""
    INACTIVE = "inactive"
    """Nobody holds the registered block any more: it stays findable and may be evicted."""
    EVICTED = "evicted"
    """Its memory is wanted for another block, or the whole pool was reset."""
    RESET = "reset"
    """Its memory is empty: it was given up before registration, or was a second copy or forgotten."""


class BlockStep(NamedTuple):
    """One step of one block. `identity` is None until the block is committed."""

    step: LifeStep
    pool: str
    block: int
    identity: BlockIdentity | None


Hook = Callable[[BlockStep], None]


class Hooks:
    """Who listens to some pools. Thread-safe. A hook that raises is counted in `failures` and logged, and goes on.

    In the main thread what is no `Exception`, an interrupt say, reaches the pool's caller, and no block is lost.
    """

    def __init__(self) -> None:
        self.listeners: tuple[Hook, ...] = ()
        self.failures = 0
        self._noted: deque[BlockStep] = deque()
        self._changing = threading.Lock()
        self._telling = threading.Lock()

    def add(self, hook: Hook) -> Callable[[], None]:
        """Tell `hook` every step from now on. What is returned takes it away again."""
        with self._changing:
            self.listeners = (*self.listeners, hook)

        def remove() -> None:
            with self._changing:
                self.listeners = tuple(each for each in self.listeners if each is not hook)

        return remove

    def note(self, step: BlockStep) -> None:
        """Remember a step; for pools, under their lock."""
        self._noted.append(step)

    def tell(self) -> None:
        """Call the hooks with what was noted, unless another thread, or a hook's own caller, is at it: it goes on."""
        while self._noted and self._telling.acquire(blocking=False):
            try:
                while self._noted:
                    self._tell_one(self._noted.popleft())
            finally:
                self._telling.release()

    def _tell_one(self, step: BlockStep) -> None:
        for hook in self.listeners:
            try:
                hook(step)
            except Exception as error:  # noqa: BLE001 – a hook is foreign code, and the pool goes on whatever it does
                self._failed(step, error)
            except BaseException as error:
                # Ctrl-C is for the main thread. Elsewhere it would end a thread of the manager's own, and with it all
                # transfers.
                if threading.current_thread() is threading.main_thread():
                    raise
                self._failed(step, error)

    def _failed(self, step: BlockStep, error: BaseException) -> None:
        self.failures += 1
        _log.warning("hook failed", step=step.step, pool=step.pool, block=step.block, error=repr(error))
