"""`AdvisorUsage` over plain values: blocks of one tenant."""

from __future__ import annotations

from advisor.usage_views import PlaceUsage, TenantUsage
from advisor.views import TierView


class SampleUsage:
    def usage(self, tenant: str) -> TenantUsage:
        if tenant != "agents":
            return TenantUsage(tenant=tenant, namespaces=0, blocks=0, block_bytes=0, tiers=[], places=[])
        place = PlaceUsage(place="nvme-a", tier=3, blocks=125, block_bytes=125 * 16_384)
        tier = TierView(tier=3, blocks=125, block_bytes=125 * 16_384)
        return TenantUsage(
            tenant=tenant, namespaces=1, blocks=125, block_bytes=125 * 16_384, tiers=[tier], places=[place]
        )
