"""Which of a request's blocks to load and to save: the half of a connector that lives beside an engine's scheduler.

It knows engines' blocks by number and by identity, and no engine. Not thread-safe: the scheduler's thread alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from kvbm_core.connectors.host_cache import HostCache, Lookup
from kvbm_core.connectors.loads_underway import LoadsUnderway
from kvbm_core.connectors.step_plan import Load, RequestBlocks, Save, StepPlan, loadable_blocks
from kvbm_core.identity import BlockIdentity

PATIENCE_S = 0.002
"""An engine with nothing else to do asks for a lookup or a load again and again: it waits so long each time instead."""


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
        self._underway = LoadsUnderway()
        self._is_idle = True

    def chain(self, request: str, hashes: int, extend: Callable[[int], Sequence[BlockIdentity]]) -> None:
        """The request has `hashes` full blocks by now; `extend(n)` gives those after the first n."""
        blocks = self._requests.setdefault(request, RequestBlocks())
        if len(blocks.chain) < hashes:
            blocks.chain += extend(len(blocks.chain))

    def matched(self, request: str, tokens: int, had: int, block_tokens: int) -> int | None:
        """How many blocks after the first `had`, which the engine has, can be loaded; None: ask again later, since they
        are on their way to the host, or one of them or of the first `had` is on its way to another request."""
        blocks = self._requests[request]
        blocks.had = had
        wanted = blocks.chain[: loadable_blocks(tokens, block_tokens)]
        lookup = self._lookups.get(request)
        if lookup is not None and not lookup.start <= had <= lookup.start + lookup.wanted:
            self._drop(request)
            lookup = None
        found = 0
        if had < len(wanted):
            if lookup is None:
                lookup = self._lookups[request] = self._cache.find(wanted[had:], had)
            held = lookup.blocks(PATIENCE_S if self._is_idle else 0.0)
            if held is None:
                return None
            found = max(0, lookup.start + len(held) - had)
        return None if self._underway.is_coming(blocks.chain[: had + 1]) else found

    def allocated(self, request: str, engine_blocks: Sequence[int], count: int) -> None:
        """Of these, the request's blocks in order, the engine takes `count` from the lookup, after the ones that it had
        when it asked; 0: it takes none."""
        if not count:
            self._drop(request)
            return
        had = self._requests[request].had
        taken = self._lookups.pop(request).take(had, count)
        load = self._cache.hold(request, taken, engine_blocks[had : had + count])
        self._underway.begin(load.ticket, [block.identity for block in taken], engine_blocks[had:])
        self._loads.append(load)

    def step(self, scheduled: Sequence[Scheduled]) -> StepPlan:
        """What the next step loads and saves."""
        saves: list[Save] = []
        for request, full, engine_blocks in scheduled:
            blocks = self._requests.get(request)
            save = None if blocks is None else blocks.offer(full, engine_blocks)
            if save is not None:
                saves.append(save)
        loads, self._loads = self._loads, []
        self._is_idle = not scheduled
        return StepPlan(tuple(loads), tuple(saves), self._is_idle)

    def ended(self, tickets: Iterable[int], failed: Collection[int]) -> set[int]:
        """These loads are over, and the engine was told of its blocks of which they failed. Its blocks that nobody may
        find any more: those, and what may have been computed from them."""
        if failed:
            for blocks in self._requests.values():
                blocks.offered = 0  # nothing of a spoilt step was saved, and what failed is not in the host any more
        return self._underway.end(tickets, failed)

    def finished(self, request: str) -> None:
        """The request ended, however. Idempotent."""
        self._drop(request)
        self._requests.pop(request, None)

    def reset(self) -> None:
        """Empty the host, as the engine did with its own blocks. Raises `BlockStateError` while blocks of it are being
        loaded."""
        for request in list(self._lookups):
            self._drop(request)
        self._cache.reset()

    def close(self) -> None:
        """Let go of every lookup. Idempotent."""
        for request in list(self._lookups):
            self._drop(request)

    def _drop(self, request: str) -> None:
        lookup = self._lookups.pop(request, None)
        if lookup is not None:
            lookup.drop()
