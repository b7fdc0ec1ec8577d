"""The prefix explorer: the prefix tree as an icicle that one walks by links, and the same as a table."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query
from fastapi.responses import HTMLResponse
from pydantic import Field

from advisor.access.identity import Identity, Scope
from advisor.api.access import needs
from advisor.api.feed import LiveFeed
from advisor.api.parts import AdminParts
from advisor.api.prefixes import TreeAddress, prefix_tree
from advisor.errors import NothingSuch, PictureBeingMade
from advisor.prefix_views import PrefixNode, PrefixTree
from advisor.web import icicle
from advisor.web.pages import Pages
from advisor.web.paging import address

PATH = "/prefixes"
DEPTH = 4
WIDTH = 24
AGAIN_S = 1
"""While the first picture is taken."""
EVERY_S = 10


class PrefixesQuery(TreeAddress):
    colour: Literal["tier", "heat", "recent"] = Field("tier", description="What the boxes are coloured by.")


class Links:
    """Addresses of this page that keep what `query` says of tenant and colour."""

    def __init__(self, query: PrefixesQuery) -> None:
        self._kept = {"tenant": query.tenant, "colour": "" if query.colour == "tier" else query.colour}
        self._here = {"namespace_id": query.namespace_id, "group": query.group, "hash": query.hash}
        self.top = address(PATH, self._kept)

    def of_colour(self, colour: str) -> str:
        return address(PATH, {**self._kept, **self._here, "colour": "" if colour == "tier" else colour})

    def to(self, node: PrefixNode) -> str:
        return self.step(node.first_hash, node)

    def step(self, first_hash: str, within: PrefixNode) -> str:
        """To a block of the group of `within`."""
        at = {"namespace_id": within.namespace_id, "group": within.group, "hash": first_hash}
        return address(PATH, {**self._kept, **at})

    def blocks(self, node: PrefixNode) -> str:
        """The blocks page at a node's first block."""
        return address("/blocks", {"hash_prefix": node.first_hash, "namespace_id": node.namespace_id})


def prefixes_routes(pages: Pages, parts: AdminParts, feed: LiveFeed) -> APIRouter:
    """`feed` is not used: the page asks for itself anew."""
    routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)
    prefixes = parts.prefixes
    if prefixes is None:
        return routes

    @routes.get(PATH)
    def explorer(
        query: Annotated[PrefixesQuery, Query()], who: Annotated[Identity, Depends(needs(Scope.READ, tenants=True))]
    ) -> HTMLResponse:
        # All states are answered with 200: the script keeps the page on one that is not.
        tree: PrefixTree | None = None
        problem, is_gone = "", False
        try:
            tree = prefix_tree(prefixes, query, who, depth=DEPTH, width=WIDTH)
        except PictureBeingMade as error:
            problem = str(error)
        except NothingSuch:
            is_gone = True
        shown = pages.render(
            "prefixes.html", who, query=query, tree=tree, here=tree.nodes[0] if tree and query.hash else None,
            drawing=None if tree is None else icicle.draw(tree, query.colour), problem=problem, is_gone=is_gone,
            links=Links(query), every_s=EVERY_S if tree else AGAIN_S,
            heat_steps=icicle.HEAT_STEPS, recent_steps_s=icicle.RECENT_STEPS_S,
            tiers_text=icicle.tiers_text, branches=icicle.branches, bands=icicle.bands,
            now_us=parts.reader.summary().now_us,
        )  # fmt: skip
        # Without a script the browser asks again by itself.
        return HTMLResponse(shown, headers={"Refresh": str(AGAIN_S)} if problem else None)

    return routes
