"""Commands on the same blocks one after another, others at once; each carried out once however often it is asked."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

REMEMBERED_ANSWERS = 4096
"""Commands of a lane whose answers are kept, to answer the same when asked again."""
EVERYTHING = ("everything",)
"""In the place of a command's blocks: one that is alone in its lane."""

Answer = TypeVar("Answer")


class Turn:
    """A place in the line of each thing that a command touches."""

    def __init__(self, things: Iterable[Hashable]) -> None:
        self.things = frozenset(things)


class Turns:
    """Thread-safe. Whoever touches the same thing goes in the order of `announce`; others need not wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lines: dict[Hashable, deque[Turn]] = {}

    def announce(self, things: Iterable[Hashable]) -> Turn:
        """Stand in line. Who does must `take` the turn, or all behind wait for ever."""
        turn = Turn(things)
        with self._changed:
            for thing in turn.things:
                self._lines.setdefault(thing, deque()).append(turn)
        return turn

    @contextmanager
    def take(self, turn: Turn) -> Iterator[None]:
        """Wait for the turn, and let the next ones go at the end."""
        with self._changed:
            self._changed.wait_for(lambda: all(self._lines[thing][0] is turn for thing in turn.things))
        try:
            yield
        finally:
            with self._changed:
                for thing in turn.things:
                    line = self._lines[thing]
                    line.popleft()
                    if not line:
                        del self._lines[thing]
                self._changed.notify_all()


class CommandLane(Generic[Answer]):
    """Thread-safe. A command asked again while it is under way waits for its end."""

    def __init__(self) -> None:
        self._turns = Turns()
        self._lock = threading.Lock()
        self._answers: OrderedDict[str, Answer] = OrderedDict()

    def run(
        self, command_id: str, carry_out: Callable[[], Answer], blocks: Iterable[Hashable] = EVERYTHING
    ) -> Answer:
        """The answer of `carry_out`, or the one remembered for `command_id`; an empty id is never remembered."""
        things = [*blocks, ("command", command_id)] if command_id else [*blocks]
        with self._turns.take(self._turns.announce(things)):
            with self._lock:
                known = self._answers.get(command_id)
            if known is not None:
                return known
            answer = carry_out()
            if command_id:
                with self._lock:
                    self._answers[command_id] = answer
                    while len(self._answers) > REMEMBERED_ANSWERS:
                        self._answers.popitem(last=False)
            return answer
