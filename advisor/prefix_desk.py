"""The prefix tree of the running service: what the REST API and the pages ask for, from a picture of the index."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from advisor.errors import NothingSuch
from advisor.index import Key
from advisor.index.layout import Array
from advisor.prefix_keeper import PictureKeeper
from advisor.prefix_views import OtherNodes, PrefixGroups, PrefixNode, PrefixStep, PrefixTree, SubtreeFigures
from advisor.prefixes.picture import Figures, Picture
from advisor.service import AdvisorService
from advisor.views import TierView
from event_plane.schema import Namespace

ANSWER_NODES_MAX = 2_000
"""Nodes in one tree, the upper levels first."""
TAKES_S_PER_BLOCK = 0.4e-6
"""Twice of what it took on two busy cores (docs/index.md)."""
PATH_STEPS_MAX = 16
"""Of the nodes above, the first and the last ones."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A picture, and whose blocks are in it."""

    picture: Picture
    namespaces: dict[int, Namespace]
    as_of_us: int
    allowed: Array
    """u1 by realm: all."""
    whole: Figures

    def namespaces_of(self, tenant: str) -> Iterable[int]:
        return [each for each, namespace in self.namespaces.items() if namespace.tenant == tenant]

    def allowed_to(self, tenant: str) -> Array:
        """u1 by realm: those of a tenant, or of all."""
        return self.picture.allowed(self.namespaces_of(tenant)) if tenant else self.allowed


class ServicePrefixes:
    """`advisor.prefix_views.AdvisorPrefixes` over a running service. See there."""

    def __init__(self, service: AdvisorService) -> None:
        self._service = service
        self._keeper = PictureKeeper(self._take, takes_s=lambda: TAKES_S_PER_BLOCK * len(service.fold.index))

    def _take(self) -> Seen:
        fold = self._service.fold
        picture = Picture.take(fold.index)
        as_of_us = time.time_ns() // 1000
        with self._service.lock.shared():
            known = {each: fold.namespaces.get(each) for each, _ in picture.realms}
        namespaces = {each: namespace for each, namespace in known.items() if namespace is not None}
        allowed = picture.allowed(None)
        return Seen(picture, namespaces, as_of_us, allowed, picture.sum_of(picture.groups(), allowed))

    def groups(
        self, *, by: str = "bytes", tenant: str = "", limit: int = 100, after: str | None = None
    ) -> PrefixGroups:
        """See `AdvisorPrefixes.groups`."""
        start = _parse_cursor(after) if after is not None else 0
        seen = self._keeper.newest()
        roots = _roots(seen, tenant)
        shown = seen.picture.largest(roots, by, limit, start)
        return PrefixGroups(
            as_of_us=seen.as_of_us,
            groups=[_node_view(seen, node, [], None) for node in shown],
            next_cursor=str(start + limit) if start + limit < len(roots) else None,
        )

    def tree(
        self, *, namespace_id: int = 0, group: int = 0, sequence_hash: int = 0, tenant: str = "", depth: int = 3,
        width: int = 16,
    ) -> PrefixTree:
        """See `AdvisorPrefixes.tree`."""
        seen = self._keeper.newest()
        walk = _Walk(seen, width)
        if not sequence_hash:
            roots = _roots(seen, tenant)
            allowed = seen.allowed_to(tenant)
            whole = seen.picture.sum_of(roots, allowed) if tenant else seen.whole
            shown = walk.largest(roots)
            nodes = walk.down(shown, depth)
            others = walk.rest(roots, shown, whole)
            return PrefixTree(
                as_of_us=seen.as_of_us, tenant=tenant, path=[], path_left_out=0, figures=_figures_view(whole),
                nodes=nodes, others=others,
            )
        node = self._node_of(seen, Key(namespace_id, group, sequence_hash), tenant)
        above = seen.picture.path(node)[:-1]
        left_out = max(0, len(above) - PATH_STEPS_MAX)
        if left_out:
            above = above[: PATH_STEPS_MAX // 2] + above[-PATH_STEPS_MAX // 2 :]
        return PrefixTree(
            as_of_us=seen.as_of_us,
            tenant=tenant,
            path=[_step_view(seen.picture, each) for each in above],
            path_left_out=left_out,
            figures=_figures_view(seen.picture.figures(node)),
            nodes=walk.down([node], depth),
            others=None,
        )

    def _node_of(self, seen: Seen, key: Key, tenant: str) -> int:
        """Raises `NothingSuch`."""
        namespace = seen.namespaces.get(key.namespace_id)
        node = None
        if namespace is not None and tenant in ("", namespace.tenant):
            row = self._service.fold.index.row_of(key)
            node = None if row is None else seen.picture.node_at(key, row)
        if node is None:
            raise NothingSuch(
                f"no block {key.sequence_hash:032x} of namespace {key.namespace_id:016x}, group {key.group}, is in the "
                "picture: one that came just now is in the next, and GET /api/v1/prefixes lists what there is"
            )
        return node


class _Walk:
    """Down from some nodes, to at most `ANSWER_NODES_MAX`."""

    def __init__(self, seen: Seen, width: int) -> None:
        self._seen = seen
        self._width = width
        self._by = "bytes" if seen.whole.block_bytes else "blocks"

    def largest(self, nodes: Array) -> list[int]:
        return self._seen.picture.largest(nodes, self._by, self._width)

    def rest(self, nodes: Array, shown: list[int], whole: Figures | None = None) -> OtherNodes | None:
        """What `nodes` come to without those shown. `whole` is their sum, where it is known."""
        if len(shown) == len(nodes):
            return None
        picture, allowed = self._seen.picture, self._seen.allowed
        whole = picture.sum_of(nodes, allowed) if whole is None else whole
        without = [picture.figures(node) for node in shown]
        figures = Figures(
            len(nodes) - len(shown),
            whole.blocks - sum(each.blocks for each in without),
            tuple(
                (blocks - sum(each.by_tier[tier][0] for each in without),
                 block_bytes - sum(each.by_tier[tier][1] for each in without))
                for tier, (blocks, block_bytes) in enumerate(whole.by_tier)
            ),
            whole.touches - sum(each.touches for each in without),
            whole.last_touch_us,
        )  # fmt: skip
        return OtherNodes(nodes=figures.nodes, figures=_figures_view(figures))

    def down(self, nodes: list[int], depth: int) -> list[PrefixNode]:
        """Views of `nodes` with `depth` levels below them, level by level, so that a limit cuts the lowest."""
        picture = self._seen.picture
        shown: dict[int, list[int]] = {}
        order = list(nodes)
        level = deque(nodes)
        for _ in range(depth):
            below: deque[int] = deque()
            for node in level:
                if len(order) + self._width > ANSWER_NODES_MAX:
                    break
                shown[node] = self.largest(picture.children_of(node))
                order += shown[node]
                below.extend(shown[node])
            level = below
        views: dict[int, PrefixNode] = {}
        for node in reversed(order):
            children = shown.get(node, [])
            others = self.rest(picture.children_of(node), children) if children else None
            views[node] = _node_view(self._seen, node, [views[child] for child in children], others)
        return [views[node] for node in nodes]


def _roots(seen: Seen, tenant: str) -> Array:
    return seen.picture.of_realms(seen.picture.groups(), seen.allowed_to(tenant))


def _parse_cursor(cursor: str) -> int:
    if not (cursor.isascii() and cursor.isdecimal() and len(cursor) <= 10):
        raise ValueError(f"cursor {cursor!r} is none of ours: use next_cursor of the page before")
    return int(cursor)


def _figures_view(figures: Figures) -> SubtreeFigures:
    return SubtreeFigures(
        blocks=figures.blocks,
        block_bytes=figures.block_bytes,
        tiers=[
            TierView(tier=tier, blocks=blocks, block_bytes=block_bytes)
            for tier, (blocks, block_bytes) in enumerate(figures.by_tier, start=1)
            if blocks
        ],
        uses=figures.touches,
        last_use_us=figures.last_touch_us,
    )


def _step_view(picture: Picture, node: int) -> PrefixStep:
    chain = picture.chain(node)
    return PrefixStep(
        first_hash=f"{chain.first.sequence_hash:032x}",
        chain_blocks=chain.blocks,
        figures=_figures_view(picture.figures(node)),
    )


def _node_view(seen: Seen, node: int, nodes: list[PrefixNode], others: OtherNodes | None) -> PrefixNode:
    chain = seen.picture.chain(node)
    namespace = seen.namespaces.get(chain.first.namespace_id)
    return PrefixNode(
        namespace_id=f"{chain.first.namespace_id:016x}",
        tenant=namespace.tenant if namespace is not None else "",
        model=namespace.model if namespace is not None else "",
        group=chain.first.group,
        first_hash=f"{chain.first.sequence_hash:032x}",
        last_hash=f"{chain.last.sequence_hash:032x}",
        depth=chain.depth,
        chain_blocks=chain.blocks,
        figures=_figures_view(seen.picture.figures(node)),
        children=chain.children,
        nodes=nodes,
        others=others,
    )
