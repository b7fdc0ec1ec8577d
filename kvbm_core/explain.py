"""Where a block is, who owns each copy, and what waits for it."""

from __future__ import annotations

import msgspec

from kvbm_core.offload import HOST, OffloadManager
from kvbm_core.onboard import Onboarder
from kvbm_core.tiers import Tiers
from storage_agent.port import BlockKey

_HASH_DIGITS = 32


class CopyExplanation(msgspec.Struct, frozen=True):
    """One tier's word on a block. `owner` is who may free it there.

    `state`: `active` (in use), `inactive` (may be evicted), `seen` (on a volume when it was last put or read, which
    the agent may have changed since), `announced` (so the advisor heard) or `absent`. `next`: what the offload policy
    says of bringing it there.
    """

    tier: str
    location: str
    state: str
    owner: str
    block: int | None = None
    guards: int = 0
    priority: int | None = None
    next: str = ""


class BlockExplanation(msgspec.Struct, frozen=True):
    """A block in one core. `waits`: what is under way or queued for it."""

    sequence_hash: str
    namespace_id: str
    group: int
    copies: list[CopyExplanation]
    waits: list[str]


def explain_block(
    key: BlockKey, tiers: Tiers, offloads: OffloadManager, onboarder: Onboarder
) -> BlockExplanation:
    """What is so at this moment; a moment later it may not be."""
    copies = []
    for tier in tiers.own():
        place = tier.pool.find(key)
        copies.append(
            CopyExplanation(
                tier=tier.storage.tier.name,
                location=tier.storage.location,
                state="absent" if place is None else "active" if place.references else "inactive",
                owner="core",
                block=None if place is None else place.slot,
                guards=0 if place is None else place.references,
                priority=None if place is None else place.priority,
                next=offloads.decision(key, HOST).reason if tier.name == HOST else "",
            )
        )
    for view in tiers.views:
        volume = view.where(key)
        copies.append(
            CopyExplanation(
                tier=view.tier.name,
                location=volume,
                state="seen" if volume else "absent",
                owner="storage agent",
                next=offloads.decision(key, view.name).reason,
            )
        )
    waits = offloads.waits(key)
    if onboarder.is_loading(key):
        waits.append("on its way to the device")
    return BlockExplanation(f"{key.sequence_hash:032x}", f"{key.namespace_id:016x}", key.group, copies, waits)


def find_keys(hash_prefix: str, tiers: Tiers) -> list[BlockKey]:
    """See `KvBlockManager.find_keys`."""
    digits = hash_prefix.lower()
    if not 1 <= len(digits) <= _HASH_DIGITS or set(digits) - set("0123456789abcdef"):
        raise ValueError(f"{hash_prefix!r} begins no hash: give 1 to {_HASH_DIGITS} hex digits")
    shift = 4 * (_HASH_DIGITS - len(digits))
    wanted = int(digits, 16)
    keys = [key for tier in tiers.own() for key in tier.pool.registered_keys()]
    keys += [key for view in tiers.views for on_volume in view.keys_by_volume().values() for key in on_volume]
    return sorted({key for key in keys if key.sequence_hash >> shift == wanted})
