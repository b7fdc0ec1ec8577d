"""An engine's blocks on the volumes of a storage agent: are they there, put them, get them.

What every engine's connector does is here; what differs is how an engine names its blocks and where their bytes lie.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import structlog

from kvbm_core.connectors.engine_blocks import WorkersPart
from kvbm_core.identity import BlockIdentity
from storage_agent.client_storage import ClientStorage
from storage_agent.errors import StorageAgentError
from storage_agent.port import BlockKey, Outcome, PutBlock, Result

_log = structlog.get_logger()

_PUT_WELL = frozenset({Result.STORED, Result.PRESENT, Result.PARTIAL, Result.BUSY})
"""`partial`: the other workers' parts are awaited. `busy`: another process puts the same part right now."""
_NO_TROUBLE = _PUT_WELL | {Result.HIT, Result.MISS}
_MOVED = frozenset({Result.STORED, Result.PARTIAL, Result.HIT})

Moved = Callable[[str, int, int, float], None]
"""Told of each batch that moved anything: `put` or `get`, blocks and bytes that were moved, seconds that it took."""


def log_fault(moved: Future[None]) -> None:
    """Called when a move in a thread of its own is over, which nobody waits for: a fault in it is not lost."""
    fault = None if moved.cancelled() else moved.exception()
    if fault is not None:
        _log.error("a move of engine blocks ended by a fault: their engine computes them", exc_info=fault)


class _Tally:
    """What became of blocks, for as many stores as share an agent. Thread-safe."""

    def __init__(self, volume: str) -> None:
        self._volume = volume
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._troubles: dict[str, str] = {}

    def count(self, what: str, outcomes: Sequence[Outcome]) -> None:
        with self._lock:
            self._counts.update(f"{what}_{outcome.result.value}" for outcome in outcomes)
        bad = next((outcome for outcome in outcomes if outcome.result not in _NO_TROUBLE), None)
        self.note(what, (bad.reason or bad.result.value) if bad is not None else "")

    def note(self, what: str, trouble: str) -> None:
        """Logged when it begins and when it is over, not for every block. A put that works ends no get's trouble."""
        with self._lock:
            before = self._troubles.get(what, "")
            self._troubles[what] = trouble
        if trouble and not before:
            _log.warning("engine blocks are recomputed", what=what, volume=self._volume, reason=trouble)
        elif before and not trouble:
            _log.info("engine blocks are stored again", what=what, volume=self._volume)

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


class EngineStore:
    """Thread-safe. Raises nothing for an agent that does not answer: its blocks are not there, and are recomputed."""

    def __init__(
        self, storage: ClientStorage, volume: str, part: WorkersPart, *, moved: Moved | None = None
    ) -> None:
        """Blocks are put on `volume` and read from wherever the agent has them. Closes `storage` at its end."""
        self.volume = volume
        self.part = part
        self._storage = storage
        self._moved = moved
        self._tally = _Tally(volume)

    def beside(self, part: WorkersPart) -> EngineStore:
        """For blocks that are split otherwise: over the same connection, closed with it, and counted with these."""
        other = EngineStore(self._storage, self.volume, part, moved=self._moved)
        other._tally = self._tally
        return other

    def present(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which blocks could be read now. No use of a block."""
        try:
            found = [bool(where) for where in self._storage.holding(keys, self.part.wanted)]
        except StorageAgentError as error:
            self._tally.note("look", str(error))
            return [False] * len(keys)
        self._tally.note("look", "")
        return found

    def present_prefix(self, keys: Sequence[BlockKey]) -> int:
        """How many of `keys` could be read now, from the first to the one before the first that could not."""
        found = self.present(keys)
        return found.index(False) if False in found else len(found)

    def put(self, blocks: Sequence[BlockIdentity], payloads: Sequence[memoryview]) -> list[bool]:
        """Write this worker's part of each block; whether it is there, or will be with the other workers' parts."""
        puts = [
            PutBlock(
                block.key,
                block.namespace,
                payload,
                parent_hash=block.parent_hash,
                depth=block.depth,
                block_tokens=block.block_tokens,
                span=self.part.span,
                layout=self.part.layout,
            )
            for block, payload in zip(blocks, payloads, strict=True)
        ]
        started_s = time.perf_counter()
        outcomes = self._storage.put(self.volume, puts)
        self._tell("put", outcomes, payloads, time.perf_counter() - started_s)
        return [outcome.result in _PUT_WELL for outcome in outcomes]

    def get(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[bool]:
        """Fill each buffer with this worker's part of a block, verified; where the answer is False it is as it was."""
        started_s = time.perf_counter()
        outcomes = self._storage.get(keys, buffers, self.part.wanted)
        self._tell("get", outcomes, buffers, time.perf_counter() - started_s)
        return [outcome.result is Result.HIT for outcome in outcomes]

    def counts(self) -> dict[str, int]:
        """Blocks since it was opened, by `put_` or `get_` and the result: `get_hit`, `get_corrupt`, `put_full`."""
        return self._tally.counts()

    def close(self) -> None:
        """Idempotent."""
        self._storage.close()

    def _tell(
        self, what: str, outcomes: Sequence[Outcome], memory: Sequence[memoryview], took_s: float
    ) -> None:
        self._tally.count(what, outcomes)
        moved = [place.nbytes for outcome, place in zip(outcomes, memory, strict=True) if outcome.result in _MOVED]
        if moved and self._moved is not None:
            self._moved(what, len(moved), sum(moved), took_s)
