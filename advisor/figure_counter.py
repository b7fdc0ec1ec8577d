"""What recordings hold, counted by `kvadvisor inspect` in a process of its own, one at a time."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from advisor.attended import NICE, run_command
from advisor.recording_shelf import Shelved, without_place
from advisor.recording_views import (
    EpochFiguresView,
    ProducerFiguresView,
    RecordingFiguresView,
    RequestsView,
)
from event_plane.errors import RecordingError

COUNT_S_MAX: Final = 600.0
WAITING_MAX: Final = 64
KEPT_MAX: Final = 256
ROWS_MAX: Final = 100
"""Of locations, namespaces and producers."""
EPOCHS_MAX: Final = 10

_Stamp = tuple[int, int, int]


class FigureCounter(threading.Thread):
    """Counts what is asked for, in turn, and keeps the last results. `look` may be called from any thread."""

    def __init__(self, nice: int = NICE) -> None:
        super().__init__(name="kvadvisor-figures", daemon=True)
        self._nice = nice
        self._waiting: queue.Queue[Shelved | None] = queue.Queue(WAITING_MAX)
        self._known: OrderedDict[_Stamp, RecordingFiguresView | str] = OrderedDict()
        self._asked: set[_Stamp] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()

    def look(self, shelved: Shelved) -> tuple[RecordingFiguresView | None, str]:
        """Its figures; where there are none, why. Has them counted if nobody has asked for them yet."""
        with self._lock:
            known = self._known.get(shelved.stamp)
            if isinstance(known, RecordingFiguresView):
                return known, ""
            if known is not None:
                return None, known
            if shelved.stamp not in self._asked:
                try:
                    self._waiting.put_nowait(shelved)
                except queue.Full:
                    return None, f"{WAITING_MAX} recordings wait to be counted: ask again later"
                self._asked.add(shelved.stamp)
        return None, "its figures are being counted: ask again"

    def know(self, stamp: _Stamp, figures: RecordingFiguresView | str) -> None:
        """These are its figures, or why there are none."""
        with self._lock:
            self._asked.discard(stamp)
            self._known[stamp] = figures
            if len(self._known) > KEPT_MAX:
                self._known.popitem(last=False)

    def count(self, path: Path, is_unwanted: Callable[[], bool]) -> RecordingFiguresView:
        """Reads the whole of it at once, on the thread that calls.

        Raises `RecordingError` for what cannot be read, or was not to be any more.
        """
        with TemporaryDirectory(prefix="kvadvisor-figures-") as folder:
            out = Path(folder) / "figures.json"
            arguments = ["inspect", str(path), "--requests", "--json", str(out)]
            ended = run_command(arguments, deadline_s=COUNT_S_MAX, is_unwanted=is_unwanted, nice=self._nice)
            if ended.fault or ended.is_unwanted:
                raise RecordingError(ended.fault or f"{path} is not counted any more: ask again")
            return _figures(json.loads(out.read_bytes()))

    def stop(self) -> None:
        """Ends what is under way."""
        self._stopping.set()
        with contextlib.suppress(queue.Full):  # it looks at `_stopping` after each one
            self._waiting.put_nowait(None)
        if self.is_alive():
            self.join()

    def run(self) -> None:
        while (shelved := self._waiting.get()) is not None and not self._stopping.is_set():
            try:
                self.know(shelved.stamp, self.count(shelved.path, self._stopping.is_set))
            except RecordingError as error:
                self.know(shelved.stamp, without_place(str(error), shelved.path))


def _figures(read: dict[str, Any]) -> RecordingFiguresView:
    producers = read["producers"]
    epochs = [epoch for producer in producers for epoch in producer["epochs"]]
    told = [_producer(producer) for producer in producers[:ROWS_MAX]]
    return RecordingFiguresView(
        **{name: read[name] for name in ("batches", "events", "wire_bytes", "first_us", "last_us", "kinds", "types")},
        locations=_most(read["locations"]),
        namespaces=_most(read["namespaces"]),
        producers=told,
        producers_untold=read["producers_untold"] + len(producers) - len(told),
        missing=sum(epoch["missing"] for epoch in epochs),
        duplicates=read["duplicates_dropped"] + sum(epoch["duplicates"] for epoch in epochs),
        not_used=_most(read["refused"]),
        requests=RequestsView(**read["requests"]),
    )


def _most(counts: dict[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:ROWS_MAX])


def _producer(producer: dict[str, Any]) -> ProducerFiguresView:
    epochs = producer["epochs"]
    shown = [EpochFiguresView(**epoch | {"epoch": f"{epoch['epoch']:016x}"}) for epoch in epochs[-EPOCHS_MAX:]]
    return ProducerFiguresView(
        name=producer["name"],
        producer=f"{producer['producer']:016x}",
        epochs=shown,
        epochs_untold=producer["epochs_untold"] + len(epochs) - len(shown),
    )
