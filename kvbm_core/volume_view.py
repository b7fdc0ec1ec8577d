"""The disk (G3) or remote (G4) tier as the core sees it: volumes of an agent, and what the core saw there.

A view owns nothing and publishes nothing. What it says is a belief, good enough to choose a path or to skip a put:
the advisor moves blocks, other engines put them, and the agent's answer to a `get` is the truth.
"""

from __future__ import annotations

import threading

from event_plane.schema import Tier
from kvbm_core.config import TierVolumes
from kvbm_core.paths import VOLUME_PATHS
from storage_agent.port import BlockKey

_SEEN_MAX = 1 << 20
_TIERS = {"disk": Tier.G3, "remote": Tier.G4}


class VolumeView:
    """Thread-safe. `put_path` and `load_path`: how blocks get there and back, which depends on the host tier."""

    def __init__(
        self,
        name: str,
        volumes: TierVolumes,
        *,
        has_host: bool,
        seen_max: int = _SEEN_MAX,
    ) -> None:
        """`name` is `disk` or `remote`. `seen_max`: keys remembered; the one seen longest ago is forgotten first."""
        self.name = name
        self.volumes = volumes
        self.tier = _TIERS[name]
        self.put_path, self.load_path = VOLUME_PATHS[name, has_host]
        self._seen_max = seen_max
        self._lock = threading.Lock()
        self._seen: dict[BlockKey, str] = {}

    def saw(self, key: BlockKey, volume: str) -> None:
        """The agent put the block there, or read it from there."""
        with self._lock:
            self._seen.pop(key, None)
            self._seen[key] = volume
            if len(self._seen) > self._seen_max:
                del self._seen[next(iter(self._seen))]

    def missed(self, key: BlockKey) -> None:
        """The agent does not have it, or could not give it."""
        with self._lock:
            self._seen.pop(key, None)

    def where(self, key: BlockKey) -> str:
        """The volume that the block was last seen on; empty where it never was."""
        with self._lock:
            return self._seen.get(key, "")

    def keys_by_volume(self) -> dict[str, list[BlockKey]]:
        """All that is remembered."""
        found: dict[str, list[BlockKey]] = {}
        with self._lock:
            for key, volume in self._seen.items():
                found.setdefault(volume, []).append(key)
        return found

    def __len__(self) -> int:
        return len(self._seen)
