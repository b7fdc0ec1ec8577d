"""`OffloadManager`: newly registered blocks go from the device to the host, and from there to volumes.

Registration only queues a block; until its turn comes it may be evicted, which is counted. The turn comes when the
engine says so (`KvBlockManager.offload`), or at the end of each iteration.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections.abc import Sequence
from itertools import count

from kvbm_core.accounting import Accounts
from kvbm_core.block import ImmutableBlock, WeakBlock
from kvbm_core.config import KvbmConfig
from kvbm_core.frequency import FrequencySketch
from kvbm_core.offload_policy import Decision, Offered, Skip, offload_policy
from kvbm_core.paths import TransferPath
from kvbm_core.progress import NO_GATE, Gate
from kvbm_core.tier_pool import TierPool
from kvbm_core.transfer import BlockOutcome, BlockTransfer, TransferManager
from kvbm_core.volume_view import VolumeView
from storage_agent.port import BlockKey

HOST = "host"
_CHUNKS_AT_ONCE = 2
"""One is put to volumes while the next is copied to the host."""


class OffloadManager:
    """Which blocks wait, and the journey of those whose turn has come. `run` is a coroutine of the transfers' loop;
    the rest is called from any thread."""

    def __init__(
        self,
        host: TierPool | None,
        views: Sequence[VolumeView],
        transfers: TransferManager,
        accounts: Accounts,
        config: KvbmConfig,
    ) -> None:
        self._host = host
        self._views = tuple(views)
        self._transfers = transfers
        self._accounts = accounts
        self._config = config
        self._policy = offload_policy(config.offload_policy, config.offload_frequency_min)
        self._counts_uses = config.offload_policy == "presence_frequency"
        self._lock = threading.Lock()
        self._uses = FrequencySketch(config.device_blocks + config.host_blocks)
        self._order = count()
        self._queue: list[tuple[int, int, WeakBlock]] = []
        self._moving: set[tuple[str, BlockKey]] = set()
        """(target, block) of what is under way. Changed in the loop's thread alone."""

    @property
    def waiting(self) -> int:
        """Blocks that are registered on the device and wait for their turn."""
        return len(self._queue)

    def ask(self, blocks: Sequence[ImmutableBlock]) -> None:
        """Queue newly registered blocks by their priority, lower first; what a full queue refuses is counted."""
        if self._host is None and not self._views:
            self._accounts.skipped("", Skip.NO_TARGET, len(blocks))
            return
        refused = 0
        with self._lock:
            for block in blocks:
                if self._counts_uses:
                    self._uses.use(block.identity.key)
                if len(self._queue) >= self._config.offload_queue_blocks:
                    refused += 1
                else:
                    heapq.heappush(self._queue, (block.priority, next(self._order), block.downgrade()))
        self._accounts.skipped("", Skip.QUEUE_FULL, refused)

    def matched(self, blocks: Sequence[ImmutableBlock]) -> None:
        """Blocks of the device were used again: one that now is used often enough is queued."""
        if not self._counts_uses:
            return
        often = []
        with self._lock:
            for block in blocks:
                self._uses.use(block.identity.key)
                if self._uses.count(block.identity.key) == self._config.offload_frequency_min:
                    often.append(block)
            for block in often:
                if len(self._queue) < self._config.offload_queue_blocks:
                    heapq.heappush(self._queue, (block.priority, next(self._order), block.downgrade()))

    async def run(self, blocks_max: int, gate: Gate = NO_GATE) -> int:
        """Offload at most `blocks_max` of those that wait, in batches; how many left the queue.

        The device is not read before `gate` is passed.
        """
        taken = self._take(blocks_max)
        size = self._config.transfer_blocks
        at_once = asyncio.Semaphore(_CHUNKS_AT_ONCE)

        async def offload(chunk: Sequence[WeakBlock]) -> None:
            async with at_once:
                await self._offload(chunk, gate)

        async with asyncio.TaskGroup() as group:
            for start in range(0, len(taken), size):
                group.create_task(offload(taken[start : start + size]))
        return len(taken)

    async def follow(self, in_host: Sequence[ImmutableBlock]) -> None:
        """Put blocks that have come to the host to volumes. Takes over the guards."""
        await self._to_volumes(in_host, NO_GATE)

    def decision(self, key: BlockKey, target: str) -> Decision:
        """What the policy says now of a block and a target: `host`, `disk` or `remote`."""
        with self._lock:
            uses = self._uses.count(key) if self._counts_uses else 1
        present = target == HOST and self._host is not None and self._host.pool.has(key)
        return self._policy.decide(Offered(present, (target, key) in self._moving, uses))

    def waits(self, key: BlockKey) -> list[str]:
        """What of a block's offload is queued or under way, in words."""
        with self._lock:
            queued = any(weak.key == key for _, _, weak in self._queue)
        moving = [f"on its way to {target}" for target, each in tuple(self._moving) if each == key]
        return (["queued for offload"] if queued else []) + moving

    def _take(self, blocks_max: int) -> list[WeakBlock]:
        with self._lock:
            return [heapq.heappop(self._queue)[2] for _ in range(min(blocks_max, len(self._queue)))]

    async def _offload(self, asked: Sequence[WeakBlock], gate: Gate) -> None:
        there = [block for weak in asked if (block := weak.upgrade()) is not None]
        self._accounts.skipped("", Skip.EVICTED_BEFORE_COPY, len(asked) - len(there))
        if self._host is None:
            await self._to_volumes(there, gate)
        else:
            await self._to_volumes(await self._to_host(self._host, there, gate), NO_GATE)

    async def _to_host(
        self, host: TierPool, blocks: Sequence[ImmutableBlock], gate: Gate
    ) -> list[ImmutableBlock]:
        """Guards of the blocks' host copies, made where there was none. Takes over the device's guards."""
        wanted, in_host = [], []
        for block in blocks:
            decision = self.decision(block.identity.key, HOST)
            if decision.skip is None:
                wanted.append(block)
                continue
            self._accounts.skipped(HOST, decision.skip)
            copy = host.pool.acquire(block.identity.key) if decision.skip is Skip.PRESENT else None
            if copy is not None:
                in_host.append(copy)
            block.release()
        for outcome in await self._move(TransferPath.DEVICE_TO_HOST, HOST, wanted, gate):
            if outcome.block is not None:
                in_host.append(outcome.block)
            if outcome.unused is not None:
                outcome.unused.release()
        return in_host

    async def _to_volumes(self, blocks: Sequence[ImmutableBlock], gate: Gate) -> None:
        """Put to each tier of volumes what its policy lets pass. Takes over the guards."""
        try:
            async with asyncio.TaskGroup() as group:
                for view in self._views:
                    group.create_task(self._to_tier(view, blocks, gate))
        finally:
            # The root goes last, as in the device, so that the host evicts tails before what many share.
            for block in reversed(blocks):
                block.release()

    async def _to_tier(self, view: VolumeView, blocks: Sequence[ImmutableBlock], gate: Gate) -> None:
        wanted = []
        if not self._config.holds_first_copy:
            self._accounts.skipped(view.name, Skip.OTHER_RANK, len(blocks))
            return
        for block in blocks:
            if not view.volumes.volumes_of(block.identity.namespace.tenant):
                self._accounts.skipped(view.name, Skip.NO_TARGET)
                continue
            decision = self.decision(block.identity.key, view.name)
            if decision.skip is None:
                wanted.append(block.clone())
            else:
                self._accounts.skipped(view.name, decision.skip)
        outcomes = await self._move(view.put_path, view.name, wanted, gate)
        self._accounts.skipped(view.name, Skip.PRESENT, sum(outcome.was_there for outcome in outcomes))

    async def _move(
        self, path: TransferPath, target: str, blocks: Sequence[ImmutableBlock], gate: Gate
    ) -> list[BlockOutcome]:
        moving = {(target, block.identity.key) for block in blocks}
        self._moving |= moving
        try:
            outcomes = await self._transfers.move(
                path,
                [BlockTransfer(block.identity, block) for block in blocks],
                deadline_s=self._transfers.now_s() + self._config.limits_of(path).deadline_s,
                gate=gate,
            )
        finally:
            self._moving -= moving
        exhausted = sum(outcome.reason.endswith("_exhausted") for outcome in outcomes)
        self._accounts.skipped(target, Skip.HOST_EXHAUSTED, exhausted)
        return outcomes
