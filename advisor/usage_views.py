"""What one tenant's blocks take, as the REST API shows it, and the port that answers."""

from __future__ import annotations

from typing import Protocol

from advisor.views import TierView, View


class PlaceUsage(View):
    place: str
    """A volume's id, or `producer-name/location`."""
    tier: int
    blocks: int
    block_bytes: int


class TenantUsage(View):
    """All zero for a tenant that nothing is known of."""

    tenant: str
    namespaces: int
    blocks: int
    """That are anywhere, each once."""
    block_bytes: int
    """Of all their copies."""
    tiers: list[TierView]
    """A block counts once for each place in the tier."""
    places: list[PlaceUsage]
    """Those that hold any, volumes and engines' memory, most bytes first."""


class AdvisorUsage(Protocol):
    def usage(self, tenant: str) -> TenantUsage:
        """Counted now or some seconds ago. Thread-safe."""
