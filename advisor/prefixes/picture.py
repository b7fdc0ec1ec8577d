"""A picture of the prefix tree: every subtree's figures at about one moment, to be walked without the index's lock.

It takes 20 bytes a block row and 90 a node, and up to 45 a row while it is made. Ten million blocks take one to two
seconds, of which each hold of the lock is a few milliseconds. See kernels.py for what "about" means.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from advisor.index import ArrayIndex, Key
from advisor.index.layout import BLOCK_TOP, DEPTH_UNKNOWN, Array
from advisor.prefixes import kernels
from advisor.prefixes.kernels import Nodes, Rows

SLICE_ROWS = 1 << 15
"""Rows copied in one hold of the lock."""
MEASURES = ("bytes", "blocks", "heat")
"""What nodes are ordered by, the most first. Heat is uses."""
NO_NAMESPACE = 0
"""Of a realm that passed to another namespace while the picture was taken. It has no blocks of anybody."""


class Figures(NamedTuple):
    """Of a subtree, or of several."""

    nodes: int
    """How many subtrees."""
    blocks: int
    by_tier: tuple[tuple[int, int], ...]
    """Of G1 to G4: blocks whose fastest tier it is, and their bytes there."""
    touches: int
    last_touch_us: int
    """Whole seconds; 0 where none was ever used."""

    @property
    def block_bytes(self) -> int:
        return sum(block_bytes for _, block_bytes in self.by_tier)

    def measure(self, by: str) -> int:
        return {"bytes": self.block_bytes, "blocks": self.blocks, "heat": self.touches}[by]


class Chain(NamedTuple):
    """What a node is itself: blocks one after the other, without a branch."""

    first: Key
    last: Key
    blocks: int
    """That are placed."""
    depth: int | None
    """Of the first."""
    children: int


@dataclass(frozen=True, slots=True)
class Picture:
    """Nodes are numbers below `len(nodes.first)`."""

    nodes: Nodes
    node_of: Array
    """i4 by block row; -1 of none."""
    hashes: Array
    """u8 (rows, 2)."""
    realm: Array
    """u2 by node."""
    depth: Array
    """u4 by node."""
    starts: Array
    children: Array
    """See `kernels.list_children`."""
    realms: list[tuple[int, int]]
    """Namespace id and group by realm."""

    @classmethod
    def take(cls, index: ArrayIndex, slice_rows: int = SLICE_ROWS) -> Picture:
        """Takes time in proportion to the index, and the lock for `slice_rows` rows at a time. Raises `MemoryError`."""
        with index.lock.shared():
            count = int(index.tables.state[BLOCK_TOP])
            realms_before = index.tables.realms[["namespace_id", "group"]].copy()
        rows = Rows(
            parent=np.empty(count, np.int32), hashes=np.empty((count, 2), np.uint64), realm=np.empty(count, np.uint16),
            depth=np.empty(count, np.uint32), tier=np.empty(count, np.uint8), block_bytes=np.empty(count, np.uint32),
            touches=np.empty(count, np.uint32), last_touch_s=np.empty(count, np.uint32),
        )  # fmt: skip
        kernels.read_rows(index.tables, 0, 0, rows)  # nothing, so that it is compiled without the lock
        for first in range(0, count, slice_rows):
            end = min(first + slice_rows, count)
            for column in rows:
                column[first:end] = 0  # memory that is used for the first time is waited for, here without the lock
            with index.lock.shared():
                kernels.read_rows(index.tables, first, end, rows)
        with index.lock.shared():
            realms = index.tables.realms[["namespace_id", "group"]].copy()
        realms["namespace_id"][realms != realms_before] = NO_NAMESPACE
        used = int(rows.realm.max(initial=0)) + 1
        return cls.of_rows(rows, realms[:used].tolist())

    @classmethod
    def of_rows(cls, rows: Rows, realms: list[tuple[int, int]]) -> Picture:
        """Of a copy of the rows, whose links may be of different moments; changes it."""
        child_counts = np.zeros(len(rows.parent), np.int32)
        kernels.count_children(rows, child_counts)
        node_of = np.empty(len(rows.parent), np.int32)
        count = int(kernels.number_nodes(rows, child_counts, node_of))
        nodes = Nodes(
            first=np.empty(count, np.int32), last=np.empty(count, np.int32), length=np.zeros(count, np.int32),
            parent=np.empty(count, np.int32), waiting=np.empty(count, np.int32), blocks=np.zeros(count, np.int64),
            by_tier=np.zeros((count, 4, 2), np.int64), touches=np.zeros(count, np.int64),
            last_touch_s=np.zeros(count, np.int64),
        )  # fmt: skip
        kernels.fold_chains(rows, child_counts, node_of, nodes)
        kernels.add_up(rows, node_of, nodes)
        starts, children = np.zeros(count + 2, np.int64), np.empty(count, np.int32)
        kernels.list_children(nodes.parent, starts, children)
        realm, depth = rows.realm[nodes.first], rows.depth[nodes.first]
        return cls(nodes, node_of, rows.hashes, realm, depth, starts, children, realms)

    # -- which nodes

    def groups(self) -> Array:
        """The first node of every prefix group."""
        return self.children_of(len(self.nodes.first))

    def children_of(self, node: int) -> Array:
        return self.children[self.starts[node] : self.starts[node + 1]]

    def allowed(self, namespace_ids: Iterable[int] | None) -> Array:
        """u1 by realm: those of the namespaces; None: of all that are known."""
        wanted = None if namespace_ids is None else set(namespace_ids)
        allows = [n != NO_NAMESPACE and (wanted is None or n in wanted) for n, _ in self.realms]
        return np.array(allows or [False], np.uint8)

    def node_at(self, key: Key, row: int) -> int | None:
        """The node with the block of that key, whose row the index says; None where the picture has another there."""
        if row >= len(self.node_of) or (node := int(self.node_of[row])) < 0:
            return None
        return node if self._key(row, int(self.realm[node])) == key else None

    def path(self, node: int) -> list[int]:
        """From the first node of its group to `node`."""
        path = []
        while node >= 0:
            path.append(node)
            node = int(self.nodes.parent[node])
        return path[::-1]

    def largest(self, nodes: Array, by: str, count: int, after: int = 0) -> list[int]:
        """Of `nodes` the ones numbered `after` … `after + count` by a measure of `MEASURES`, the largest first."""
        if by == "bytes":
            values = sum(self.nodes.by_tier[nodes, tier, 1] for tier in range(4))
        else:
            values = (self.nodes.blocks if by == "blocks" else self.nodes.touches)[nodes]
        return list(nodes[_largest(values, after + count)[after:]].tolist())

    def of_realms(self, nodes: Array, allowed: Array) -> Array:
        """Those of `nodes` whose realm is allowed."""
        mine: Array = nodes[allowed[self.realm[nodes]] != 0]
        return mine

    # -- what they are

    def figures(self, node: int) -> Figures:
        n = self.nodes
        last_touch_us = int(n.last_touch_s[node]) * 1_000_000
        return Figures(1, int(n.blocks[node]), _pairs(n.by_tier[node]), int(n.touches[node]), last_touch_us)

    def sum_of(self, nodes: Array, allowed: Array) -> Figures:
        """Of those of `nodes` whose realm is allowed."""
        by_tier, others = np.zeros((4, 2), np.int64), np.zeros(4, np.int64)
        kernels.add_those(self.nodes, nodes, allowed, self.realm, by_tier, others)
        count, blocks, touches, last_touch_s = others.tolist()
        return Figures(count, blocks, _pairs(by_tier), touches, last_touch_s * 1_000_000)

    def chain(self, node: int) -> Chain:
        realm, depth = int(self.realm[node]), int(self.depth[node])
        return Chain(
            first=self._key(int(self.nodes.first[node]), realm),
            last=self._key(int(self.nodes.last[node]), realm),
            blocks=int(self.nodes.length[node]),
            depth=None if depth == DEPTH_UNKNOWN else depth,
            children=int(self.starts[node + 1] - self.starts[node]),
        )

    def _key(self, row: int, realm: int) -> Key:
        low, high = self.hashes[row].tolist()
        namespace_id, group = self.realms[realm]
        return Key(namespace_id, group, high << 64 | low)


def _pairs(by_tier: Array) -> tuple[tuple[int, int], ...]:
    return tuple((blocks, block_bytes) for blocks, block_bytes in by_tier.tolist())


def _largest(values: Array, count: int) -> Array:
    """Places of the `count` largest, the largest first; of equal ones the first."""
    if len(values) <= count:
        return np.argsort(-values, kind="stable")
    least = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > least)
    level = np.flatnonzero(values == least)[: count - len(above)]
    picked = np.sort(np.concatenate((above, level)))
    return picked[np.argsort(-values[picked], kind="stable")]
