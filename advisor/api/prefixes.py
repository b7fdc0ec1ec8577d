"""The prefix tree: routes of the REST API, and their parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal, Self, TypeVar

from fastapi import APIRouter, Depends, HTTPException
from fastapi import Query as InUrl
from pydantic import Field, model_validator

from advisor.access.identity import Identity, Scope
from advisor.api.access import needs
from advisor.api.problems import documented
from advisor.api.queries import Limit, Query
from advisor.errors import NothingSuch, PictureBeingMade
from advisor.prefix_views import AdvisorPrefixes, PrefixGroups, PrefixTree

Answer = TypeVar("Answer")

Reader = Annotated[Identity, Depends(needs(Scope.READ, tenants=True))]
"""One that sees a single tenant is answered with that tenant's blocks, whatever it asks for."""


TENANT_WAIT_S = 5
"""What one that sees a single tenant is told to wait for the first picture."""


class GroupsQuery(Query):
    by: Literal["bytes", "blocks", "heat"] = Field("bytes", description="The most first; heat is uses.")
    tenant: str = Field("", max_length=256, description="Only this tenant's groups.")
    limit: Limit = 100
    after: str | None = Field(None, max_length=64, description="`next_cursor` of the page before.")


class TreeAddress(Query):
    """Where in the tree: the block of that key; without a hash, above all groups of a tenant, or of all."""

    namespace_id: str = Field("", pattern=r"^([0-9a-f]{16})?$", description="16 hex digits, as `blocks` shows it.")
    group: int = Field(0, ge=0, le=255, description="Cache group.")
    hash: str = Field("", pattern=r"^([0-9a-f]{32})?$", description="Sequence hash: 32 hex digits.")

    tenant: str = Field("", max_length=256, description="Only this tenant's groups.")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.hash and not self.namespace_id:
            raise ValueError(f"hash {self.hash} is of one namespace: give its namespace_id, as `blocks` shows it")
        return self


class TreeQuery(TreeAddress):
    depth: int = Field(3, ge=0, le=8, description="Levels below.")
    width: int = Field(16, ge=1, le=64, description="The most children of a node; the rest is summed.")


def prefix_routes(prefixes: AdvisorPrefixes) -> APIRouter:
    """`/api/v1/prefixes` and `/api/v1/prefixes/tree`."""
    routes = APIRouter(prefix="/api/v1", tags=["prefixes"])

    @routes.get("/prefixes", summary="Prefix groups, the largest first", responses=documented(400, 422, 503))
    def groups(query: Annotated[GroupsQuery, InUrl()], who: Reader) -> PrefixGroups:
        """Blocks that share their first one are a group. Read from a picture some seconds old, see `as_of_us`."""
        try:
            return _ready(
                lambda: prefixes.groups(
                    by=query.by, tenant=who.tenant or query.tenant, limit=query.limit, after=query.after
                ),
                who,
            )
        except ValueError as error:
            raise HTTPException(400, f"after was {query.after!r}: {error}") from error

    @routes.get("/prefixes/tree", summary="Subtrees of the prefix tree", responses=documented(404, 422, 503))
    def tree(query: Annotated[TreeQuery, InUrl()], who: Reader) -> PrefixTree:
        """The chain with the block `hash`, or without one all groups; chains without a branch are one node."""
        try:
            return _ready(lambda: prefix_tree(prefixes, query, who, depth=query.depth, width=query.width), who)
        except NothingSuch as error:
            raise HTTPException(404, str(error)) from error

    return routes


def prefix_tree(prefixes: AdvisorPrefixes, at: TreeAddress, who: Identity, *, depth: int, width: int) -> PrefixTree:
    """The tree at an address, as `who` may see it. Raises `NothingSuch` and `PictureBeingMade`."""
    return prefixes.tree(
        namespace_id=int(at.namespace_id or "0", 16), group=at.group, sequence_hash=int(at.hash or "0", 16),
        tenant=who.tenant or at.tenant, depth=depth, width=width,
    )  # fmt: skip


def _ready(ask: Callable[[], Answer], who: Identity) -> Answer:
    try:
        return ask()
    except PictureBeingMade as error:
        # How long it takes tells how many blocks there are, others' among them.
        wait_s = TENANT_WAIT_S if who.tenant else max(1, math.ceil(error.wait_s))
        raise HTTPException(503, f"{error}: ask again in {wait_s} s", {"Retry-After": str(wait_s)}) from error
