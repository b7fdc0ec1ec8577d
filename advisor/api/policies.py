"""Policies: what is in force, and how the shadows compare. Routes of the REST API."""

from __future__ import annotations

from fastapi import APIRouter, Depends

from advisor.access.identity import Scope
from advisor.api.access import needs
from advisor.views import AdvisorReader, ComparisonView, PoliciesView


def policy_routes(reader: AdvisorReader) -> APIRouter:
    """`/api/v1/policies`: nothing is changed by asking."""
    routes = APIRouter(prefix="/api/v1/policies", tags=["policies"], dependencies=[Depends(needs(Scope.READ))])

    @routes.get("", summary="The policy in force, and those there are")
    def policies() -> PoliciesView:
        return reader.policies()

    @routes.get("/shadow", summary="The live policy beside its shadows")
    def shadow() -> ComparisonView:
        """Without a shadow in the settings, `policies` is empty."""
        return reader.comparison()

    return routes
