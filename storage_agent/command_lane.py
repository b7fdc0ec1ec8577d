"""Commands one after another, each carried out once however often it is asked."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

REMEMBERED_ANSWERS = 4096
"""Commands of a lane whose answers are kept, to answer the same when asked again."""

Answer = TypeVar("Answer")


class CommandLane(Generic[Answer]):
    """Thread-safe. A command asked again while it is under way waits for its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: OrderedDict[str, Answer] = OrderedDict()

    def run(self, command_id: str, carry_out: Callable[[], Answer]) -> Answer:
        """The answer of `carry_out`, or the one remembered for `command_id`; an empty id is never remembered."""
        with self._lock:
            known = self._answers.get(command_id) if command_id else None
            if known is not None:
                return known
            answer = carry_out()
            if command_id:
                self._answers[command_id] = answer
                while len(self._answers) > REMEMBERED_ANSWERS:
                    self._answers.popitem(last=False)
            return answer
