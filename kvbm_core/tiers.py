"""Builds what a configuration names: pools and memory of the core's own tiers, views of the others, and the paths
between them. A tier that is not named is not there, and its paths are not either."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from kvbm_core.accounting import Accounts
from kvbm_core.block import Guard
from kvbm_core.config import KvbmConfig
from kvbm_core.copier import Copier
from kvbm_core.copies import copy_blocks
from kvbm_core.direct_lane import DirectLoadLane
from kvbm_core.errors import ConfigError
from kvbm_core.events import BlockEvents, PublishHandle
from kvbm_core.hooks import Hooks
from kvbm_core.identity import BlockIdentity
from kvbm_core.lanes import CopyLane, LoadLane, OnBatch, PutLane, Volumes
from kvbm_core.paths import TransferPath
from kvbm_core.pool import BlockPool
from kvbm_core.registry import OnRemove, OnStore
from kvbm_core.reuse import reuse_order
from kvbm_core.storage import TensorStorage, open_device, open_engines_host, open_host, open_staging
from kvbm_core.tier_pool import TierPool
from kvbm_core.transfer import Lane, LaneLimits
from kvbm_core.verification import BlockSums
from kvbm_core.volume_view import VolumeView
from storage_agent.port import BlockKey, Result, StoragePort


class Tiers(NamedTuple):
    """What there is. `staging`: host memory between volumes and device, where there is no host tier but volumes are,
    and the device pool is no such memory itself."""

    device: TierPool
    host: TierPool | None
    staging: TierPool | None
    views: tuple[VolumeView, ...]

    def own(self) -> list[TierPool]:
        """The tiers that the core owns and announces."""
        return [self.device] if self.host is None else [self.device, self.host]

    def close(self) -> None:
        """Let go of the memory."""
        for tier in (self.device, self.host, self.staging):
            if tier is not None:
                tier.storage.close()


def open_tiers(config: KvbmConfig, events: BlockEvents, hooks: Hooks, *, has_storage: bool) -> Tiers:
    """Raises `TensorAllocationError`; nothing stays allocated then."""
    open_first = open_device if config.device_memory == "device" else open_engines_host
    device = _announced(config, open_first(config.device_pool_layout), events, hooks)
    host_layout, staging_layout = config.host_pool_layout, config.staging_pool_layout
    host = None if host_layout is None else _announced(config, open_host(host_layout), events, hooks)
    staging = None
    if has_storage and staging_layout is not None:
        staging = _pool(config, open_staging(staging_layout), _untold_store, _untold_remove, Hooks())
    named = config.tiers() if has_storage else ()
    views = tuple(VolumeView(name, volumes, has_host=host is not None) for name, volumes in named)
    return Tiers(device, host, staging, views)


class Copiers(NamedTuple):
    """Both directions between the device and near memory, and the sums that they are held to."""

    to_host: Copier
    to_device: Copier
    sums: BlockSums | None


def build_copiers(tiers: Tiers, config: KvbmConfig, accounts: Accounts) -> Copiers | None:
    """None where there is nothing but a device."""
    near = tiers.host or tiers.staging
    if near is None:
        return None
    sums = BlockSums(near.storage) if config.verify_copies else None
    # The first copy and the first checksum of a process load compiled code, which takes a second: now, while all is
    # zeros and nobody waits.
    copy_blocks(near.storage, [0], tiers.device.storage, [0])
    if sums is not None:
        sums.take([0])
    return Copiers(
        Copier(TransferPath.DEVICE_TO_HOST, tiers.device, near, accounts, sums),
        Copier(TransferPath.HOST_TO_DEVICE, near, tiers.device, accounts, sums),
        sums,
    )


def build_lanes(
    tiers: Tiers,
    copiers: Copiers | None,
    volumes: Volumes | None,
    config: KvbmConfig,
    on_batch: OnBatch,
) -> Mapping[TransferPath, tuple[Lane, LaneLimits]]:
    """A lane for each path between two tiers that are there."""
    lanes: dict[TransferPath, Lane] = {}
    if config.is_device_put_whole:
        if volumes is not None:
            for view in tiers.views:
                lanes[view.put_path] = PutLane(view.put_path, view, tiers.device, None, volumes)
                lanes[view.load_path] = DirectLoadLane(view.load_path, tiers.device, volumes, on_batch)
        return {path: (lane, _limits(path, config, tiers)) for path, lane in lanes.items()}
    near = tiers.host or tiers.staging
    if copiers is None or near is None:
        return {}
    if tiers.host is not None:
        lanes[TransferPath.DEVICE_TO_HOST] = CopyLane(copiers.to_host, on_batch)
        lanes[TransferPath.HOST_TO_DEVICE] = CopyLane(copiers.to_device, on_batch)
    if volumes is not None:
        staged_from = tiers.device if tiers.host is None else None
        check = None if copiers.sums is None or tiers.host is None else partial(_still_right, copiers.sums)
        for view in tiers.views:
            ends_in_host = view.load_path is TransferPath.REMOTE_TO_HOST
            lanes[view.put_path] = PutLane(view.put_path, view, near, staged_from, volumes, check)
            lanes[view.load_path] = LoadLane(
                view.load_path,
                near,
                None if ends_in_host else copiers.to_device,
                volumes,
                on_batch,
                keeps=tiers.host is not None,
                sums=copiers.sums,
            )
    return {path: (lane, _limits(path, config, tiers)) for path, lane in lanes.items()}


def _still_right(
    sums: BlockSums, blocks: Sequence[Guard], host: TensorStorage, places: Sequence[int]
) -> Sequence[bool]:
    """A `lanes.PutCheck` of host blocks."""
    return list(map(bool, sums.check_copies(places, host, places)))


def reset_tier(name: str, tiers: Tiers, storage: StoragePort | None) -> int:
    """Empty one tier; how many blocks that freed. Raises `BlockStateError` and `ConfigError` as the manager's does."""
    for tier in tiers.own():
        if tier.name == name:
            return len(tier.pool.reset())
    for view in tiers.views:
        if view.name == name and storage is not None:
            return sum(_delete(storage, view, volume, keys) for volume, keys in view.keys_by_volume().items())
    there = ", ".join([*(tier.name for tier in tiers.own()), *(view.name for view in tiers.views)])
    raise ConfigError(f"there is no tier {name!r} to reset: name one of {there}")


def _delete(storage: StoragePort, view: VolumeView, volume: str, keys: Sequence[BlockKey]) -> int:
    answer = storage.delete(f"reset-{secrets.token_hex(8)}", volume, keys)
    gone = [outcome for outcome in answer.outcomes if outcome.result in (Result.DELETED, Result.MISS)]
    for outcome in gone:
        view.missed(outcome.key)
    return sum(outcome.result is Result.DELETED for outcome in gone)


def _limits(path: TransferPath, config: KvbmConfig, tiers: Tiers) -> LaneLimits:
    limits = config.limits_of(path)
    batch_blocks = config.transfer_blocks
    if tiers.staging is not None:
        # All batches of all paths that may be under way fit into the buffer together.
        batch_blocks = max(1, min(batch_blocks, config.staging_blocks // config.staged_batches))
    # A block on its way layer by layer waits once for each of them.
    blocks_max = max(config.offload_queue_blocks, config.device_blocks * config.layers)
    return LaneLimits(blocks_max, batch_blocks, limits.concurrency)


def _announced(config: KvbmConfig, storage: TensorStorage, events: BlockEvents, hooks: Hooks) -> TierPool:
    tell = PublishHandle(events, storage.tier, storage.location)
    return _pool(config, storage, tell.stored, tell.removed, hooks)


def _pool(
    config: KvbmConfig, storage: TensorStorage, on_store: OnStore, on_remove: OnRemove, hooks: Hooks
) -> TierPool:
    pool = BlockPool(
        name=storage.location,
        blocks=storage.layout.blocks,
        page_tokens=storage.layout.page_tokens,
        reuse=reuse_order(config.reuse, storage.layout.blocks),
        duplicates=config.duplicates,
        on_store=on_store,
        on_remove=on_remove,
        hooks=hooks,
    )
    return TierPool(pool, storage)


def _untold_store(identity: BlockIdentity, copied: bool) -> None:
    raise AssertionError(f"a block of the staging buffer was registered: {identity}")


def _untold_remove(identity: BlockIdentity) -> None:
    raise AssertionError(f"a block of the staging buffer was evicted: {identity}")
