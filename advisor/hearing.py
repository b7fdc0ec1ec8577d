"""One source heard as the service hears it, gate and resends included, for commands that keep no log."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from advisor.entries import Appendable
from advisor.intake import Intake
from advisor.pipeline import Group, LogThread
from event_plane.schema import Batch
from event_plane.transport import Subscriber

_GROUPS_MAX: Final = 64
_BATCHES_MAX: Final = 64
_TURN_S: Final = 0.05

Heard = Callable[[float], list[Batch]]
"""Waits so many seconds for the next batches; none where none come."""


@contextmanager
def hearing(
    subscriber: Subscriber, intake: Intake, log: Appendable, stopping: threading.Event
) -> Iterator[Heard]:
    """A log thread at work on `subscriber`, which it closes, until `stopping` is set: by the caller, or by a fault.

    `log` takes what is accepted, before it is acknowledged and heard. Raises the fault at the end.
    """
    groups: queue.Queue[Group] = queue.Queue(_GROUPS_MAX)
    faults: list[BaseException] = []

    def fail(fault: BaseException) -> None:
        faults.append(fault)
        stopping.set()

    thread = LogThread(log, intake, [subscriber], groups, batches_max=_BATCHES_MAX, stopping=stopping, fail=fail)

    def heard(timeout_s: float) -> list[Batch]:
        try:
            group = groups.get(timeout=timeout_s) if timeout_s else groups.get_nowait()
        except queue.Empty:
            return []
        thread.unapplied.popleft()
        return [batch for _, batch in group.entries if batch is not None]

    thread.start()
    try:
        yield heard
    finally:
        stopping.set()
        while thread.is_alive():
            heard(_TURN_S)
    if faults:
        raise faults[0]
