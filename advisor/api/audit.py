"""The audit: what people did, and which settings came into force. A route of the REST API."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi import Query as InUrl
from pydantic import Field

from advisor.access.identity import Scope
from advisor.api.access import needs
from advisor.api.problems import documented
from advisor.api.queries import Limit, Query
from advisor.audit_views import AdvisorAudit, AuditPage


class AuditQuery(Query):
    before: int | None = Field(None, ge=1, le=2**63 - 1, description="`next_before` of the page before.")
    limit: Limit = 100
    actor: str = Field("", max_length=128, description="Only what this one did.")
    action: str = Field("", max_length=64, description="Only this action; `settings-in-force`: what then held.")


def audit_routes(audit: AdvisorAudit) -> APIRouter:
    """`/api/v1/audit`."""
    routes = APIRouter(prefix="/api/v1", tags=["audit"], dependencies=[Depends(needs(Scope.ADMIN))])

    @routes.get("/audit", summary="Who did what, newest first", responses=documented(422))
    async def page(query: Annotated[AuditQuery, InUrl()]) -> AuditPage:
        """A page may be short, even empty, and go on: until `complete`."""
        return await audit.page(before=query.before, limit=query.limit, actor=query.actor, action=query.action)

    return routes
