"""Whether this machine and these volumes can hold what a configuration asks for, before anything is allocated. Pure.

Each refusal names one number to change, and to what. Facts come from `machine.read_machine` and from the storage
agent's `stat`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Literal, NamedTuple

from kvbm_core.config import RETENTION_S_MIN, KvbmConfig, TierVolumes
from kvbm_core.errors import BudgetError
from kvbm_core.layout import PoolLayout
from storage_agent.descriptor import VolumeDescriptor


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What there is, in bytes."""

    host_available_bytes: int
    """What can be taken without swapping, within the control group's limit too."""
    locked_bytes_max: int | None
    """What may be locked in memory (`ulimit -l`); None where there is no limit, or nothing here that locks."""
    device_free_bytes: int | None
    """Of the GPU; None where there is none and host memory stands in for it."""


class Refusal(NamedTuple):
    """`setting` is `now`, and works as `to` or any number beyond it, which `bound` says the direction of.

    `reason` says with its numbers why it cannot stay.
    """

    setting: str
    now: int | float
    bound: Literal["at most", "at least"]
    to: int | float
    reason: str

    def __str__(self) -> str:
        return f"{self.reason}: change {self.setting}, now {self.now}, to {self.bound} {self.to}"


def require_budget(
    config: KvbmConfig, facts: MachineFacts, volumes: Mapping[str, VolumeDescriptor] | None = None
) -> None:
    """Raises `BudgetError` with every refusal of `check_budget`."""
    refusals = check_budget(config, facts, volumes)
    if refusals:
        raise BudgetError("; ".join(str(each) for each in refusals))


def check_budget(
    config: KvbmConfig, facts: MachineFacts, volumes: Mapping[str, VolumeDescriptor] | None = None
) -> list[Refusal]:
    """Everything that cannot work. `volumes`: those the storage agent has, by id; none where it does not answer."""
    found = [*_device_memory(config, facts), *_host_memory(config, facts), *_locked_memory(config, facts)]
    found += _staging(config)
    for name, tier in config.tiers():
        found += _rate(config, name, tier)
        found += _room(config, name, tier, volumes or {})
    return found


def _device_memory(config: KvbmConfig, facts: MachineFacts) -> Iterator[Refusal]:
    if config.device_memory == "host":
        return
    needed_bytes = config.device_pool_layout.total_bytes
    free_bytes = facts.device_free_bytes
    if free_bytes is not None and needed_bytes > free_bytes:
        fitting = free_bytes * config.device_blocks // needed_bytes
        reason = f"the device pool takes {needed_bytes} bytes of a device with {free_bytes} free"
        yield Refusal("device_blocks", config.device_blocks, "at most", fitting, reason)


def _host_memory(config: KvbmConfig, facts: MachineFacts) -> Iterator[Refusal]:
    pools = _host_pools(config)
    if facts.device_free_bytes is None and config.device_memory == "device":
        pools["device_blocks"] = (config.device_blocks, config.device_pool_layout.total_bytes)
    needed_bytes = sum(size_bytes for _, size_bytes in pools.values())
    room_bytes = facts.host_available_bytes - config.headroom_bytes
    if needed_bytes <= room_bytes:
        return
    reason = (
        f"pools in host memory take {needed_bytes} bytes, {facts.host_available_bytes} are available and "
        f"headroom_bytes keeps {config.headroom_bytes} of them for engine and system"
    )
    one_each_bytes = sum(size_bytes // blocks for blocks, size_bytes in pools.values())
    if facts.host_available_bytes < one_each_bytes:
        fitting = config.page_tokens * facts.host_available_bytes // one_each_bytes
        yield Refusal("page_tokens", config.page_tokens, "at most", fitting, f"{reason}; one block each is too much")
        return
    if room_bytes < one_each_bytes:
        fitting = facts.host_available_bytes - one_each_bytes
        yield Refusal("headroom_bytes", config.headroom_bytes, "at most", fitting, reason)
        return
    for setting, (blocks, size_bytes) in pools.items():
        fitting = (size_bytes - (needed_bytes - room_bytes)) * blocks // size_bytes
        if fitting > 0:
            yield Refusal(setting, blocks, "at most", fitting, reason)
            return
    # No pool alone makes room: each gives up the same part of what it has beyond one block.
    share = Fraction(room_bytes - one_each_bytes, needed_bytes - one_each_bytes)
    for setting, (blocks, _) in pools.items():
        yield Refusal(setting, blocks, "at most", 1 + int((blocks - 1) * share), reason)


def _locked_memory(config: KvbmConfig, facts: MachineFacts) -> Iterator[Refusal]:
    needed_bytes = sum(size_bytes for _, size_bytes in _host_pools(config).values())
    if facts.locked_bytes_max is not None and needed_bytes > facts.locked_bytes_max:
        yield Refusal(
            "the limit of locked memory in KiB (`ulimit -l`)",
            facts.locked_bytes_max // 1_024,
            "at least",
            ceil(needed_bytes / 1_024),
            f"pools that the network adapter reaches take {needed_bytes} bytes of locked memory",
        )


def _host_pools(config: KvbmConfig) -> dict[str, tuple[int, int]]:
    """(blocks, bytes) of the pools that are always in host memory, by the setting that sizes them."""
    layouts: dict[str, PoolLayout | None] = {
        "host_blocks": config.host_pool_layout,
        "staging_blocks": config.staging_pool_layout,
        "device_blocks": config.device_pool_layout if config.device_memory == "host" else None,
    }
    return {name: (layout.blocks, layout.total_bytes) for name, layout in layouts.items() if layout is not None}


def _staging(config: KvbmConfig) -> Iterator[Refusal]:
    """Each batch that may be under way needs a block of the buffer, so that no path takes another's."""
    needed = config.staged_batches
    if config.staging_pool_layout is not None and config.staging_blocks < needed:
        reason = f"{needed} batches may be under way at once, by the concurrency of all paths to volumes"
        yield Refusal("staging_blocks", config.staging_blocks, "at least", needed, reason)


def _rate(config: KvbmConfig, name: str, tier: TierVolumes) -> Iterator[Refusal]:
    """What is under way at once must be rate × latency (Little's law)."""
    under_way_bytes = tier.rate_bytes_s * tier.latency_ms / 1e3
    blocks = ceil(under_way_bytes / config.block_bytes)
    reason = (
        f"{name}.rate_bytes_s = {tier.rate_bytes_s:.0f} with latency_ms = {tier.latency_ms:g} needs {blocks} blocks "
        f"of {config.block_bytes} bytes under way"
    )
    near = "host_blocks" if config.host_blocks else "device_blocks" if config.is_device_put_whole else "staging_blocks"
    if getattr(config, near) < blocks:
        yield Refusal(near, getattr(config, near), "at least", blocks, reason)
    for path in config.paths_of(name):
        concurrency = config.limits_of(path).concurrency
        if concurrency * config.transfer_blocks < blocks:
            yield Refusal(
                f"transfers.{path}.concurrency",
                concurrency,
                "at least",
                ceil(blocks / config.transfer_blocks),
                f"{reason}, in batches of transfer_blocks = {config.transfer_blocks}",
            )


def _room(
    config: KvbmConfig, name: str, tier: TierVolumes, volumes: Mapping[str, VolumeDescriptor]
) -> Iterator[Refusal]:
    """Blocks must fit their volumes, and the volumes what comes in within the retention."""
    known = [volumes[volume] for volume in tier.all_volumes() if volume in volumes]
    for volume in known:
        if config.block_bytes > volume.block_bytes_max:
            yield Refusal(
                f"block_bytes_max of volume {volume.id!r}",
                volume.block_bytes_max,
                "at least",
                config.block_bytes,
                f"a block has {config.block_bytes} bytes",
            )
    if len(known) < len(tier.all_volumes()):
        return
    blocks_s = config.prefill_tokens_per_s / config.page_tokens
    capacity = sum(volume.capacity_blocks for volume in known)
    needed = ceil(tier.retention_s * blocks_s)
    if needed <= capacity:
        return
    reason = (
        f"prefill_tokens_per_s = {config.prefill_tokens_per_s:g} makes up to {needed} blocks in {name}.retention_s = "
        f"{tier.retention_s:g}, the volumes of {name} hold {capacity}"
    )
    fitting_s = int(capacity / blocks_s)
    if fitting_s >= RETENTION_S_MIN:
        yield Refusal(f"{name}.retention_s", tier.retention_s, "at most", fitting_s, reason)
    else:
        last = known[-1]
        wanted = last.capacity_blocks + needed - capacity
        yield Refusal(f"capacity_blocks of volume {last.id!r}", last.capacity_blocks, "at least", wanted, reason)
