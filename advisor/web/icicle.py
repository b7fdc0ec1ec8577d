"""The prefix tree as an icicle: boxes in rows, as wide as their subtrees are large. Pure.

A box stands below its parent's, the largest child on the left; what is left blank below a box are its own blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from advisor.prefix_views import OtherNodes, PrefixNode, PrefixTree, SubtreeFigures
from advisor.web import formats

NARROWEST = 0.004
"""Share of the whole width below which a box is not drawn: 5 of 1,200 pixels."""
LABELLED = 0.07
"""Share from which on a box has its text."""
HEAT_STEPS = (0.0, 1.0, 4.0, 16.0, 64.0)
"""Uses a block, each the most of a step; a last step is for more."""
RECENT_STEPS_S = (86_400.0, 3_600.0, 600.0, 60.0, 10.0)
"""Seconds since the last use, each the bound of a step; a first step is for longer, or never."""


@dataclass(frozen=True, slots=True)
class Band:
    """A part of a box's colour strip, in shares of the box."""

    style: str
    x: float
    width: float


@dataclass(frozen=True, slots=True)
class Box:
    """`x` and `width` are shares of the whole. `node` is None of others, summed."""

    number: int
    above: int
    """The number of the box above; -1 in the first row."""
    row: int
    x: float
    width: float
    node: PrefixNode | None
    says: str
    """All of it in words."""
    title: str
    note: str
    bands: list[Band]


@dataclass(frozen=True, slots=True)
class Icicle:
    boxes: list[Box]
    rows: int
    by_bytes: bool
    """Whether widths are bytes; else blocks, since no engine told a size."""
    narrow: int
    """Boxes too narrow to be drawn; what is below them is not counted."""


def measure(figures: SubtreeFigures, by_bytes: bool) -> int:
    return figures.block_bytes if by_bytes else figures.blocks


def shares_by_tier(figures: SubtreeFigures) -> list[tuple[int, float]]:
    """Tiers with their shares of the bytes, or of the blocks where no size was told."""
    by_bytes = figures.block_bytes > 0
    whole = measure(figures, by_bytes)
    parts = [(each.tier, each.block_bytes if by_bytes else each.blocks) for each in figures.tiers]
    return [(tier, part / whole) for tier, part in parts if part]


def tiers_text(figures: SubtreeFigures) -> str:
    """`G1 62.0 %, G3 38.0 %`."""
    return ", ".join(f"G{tier} {formats.percent(share)}" for tier, share in shares_by_tier(figures)) or "in no tier"


def heat_step(figures: SubtreeFigures) -> int:
    uses_per_block = figures.uses / figures.blocks if figures.blocks else 0.0
    return sum(uses_per_block > most for most in HEAT_STEPS)


def recent_step(figures: SubtreeFigures, as_of_us: int) -> int:
    if not figures.last_use_us:
        return 0
    age_s = (as_of_us - figures.last_use_us) / 1e6
    return sum(age_s <= bound_s for bound_s in RECENT_STEPS_S)


def figures_text(figures: SubtreeFigures) -> str:
    return (
        f"{formats.counted(figures.blocks, 'blocks')}, {formats.told_size(figures.block_bytes, figures.blocks)}, "
        f"{tiers_text(figures)}, {formats.counted(figures.uses, 'uses')}"
    )


def draw(tree: PrefixTree, colour: str) -> Icicle:
    """`colour` is tier, heat or recent."""
    by_bytes = tree.figures.block_bytes > 0
    whole = measure(tree.figures, by_bytes)
    drawing = _Drawing(whole, by_bytes, colour, tree.as_of_us)
    if whole:
        drawing.row_of(tree.nodes, tree.others, row=0, x=0.0, above=-1)
    rows = max((box.row for box in drawing.boxes), default=-1) + 1
    return Icicle(drawing.boxes, rows, by_bytes, drawing.narrow)


class _Drawing:
    def __init__(self, whole: int, by_bytes: bool, colour: str, as_of_us: int) -> None:
        self._whole, self._by_bytes, self._colour, self._as_of_us = whole, by_bytes, colour, as_of_us
        self.boxes: list[Box] = []
        self.narrow = 0

    def row_of(self, nodes: Sequence[PrefixNode], others: OtherNodes | None, *, row: int, x: float, above: int) -> None:
        for node in nodes:
            width = measure(node.figures, self._by_bytes) / self._whole
            if width < NARROWEST:
                self.narrow += 1
            else:
                number = self._add(row, x, width, above, node, None)
                self.row_of(node.nodes, node.others, row=row + 1, x=x, above=number)
            x += width
        if others is not None:
            width = measure(others.figures, self._by_bytes) / self._whole
            if width < NARROWEST:
                self.narrow += others.nodes
            else:
                self._add(row, x, width, above, None, others)

    def _add(
        self, row: int, x: float, width: float, above: int, node: PrefixNode | None, others: OtherNodes | None
    ) -> int:
        number = len(self.boxes)
        if node is not None:
            figures, title = node.figures, formats.short_hash(node.first_hash)
            tenant = formats.short_name(node.tenant) or "not known"
            says = f"Prefix {title} of tenant {tenant}: {figures_text(figures)}, {branches(node)}"
        else:
            assert others is not None
            figures, title = others.figures, formats.counted(others.nodes, "others")
            says = f"{title}: {figures_text(figures)}"
        size = formats.size(figures.block_bytes) if self._by_bytes else formats.counted(figures.blocks, "blocks")
        is_labelled = width >= LABELLED
        self.boxes.append(
            Box(
                number, above, row, x, width, node, says, title if is_labelled else "", size if is_labelled else "",
                bands(figures, self._colour, self._as_of_us),
            )
        )  # fmt: skip
        return number


def bands(figures: SubtreeFigures, colour: str, as_of_us: int) -> list[Band]:
    """What a box is coloured with: its tiers by their shares, or one step of heat, by all uses or by the last one."""
    if colour != "tier":
        step = heat_step(figures) if colour == "heat" else recent_step(figures, as_of_us)
        return [Band(f"heat{step}", 0.0, 1.0)]
    x, made = 0.0, []
    for tier, share in shares_by_tier(figures):
        made.append(Band(f"g{tier}", x, share))
        x += share
    return made


def branches(node: PrefixNode) -> str:
    """What follows a chain, in words."""
    blocks = f"{formats.count(node.chain_blocks)} in a row"
    if not node.children:
        return f"{blocks}, then no more"
    return f"{blocks}, then {formats.counted(node.children, 'branches')}"
