"""`Scheduler`: the engine tells how far its model is, and transfers that wait for that go on."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvbm_core.progress import Gate, ModelProgress


class Scheduler:
    """Thread-safe. On a GPU, call `layer_done` and `end_iteration` once the work is done, not when it is queued."""

    def __init__(self, layers: int, on_progress: Callable[[ModelProgress], None]) -> None:
        """`on_progress` is told of every step, in order."""
        self._lock = threading.Lock()
        self._progress = ModelProgress(layers)
        self._on_progress = on_progress

    @property
    def progress(self) -> ModelProgress:
        """How far the model is."""
        return self._progress

    def gate(self) -> Gate:
        """Passed at the end of the iteration under way, or now."""
        return self._progress.gate()

    def begin_iteration(self) -> None:
        """A forward pass begins: transfers that wait for it are held. Raises `ProgressError` during another."""
        self._step(ModelProgress.began)

    def layer_done(self, layer: int) -> None:
        """The pass has finished a layer, which are told of in order. Raises `ProgressError`."""
        self._step(lambda progress: progress.layer_ended(layer))

    def end_iteration(self) -> None:
        """The pass is over. Raises `ProgressError` where none is under way."""
        self._step(ModelProgress.ended)

    def _step(self, step: Callable[[ModelProgress], ModelProgress]) -> None:
        with self._lock:
            self._progress = step(self._progress)
            self._on_progress(self._progress)
