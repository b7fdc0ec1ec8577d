"""The pages of blocks: found by what they are, one with its facts, and its history from the log."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.concurrency import run_in_threadpool

from advisor.access.identity import Identity, Scope
from advisor.api.access import needs
from advisor.api.blocks import BlockFilters, BlockHash, HistoryQuery, block_page, history_page
from advisor.api.cursors import Cursors
from advisor.api.feed import LiveFeed
from advisor.api.parts import AdminParts
from advisor.views import BlockPage
from advisor.web.pages import Pages
from advisor.web.paging import address

PATH = "/blocks"

BLOCKS_SHOWN = 100

Reader = Annotated[Identity, Depends(needs(Scope.READ, tenants=True))]


class BlocksPageQuery(BaseModel):
    """The form as a browser sends it: a field that is not filled in is empty."""

    model_config = ConfigDict(extra="forbid", str_strip_whitespace=True)

    hash_prefix: str = Field("", max_length=64)
    volume: str = Field("", max_length=64)
    tier: str = Field("", max_length=8)
    tenant: str = Field("", max_length=256)
    namespace_id: str = Field("", max_length=32)
    older_than_s: str = Field("", max_length=32)
    newer_than_s: str = Field("", max_length=32)
    touches_min: str = Field("", max_length=32)
    touches_max: str = Field("", max_length=32)
    after: str = Field("", max_length=512)

    @property
    def filters(self) -> dict[str, str]:
        """What is filled in, but for the cursor. Hex digits are taken in capitals and with 0x, too."""
        said = {name: value for name, value in self.model_dump(exclude={"after"}).items() if value}
        for name in ("hash_prefix", "namespace_id"):
            if name in said:
                said[name] = said[name].lower().removeprefix("0x")
        return said


def wrong_fields(error: ValidationError) -> dict[str, str]:
    """What is wrong, by field; by the empty name what is wrong with several together."""
    return {
        ".".join(str(part) for part in one["loc"]): one["msg"].removeprefix("Value error, ") for one in error.errors()
    }


def blocks_routes(pages: Pages, parts: AdminParts, feed: LiveFeed) -> APIRouter:
    """`feed` is not used: a page shows the moment that it was asked for."""
    routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)
    cursors = Cursors()

    def listed(query: BlocksPageQuery, who: Identity, page: BlockPage | None, wrong: dict[str, str]) -> str:
        filters = query.filters
        return pages.render(
            "blocks.html", who, query=query, filters=filters, wrong=wrong, blocks=[] if page is None else page.blocks,
            scanned_all=page is None or page.scanned_all,
            first=address(PATH, filters) if query.after else "",
            next=address(PATH, {**filters, "after": page.next_cursor}) if page is not None and page.next_cursor else "",
            volumes=[] if who.tenant else [volume.id for volume in parts.reader.volumes()],
            now_us=parts.reader.summary().now_us,
        )  # fmt: skip

    @routes.get(PATH)
    def blocks(query: Annotated[BlocksPageQuery, Query()], who: Reader) -> HTMLResponse:
        try:
            wanted = BlockFilters.model_validate(query.filters)
        except ValidationError as error:
            return HTMLResponse(listed(query, who, None, wrong_fields(error)), status_code=422)
        page = block_page(parts.reader, cursors, wanted, who, after=query.after or None, limit=BLOCKS_SHOWN)
        return HTMLResponse(listed(query, who, page, {}))

    known = parts.blocks
    if known is None:
        return routes

    @routes.get(f"{PATH}/{{hash}}")
    async def block(hash: BlockHash, query: Annotated[HistoryQuery, Query()], who: Reader) -> HTMLResponse:
        at: dict[str, Any] = query.model_dump(include={"namespace_id", "group"}, exclude_none=True)
        namespace_id = None if query.namespace_id is None else int(query.namespace_id, 16)
        details = await run_in_threadpool(
            known.named, int(hash, 16), namespace_id=namespace_id, tenant=who.tenant or None
        )
        history = await history_page(known, cursors, hash, query, who)
        here = f"{PATH}/{hash}"
        shown = pages.render(
            "block.html", who, hash=hash, details=details, history=history, query=query,
            newest=address(here, at) if query.before else "",
            further=address(here, {**at, "before": history.next_before}) if history.next_before else "",
            now_us=parts.reader.summary().now_us, prefixes=parts.prefixes is not None,
        )  # fmt: skip
        return HTMLResponse(shown)

    return routes
