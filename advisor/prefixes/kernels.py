"""How a picture of the prefix tree is made: rows are read in slices under the index's lock, all else is done on copies.

Slices are of different moments. A row that was freed and used again between two of them may name a parent that is not
its own: such a link is cut where it leaves the namespace, and a circle of links is cut at each of its nodes. So every
function here ends, whatever it is given, and no figure of one namespace is added to another's.
"""

from __future__ import annotations

from typing import NamedTuple

from advisor.index.jit import kernel
from advisor.index.layout import FREE, NONE, Array, Tables, int64
from advisor.index.tree import last_touch_ms

NOT_USED = -2
"""The parent of a row that holds no block."""
UNPLACED = 5
"""The tier of a block that is placed nowhere."""


class Rows(NamedTuple):
    """A copy of what a picture needs of each block row, by row."""

    parent: Array
    """i4: a row, -1 of a root, `NOT_USED`."""
    hashes: Array
    """u8 (rows, 2): low and high half."""
    realm: Array
    """u2"""
    depth: Array
    """u4"""
    tier: Array
    """u1: the fastest that holds the block, else `UNPLACED`."""
    block_bytes: Array
    """u4: there."""
    touches: Array
    """u4"""
    last_touch_s: Array
    """u4: seconds since 1970, 0 for never."""


class Nodes(NamedTuple):
    """A node is a chain of blocks without a branch. Figures are of its subtree: of itself and all that follows it."""

    first: Array
    """i4: row of its first block."""
    last: Array
    """i4: row of its last, which has no child or several."""
    length: Array
    """i4: blocks in it that are placed."""
    parent: Array
    """i4: a node, -1 of the first of a group."""
    waiting: Array
    """i4: children that are not added to it yet, then -1; above 0 to the end in a circle."""
    blocks: Array
    """i8: placed blocks."""
    by_tier: Array
    """i8 (nodes, 4, 2): of those whose fastest tier is G1 to G4 their number, and their bytes there."""
    touches: Array
    """i8"""
    last_touch_s: Array
    """i8"""


@kernel
def read_rows(t: Tables, first: int, end: int, rows: Rows) -> None:
    """Copy rows `first` … `end` of the tables. The caller holds the index's lock, shared."""
    for row in range(first, end):
        b = t.blocks[row]
        if int64(b.marks) & FREE:
            rows.parent[row] = NOT_USED
            continue
        rows.parent[row] = b.parent
        rows.hashes[row, 0] = b.hash_lo
        rows.hashes[row, 1] = b.hash_hi
        rows.realm[row] = b.realm
        rows.depth[row] = b.depth
        rows.touches[row] = b.touches
        rows.last_touch_s[row] = last_touch_ms(b) // 1000
        fastest = int64(UNPLACED)
        block_bytes = int64(0)
        p = int64(b.placed)
        while p >= 0:
            x = t.placements[p]
            tier = int64(t.places[int64(x.place)].tier)
            if tier < fastest:
                fastest = tier
                block_bytes = int64(x.block_bytes)
            elif tier == fastest:
                block_bytes = max(block_bytes, int64(x.block_bytes))
            p = int64(x.next_placed)
        rows.tier[row] = fastest
        rows.block_bytes[row] = block_bytes


@kernel
def count_children(rows: Rows, children: Array) -> None:
    """Fill `children` i4 (zeroed), by row, after cutting links that lead nowhere or out of the realm."""
    for row in range(len(children)):
        parent = int64(rows.parent[row])
        if parent < 0:
            continue
        if parent >= len(children) or rows.parent[parent] == NOT_USED or rows.realm[parent] != rows.realm[row]:
            rows.parent[row] = NONE
        else:
            children[parent] += 1


@kernel
def number_nodes(rows: Rows, children: Array, node_of: Array) -> int:
    """Give every row that ends a chain the number of a node in `node_of` i4, the others -1; returns how many nodes."""
    nodes = int64(0)
    for row in range(len(children)):
        node_of[row] = NONE
        if rows.parent[row] != NOT_USED and children[row] != 1:
            node_of[row] = nodes
            nodes += 1
    return nodes


@kernel
def fold_chains(rows: Rows, children: Array, node_of: Array, nodes: Nodes) -> None:
    """Walk up from the end of each chain, adding its blocks to its node. Every row is passed once."""
    for end in range(len(children)):
        if rows.parent[end] == NOT_USED or children[end] == 1:
            continue
        node = int64(node_of[end])
        nodes.last[node] = end
        nodes.waiting[node] = children[end]
        row = end
        while True:
            node_of[row] = node
            tier = int64(rows.tier[row])
            if tier < UNPLACED:
                nodes.length[node] += 1
                nodes.blocks[node] += 1
                nodes.by_tier[node, tier - 1, 0] += 1
                nodes.by_tier[node, tier - 1, 1] += int64(rows.block_bytes[row])
                nodes.touches[node] += int64(rows.touches[row])
                nodes.last_touch_s[node] = max(int64(nodes.last_touch_s[node]), int64(rows.last_touch_s[row]))
            parent = int64(rows.parent[row])
            if parent < 0 or children[parent] != 1:
                break
            row = parent
        nodes.first[node] = row


@kernel
def add_up(rows: Rows, node_of: Array, nodes: Nodes) -> None:
    """Make each node's figures those of its subtree: leaves first, a node when its last child is added."""
    for node in range(len(nodes.parent)):
        parent = int64(rows.parent[int64(nodes.first[node])])
        nodes.parent[node] = NONE if parent < 0 else node_of[parent]
    for leaf in range(len(nodes.parent)):
        node = leaf
        # What has been added is marked, or a node that waits for nobody would be taken for a leaf.
        while node >= 0 and nodes.waiting[node] == 0:
            nodes.waiting[node] = NONE
            parent = int64(nodes.parent[node])
            if parent >= 0:
                nodes.blocks[parent] += nodes.blocks[node]
                for tier in range(4):
                    nodes.by_tier[parent, tier, 0] += nodes.by_tier[node, tier, 0]
                    nodes.by_tier[parent, tier, 1] += nodes.by_tier[node, tier, 1]
                nodes.touches[parent] += nodes.touches[node]
                nodes.last_touch_s[parent] = max(nodes.last_touch_s[parent], nodes.last_touch_s[node])
                nodes.waiting[parent] -= 1
            node = parent
    for node in range(len(nodes.parent)):
        if nodes.waiting[node] > 0:
            # Its children wait for it as it waits for them.
            nodes.parent[node] = NONE


@kernel
def list_children(parent: Array, starts: Array, children: Array) -> None:
    """Fill `children` i4 with nodes by parent: those of node n at `starts[n]` … `starts[n + 1]`, roots after the last.

    `starts` i8 (nodes + 2), zeroed.
    """
    nodes = len(parent)
    for node in range(nodes):
        above = int64(parent[node])
        starts[(nodes if above < 0 else above) + 1] += 1
    for i in range(nodes + 1):
        starts[i + 1] += starts[i]
    # Each start is moved to its end while its part is filled, which is where the next one starts: then moved back.
    for node in range(nodes):
        above = int64(parent[node])
        at = nodes if above < 0 else above
        children[int64(starts[at])] = node
        starts[at] += 1
    for i in range(nodes + 1, 0, -1):
        starts[i] = starts[i - 1]
    starts[0] = 0


@kernel
def add_those(nodes: Nodes, which: Array, allowed: Array, realm: Array, by_tier: Array, others: Array) -> None:
    """Sum the figures of the nodes `which` i4 whose realm is `allowed` (u1 by realm).

    `by_tier` i8 (4, 2); `others` i8 (4): how many, blocks, touches, last touch in seconds. Both are added to.
    """
    for i in range(len(which)):
        node = int64(which[i])
        if not allowed[int64(realm[node])]:
            continue
        for tier in range(4):
            by_tier[tier, 0] += nodes.by_tier[node, tier, 0]
            by_tier[tier, 1] += nodes.by_tier[node, tier, 1]
        others[0] += 1
        others[1] += nodes.blocks[node]
        others[2] += nodes.touches[node]
        others[3] = max(others[3], nodes.last_touch_s[node])
