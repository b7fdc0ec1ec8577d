"""`KvBlockManager`: the block manager as an engine uses it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from event_plane.transport import Publisher
from kvbm_core.block import CompleteBlock, ImmutableBlock
from kvbm_core.config import KvbmConfig
from kvbm_core.counters import CoreCounters
from kvbm_core.errors import ConfigError
from kvbm_core.events import BlockEvents, Placed
from kvbm_core.identity import BlockIdentity
from kvbm_core.offload import Offloader
from kvbm_core.onboard import Onboarded, Onboarder
from kvbm_core.pool import Allocation, BlockPool, PoolOccupancy
from kvbm_core.reuse import reuse_order
from kvbm_core.storage import TensorStorage, open_device, open_host
from kvbm_core.transfer import TierPool
from storage_agent.port import StoragePort


def _wall_clock_us() -> int:
    return time.time_ns() // 1_000


class Occupancy(NamedTuple):
    """Blocks in the tiers that the core owns, and those that wait to leave the device."""

    device: PoolOccupancy
    host: PoolOccupancy
    offload_waiting: int


class KvBlockManager:
    """Blocks of one engine over device (G1) and host (G2), with a storage agent behind them.

    Publishes Store, Remove and Access of G1 and G2; volumes belong to their agent, which announces them itself. One
    engine thread calls it; guards may be released anywhere. Raises `TensorAllocationError` when memory is short.
    """

    def __init__(
        self,
        config: KvbmConfig,
        publisher: Publisher,
        storage: StoragePort | None = None,
        *,
        clock_us: Callable[[], int] = _wall_clock_us,
    ) -> None:
        self.config = config
        self.counters = CoreCounters()
        self._events = BlockEvents(publisher, config.block_bytes, clock_us)
        host_layout = config.host_pool_layout
        if host_layout is None:
            raise ConfigError("host_blocks = 0, and there is no path past the host: set at least 1")
        self._device = self._tier(open_device(config.device_pool_layout))
        self._host = self._tier(open_host(host_layout))
        self._offloader = Offloader(self._device, self._host, storage, config, self.counters)
        self._onboarder = Onboarder(
            self._device,
            self._host,
            storage,
            config,
            self.counters,
            partial(self._events.access, self._host.storage.tier, self._host.storage.location),
        )
        self._closed = False
        # The first message of this life: whatever an earlier one had placed is gone.
        self.announce_snapshot()
        publisher.serve_snapshots(self.announce_snapshot)

    @property
    def device_tensor(self) -> torch.Tensor:
        """Device blocks, `[device_blocks, layers, outer, page, inner]`; an engine writes those it has allocated."""
        return self._device.storage.tensor

    def match(self, blocks: Sequence[BlockIdentity]) -> list[ImmutableBlock]:
        """Guards of the leading blocks that are on the device, up to the first that is not. One Access each."""
        with self._sending():
            matched = self._device.pool.match([block.key for block in blocks])
            for block in matched:
                self._events.access(self._device.storage.tier, self._device.storage.location, block.identity)
            self.counters.matched_device += len(matched)
        return matched

    def onboard(self, blocks: Sequence[BlockIdentity]) -> Onboarded:
        """Bring the leading blocks that the host or a volume has onto the device. What is missing must be computed."""
        with self._sending():
            return self._onboarder.onboard(blocks)

    def allocate(self, count: int) -> Allocation:
        """Device blocks to write, all `count` or none: `PoolExhaustedError` when too many are in use."""
        with self._sending():
            return self._device.pool.allocate(count)

    def register(self, block: CompleteBlock) -> ImmutableBlock:
        """Make a computed device block findable, announce it, and queue it for offload."""
        with self._sending():
            place = block.index
            registered = self._device.pool.register(block)
            self.counters.registered += 1
            if registered.index == place:
                self._offloader.ask(registered)
        return registered

    def offload(self, blocks_max: int) -> int:
        """Copy at most `blocks_max` waiting blocks to the host and put them to their volumes; how many were taken up.

        Call it between iterations: it copies and waits for the volumes.
        """
        with self._sending():
            return self._offloader.run(blocks_max)

    def occupancy(self) -> Occupancy:
        return Occupancy(self._device.pool.occupancy(), self._host.pool.occupancy(), self._offloader.waiting)

    def announce_snapshot(self) -> None:
        """Publish what the core's tiers hold, in the place of everything announced so far. From any thread."""
        self._events.send_snapshot(self._standing_still())

    def close(self) -> None:
        """Announce that this core's placements are gone. The publisher stays open; it is the caller's."""
        self._closed = True
        self._events.clear()
        self._events.send()

    @contextmanager
    def _standing_still(self) -> Iterator[list[Placed]]:
        """What is placed, of which nothing changes meanwhile. After `close`, nothing."""
        with self._device.pool.standing_still() as on_device, self._host.pool.standing_still() as on_host:
            tiers = [(self._device, on_device), (self._host, on_host)]
            yield [] if self._closed else [(each.storage.tier, each.storage.location, ids) for each, ids in tiers]

    def _tier(self, storage: TensorStorage) -> TierPool:
        pool = BlockPool(
            name=storage.location,
            blocks=storage.layout.blocks,
            page_tokens=storage.layout.page_tokens,
            reuse=reuse_order(self.config.reuse, storage.layout.blocks),
            duplicates=self.config.duplicates,
            on_store=partial(self._events.store, storage.tier, storage.location),
            on_remove=partial(self._events.remove, storage.tier, storage.location),
        )
        return TierPool(pool, storage)

    @contextmanager
    def _sending(self) -> Iterator[None]:
        """Whatever a step changed before it failed has happened, and is announced."""
        try:
            yield
        finally:
            self._events.send()
