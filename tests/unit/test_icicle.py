"""Where boxes of the prefix tree stand, and what they say."""

from __future__ import annotations

import pytest

from advisor.prefix_views import OtherNodes, PrefixNode, PrefixTree, SubtreeFigures
from advisor.views import TierView
from advisor.web.icicle import NARROWEST, Band, bands, draw, heat_step, recent_step


def figures(*sizes: tuple[int, int, int], uses: int = 0, last_use_us: int = 0) -> SubtreeFigures:
    """`sizes`: tier, blocks, bytes."""
    return SubtreeFigures(
        blocks=sum(blocks for _, blocks, _ in sizes), block_bytes=sum(each for _, _, each in sizes),
        tiers=[TierView(tier=tier, blocks=blocks, block_bytes=each) for tier, blocks, each in sizes],
        uses=uses, last_use_us=last_use_us,
    )  # fmt: skip


def node(number: int, of: SubtreeFigures, nodes: list[PrefixNode], others: OtherNodes | None = None) -> PrefixNode:
    return PrefixNode(
        namespace_id="1" * 16, tenant="acme", model="", group=0, first_hash=f"{number:032x}", last_hash="f" * 32,
        depth=0, chain_blocks=2, figures=of, children=len(nodes), nodes=nodes, others=others,
    )  # fmt: skip


def tree(of: SubtreeFigures, nodes: list[PrefixNode], others: OtherNodes | None = None) -> PrefixTree:
    return PrefixTree(as_of_us=1, tenant="", path=[], path_left_out=0, figures=of, nodes=nodes, others=others)


def test_boxes_stand_below_their_parents_as_wide_as_their_bytes() -> None:
    children = [node(2, figures((3, 1, 300)), []), node(3, figures((4, 1, 100)), [])]
    first = node(1, figures((3, 3, 500), (4, 1, 100)), children, OtherNodes(nodes=7, figures=figures((4, 1, 50))))
    drawn = draw(tree(figures((3, 5, 900), (4, 1, 100)), [first, node(4, figures((3, 2, 400)), [])]), "tier")
    assert [(box.row, box.above, box.x, box.width) for box in drawn.boxes] == [
        (0, -1, 0.0, 0.6), (1, 0, 0.0, 0.3), (1, 0, 0.3, 0.1), (1, 0, 0.4, 0.05), (0, -1, 0.6, 0.4),
    ]
    assert (drawn.rows, drawn.by_bytes, drawn.narrow) == (2, True, 0)
    assert drawn.boxes[0].bands == [Band("g3", 0.0, 500 / 600), Band("g4", 500 / 600, 100 / 600)]
    assert drawn.boxes[3].node is None
    assert drawn.boxes[3].says == "7 others: 1 block, 50 B, G4 100 %, 0 uses"
    assert drawn.boxes[0].says == (
        "Prefix 0000…0001 of tenant acme: 4 blocks, 600 B, G3 83.3 %, G4 16.7 %, 0 uses, 2 in a row, then 2 branches"
    )


def test_boxes_too_narrow_to_see_are_counted_and_their_place_stays() -> None:
    sliver = round(1_000 * NARROWEST) - 1
    wide = figures((3, 1, 1_000 - sliver))
    drawn = draw(tree(figures((3, 2, 1_000)), [node(1, figures((3, 1, sliver)), []), node(2, wide, [])]), "tier")
    assert [(box.x, box.width) for box in drawn.boxes] == [(sliver / 1_000, 1 - sliver / 1_000)]
    assert drawn.narrow == 1


def test_widths_are_blocks_where_no_engine_told_a_size() -> None:
    nodes = [node(1, figures((1, 3, 0)), []), node(2, figures((1, 1, 0)), [])]
    drawn = draw(tree(figures((1, 4, 0)), nodes), "tier")
    assert ([box.width for box in drawn.boxes], drawn.by_bytes) == ([0.75, 0.25], False)
    assert drawn.boxes[0].bands == [Band("g1", 0.0, 1.0)]
    assert (drawn.boxes[0].note, "size not told" in drawn.boxes[0].says) == ("3 blocks", True)


def test_nothing_is_drawn_of_nothing() -> None:
    drawn = draw(tree(figures(), []), "tier")
    assert (drawn.boxes, drawn.rows) == ([], 0)


@pytest.mark.parametrize(("uses", "step"), [(0, 0), (1, 1), (4, 1), (5, 2), (16, 2), (64, 3), (256, 4), (257, 5)])
def test_heat_is_uses_a_block_in_steps(uses: int, step: int) -> None:
    four_blocks = figures((2, 4, 400), uses=uses)
    assert heat_step(four_blocks) == step
    assert bands(four_blocks, "heat", 0) == [Band(f"heat{step}", 0.0, 1.0)]


@pytest.mark.parametrize(("age_s", "step"), [(0, 5), (10, 5), (11, 4), (600, 3), (601, 2), (86_400, 1), (86_401, 0)])
def test_recent_is_the_time_since_the_last_use_in_steps(age_s: int, step: int) -> None:
    now_us = 1_000_000_000_000
    used = figures((2, 4, 400), uses=7, last_use_us=now_us - age_s * 1_000_000)
    assert recent_step(used, now_us) == step
    assert bands(used, "recent", now_us) == [Band(f"heat{step}", 0.0, 1.0)]
    assert recent_step(figures((2, 4, 400)), now_us) == 0, "never used"
