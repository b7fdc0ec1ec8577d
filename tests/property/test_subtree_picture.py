"""A picture of the prefix tree: a quiet index gives exactly the naive sums, and no state of its links stops it."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.index import ArrayIndex, BlockRow, IndexSize, Key
from advisor.prefixes.kernels import NOT_USED, Rows
from advisor.prefixes.picture import MEASURES, Figures, Picture
from event_plane.schema import RECORD_DTYPE
from tests.examples import examples

NAMESPACES = (5, 9)

# Block n follows one before it, or is a root: a forest. A few are taken out again, so that ghosts and free rows appear.
PARENT = st.integers(0, 12)
STORED = st.tuples(st.integers(0, 1), PARENT, st.integers(1, 4), st.integers(0, 3), st.integers(0, 500))
FOREST = st.tuples(st.lists(STORED, min_size=1, max_size=30), st.sets(st.integers(1, 30), max_size=8))


def index_of(stored: list[tuple[int, int, int, int, int]], removed: set[int]) -> ArrayIndex:
    events = np.zeros(128, RECORD_DTYPE)
    count = 0

    def apply(kind: int, number: int, namespace: int, parent: int, tier: int, block_size: int, hits: int) -> None:
        nonlocal count
        row = events[count]
        row["event_type"], row["sequence_hash_lo"], row["namespace"] = kind, number, namespace
        row["parent_hash_lo"], row["tier"], row["block_size"], row["hits"] = parent, tier, block_size, hits
        count += 1

    for number, (namespace, back, tier, hits, block_size) in enumerate(stored, start=1):
        parent = max(0, number - back) % number
        apply(1, number, namespace, parent, tier, block_size, 0)
        if hits:
            apply(3, number, namespace, 0, tier, 0, hits)
        if hits == 3:
            apply(1, number, namespace, parent, min(4, tier + 1), block_size, 0)
    for number in sorted(removed & set(range(1, len(stored) + 1))):
        namespace, _, tier, hits, _ = stored[number - 1]
        for each in (tier, min(4, tier + 1)) if hits == 3 else (tier,):
            apply(2, number, namespace, 0, each, 0, 0)
    index = ArrayIndex(IndexSize.for_blocks(400))
    for moment, part in enumerate(np.array_split(events[:count], 3), start=1):
        index.apply(part, producer=1, namespace_ids=NAMESPACES, locations=("a",), now_us=moment * 5_000_000)
    return index


def naive_figures(index: ArrayIndex, rows: list[BlockRow]) -> Figures:
    """Of placed blocks, each in its fastest tier."""
    by_tier = [[0, 0], [0, 0], [0, 0], [0, 0]]
    placed = [block for block in rows if block.placements]
    for block in placed:
        tier, block_bytes = min((index.places[each.place].tier, each.block_bytes) for each in block.placements)
        by_tier[tier - 1][0] += 1
        by_tier[tier - 1][1] += block_bytes
    last_touch_us = max((block.last_touch_us // 1_000_000 * 1_000_000 for block in placed), default=0)
    pairs = tuple((blocks, block_bytes) for blocks, block_bytes in by_tier)
    return Figures(1, len(placed), pairs, sum(block.touches for block in placed), last_touch_us)


@settings(max_examples=examples(40), deadline=None)
@given(forest=FOREST, slice_rows=st.integers(1, 40))
def test_a_quiet_index_gives_the_naive_sums_for_every_block(
    forest: tuple[list[tuple[int, int, int, int, int]], set[int]], slice_rows: int
) -> None:
    index = index_of(*forest)
    picture = Picture.take(index, slice_rows)
    rows = [index.block(row) for row in range(len(picture.node_of)) if picture.node_of[row] >= 0]
    below: dict[int, list[BlockRow]] = defaultdict(list)
    for block in rows:
        below[block.parent].append(block)

    def subtree(block: BlockRow) -> list[BlockRow]:
        return [block, *(each for child in below[block.row] for each in subtree(child))]

    def nodes_below(node: int) -> int:
        return 1 + sum(nodes_below(int(child)) for child in picture.children_of(node))

    assert index.totals().ghosts + len(index) == len(rows)
    for block in rows:
        # Up while the parent has one child: the first block of the chain, whose subtree is the node's.
        first = block
        while first.parent >= 0 and len(below[first.parent]) == 1:
            first = index.block(first.parent)
        chain = [first]
        while len(below[chain[-1].row]) == 1:
            chain.append(below[chain[-1].row][0])
        node = picture.node_at(block.key, block.row)
        assert node is not None
        about = picture.chain(node)
        assert (about.first, about.last) == (first.key, chain[-1].key)
        assert about.blocks == sum(bool(each.placements) for each in chain)
        assert {int(each) for each in picture.children_of(node)} == {
            picture.node_at(child.key, child.row) for child in below[chain[-1].row]
        }
        assert picture.figures(node) == naive_figures(index, subtree(first))
    groups = picture.groups()
    assert sum(nodes_below(int(node)) for node in groups) == len(picture.nodes.first)
    everything = picture.allowed(None)
    assert picture.sum_of(groups, everything)[1:] == naive_figures(index, rows)[1:]
    mine = picture.allowed([5])
    assert picture.sum_of(groups, mine)[1:] == naive_figures(index, [b for b in rows if b.key.namespace_id == 5])[1:]
    for by in MEASURES:
        ranked = [picture.figures(node).measure(by) for node in picture.largest(groups, by, 400)]
        assert ranked == sorted(ranked, reverse=True)
        for count in (1, 3):
            assert picture.largest(groups, by, count, 1) == picture.largest(groups, by, 400)[1 : 1 + count]
    assert picture.node_at(Key(5, 0, 99), 0) is None
    assert picture.node_at(Key(5, 0, 1), 10_000) is None


@st.composite
def torn_rows(draw: st.DrawFn) -> Rows:
    """Links as no one moment has them: to themselves, in circles, to free rows, past the end, into another realm."""
    count = draw(st.integers(1, 12))
    parents = draw(st.lists(st.integers(NOT_USED, count + 2), min_size=count, max_size=count))
    realms = draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    return Rows(
        parent=np.array(parents, np.int32), hashes=np.arange(2 * count, dtype=np.uint64).reshape(-1, 2),
        realm=np.array(realms, np.uint16), depth=np.zeros(count, np.uint32), tier=np.full(count, 3, np.uint8),
        block_bytes=np.full(count, 10, np.uint32), touches=np.ones(count, np.uint32),
        last_touch_s=np.ones(count, np.uint32),
    )  # fmt: skip


@settings(max_examples=examples(150), deadline=None)
@given(rows=torn_rows())
def test_torn_links_end_and_never_mix_namespaces(rows: Rows) -> None:
    used = {realm: int(((rows.parent != NOT_USED) & (rows.realm == realm)).sum()) for realm in (0, 1)}
    picture = Picture.of_rows(rows, [(5, 0), (9, 0)])
    reached: set[int] = set()
    waiting = [int(node) for node in picture.groups()]
    while waiting:
        node = waiting.pop()
        assert node not in reached
        reached.add(node)
        children = [int(child) for child in picture.children_of(node)]
        assert {int(picture.realm[child]) for child in children} <= {int(picture.realm[node])}
        own = picture.chain(node).blocks
        assert picture.figures(node).blocks == own + sum(picture.figures(child).blocks for child in children)
        assert picture.path(node)[-1] == node
        waiting += children
    assert reached == set(range(len(picture.nodes.first)))
    for realm, namespace_id in enumerate((5, 9)):
        counted = picture.sum_of(picture.groups(), picture.allowed([namespace_id])).blocks
        # A circle without a branch belongs to no node.
        assert counted <= used[realm]
