"""An `AdvisorPrefixes` over a made-up tree. Tests change its attributes and look again."""

from __future__ import annotations

from collections.abc import Iterator

from sample_reader import BLOCK_BYTES, NOW_US, block_hash

from advisor.errors import NothingSuch, PictureBeingMade
from advisor.prefix_views import OtherNodes, PrefixGroups, PrefixNode, PrefixStep, PrefixTree, SubtreeFigures
from advisor.views import TierView

NAMESPACES = {"agents": "00000000000000f1", "support-bot": "00000000000000f2"}


def figures(blocks_by_tier: list[int], uses: int) -> SubtreeFigures:
    return SubtreeFigures(
        blocks=sum(blocks_by_tier), block_bytes=sum(blocks_by_tier) * BLOCK_BYTES,
        tiers=[
            TierView(tier=tier, blocks=blocks, block_bytes=blocks * BLOCK_BYTES)
            for tier, blocks in enumerate(blocks_by_tier, start=1)
            if blocks
        ],
        uses=uses, last_use_us=NOW_US - uses * 1_000_000,
    )  # fmt: skip


def summed(parts: list[SubtreeFigures]) -> SubtreeFigures:
    by_tier = [0, 0, 0, 0]
    for part in parts:
        for tier in part.tiers:
            by_tier[tier.tier - 1] += tier.blocks
    return figures(by_tier, sum(part.uses for part in parts))


def _node(tenant: str, number: int, chain: list[int], uses: int, nodes: list[PrefixNode], more: int = 0) -> PrefixNode:
    """A chain with blocks by tier, its children, and `more` small ones that are not shown."""
    others = OtherNodes(nodes=more, figures=figures([0, 0, 0, more], more)) if more else None
    below = [node.figures for node in nodes] + ([others.figures] if others else [])
    return PrefixNode(
        namespace_id=NAMESPACES[tenant], tenant=tenant, model="demo-4l", group=0, first_hash=block_hash(number),
        last_hash=block_hash(number + sum(chain) - 1), depth=0 if number % 1000 == 0 else number % 1000,
        chain_blocks=sum(chain), figures=summed([figures(chain, uses), *below]), children=len(nodes) + more,
        nodes=nodes, others=others,
    )  # fmt: skip


def _groups() -> list[PrefixNode]:
    turns = [_node("agents", 1_200 + 10 * turn, [0, 0, 2, 6], 30 - turn, []) for turn in range(6)]
    tools = _node("agents", 1_064, [16, 0, 16, 0], 900, turns, more=40)
    plain = _node("agents", 1_128, [0, 0, 20, 12], 60, [_node("agents", 1_160, [0, 0, 0, 24], 3, [])])
    agents = _node("agents", 1_000, [64, 0, 0, 0], 2_400, [tools, plain])
    bot = _node("support-bot", 2_000, [0, 12, 20, 0], 400, [_node("support-bot", 2_032, [0, 0, 8, 0], 12, [])])
    return [agents, bot, _node("support-bot", 3_000, [0, 0, 0, 4], 0, [])]


class SamplePrefixes:
    """`is_being_made`: no picture is taken yet."""

    def __init__(self) -> None:
        self.group_views = _groups()
        self.is_being_made = False
        self.as_of_us = NOW_US

    @classmethod
    def empty(cls) -> SamplePrefixes:
        prefixes = cls()
        prefixes.group_views = []
        return prefixes

    def _of(self, tenant: str) -> list[PrefixNode]:
        if self.is_being_made:
            raise PictureBeingMade("the first picture of prefixes is being taken", wait_s=3.2)
        return [group for group in self.group_views if tenant in ("", group.tenant)]

    def groups(
        self, *, by: str = "bytes", tenant: str = "", limit: int = 100, after: str | None = None
    ) -> PrefixGroups:
        if after is not None and not after.isdecimal():
            raise ValueError(f"cursor {after!r} is none of ours")
        start = int(after or 0)
        measure = {"bytes": "block_bytes", "blocks": "blocks", "heat": "uses"}[by]
        found = sorted(self._of(tenant), key=lambda group: -getattr(group.figures, measure))
        shown = [group.model_copy(update={"nodes": [], "others": None}) for group in found[start : start + limit]]
        cursor = str(start + limit) if start + limit < len(found) else None
        return PrefixGroups(as_of_us=self.as_of_us, groups=shown, next_cursor=cursor)

    def tree(
        self, *, namespace_id: int = 0, group: int = 0, sequence_hash: int = 0, tenant: str = "", depth: int = 3,
        width: int = 16,
    ) -> PrefixTree:  # fmt: skip
        found = self._of(tenant)
        if not sequence_hash:
            return PrefixTree(
                as_of_us=self.as_of_us, tenant=tenant, path=[], path_left_out=0,
                figures=summed([each.figures for each in found]),
                nodes=[_cut(each, depth, width) for each in found], others=None,
            )  # fmt: skip
        wanted = (f"{namespace_id:016x}", f"{sequence_hash:032x}")
        for path in _paths(found):
            if (path[-1].namespace_id, path[-1].first_hash) == wanted:
                steps = [
                    PrefixStep(first_hash=each.first_hash, chain_blocks=each.chain_blocks, figures=each.figures)
                    for each in path[:-1]
                ]
                return PrefixTree(
                    as_of_us=self.as_of_us, tenant=tenant, path=steps, path_left_out=0, figures=path[-1].figures,
                    nodes=[_cut(path[-1], depth, width)], others=None,
                )  # fmt: skip
        raise NothingSuch(f"no block {wanted[1]} is in the picture")


def _paths(nodes: list[PrefixNode]) -> Iterator[list[PrefixNode]]:
    for node in nodes:
        yield [node]
        for path in _paths(node.nodes):
            yield [node, *path]


def _cut(node: PrefixNode, depth: int, width: int) -> PrefixNode:
    if not depth:
        return node.model_copy(update={"nodes": [], "others": None})
    return node.model_copy(update={"nodes": [_cut(each, depth - 1, width) for each in node.nodes[:width]]})
