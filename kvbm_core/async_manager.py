"""The block manager for engines that live in an event loop: one implementation, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from kvbm_core.block import PRIORITY_DEFAULT, CompleteBlock, ImmutableBlock, MutableBlock
from kvbm_core.identity import BlockIdentity
from kvbm_core.manager import KvBlockManager
from kvbm_core.onboard import Onboarded
from kvbm_core.pool import Allocation


class AsyncKvBlockManager:
    """`KvBlockManager` as coroutines, which do not hold up their loop. Used from one event loop.

    What moves bytes goes on in the manager's own threads; a cancelled await gives its blocks up, and what may still be
    written is kept out of use until it is settled. Allocating, completing and registering wait for nothing.
    """

    def __init__(self, manager: KvBlockManager) -> None:
        """`manager` is closed with this, and may be used beside it for everything that is not here."""
        self.manager = manager

    async def match(self, blocks: Sequence[BlockIdentity]) -> list[ImmutableBlock]:
        """See `KvBlockManager.match`."""
        return self.manager.match(blocks)

    async def allocate(self, count: int) -> Allocation:
        """See `KvBlockManager.allocate`."""
        return self.manager.allocate(count)

    async def complete(
        self, blocks: Sequence[MutableBlock], identities: Sequence[BlockIdentity]
    ) -> list[CompleteBlock]:
        """See `KvBlockManager.complete`."""
        return self.manager.complete(blocks, identities)

    async def register_many(
        self, blocks: Sequence[CompleteBlock], *, priority: int = PRIORITY_DEFAULT
    ) -> list[ImmutableBlock]:
        """See `KvBlockManager.register_many`."""
        return self.manager.register_many(blocks, priority=priority)

    async def onboard(
        self,
        blocks: Sequence[BlockIdentity],
        targets: Sequence[MutableBlock] | None = None,
        *,
        budget_ms: float | None = None,
        priority: int = 0,
    ) -> Onboarded:
        """See `KvBlockManager.onboard`."""
        future = self.manager.onboard_soon(blocks, targets, budget_ms=budget_ms, priority=priority)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            # It may have ended in the moment before it was cancelled.
            if not future.cancel() and future.exception() is None:
                future.result().release()
            raise

    async def offload(self, blocks_max: int) -> int:
        """See `KvBlockManager.offload_soon`: during an iteration it is done once that has ended."""
        return await asyncio.wrap_future(self.manager.offload_soon(blocks_max))

    async def reset(self, tier: str) -> int:
        """See `KvBlockManager.reset`."""
        return await asyncio.to_thread(self.manager.reset, tier)

    async def flush_events(self) -> None:
        """See `KvBlockManager.flush_events`."""
        await asyncio.to_thread(self.manager.flush_events)

    async def close(self) -> None:
        """See `KvBlockManager.close`."""
        await asyncio.to_thread(self.manager.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
