"""The agent's ports on an event loop: each call runs on a thread of a small pool of its own.

Cancellation: a call that waits for a thread is not begun. One that has begun cannot be stopped, for bytes are moving
between its caller's memory and a device; so the await goes on until the call has ended, with its payloads and buffers
kept, and then raises `CancelledError`. A timeout (`asyncio.timeout`) is late by as much; a transfer's own deadline
bounds that. What was put stays put. When the await is over, however it ends, the buffers are the caller's again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import CommandRefused
from storage_agent.port import (
    AgentPort,
    AgentStat,
    BlockKey,
    Buffer,
    CommandOutcome,
    CompactReport,
    Outcome,
    PutBlock,
    ScrubReport,
    StoragePort,
    VolumeStat,
)
from storage_agent.shards import Shard

BLOCK_THREADS = 16
"""Gets and puts under way at once: as deep as a device is kept busy."""
_COMMAND_THREADS = 1
"""Copies, deletes and moves go one after another, in the order they came."""
_LONG_THREADS = 2
"""A scrub and a compaction; no move waits for them."""
_VOLUME_THREADS = 2

T = TypeVar("T")


class AsyncAgentClient:
    """Implements `port.AsyncAgentPort` over an `AgentPort`, such as an `AgentClient`, which stays open.

    Of one event loop. More calls than there are threads wait in the order they came. An `AgentClient` asks one thing at
    a time: give a scrub a client of its own.
    """

    def __init__(self, agent: AgentPort) -> None:
        self._agent = agent
        self._stats = _Lane("stats", 1)
        self._volumes = _Lane("volumes", _VOLUME_THREADS)
        self._commands = _Lane("commands", _COMMAND_THREADS)
        self._long = _Lane("scrubs", _LONG_THREADS)
        self._lanes = [self._stats, self._volumes, self._commands, self._long]

    async def stat(self) -> AgentStat:
        """See `AgentPort.stat`."""
        return await self._stats.run(self._agent.stat)

    async def copy(
        self, command_id: str, keys: Sequence[BlockKey], source: str, target: str, *, term: int = 0
    ) -> CommandOutcome:
        """See `AgentPort.copy`."""
        return await self._commands.run(partial(self._agent.copy, command_id, keys, source, target, term=term))

    async def delete(
        self, command_id: str, volume: str, keys: Sequence[BlockKey], *, term: int = 0
    ) -> CommandOutcome:
        """See `AgentPort.delete`."""
        return await self._commands.run(partial(self._agent.delete, command_id, volume, keys, term=term))

    async def move(
        self, command_id: str, keys: Sequence[BlockKey], source: str, target: str, *, keep: bool, term: int = 0
    ) -> CommandOutcome:
        """See `AgentPort.move`."""
        call = partial(self._agent.move, command_id, keys, source, target, keep=keep, term=term)
        return await self._commands.run(call)

    async def scrub(self, command_id: str, volume: str, *, term: int = 0) -> ScrubReport:
        """See `AgentPort.scrub`."""
        return await self._long.run(partial(self._agent.scrub, command_id, volume, term=term))

    async def compact(
        self, command_id: str, volume: str, keys: Sequence[BlockKey] = (), *, term: int = 0
    ) -> CompactReport:
        """See `AgentPort.compact`."""
        return await self._long.run(partial(self._agent.compact, command_id, volume, keys, term=term))

    async def refuse_tenants(self, tenants: Sequence[str], *, term: int = 0) -> None:
        """See `AgentPort.refuse_tenants`."""
        await self._commands.run(partial(self._agent.refuse_tenants, tenants, term=term))

    async def register_volume(self, descriptor: VolumeDescriptor, *, term: int = 0) -> VolumeStat:
        """See `AgentPort.register_volume`."""
        return await self._volumes.run(partial(self._agent.register_volume, descriptor, term=term))

    async def unregister_volume(self, volume: str, *, drain_s: float = 0.0, term: int = 0) -> None:
        """See `AgentPort.unregister_volume`."""
        await self._volumes.run(partial(self._agent.unregister_volume, volume, drain_s=drain_s, term=term))

    async def resize_volume(self, volume: str, capacity_blocks: int, *, term: int = 0) -> VolumeStat:
        """See `AgentPort.resize_volume`."""
        return await self._volumes.run(partial(self._agent.resize_volume, volume, capacity_blocks, term=term))

    async def close(self) -> None:
        """Refuse what waits and what comes by `CommandRefused`, wait for what has begun. Idempotent."""
        await asyncio.gather(*(lane.close() for lane in self._lanes))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncStorageAgent(AsyncAgentClient):
    """Implements `port.AsyncStoragePort` over a `StoragePort`, such as a `StorageAgent`, which stays open."""

    def __init__(self, agent: StoragePort, *, threads: int = BLOCK_THREADS) -> None:
        """`threads`: gets and puts that are under way at once; others wait. Raises `ValueError` below 1."""
        super().__init__(agent)
        self._storage = agent
        self._blocks = _Lane("blocks", threads)
        self._lanes.append(self._blocks)

    async def put(self, volume: str, blocks: Sequence[PutBlock]) -> list[Outcome]:
        """See `StoragePort.put`."""
        return await self._blocks.run(partial(self._storage.put, volume, blocks))

    async def get(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer], wanted: Shard | None = None
    ) -> list[Outcome]:
        """See `StoragePort.get`."""
        return await self._blocks.run(partial(self._storage.get, keys, buffers, wanted))

    async def holding(self, keys: Sequence[BlockKey], wanted: Shard | None = None) -> list[str]:
        """See `StoragePort.holding`."""
        return await self._blocks.run(partial(self._storage.holding, keys, wanted))


class _Lane:
    """Calls on at most so many threads at once, in the order they came. Of one event loop."""

    def __init__(self, name: str, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"{threads} threads are asked for; give at least 1")
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"async-{name}")
        self._places = asyncio.Semaphore(threads)
        self._under_way: set[asyncio.Future[Any]] = set()
        self._closed = False

    async def run(self, call: Callable[[], T]) -> T:
        """What `call` returns or raises. Raises `CommandRefused` once closed."""
        async with self._places:
            if self._closed:
                raise CommandRefused("the agent's port on this event loop is closed; make another one")
            future = asyncio.wrap_future(self._pool.submit(call))
            self._under_way.add(future)
            try:
                return await _outlast(future)
            finally:
                self._under_way.discard(future)

    async def close(self) -> None:
        self._closed = True
        if self._under_way:
            await asyncio.wait(self._under_way)
        self._pool.shutdown()


async def _outlast(future: asyncio.Future[T]) -> T:
    """The result of what runs on a thread. A cancellation is raised when that has ended, and not before."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from future.exception()
    return future.result()
