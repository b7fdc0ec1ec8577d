"""What a tenant's blocks take: a route of the REST API."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path

from advisor.access.identity import Identity, Scope
from advisor.api.access import needs
from advisor.api.problems import documented
from advisor.usage_views import AdvisorUsage, TenantUsage


def usage_routes(usage: AdvisorUsage) -> APIRouter:
    """`/api/v1/tenants/{tenant}/usage`."""
    routes = APIRouter(prefix="/api/v1", tags=["tenants"])

    @routes.get("/tenants/{tenant:path}/usage", summary="What a tenant's blocks take", responses=documented(422))
    def usage_of(
        tenant: Annotated[str, Path(max_length=256)], who: Annotated[Identity, Depends(needs(Scope.READ, tenants=True))]
    ) -> TenantUsage:
        """By tier and by volume; all zero for a tenant that has no blocks, or that the asker may not see."""
        if who.tenant not in ("", tenant):
            return TenantUsage(tenant=tenant, namespaces=0, blocks=0, block_bytes=0, tiers=[], places=[])
        return usage.usage(tenant)

    return routes
