"""What a connector's scheduling half knows of loads that were planned and have not ended. Pure.

An engine may lend a block to other requests as soon as it is promised one, and vLLM 0.32 takes a promise back badly: a
block that failed stays findable with wrong bytes until the request that was to load it has computed it, which a
preempted one never does, and so do the blocks that were computed behind it. So nobody is given a block that is on its
way to another request, and what failed is made unfindable at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from kvbm_core.identity import BlockIdentity
from storage_agent.port import BlockKey


@dataclass(frozen=True, slots=True)
class _Underway:
    keys: tuple[BlockKey, ...]
    engine_blocks: tuple[int, ...]


class LoadsUnderway:
    """By ticket. The scheduler's thread alone."""

    def __init__(self) -> None:
        self._loads: dict[int, _Underway] = {}
        self._coming: Counter[BlockKey] = Counter()

    def begin(self, ticket: int, loaded: Iterable[BlockIdentity], engine_blocks: Sequence[int]) -> None:
        """`engine_blocks`: the request's, in order, from the first that is loaded to the last that it has."""
        keys = tuple(identity.key for identity in loaded)
        self._loads[ticket] = _Underway(keys, tuple(engine_blocks))
        self._coming.update(keys)

    def is_coming(self, chain: Iterable[BlockIdentity]) -> bool:
        """Whether one of these blocks is on its way."""
        return bool(self._loads) and any(identity.key in self._coming for identity in chain)

    def end(self, tickets: Iterable[int], failed: Collection[int]) -> set[int]:
        """These loads are over, and the engine was told which of their blocks failed. The engine's blocks that hold
        what did not come, or may have been computed from it. A ticket that is not underway changes nothing."""
        spoilt: set[int] = set()
        for ticket in tickets:
            load = self._loads.pop(ticket, None)
            if load is None:
                continue
            self._coming.subtract(load.keys)
            for key in load.keys:
                if not self._coming[key]:
                    del self._coming[key]
            first = next((n for n, block in enumerate(load.engine_blocks) if block in failed), None)
            if first is not None:
                spoilt.update(load.engine_blocks[first:])
        return spoilt
