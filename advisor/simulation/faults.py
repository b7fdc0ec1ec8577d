"""What a transport does to messages: loses some, brings some twice, and some after the next one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from random import Random
from typing import TypeVar

from advisor.simulation.workload import Faults

Message = TypeVar("Message")


def with_faults(messages: Iterable[Message], faults: Faults, seed: int, done: Counter[str]) -> Iterator[Message]:
    """`messages`, damaged. `done` counts what was done, by the names of `Faults`."""
    random = Random(f"{seed}/faults")
    overtaken: list[Message] = []
    for message in messages:
        if random.random() < faults.lost:
            done["lost"] += 1
            continue
        if not overtaken and random.random() < faults.reordered:
            overtaken.append(message)
            continue
        yield message
        if random.random() < faults.doubled:
            done["doubled"] += 1
            yield message
        if overtaken:
            done["reordered"] += 1
            yield overtaken.pop()
    yield from overtaken
