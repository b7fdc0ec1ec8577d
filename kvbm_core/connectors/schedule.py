"""Which of a request's blocks to load and to save: the half of a connector that lives beside an engine's scheduler.

It knows engines' blocks by number and by identity, and no engine. Not thread-safe: the scheduler's thread alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from kvbm_core.connectors.host_cache import HostCache, Lookup
from kvbm_core.connectors.step_plan import Load, RequestBlocks, Save, StepPlan, loadable_blocks
from kvbm_core.identity import BlockIdentity

PATIENCE_S = 0.002
"""An engine with nothing else to do asks for a lookup again and again: it waits so long each time instead."""


class Scheduled(NamedTuple):
    """A request of one step. `full`: its blocks that are full once the step is computed; `engine_blocks`: all of its
    blocks, in order."""

    request: str
    full: int
    engine_blocks: list[int]


class Schedule:
    """Plans loads and saves for `cache`. Every lookup ends with `allocated`, `finished` or `close`."""

    def __init__(self, cache: HostCache) -> None:
        self._cache = cache
        self._requests: dict[str, RequestBlocks] = {}
        self._lookups: dict[str, Lookup] = {}
        self._loads: list[Load] = []
        self._failures_known = 0
        self._doubtful: set[int] = set()
        """The engine's blocks that may hold what did not come, or was computed from it."""
        self._suspects: set[str] = set()
        """Requests that were there at a failure."""
        self._is_idle = True

    def chain(self, request: str, hashes: int, extend: Callable[[int], Sequence[BlockIdentity]]) -> None:
        """The request has `hashes` full blocks by now; `extend(n)` gives those after the first n."""
        blocks = self._requests.setdefault(request, RequestBlocks())
        if len(blocks.chain) < hashes:
            blocks.chain += extend(len(blocks.chain))

    def matched(self, request: str, tokens: int, had: int, block_tokens: int) -> int | None:
        """How many blocks after the first `had`, which the engine has, can be loaded; None: ask again later."""
        blocks = self._requests[request]
        blocks.had = had
        wanted = blocks.chain[: loadable_blocks(tokens, block_tokens)]
        lookup = self._lookups.get(request)
        if lookup is not None and not lookup.start <= had <= lookup.start + lookup.wanted:
            self._drop(request)
            lookup = None
        if lookup is None:
            if had >= len(wanted):
                return 0
            lookup = self._lookups[request] = self._cache.find(wanted[had:], had)
        found = lookup.blocks(PATIENCE_S if self._is_idle else 0.0)
        return None if found is None else max(0, lookup.start + len(found) - had)

    def allocated(self, request: str, engine_blocks: Sequence[int], count: int) -> None:
        """Of these, the request's blocks in order, the engine takes `count` from the lookup, after the ones that it had
        when it asked; 0: it takes none."""
        if not count:
            self._drop(request)
            return
        had = self._requests[request].had
        taken = self._lookups.pop(request).take(had, count)
        self._loads.append(self._cache.hold(taken, engine_blocks[had : had + count]))

    def step(self, scheduled: Sequence[Scheduled]) -> StepPlan:
        """What the next step loads and saves."""
        saves: list[Save] = []
        for request, _, engine_blocks in scheduled:
            if request in self._suspects:
                self._doubtful.update(engine_blocks[self._sound(engine_blocks) :])
        for request, full, engine_blocks in scheduled:
            blocks = self._requests.get(request)
            save = None if blocks is None else blocks.offer(min(full, self._sound(engine_blocks)), engine_blocks)
            if save is not None:
                saves.append(save)
        loads, self._loads = self._loads, []
        self._is_idle = not scheduled
        return StepPlan(tuple(loads), tuple(saves), self._failures_known)

    def failed(self, engine_blocks: Collection[int]) -> None:
        """The engine was told that loads of one step into these blocks failed, and means to compute them again.

        When it has is not told: it may lend such a block to other requests before. So nothing is ever saved of these
        blocks, of those behind them in requests of now, and behind them in later ones, until `reset`.
        """
        self._failures_known += 1
        self._doubtful.update(engine_blocks)
        self._suspects.update(self._requests)
        for blocks in self._requests.values():
            blocks.offered = 0

    def finished(self, request: str) -> None:
        """The request ended, however. Idempotent."""
        self._drop(request)
        self._requests.pop(request, None)
        self._suspects.discard(request)

    def reset(self) -> None:
        """Empty the host, as the engine did with its own blocks. Raises `BlockStateError` while blocks of it are being
        loaded."""
        for request in list(self._lookups):
            self._drop(request)
        self._cache.reset()
        self._doubtful.clear()

    def close(self) -> None:
        """Let go of every lookup. Idempotent."""
        for request in list(self._lookups):
            self._drop(request)

    def _sound(self, engine_blocks: Sequence[int]) -> int:
        """How many leading blocks are not in doubt."""
        if not self._doubtful:
            return len(engine_blocks)
        doubtful = (number for number, block in enumerate(engine_blocks) if block in self._doubtful)
        return next(doubtful, len(engine_blocks))

    def _drop(self, request: str) -> None:
        lookup = self._lookups.pop(request, None)
        if lookup is not None:
            lookup.drop()
