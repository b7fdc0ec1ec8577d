"""Away from the device: newly registered blocks are copied to the host, then put to their tenant's volumes.

Registration only queues a block. `run` does the work when the engine has time for it, so that nothing here holds up
an iteration of the model; until then the block waits and may be evicted, which is counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack

from kvbm_core.block import ImmutableBlock, WeakBlock
from kvbm_core.config import KvbmConfig
from kvbm_core.counters import CoreCounters
from kvbm_core.errors import PoolExhaustedError
from kvbm_core.transfer import TierPool, copy_to
from storage_agent.errors import StorageAgentError
from storage_agent.port import Outcome, PutBlock, Result, StoragePort


class Offloader:
    """The queue device → host → volume. Used by the engine's thread."""

    def __init__(
        self,
        device: TierPool,
        host: TierPool,
        storage: StoragePort | None,
        config: KvbmConfig,
        counters: CoreCounters,
    ) -> None:
        self._device = device
        self._host = host
        self._storage = storage
        self._config = config
        self._counters = counters
        self._queue: deque[WeakBlock] = deque()

    @property
    def waiting(self) -> int:
        """Blocks that are registered on the device and not yet offloaded."""
        return len(self._queue)

    def ask(self, block: ImmutableBlock) -> None:
        """Queue a newly registered block; a full queue refuses it, which is counted."""
        if len(self._queue) >= self._config.offload_queue_blocks:
            self._skip("queue_full", 1)
            return
        self._queue.append(block.downgrade())

    def run(self, blocks_max: int) -> int:
        """Offload at most `blocks_max` of the oldest, in batches of `transfer_blocks`; how many left the queue."""
        left = 0
        while left < blocks_max and self._queue:
            count = min(len(self._queue), blocks_max - left, self._config.transfer_blocks)
            self._offload([self._queue.popleft() for _ in range(count)])
            left += count
        return left

    def _offload(self, asked: Sequence[WeakBlock]) -> None:
        with ExitStack() as held:
            there = [held.enter_context(block) for weak in asked if (block := weak.upgrade()) is not None]
            self._skip("evicted_before_copy", len(asked) - len(there))
            in_host = [held.enter_context(block) for block in self._to_host(there)]
            if self._storage is not None:
                self._put(self._storage, in_host)

    def _skip(self, reason: str, blocks: int) -> None:
        if blocks:
            self._counters.offload_skipped[reason] += blocks

    def _to_host(self, blocks: Sequence[ImmutableBlock]) -> list[ImmutableBlock]:
        """Guards of the blocks' host copies, made where there was none."""
        present, missing = [], []
        for block in blocks:
            copy = self._host.pool.acquire(block.identity.key)
            if copy is None:
                missing.append(block)
            else:
                present.append(copy)
        self._skip("present_in_host", len(present))
        try:
            copies = copy_to(self._device, missing, self._host)
        except PoolExhaustedError:
            self._skip("host_exhausted", len(missing))
            return present
        self._counters.offloaded += len(copies)
        return present + copies

    def _put(self, storage: StoragePort, blocks: Sequence[ImmutableBlock]) -> None:
        """Put each block to the first of its tenant's volumes that takes it."""
        by_volumes: dict[tuple[str, ...], list[PutBlock]] = {}
        for block in blocks:
            volumes = self._config.volumes_of(block.identity.namespace.tenant)
            if volumes:
                by_volumes.setdefault(volumes, []).append(self._put_block(block))
        for volumes, waiting in by_volumes.items():
            for place, volume in enumerate(volumes):
                waiting = self._put_to(storage, volume, waiting, last=place == len(volumes) - 1)
                if not waiting:
                    break
                self._counters.put_fell_back[volume] += len(waiting)

    def _put_to(self, storage: StoragePort, volume: str, blocks: list[PutBlock], *, last: bool) -> list[PutBlock]:
        """Put to one volume; the blocks to try on the next one."""
        full = []
        for block, outcome in zip(blocks, _put_outcomes(storage, volume, blocks), strict=True):
            if outcome.result.ok:
                self._counters.put[volume] += 1
            elif outcome.result is Result.FULL and not last:
                full.append(block)
            else:
                self._counters.put_refused[outcome.result] += 1
        return full

    def _put_block(self, block: ImmutableBlock) -> PutBlock:
        identity = block.identity
        return PutBlock(
            key=identity.key,
            namespace=identity.namespace,
            payload=self._host.storage.payload(block.index),
            parent_hash=identity.parent_hash,
            depth=identity.depth,
            block_tokens=identity.block_tokens,
        )


def _put_outcomes(storage: StoragePort, volume: str, blocks: Sequence[PutBlock]) -> list[Outcome]:
    try:
        return storage.put(volume, blocks)
    except StorageAgentError as error:
        return [Outcome(block.key, Result.FAILED, volume=volume, reason=str(error)) for block in blocks]
