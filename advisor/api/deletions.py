"""Deletions: routes of the REST API, and their bodies."""

from __future__ import annotations

from typing import Annotated, Self

from fastapi import APIRouter, Depends, HTTPException, Path, Query, Response
from pydantic import Field, model_validator

from advisor.access.identity import Identity
from advisor.access.identity import Scope as AccessScope
from advisor.api.access import needs
from advisor.api.actions import NoOrder, Order, done
from advisor.api.problems import documented
from advisor.api.queries import Limit
from advisor.api.queries import Query as Parameters
from advisor.deletion_views import AdvisorDeletions, DeletionPage, DeletionView, RefusedTenantView
from advisor.deletions import IllegalDeletion, Scope

DeletionId = Annotated[str, Path(max_length=64)]
Admin = Annotated[Identity, Depends(needs(AccessScope.ADMIN))]
Reader = Annotated[Identity, Depends(needs(AccessScope.READ, tenants=True))]
"""One that sees a single tenant is answered with that tenant's deletions."""


class DeletionsQuery(Parameters):
    after: str | None = Field(None, max_length=64, description="`next_cursor` of the page before.")
    limit: Limit = 100


class DeletionOrder(Order):
    """A tenant, a namespace, or a prefix within a namespace."""

    tenant: str = Field("", max_length=256, description="All of a tenant's namespaces; it stays refused.")
    namespace_id: str = Field("", pattern=r"^([0-9a-f]{16})?$", description="16 hex digits, as `blocks` shows it.")
    prefix: str = Field(
        "", pattern=r"^([0-9a-f]{32})?$", description="Hash of a block in that namespace: it and all that follows it."
    )

    @model_validator(mode="after")
    def _one_scope(self) -> Self:
        for name in ("namespace_id", "prefix"):
            value = getattr(self, name)
            if value and int(value, 16) == 0:
                raise ValueError(f"{name} {value} names nothing: leave it out, or give that of a block in `blocks`")
        try:
            self.scope  # noqa: B018 - raises where there is none
        except IllegalDeletion as error:
            raise ValueError(str(error)) from error
        return self

    @property
    def scope(self) -> Scope:
        return Scope(self.tenant, int(self.namespace_id or "0", 16), int(self.prefix or "0", 16))


def deletion_routes(deletions: AdvisorDeletions) -> APIRouter:
    """`/api/v1/deletions`, and tenants that are refused after one."""
    routes = APIRouter(prefix="/api/v1", tags=["deletions"])

    @routes.post(
        "/deletions",
        status_code=202,
        summary="Delete a tenant, a namespace or a prefix from all volumes",
        responses={
            200: {"model": DeletionView, "description": "A deletion of the same is open already: this one"},
            **documented(404, 409, 422),
        },
    )
    def order(order: DeletionOrder, who: Admin, response: Response) -> DeletionView:
        view, is_fresh = done(lambda: deletions.order(order.scope, who.name))
        response.status_code = 202 if is_fresh else 200
        return view

    @routes.get("/deletions", summary="Deletions, newest first, and refused tenants", responses=documented(400, 422))
    def page(query: Annotated[DeletionsQuery, Query()], who: Reader) -> DeletionPage:
        try:
            return deletions.page(query.after, query.limit, who.tenant)
        except ValueError as error:
            raise HTTPException(400, f"after was {query.after!r}: {error}") from error

    @routes.get("/deletions/{deletion_id}", summary="How far a deletion is", responses=documented(404, 422))
    def one(deletion_id: DeletionId, who: Reader) -> DeletionView:
        return done(lambda: deletions.get(deletion_id, who.tenant))

    @routes.post(
        "/deletions/{deletion_id}/abandon",
        summary="Give up an open deletion: what was not proven gone may be there still",
        responses=documented(404, 409, 422),
    )
    def abandon(deletion_id: DeletionId, _: NoOrder, who: Admin) -> DeletionView:
        return done(lambda: deletions.abandon(deletion_id, who.name))

    @routes.post(
        "/tenants/{tenant:path}/enable",
        summary="Refuse a deleted tenant no longer",
        responses=documented(404, 409, 422),
    )
    def enable(tenant: Annotated[str, Path(max_length=256)], _: NoOrder, who: Admin) -> list[RefusedTenantView]:
        """Answers with those that are refused still."""
        return done(lambda: deletions.enable(tenant, who.name))

    return routes
