"""Sizes and places of one block manager. A tier that is not named is not there: no disk or remote one by default."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Literal

import msgspec

from event_plane.hashing import salt
from event_plane.schema import Namespace
from kvbm_core.errors import ConfigError
from kvbm_core.layout import (
    DTYPE_BYTES,
    FullyContiguousLayout,
    LayerSeparateLayout,
    LayoutKind,
    Order,
    PoolLayout,
    block_layout_of,
)
from kvbm_core.paths import VOLUME_PATHS, TransferPath
from storage_agent.shards import SHARD_COUNT_MAX, BlockLayout, Shard, ShardSpan

BLOCKS_MAX = 1 << 24
BLOCK_BYTES_MAX = 64 * 1024 * 1024
SECRET_CHARACTERS_MIN = 16
TENSOR_PARALLEL_SIZE_MAX = 1_024
RETENTION_S_MIN = 1.0

ReuseName = Literal["fifo", "lru", "multi_lru", "lineage"]
OffloadPolicyName = Literal["all", "presence", "presence_frequency"]


def _check_ranges(settings: msgspec.Struct, *ranges: tuple[str, float, float]) -> None:
    for name, low, high in ranges:
        value = getattr(settings, name)
        if not (math.isfinite(value) and low <= value <= high):
            raise ConfigError(f"{name} = {value} is out of range: set it from {low} to {high}")


class TierVolumes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The volumes of a disk (G3) or remote (G4) tier. Their agent owns them; the core only puts and gets.

    A put tries them in order, the next one when one is full.
    """

    volumes: tuple[str, ...]
    tenant_volumes: dict[str, tuple[str, ...]] = {}
    """In the place of `volumes` for a tenant; an empty list keeps that tenant off the tier."""
    retention_s: float
    """How long a block must find room to stay. The core frees nothing: the budget check compares it with the volumes'
    capacity and `prefill_tokens_per_s`."""
    rate_bytes_s: float = 0.0
    """Rate wanted of the tier in each direction; the budget check sees that enough can be under way. 0: none."""
    latency_ms: float = 10.0
    """Time one read or write takes, which `rate_bytes_s` is reached in spite of."""

    def __post_init__(self) -> None:
        if not self.volumes:
            raise ConfigError("volumes is empty: name a volume, or leave the tier out")
        for where, volumes in (("volumes", self.volumes), *self.tenant_volumes.items()):
            if len(set(volumes)) != len(volumes):
                raise ConfigError(f"volumes of {where!r} name one twice: {', '.join(volumes)}; name each once")
        _check_ranges(
            self, ("retention_s", RETENTION_S_MIN, 1e10), ("rate_bytes_s", 0.0, 1e13), ("latency_ms", 0.001, 600_000.0)
        )

    def volumes_of(self, tenant: str) -> tuple[str, ...]:
        """Volumes that a tenant's blocks are put to, in the order to try them."""
        return self.tenant_volumes.get(tenant, self.volumes)

    def all_volumes(self) -> tuple[str, ...]:
        """Every volume of the tier, each once."""
        lists = (self.volumes, *self.tenant_volumes.values())
        return tuple(dict.fromkeys(volume for volumes in lists for volume in volumes))


class PathLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one path: how many batches may be under way, and when one is given up."""

    concurrency: int = 2
    deadline_s: float = 10.0

    def __post_init__(self) -> None:
        _check_ranges(self, ("concurrency", 1, 256), ("deadline_s", 0.001, 3_600.0))


PATH_LIMITS = {
    TransferPath.DEVICE_TO_HOST: PathLimits(),
    TransferPath.HOST_TO_DEVICE: PathLimits(),
    TransferPath.HOST_TO_DISK: PathLimits(deadline_s=30.0),
    TransferPath.DISK_TO_DEVICE: PathLimits(),
    TransferPath.HOST_TO_REMOTE: PathLimits(deadline_s=60.0),
    TransferPath.REMOTE_TO_HOST: PathLimits(deadline_s=30.0),
    TransferPath.DEVICE_TO_DISK: PathLimits(deadline_s=30.0),
    TransferPath.DEVICE_TO_REMOTE: PathLimits(deadline_s=60.0),
    TransferPath.REMOTE_TO_DEVICE: PathLimits(deadline_s=30.0),
}
"""What holds for a path that `KvbmConfig.transfers` does not name."""


class KvbmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """What a block is, how many there are, and where copies go. Raises `ConfigError` when a number cannot work.

    A block holds `layers × outer × page_tokens × heads × head_dim` elements of `dtype`, of which a tensor-parallel
    worker has its share of the heads; `outer` is 2 for keys and values and 1 for MLA. Sizes of pools are given in
    blocks or in bytes: bytes become as many whole blocks, and are 0 afterwards.
    """

    layers: int
    outer: int = 2
    page_tokens: int = 16
    heads: int
    """Key-value heads of the whole model, however many workers share them."""
    head_dim: int
    dtype: str = "float16"
    tensor_parallel_rank: int = 0
    tensor_parallel_size: int = 1

    device_blocks: int = 0
    device_bytes: int = 0
    device_memory: Literal["device", "host"] = "device"
    """`host`: the engine keeps and announces its GPU's blocks itself. What `device_*` sizes is then host memory, which
    the core announces as G2; the engine copies between the two, and there is no other host tier."""
    host_blocks: int = 0
    """0: no host tier. Disk and remote then go through `staging_blocks`."""
    host_bytes: int = 0
    staging_blocks: int = 64
    """Blocks of host memory between disk and device where there is no host tier."""
    disk: TierVolumes | None = None
    remote: TierVolumes | None = None

    device_layout: LayoutKind = "fully_contiguous"
    """The host's is always fully contiguous: what is put to a volume is one piece."""
    device_order: Order = "NHD"
    host_order: Order | None = None
    """Of host, disk and remote; the device's where it is not set."""
    alignment_bytes: int = 1
    """A block starts at a multiple of this in its pool."""

    reuse: ReuseName = "lru"
    duplicates: Literal["allow", "reject"] = "reject"

    offload_policy: OffloadPolicyName = "presence"
    offload_frequency_min: int = 2
    """Uses of a block before `presence_frequency` lets it leave the device."""
    offload_queue_blocks: int = 4_096
    offload_blocks_per_iteration: int = 0
    """Waiting blocks that begin to leave the device by themselves when an iteration ends; 0: only when told to."""
    verify_copies: bool = True
    """Whether a copy between device and host is registered only if its checksum is right. It reads the bytes again."""
    transfer_blocks: int = 32
    """Blocks of one batch: one copy, or one call to the storage agent."""
    transfers: dict[TransferPath, PathLimits] = {}
    """Limits of paths that need others than `PATH_LIMITS`."""
    onboard_budget_ms: float = 0.0
    """How long bringing blocks onto the device may take; 0: as long as its deadlines."""
    prefill_tokens_per_s: float = 0.0
    """How fast the engine computes a prompt, for load or recompute; 0: not known, so that what is found is loaded."""
    headroom_bytes: int = 512 * 1024 * 1024
    """Host memory that the budget check leaves to the engine, the system and their buffers."""

    hash_secret: str
    """Keys the high half of every sequence hash, so that nobody forges another tenant's block."""
    model: str = ""
    revision: str = ""
    adapter: str = ""

    def __post_init__(self) -> None:
        _check_ranges(
            self,
            ("layers", 1, 1_024),
            ("outer", 1, 2),
            ("page_tokens", 1, 65_535),
            ("heads", 1, 4_096),
            ("head_dim", 1, 65_536),
            ("tensor_parallel_size", 1, TENSOR_PARALLEL_SIZE_MAX),
            ("tensor_parallel_rank", 0, self.tensor_parallel_size - 1),
            ("device_bytes", 0, 1 << 50),
            ("host_bytes", 0, 1 << 50),
            ("staging_blocks", 1, BLOCKS_MAX),
            ("alignment_bytes", 1, 1 << 21),
            ("offload_frequency_min", 1, 15),
            ("offload_queue_blocks", 1, BLOCKS_MAX),
            ("offload_blocks_per_iteration", 0, BLOCKS_MAX),
            ("transfer_blocks", 1, 4_096),
            ("onboard_budget_ms", 0.0, 3_600_000.0),
            ("prefill_tokens_per_s", 0.0, 1e9),
            ("headroom_bytes", 0, 1 << 50),
        )
        self._check_block()
        self._check_places()
        self._count_blocks("device", self._device(1).total_bytes)
        self._count_blocks("host", self._contiguous(1).total_bytes)
        _check_ranges(self, ("device_blocks", 1, BLOCKS_MAX), ("host_blocks", 0, BLOCKS_MAX))
        if len(self.hash_secret) < SECRET_CHARACTERS_MIN:
            raise ConfigError(
                f"hash_secret has {len(self.hash_secret)} characters: set at least {SECRET_CHARACTERS_MIN} random ones"
            )

    @cached_property
    def shard(self) -> Shard:
        """Which part of a block this worker holds. With more workers than heads, several hold the same."""
        count = min(self.tensor_parallel_size, self.heads)
        return Shard(self.tensor_parallel_rank * count // self.tensor_parallel_size, count)

    @cached_property
    def wanted(self) -> Shard:
        """What to ask a volume for, also where one worker holds all: what was put may be in more shards than one."""
        return Shard(self.shard.index, self.shard.count, self.block_layout)

    @property
    def holds_first_copy(self) -> bool:
        """Whether no worker of a lower rank holds the same shard: it alone puts it to a volume."""
        replicas = self.tensor_parallel_size // self.shard.count
        return self.tensor_parallel_rank % replicas == 0

    @property
    def shard_heads(self) -> int:
        """Heads that this worker holds."""
        return self.heads // self.shard.count

    @property
    def inner(self) -> int:
        """Elements of one token, one layer and one outer that this worker holds: its heads × head_dim."""
        return self.shard_heads * self.head_dim

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of what this worker holds of a block, without padding between blocks."""
        return self.layers * self.outer * self.page_tokens * self.inner * DTYPE_BYTES[self.dtype]

    @property
    def device_pool_layout(self) -> PoolLayout:
        return self._device(self.device_blocks)

    @property
    def host_pool_layout(self) -> FullyContiguousLayout | None:
        """None: there is no host tier."""
        return self._contiguous(self.host_blocks) if self.host_blocks else None

    @property
    def staging_pool_layout(self) -> FullyContiguousLayout | None:
        """Of the buffer between volumes and device; None where none is needed, or there are no volumes."""
        needed = not self.host_blocks and not self.is_device_put_whole
        needed = needed and (self.disk is not None or self.remote is not None)
        return self._contiguous(self.staging_blocks) if needed else None

    @property
    def is_device_put_whole(self) -> bool:
        """Whether the device pool is host memory in which blocks lie as they do on volumes: no buffer is between."""
        return (
            self.device_memory == "host"
            and self.device_layout == "fully_contiguous"
            and self.host_order in (None, self.device_order)
        )

    @cached_property
    def block_layout(self) -> BlockLayout:
        """Of the whole block of all workers, as it lies on volumes: goes with each put."""
        return block_layout_of(self._contiguous(1), self.heads)

    @cached_property
    def shard_span(self) -> ShardSpan:
        """What this worker's payload is of the whole block: goes with each put."""
        return ShardSpan(shard_bytes=self.block_bytes, first=self.shard.index, count=self.shard.count)

    def limits_of(self, path: TransferPath) -> PathLimits:
        return self.transfers.get(path, PATH_LIMITS[path])

    def paths_of(self, tier: str) -> tuple[TransferPath, TransferPath]:
        """(put, load) of a tier of volumes, `disk` or `remote`."""
        return VOLUME_PATHS[tier, self.host_blocks > 0]

    @property
    def staged_batches(self) -> int:
        """Batches between volumes and device that may be under way at once, all paths together."""
        return sum(self.limits_of(path).concurrency for tier, _ in self.tiers() for path in self.paths_of(tier))

    def tiers(self) -> Iterator[tuple[str, TierVolumes]]:
        """The tiers of volumes that are named, `disk` before `remote`."""
        for name, tier in (("disk", self.disk), ("remote", self.remote)):
            if tier is not None:
                yield name, tier

    def volumes_of(self, tenant: str) -> tuple[str, ...]:
        """Volumes of any tier that a tenant's blocks are put to, in the order to try them."""
        return tuple(volume for _, tier in self.tiers() for volume in tier.volumes_of(tenant))

    def namespace_of(self, tenant: str, adapter: str | None = None, cache_salt: str = "") -> Namespace:
        """The namespace of a tenant's blocks. `adapter` and `cache_salt` are as `salt_of` takes them."""
        return Namespace(
            tenant=tenant,
            model=self.model,
            revision=self.revision,
            adapter=self.adapter if adapter is None else adapter,
            kv_dtype=self.dtype,
            block_tokens=self.page_tokens,
            hash_root=f"{self.salt_of(tenant, adapter, cache_salt):016x}",
        )

    def salt_of(self, tenant: str, adapter: str | None = None, cache_salt: str = "") -> int:
        """u64 seed of a tenant's token hashes. `adapter`, where given, is in the place of the configuration's own;
        requests that give a `cache_salt` share blocks only with those that give the same."""
        return salt(
            self.adapter if adapter is None else adapter, f"{tenant}\0{cache_salt}" if cache_salt else tenant
        )

    def secret_of(self, tenant: str) -> bytes:
        """32 bytes that key a tenant's sequence hashes: BLAKE2b of the tenant's name under `hash_secret`."""
        key = hashlib.blake2b(self.hash_secret.encode(), digest_size=32).digest()
        return hashlib.blake2b(tenant.encode(), key=key, digest_size=32).digest()

    def _check_block(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype = {self.dtype!r} is unknown: set one of {', '.join(DTYPE_BYTES)}")
        if self.alignment_bytes % DTYPE_BYTES[self.dtype] and self.alignment_bytes != 1:
            raise ConfigError(
                f"alignment_bytes = {self.alignment_bytes} splits an element of {self.dtype}: "
                f"set a multiple of {DTYPE_BYTES[self.dtype]}"
            )
        size, heads = self.tensor_parallel_size, self.heads
        if heads % size and size % heads:
            raise ConfigError(
                f"tensor_parallel_size = {size} does not divide {heads} heads, nor they it: set a divisor of {heads}, "
                f"or a multiple, of which several workers hold the same heads"
            )
        if self.shard.count > SHARD_COUNT_MAX:
            raise ConfigError(
                f"tensor_parallel_size = {size} makes {self.shard.count} shards of a block: set at most "
                f"{SHARD_COUNT_MAX}"
            )
        if self.block_bytes > BLOCK_BYTES_MAX:
            raise ConfigError(
                f"a block of {self.block_bytes} bytes is larger than {BLOCK_BYTES_MAX}: "
                f"lower page_tokens, now {self.page_tokens}"
            )

    def _check_places(self) -> None:
        if self.device_memory == "host" and (self.host_blocks or self.host_bytes):
            raise ConfigError(
                "device_memory = 'host' and a host tier would be two pools in host memory: size one by device_blocks, "
                "and leave host_blocks and host_bytes out"
            )
        if self.device_layout != "fully_contiguous" and self.device_order == "universal":
            raise ConfigError(
                f"device_order = 'universal' has no {self.device_layout} layout: set device_order to NHD or HND, or "
                f"device_layout to fully_contiguous"
            )
        if self.disk is not None and self.remote is not None:
            twice = sorted(set(self.disk.all_volumes()) & set(self.remote.all_volumes()))
            if twice:
                raise ConfigError(f"disk and remote both name volume {twice[0]!r}: name it in one of them")

    def _count_blocks(self, tier: str, block_footprint_bytes: int) -> None:
        """Turn a pool's size in bytes into blocks, each of which takes `block_footprint_bytes`."""
        size_bytes = getattr(self, f"{tier}_bytes")
        if not size_bytes:
            return
        if getattr(self, f"{tier}_blocks"):
            raise ConfigError(f"{tier}_blocks and {tier}_bytes are both set: set one of them")
        if size_bytes < block_footprint_bytes:
            raise ConfigError(
                f"{tier}_bytes = {size_bytes} holds no block of {block_footprint_bytes} bytes: set at least that"
            )
        # Blocks alone are kept, so that there is one truth, and a copy with other blocks can be made.
        msgspec.structs.force_setattr(self, f"{tier}_blocks", size_bytes // block_footprint_bytes)
        msgspec.structs.force_setattr(self, f"{tier}_bytes", 0)

    def _device(self, blocks: int) -> PoolLayout:
        shape = self._shape(blocks, self.device_order)
        if self.device_layout == "fully_contiguous":
            return FullyContiguousLayout(**shape)
        return LayerSeparateLayout(**shape, outer_first=self.device_layout == "layer_separate_outer_first")

    def _contiguous(self, blocks: int) -> FullyContiguousLayout:
        return FullyContiguousLayout(**self._shape(blocks, self.host_order or self.device_order))

    def _shape(self, blocks: int, order: Order) -> dict[str, Any]:
        return {
            "blocks": blocks,
            "layers": self.layers,
            "outer": self.outer,
            "page_tokens": self.page_tokens,
            "heads": self.shard_heads,
            "head_dim": self.head_dim,
            "dtype": self.dtype,
            "order": order,
            "alignment_bytes": self.alignment_bytes,
        }
