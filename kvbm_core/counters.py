"""What the block manager did and refused to do, by reason, since it started. Blocks, unless named."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class CoreCounters:
    """Changed by the engine's thread alone; a reader in another thread sees numbers that may be a moment apart."""

    matched_device: int = 0
    onboarded_host: int = 0
    """Blocks copied to the device from a host copy that was there."""
    loaded: Counter[str] = field(default_factory=Counter)
    """Blocks onboarded from a volume, verified, by volume."""
    load_misses: Counter[str] = field(default_factory=Counter)
    """Blocks not loaded, by reason: the agent's result (`miss` is on no volume), `host_exhausted`, `device_exhausted`,
    or `behind_a_miss`: read well but of no use, since an earlier block is missing."""
    registered: int = 0
    """Computed blocks registered in the device pool, duplicates included."""
    offloaded: int = 0
    """Blocks copied from device to host."""
    offload_skipped: Counter[str] = field(default_factory=Counter)
    """Blocks not offloaded: `queue_full`, `evicted_before_copy`, `host_exhausted`; `present_in_host` needs no copy."""
    put: Counter[str] = field(default_factory=Counter)
    """Blocks durable on a volume after a put, by volume; those there before are included."""
    put_refused: Counter[str] = field(default_factory=Counter)
    """Blocks that no volume took, by the last volume's reason."""
    put_fell_back: Counter[str] = field(default_factory=Counter)
    """Blocks that a full volume passed on to the next one of its list, by the full volume."""
