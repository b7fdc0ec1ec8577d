"""Blocks: pages of them, one by its hash, its history from the log. Routes of the REST API, and their parameters."""

from __future__ import annotations

from typing import Annotated, Self, TypeVar

from fastapi import APIRouter, Depends, HTTPException, Path
from fastapi import Query as InUrl
from pydantic import Field, model_validator

from advisor.access.identity import Identity, Scope
from advisor.api.access import needs
from advisor.api.cursors import Cursors
from advisor.api.problems import documented
from advisor.api.queries import Limit, Query
from advisor.block_views import AdvisorBlocks, BlockDetail, HistoryPage
from advisor.views import AdvisorReader, BlockPage

Number = TypeVar("Number", int, float)

AGE_S_MAX = 1e10
TOUCHES_MAX = 2**32 - 1

Reader = Annotated[Identity, Depends(needs(Scope.READ, tenants=True))]
"""One that sees a single tenant is answered with that tenant's blocks, whatever it asks for."""

BlockHash = Annotated[
    str, Path(pattern=r"^[0-9a-f]{32}$", description="Sequence hash: 32 hex digits (lower case), as `blocks` shows it.")
]
NamespaceId = Annotated[
    str | None, Field(pattern=r"^[0-9a-f]{16}$", description="16 hex digits, as `blocks` shows it; all where left out.")
]


class BlockFilters(Query):
    """What a block must be. Ages are of its last use."""

    volume: str | None = Field(None, min_length=1, max_length=64, description="Only blocks on this volume.")
    tier: int | None = Field(None, ge=1, le=4, description="Only blocks in this tier: 1 for G1 to 4 for G4.")
    tenant: str | None = Field(None, min_length=1, max_length=256, description="Only this tenant's blocks.")
    namespace_id: NamespaceId = None
    hash_prefix: str | None = Field(
        None, pattern=r"^[0-9a-f]{1,32}$", description="First hex digits (lower case) of the sequence hash."
    )
    older_than_s: float | None = Field(None, ge=0, le=AGE_S_MAX, description="Last used at least so long ago.")
    newer_than_s: float | None = Field(None, ge=0, le=AGE_S_MAX, description="Last used at most so long ago.")
    touches_min: int | None = Field(None, ge=0, le=TOUCHES_MAX, description="Used at least so often.")
    touches_max: int | None = Field(None, ge=0, le=TOUCHES_MAX, description="Used at most so often.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        for least, most in (("older_than_s", "newer_than_s"), ("touches_min", "touches_max")):
            low, high = getattr(self, least), getattr(self, most)
            if low is not None and high is not None and low > high:
                raise ValueError(f"{least} {low} is more than {most} {high}, and no block is both: change one")
        return self


class BlocksQuery(BlockFilters):
    after: str | None = Field(None, max_length=512, description="`next_cursor` of the page before.")
    limit: Limit = 100


class NamedQuery(Query):
    namespace_id: NamespaceId = None


class HistoryQuery(NamedQuery):
    group: int | None = Field(None, ge=0, le=255, description="Only of this cache group.")
    before: str | None = Field(None, max_length=512, description="`next_before` of the page before.")
    limit: Limit = 100


def block_routes(reader: AdvisorReader, blocks: AdvisorBlocks | None) -> APIRouter:
    """`/api/v1/blocks` and what is below it."""
    routes = APIRouter(prefix="/api/v1", tags=["blocks"])
    cursors = Cursors()

    @routes.get("/blocks", summary="Blocks, a page at a time", responses=documented(400, 422))
    def page(query: Annotated[BlocksQuery, InUrl()], who: Reader) -> BlockPage:
        """A page may be short, even empty, and go on: `scanned_all` is false then."""
        return block_page(reader, cursors, query, who, after=query.after, limit=query.limit)

    if blocks is None:
        return routes

    @routes.get("/blocks/{hash}", summary="One block, in each namespace that has it", responses=documented(404, 422))
    def named(hash: BlockHash, query: Annotated[NamedQuery, InUrl()], who: Reader) -> list[BlockDetail]:
        found = blocks.named(int(hash, 16), namespace_id=_number(query.namespace_id), tenant=who.tenant or None)
        if not found:
            raise HTTPException(404, f"no block {hash} is placed anywhere: its history may still be in the log")
        return found

    @routes.get(
        "/blocks/{hash}/history", summary="What the log says of a block, newest first", responses=documented(400, 422)
    )
    async def history(hash: BlockHash, query: Annotated[HistoryQuery, InUrl()], who: Reader) -> HistoryPage:
        """One answer looks back a bounded piece of the log: go on with `next_before` until `complete`."""
        return await history_page(blocks, cursors, hash, query, who)

    return routes


def block_page(
    reader: AdvisorReader, cursors: Cursors, wanted: BlockFilters, who: Identity, *, after: str | None, limit: int
) -> BlockPage:
    """Blocks that `who` may see. Raises `HTTPException` for a bad cursor."""
    if who.tenant and wanted.tenant not in (None, who.tenant):
        return BlockPage(blocks=[], next_cursor=None)
    try:
        page = reader.blocks(
            after=cursors.opened(who, "blocks", after), limit=limit, volume=wanted.volume, tier=wanted.tier,
            tenant=who.tenant or wanted.tenant, hash_prefix=wanted.hash_prefix,
            namespace_id=_number(wanted.namespace_id),
            touches=_span(wanted.touches_min, wanted.touches_max, TOUCHES_MAX),
            age_s=_span(wanted.older_than_s, wanted.newer_than_s, AGE_S_MAX),
        )  # fmt: skip
    except ValueError as error:
        raise HTTPException(400, f"after was {after!r}: {error}") from error
    return page.model_copy(update={"next_cursor": cursors.sealed(who, "blocks", page.next_cursor)})


async def history_page(
    blocks: AdvisorBlocks, cursors: Cursors, sequence_hash: str, query: HistoryQuery, who: Identity
) -> HistoryPage:
    """What `who` may see of a block's history. Raises `HTTPException` for a bad cursor."""
    route = f"history of {sequence_hash}"
    try:
        page = await blocks.history(
            int(sequence_hash, 16), namespace_id=_number(query.namespace_id), group=query.group,
            tenant=who.tenant or None, before=cursors.opened(who, route, query.before), limit=query.limit,
        )  # fmt: skip
    except ValueError as error:
        raise HTTPException(400, f"before was {query.before!r}: {error}") from error
    return page.model_copy(update={"next_before": cursors.sealed(who, route, page.next_before)})


def _number(hex_digits: str | None) -> int | None:
    return None if hex_digits is None else int(hex_digits, 16)


def _span(least: Number | None, most: Number | None, highest: Number) -> tuple[Number, Number] | None:
    if least is None and most is None:
        return None
    return type(highest)(0) if least is None else least, highest if most is None else most
