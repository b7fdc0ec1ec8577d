"""`KvBlockManager`: the block manager as an engine uses it."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from math import inf
from types import TracebackType
from typing import NamedTuple, Self

import torch

from event_plane.schema import EventType, Tier
from event_plane.transport import Publisher
from kvbm_core.accounting import Accounts, CoreTotals, RequestAccount
from kvbm_core.block import PRIORITY_DEFAULT, CompleteBlock, ImmutableBlock, MutableBlock
from kvbm_core.budget import require_budget
from kvbm_core.config import KvbmConfig
from kvbm_core.copier import Copier
from kvbm_core.direct_lane import DirectLoadLane, OnLoaded
from kvbm_core.errors import ConfigError, KvbmError, ManagerClosedError, ProgressError
from kvbm_core.estimate import LoadPlan
from kvbm_core.events import BlockEvents, Placed
from kvbm_core.explain import BlockExplanation, explain_block, find_keys
from kvbm_core.hooks import Hooks
from kvbm_core.identity import BlockIdentity
from kvbm_core.lanes import PutCheck, PutLane, Volumes
from kvbm_core.layered import LayeredLoad, LayeredStore, LayerMoves
from kvbm_core.machine import read_machine
from kvbm_core.offload import OffloadManager
from kvbm_core.onboard import Onboarded, Onboarder, take_targets
from kvbm_core.paths import TransferPath
from kvbm_core.pool import Allocation, PoolCounters, PoolOccupancy
from kvbm_core.progress import NO_GATE, Gate, ModelProgress
from kvbm_core.scheduler import Scheduler
from kvbm_core.storage import TensorStorage
from kvbm_core.tier_pool import TierPool
from kvbm_core.tiers import Copiers, build_copiers, build_lanes, open_tiers, reset_tier
from kvbm_core.transfer import BlockTransfer, TransferManager
from kvbm_core.transfer_queue import QueueDepth
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import StorageAgentError
from storage_agent.port import BlockKey, StoragePort

_NONE = PoolOccupancy(0, 0, 0)


def _wall_clock_us() -> int:
    return time.time_ns() // 1_000


class Occupancy(NamedTuple):
    """Blocks in the tiers that the core owns, and those that wait to leave the device. Without a host tier it is 0."""

    device: PoolOccupancy
    host: PoolOccupancy
    offload_waiting: int


class KvBlockManager:
    """Blocks of one engine over device (G1) and host (G2), with a storage agent's volumes (G3, G4) behind them.

    Publishes Store, Remove and Access of G1 and G2; volumes belong to their agent, which announces them itself.
    Thread-safe. Every call that waits for bytes has a form that gives a future (`onboard_soon`, `offload_soon`), and
    `async_manager.AsyncKvBlockManager` has them as coroutines.
    """

    def __init__(
        self,
        config: KvbmConfig,
        publisher: Publisher,
        storage: StoragePort | None = None,
        *,
        clock_us: Callable[[], int] = _wall_clock_us,
        hooks: Hooks | None = None,
    ) -> None:
        """Without `storage` the volumes that `config` names are not used.

        Raises `ConfigError` when the agent answers and lacks a volume that `config` names, `BudgetError` when the
        machine or the volumes cannot hold what `config` asks for, and `TensorAllocationError` when memory is short all
        the same.
        """
        require_budget(config, read_machine(), _descriptors(config, storage))
        self.config = config
        self._storage = storage
        self.hooks = Hooks() if hooks is None else hooks
        self._closed = False
        self._accounts = Accounts()
        with ExitStack() as undoing:
            self._events = BlockEvents(publisher, config.block_bytes, clock_us)
            undoing.callback(self._events.close)
            self._tiers = open_tiers(config, self._events, self.hooks, has_storage=storage is not None)
            undoing.callback(self._tiers.close)
            volumes = None
            if storage is not None and self._tiers.views:
                volumes = Volumes(storage, self._tiers.views, config, self._accounts)
            self._copiers = build_copiers(self._tiers, config, self._accounts)
            lanes = build_lanes(self._tiers, self._copiers, volumes, config, self._events.send)
            self._put_lanes = [lane for lane, _ in lanes.values() if isinstance(lane, PutLane)]
            self._direct_lanes = [lane for lane, _ in lanes.values() if isinstance(lane, DirectLoadLane)]
            self._transfers = TransferManager(lanes, on_failure=self._accounts.failed)
            undoing.callback(self._transfers.close)
            self.scheduler = Scheduler(config.layers, self._progressed)
            self._offloads = OffloadManager(
                self._tiers.host, self._tiers.views, self._transfers, self._accounts, config
            )
            self._onboarder = Onboarder(
                self._tiers, volumes, self._transfers, self._accounts, config, self._used
            )
            # The first message of this life: whatever an earlier one had placed is gone.
            self.announce_snapshot()
            publisher.serve_snapshots(self.announce_snapshot)
            undoing.pop_all()

    # Blocks of the device

    @property
    def device(self) -> TensorStorage:
        """The device's blocks, in whatever layout; an engine writes those that it has allocated."""
        return self._tiers.device.storage

    @property
    def device_tensor(self) -> torch.Tensor:
        """All of them in one tensor, of a fully contiguous layout: `[device_blocks, layers, outer, page, inner]`."""
        return self._tiers.device.storage.tensor

    def match(self, blocks: Sequence[BlockIdentity]) -> list[ImmutableBlock]:
        """Guards of the leading blocks that are on the device, up to the first that is not. One Access each.

        Ask `onboard` for the rest, even without a lower tier: that counts them, and finds those behind a gap. Raises
        `ManagerClosedError`.
        """
        self._check_open()
        matched = self._tiers.device.pool.match([block.key for block in blocks])
        self._accounts.served(
            RequestAccount(
                asked=len(matched),
                tokens_asked=len(matched) * self.config.page_tokens,
                ready=len(matched),
                tokens_matched=len(matched) * self.config.page_tokens,
                bytes_asked=len(matched) * self.config.block_bytes,
            )
        )
        self._used(self._tiers.device.storage.tier, matched)
        return matched

    def allocate(self, count: int) -> Allocation:
        """Device blocks to write, all `count` or none: `PoolExhaustedError` when too many are in use.

        Raises `ManagerClosedError`.
        """
        self._check_open()
        allocation = self._tiers.device.pool.allocate(count)
        self._events.send()
        return allocation

    def complete(self, blocks: Sequence[MutableBlock], identities: Sequence[BlockIdentity]) -> list[CompleteBlock]:
        """Commit device blocks all of whose bytes were written at once. Raises as `BlockPool.complete_many` does."""
        return self._tiers.device.pool.complete_many(blocks, identities)

    def register(self, block: CompleteBlock, *, priority: int = PRIORITY_DEFAULT) -> ImmutableBlock:
        """`register_many` of one."""
        return self.register_many((block,), priority=priority)[0]

    def register_many(
        self, blocks: Sequence[CompleteBlock], *, priority: int = PRIORITY_DEFAULT
    ) -> list[ImmutableBlock]:
        """Make computed device blocks findable, announce them, and queue them for offload, lower priority first.

        On a GPU, once their bytes are written, not when that is queued.
        """
        places = [block.index for block in blocks]
        registered = self._tiers.device.pool.register_many(blocks, priority=priority)
        self._accounts.registered(len(registered))
        self._offloads.ask(
            [
                block
                for block, place in zip(registered, places, strict=True)
                if block.index == place and not block.is_second_copy
            ]
        )
        self._events.send()
        return registered

    # Between the tiers

    def check_puts(self, check: PutCheck) -> None:
        """Look at blocks before volumes get them, for who knows what the device's memory held: where there is no host
        tier, nothing else does. One that does not pass is not put, and the device forgets it."""
        for lane in self._put_lanes:
            lane.check = check

    def note_loads(self, on_loaded: OnLoaded) -> None:
        """Hear of the blocks that come from volumes straight into the first pool, batch by batch, in any thread: while
        others are still on their way. Nothing is heard where they come through other memory."""
        for lane in self._direct_lanes:
            lane.on_loaded = on_loaded

    def onboard(
        self,
        blocks: Sequence[BlockIdentity],
        targets: Sequence[MutableBlock] | None = None,
        *,
        budget_ms: float | None = None,
        priority: int = 0,
    ) -> Onboarded:
        """Get the leading blocks onto the device from wherever they are. What is missing must be computed.

        `targets`: one empty device block for each to be written. `budget_ms`: the longest that the caller waits;
        None: `onboard_budget_ms` of the configuration; 0: as long as the paths' deadlines. `priority`: lower goes
        first where requests wait for one path.
        Raises `ManagerClosedError`, `ValueError` for another number of targets or a negative budget, and
        `BlockStateError` for a target that is no empty block of the device; the targets are the caller's then.
        """
        return self._transfers.wait_for(self.onboard_soon(blocks, targets, budget_ms=budget_ms, priority=priority))

    def onboard_soon(
        self,
        blocks: Sequence[BlockIdentity],
        targets: Sequence[MutableBlock] | None = None,
        *,
        budget_ms: float | None = None,
        priority: int = 0,
    ) -> concurrent.futures.Future[Onboarded]:
        """`onboard` that goes on meanwhile. Cancelling the future gives the blocks up; their guards go back."""
        work = self._onboarder.onboard(blocks, targets, self._budget_s(budget_ms), priority)
        return self._transfers.submit(work, Onboarded.release)

    def estimate(self, blocks: Sequence[BlockIdentity], *, budget_ms: float | None = None) -> LoadPlan:
        """How many of the leading blocks `onboard` would load now and how long that takes, and why no more."""
        return self._onboarder.estimate(blocks, self._budget_s(budget_ms))

    def offload(self, blocks_max: int) -> int:
        """Copy at most `blocks_max` waiting blocks to the host and put them to their volumes; how many were taken up.

        Waits for the volumes. Raises `ProgressError` during an iteration, which it would wait for too, and
        `ManagerClosedError`.
        """
        if self.scheduler.progress.is_running:
            raise ProgressError("offload would wait for the iteration under way: use offload_soon, or end it")
        return self._transfers.wait_for(self.offload_soon(blocks_max))

    def offload_soon(self, blocks_max: int) -> concurrent.futures.Future[int]:
        """`offload` that goes on meanwhile. During an iteration blocks are read once it has ended."""
        return self._transfers.submit(self._offloads.run(blocks_max, self.scheduler.gate()))

    def onboard_by_layer(
        self, blocks: Sequence[BlockIdentity], targets: Sequence[MutableBlock] | None = None
    ) -> LayeredLoad:
        """Begin to bring the leading blocks that the host has, layer after layer, into empty device blocks.

        `targets`: one for each of `blocks`; those behind the last that the host has stay the caller's. Raises
        `PoolExhaustedError` where the device has no room for them, `ConfigError` without a host tier, and what
        `onboard` raises for targets, which are all the caller's then.
        """
        copiers, host = self._host_paths()
        sources = host.pool.match([block.key for block in blocks])
        try:
            if targets is None:
                places = self.allocate(len(sources)).blocks
            else:
                places = take_targets(self._tiers.device.pool, targets, len(blocks), taken=len(sources))
        except (KvbmError, ValueError):
            host.pool.release_many(sources[::-1])
            raise
        moving = [
            BlockTransfer(source.identity, source, place) for source, place in zip(sources, places, strict=True)
        ]
        moves = self._layer_moves(copiers.to_device, moving, [NO_GATE] * self.config.layers)
        return LayeredLoad(moves, copiers.to_device, self._accounts, self._used)

    def offload_by_layer(
        self, blocks: Sequence[MutableBlock], identities: Sequence[BlockIdentity]
    ) -> LayeredStore:
        """Within an iteration that writes these device blocks: take each layer to the host once it is done.

        The blocks' guards end; `finish` gives others. Raises `ProgressError` where no iteration is under way,
        `PoolExhaustedError` where the host has no room, `ConfigError` without a host tier, `BlockStateError` for what
        is no empty block of the device and `ValueError` for another number of identities; the guards go on then.
        """
        copiers, host = self._host_paths()
        if len(identities) != len(blocks):
            raise ValueError(f"{len(identities)} identities for {len(blocks)} blocks: give one for each")
        progress = self.scheduler.progress
        if not progress.is_running:
            raise ProgressError("no iteration is under way: call scheduler.begin_iteration first")
        device = self._tiers.device.pool
        device.check_empty(blocks)
        places = host.pool.allocate(len(blocks)).blocks
        self._events.send()
        moving = [
            BlockTransfer(identity, block, place)
            for identity, block, place in zip(identities, device.take_over(blocks), places, strict=True)
        ]
        gates = [Gate(progress.iteration, layer) for layer in range(self.config.layers)]
        moves = self._layer_moves(copiers.to_host, moving, gates)
        return LayeredStore(moves, copiers.to_host, self._register_stored, self._follow)

    # What there is, and what was done

    def occupancy(self) -> Occupancy:
        """Blocks by what may happen to them, now."""
        host = self._tiers.host
        return Occupancy(
            self._tiers.device.pool.occupancy(),
            _NONE if host is None else host.pool.occupancy(),
            self._offloads.waiting,
        )

    def totals(self) -> CoreTotals:
        """The accounts since the start, copied at one moment."""
        totals = self._accounts.totals()
        totals.events_lost = self._events.lost
        return totals

    def pools(self) -> dict[str, tuple[PoolOccupancy, PoolCounters]]:
        """Of each pool that the core owns, by `device` and `host`."""
        return {tier.name: (tier.pool.occupancy(), tier.pool.counters()) for tier in self._tiers.own()}

    def own_tier(self, name: str) -> TierPool:
        """Pool and memory of `device` or `host`, as `remote` takes them. Raises `ConfigError` where it is not there.

        What is registered in the pool by itself is announced with the next step here, or by `flush_events`.
        """
        own = {tier.name: tier for tier in self._tiers.own()}
        if name not in own:
            raise ConfigError(f"the core has no tier {name!r} of its own: name one of {', '.join(own)}")
        return own[name]

    def queues(self) -> dict[TransferPath, QueueDepth]:
        """What waits, runs and is in doubt on each path, a moment ago."""
        return self._transfers.depths()

    def explain(self, key: BlockKey) -> BlockExplanation:
        """Where a block is, who owns each copy, and what waits for it."""
        return explain_block(key, self._tiers, self._offloads, self._onboarder)

    def find_keys(self, hash_prefix: str) -> list[BlockKey]:
        """Keys of blocks in any tier, or seen on a volume, whose hash begins with these hex digits.

        Looks through all of them. Raises `ValueError` for what is no beginning of a hash.
        """
        return find_keys(hash_prefix, self._tiers)

    def announce_snapshot(self) -> None:
        """Publish what the core's tiers hold, in the place of everything announced so far. From any thread."""
        self._events.send_snapshot(self._standing_still())

    def flush_events(self) -> None:
        """Hand all that has happened to the publisher now; it otherwise follows within milliseconds, an Access within
        half a second."""
        self._events.flush()

    def reset(self, tier: str) -> int:
        """An operator's reset: empty `device`, `host`, `disk` or `remote`; how many blocks that freed.

        Of volumes only what this core put there or read from there. Raises `BlockStateError` while a block of the
        core's own tiers is in use, and `ConfigError` for a tier that is not there.
        """
        freed = reset_tier(tier, self._tiers, self._storage)
        self._events.send()
        return freed

    def close(self) -> None:
        """End what is under way, announce that this core's placements are gone, and let go of the memory.

        Waits for calls that hang. The publisher stays open; it is the caller's. Views of the memory that were given out
        stay valid. Idempotent.
        """
        self._transfers.close()
        self._closed = True
        self._events.close()
        self._tiers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ManagerClosedError

    def _host_paths(self) -> tuple[Copiers, TierPool]:
        if self._copiers is None or self._tiers.host is None:
            raise ConfigError("host_blocks = 0, and layers go to and from the host only: set at least 1")
        return self._copiers, self._tiers.host

    def _layer_moves(self, copier: Copier, moving: Sequence[BlockTransfer], gates: Sequence[Gate]) -> LayerMoves:
        wait_s = self.config.limits_of(copier.path).deadline_s
        return LayerMoves(self._transfers, copier, moving, gates, wait_s=wait_s)

    def _register_stored(self, blocks: Sequence[BlockTransfer], stored: Sequence[bool]) -> list[ImmutableBlock]:
        """Of a `LayeredStore`: device blocks, of which those not `stored` in the host wait for offload."""
        places = [block.source for block in blocks if isinstance(block.source, MutableBlock)]
        completed = self.complete(places, [block.identity for block in blocks])
        registered = self._tiers.device.pool.register_many(completed)
        self._accounts.registered(len(registered))
        self._offloads.ask([block for block, is_there in zip(registered, stored, strict=True) if not is_there])
        self._events.send()
        return registered

    def _follow(self, in_host: Sequence[ImmutableBlock]) -> None:
        self._events.send()
        self._transfers.submit(self._offloads.follow(in_host))

    def _used(self, tier: Tier, blocks: Sequence[ImmutableBlock]) -> None:
        """A request got blocks, which it has on the device now, that were on this tier."""
        self._offloads.matched(blocks)
        locations = {each.storage.tier: each.storage.location for each in self._tiers.own()}
        for block in blocks:
            self._events.note(EventType.ACCESS, tier, locations[tier], block.identity)
        self._events.send()

    def _progressed(self, progress: ModelProgress) -> None:
        self._transfers.progressed(progress)
        if not progress.is_running and self.config.offload_blocks_per_iteration and self._offloads.waiting:
            with suppress(ManagerClosedError):
                self.offload_soon(self.config.offload_blocks_per_iteration)

    def _budget_s(self, budget_ms: float | None) -> float:
        chosen_ms = self.config.onboard_budget_ms if budget_ms is None else budget_ms
        if not chosen_ms >= 0.0:
            raise ValueError(f"budget_ms = {chosen_ms} is no time to wait: give milliseconds, or 0 for no limit")
        return chosen_ms / 1e3 if chosen_ms else inf

    @contextmanager
    def _standing_still(self) -> Iterator[list[Placed]]:
        """What is placed, of which nothing changes meanwhile. After `close`, nothing."""
        with ExitStack() as still:
            placed: list[Placed] = [
                (tier.storage.tier, tier.storage.location, still.enter_context(tier.pool.standing_still()))
                for tier in self._tiers.own()
            ]
            yield [] if self._closed else placed


def _descriptors(config: KvbmConfig, storage: StoragePort | None) -> dict[str, VolumeDescriptor]:
    """The volumes that the agent has now; none where it cannot be asked, since it may come later.

    Raises `ConfigError` for a volume that an agent which answers does not have.
    """
    if storage is None:
        return {}
    try:
        stat = storage.stat()
    except StorageAgentError:
        return {}
    found = {volume.descriptor.id: volume.descriptor for volume in (*stat.volumes, *stat.views)}
    for name, tier in config.tiers():
        lacking = [volume for volume in tier.all_volumes() if volume not in found]
        if lacking:
            raise ConfigError(
                f"{name}.volumes names {', '.join(map(repr, lacking))}, which agent {stat.agent!r} does not have: "
                f"register it there, or name one of its own, {', '.join(map(repr, found)) or 'of which there are none'}"
            )
    return found
