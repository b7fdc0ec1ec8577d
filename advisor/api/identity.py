"""Who you are, which tokens there are, and the settings in force: routes of the REST API."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Request
from pydantic import BaseModel

from advisor.access.errors import TokensError
from advisor.access.identity import Identity, Scope
from advisor.access.masking import masked
from advisor.access.sessions import Admission
from advisor.api.access import needs
from advisor.api.parts import AdminParts
from advisor.api.problems import documented


class IdentityView(BaseModel):
    name: str
    """The actor that the audit names."""
    scope: str
    tenant: str
    """The one tenant whose blocks it sees; empty: all."""
    expires_us: int
    """When it ends, µs since the epoch; 0: never."""


class TokenView(BaseModel):
    """A token, without its secret, which nobody has but who was given it."""

    id: str
    name: str
    scope: str
    tenant: str
    created_us: int
    expires_us: int
    used_us: int
    """When it was last shown in this life of the service; 0: not yet."""


def identity_routes(parts: AdminParts) -> APIRouter:
    routes = APIRouter(prefix="/api/v1", tags=["access"])

    @routes.get("/identity", summary="Who you are", responses=documented(401))
    def identity(
        request: Request, who: Annotated[Identity, Depends(needs(Scope.READ, tenants=True))]
    ) -> IdentityView:
        admission: Admission = request.state.admission
        return IdentityView(
            name=who.name, scope=who.scope.word, tenant=who.tenant, expires_us=admission.expires_us
        )

    @routes.get("/tokens", summary="The tokens there are", dependencies=[Depends(needs(Scope.ADMIN))],
                responses=documented(409))
    async def tokens() -> list[TokenView]:
        """At most 1,024, oldest first. `kvadvisor token` makes and revokes them."""
        try:
            uses = parts.doorkeeper.tokens()
        except TokensError as error:
            raise HTTPException(409, str(error)) from error
        return [
            TokenView(
                id=use.token.id, name=use.token.name, scope=use.token.scope, tenant=use.token.tenant,
                created_us=use.token.created_us, expires_us=use.token.expires_us, used_us=use.used_us,
            )
            for use in uses
        ]

    config_source = parts.config
    if config_source is not None:
        @routes.get("/config", summary="The settings in force, without their secrets",
                    dependencies=[Depends(needs(Scope.ADMIN))])
        def config() -> dict[str, Any]:
            """As docs/settings.md names them. Files that hold secrets are named, never read."""
            shown: dict[str, Any] = masked(config_source())
            return shown

    return routes
