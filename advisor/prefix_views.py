"""What the REST API and the pages show of the prefix tree: subtrees with their figures, and the port that answers."""

from __future__ import annotations

from typing import Protocol

from advisor.views import TierView, View


class SubtreeFigures(View):
    """Of a chain of blocks and all that follows it. Every block is counted once, in the fastest tier that has it."""

    blocks: int
    block_bytes: int
    tiers: list[TierView]
    """Those that have any, the fastest first."""
    uses: int
    last_use_us: int
    """Whole seconds; 0 where none was ever used."""


class OtherNodes(View):
    """Those beside the ones that are shown, summed."""

    nodes: int
    figures: SubtreeFigures


class PrefixNode(View):
    """Blocks one after the other without a branch, from `first_hash` to `last_hash`; the figures are of its subtree."""

    namespace_id: str
    tenant: str
    model: str
    group: int
    first_hash: str
    last_hash: str
    depth: int | None
    """Of its first block; None where it is not known."""
    chain_blocks: int
    """Blocks of the chain itself."""
    figures: SubtreeFigures
    children: int
    nodes: list[PrefixNode]
    """The largest of its children; empty where the answer ends above them."""
    others: OtherNodes | None
    """The rest of its children; None where there is none, or `nodes` is empty."""


class PrefixGroups(View):
    """Prefix groups (blocks that share their first one), the largest first."""

    as_of_us: int
    """When the picture was taken that this is read from."""
    groups: list[PrefixNode]
    next_cursor: str | None
    """Give it as `after` for the next page; None at the end. Groups are ranked anew with each picture."""


class PrefixStep(View):
    """A node on the way from its group's first block."""

    first_hash: str
    chain_blocks: int
    figures: SubtreeFigures


class PrefixTree(View):
    """A part of the tree: one node, or the first nodes of all groups, with what follows."""

    as_of_us: int
    tenant: str
    """Of whom alone it is; empty: of all."""
    path: list[PrefixStep]
    """Nodes above, the group's first one first; the middle is left out where they are many."""
    path_left_out: int
    figures: SubtreeFigures
    """Of all that is shown, others included."""
    nodes: list[PrefixNode]
    others: OtherNodes | None


class AdvisorPrefixes(Protocol):
    """Reads a picture of the index, some seconds old. Raises `advisor.errors.PictureBeingMade` before the first."""

    def groups(
        self, *, by: str = "bytes", tenant: str = "", limit: int = 100, after: str | None = None
    ) -> PrefixGroups:
        """`by` is bytes, blocks or heat; `tenant` empty is all. Raises `ValueError` for a bad cursor."""

    def tree(
        self, *, namespace_id: int = 0, group: int = 0, sequence_hash: int = 0, tenant: str = "", depth: int = 3,
        width: int = 16,
    ) -> PrefixTree:
        """The node with that block, or without a hash the first nodes of all groups, each with `depth` levels below.

        Largest first by bytes, or by blocks where no engine told any size. Raises `advisor.errors.NothingSuch`, for a
        block of another tenant in the same words as for one that there is not.
        """
