"""The stream that `kvadvisor bench index` measures on: wire records of chains with shared prefixes.

70 % store, 20 % duplicate store, 10 % remove, counted in records; chains of 1–200 blocks, each of which continues, at a
random block, one of the first chains (10,000, fewer in a small stream), picked by Zipf's law.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from event_plane.schema import RECORD_DTYPE, EventType, Records, Tier

ROOTS_MAX = 10_000
CHAIN_BLOCKS_MAX = 200
BLOCK_BYTES = 16_384
BLOCK_TOKENS = 16

Ids = npt.NDArray[np.int64]


@dataclass(slots=True)
class ChainStream:
    """Blocks are numbered in the order in which they are first stored; everything else follows from the number."""

    seed: int = 1
    roots: int = ROOTS_MAX
    starts: Ids = field(default_factory=lambda: np.zeros(0, np.int64))
    """By chain, its first block; one more than there are chains."""
    parents: Ids = field(default_factory=lambda: np.zeros(0, np.int64))
    """By block; -1 at a root."""

    def grow(self, blocks: int) -> None:
        """Lay out at least `blocks` blocks."""
        rng = np.random.default_rng(self.seed)
        chains = int(blocks / (CHAIN_BLOCKS_MAX + 1) * 2 * 1.05) + 100
        self.roots = min(ROOTS_MAX, chains // 10)
        lengths = rng.integers(1, CHAIN_BLOCKS_MAX + 1, chains)
        self.starts = np.concatenate(([0], np.cumsum(lengths)))
        self.parents = np.arange(-1, self.starts[-1] - 1)
        heads = self.starts[:-1].copy()
        weights = 1 / np.arange(1, self.roots + 1)
        followed = rng.choice(self.roots, chains, p=weights / weights.sum())
        at = self.starts[followed] + (rng.random(chains) * lengths[followed]).astype(np.int64)
        self.parents[heads] = at
        self.parents[heads[: self.roots]] = -1

    @property
    def blocks(self) -> int:
        return len(self.parents)

    def stores(self, first: int, end: int) -> Records:
        """Stores of the blocks numbered `first` … `end`."""
        return self.records(np.arange(first, end), EventType.STORE)

    def records(self, ids: Ids, kind: EventType) -> Records:
        """Records of one kind, read-only as the wire's."""
        records = np.zeros(len(ids), RECORD_DTYPE)
        records["event_type"] = kind
        records["tier"] = Tier.G3
        records["depth"] = 0xFFFF_FFFF
        records["sequence_hash_lo"], records["sequence_hash_hi"] = _hashes(ids)
        if kind is EventType.STORE:
            parents = self.parents[ids]
            lo, hi = _hashes(parents)
            records["parent_hash_lo"] = np.where(parents < 0, 0, lo)
            records["parent_hash_hi"] = np.where(parents < 0, 0, hi)
            records["block_size"], records["block_tokens"] = BLOCK_BYTES, BLOCK_TOKENS
        return records

    def mixed(self, live: int, events: int, seed: int) -> Records:
        """The mix on `live` blocks that are there: new chains, chains stored again, chains removed from their tails."""
        rng = np.random.default_rng(seed)
        next_chain = int(np.searchsorted(self.starts, live))
        last_chain = next_chain - 1
        parts: list[Records] = []
        made = 0
        while made < events:
            what = rng.random()
            if what < 0.7:
                ids = np.arange(self.starts[next_chain], self.starts[next_chain + 1])
                next_chain += 1
                kind = EventType.STORE
            else:
                chain = int(rng.integers(self.roots, last_chain))
                ids = np.arange(self.starts[chain], self.starts[chain + 1])
                kind = EventType.STORE if what < 0.9 else EventType.REMOVE
            parts.append(self.records(ids if kind is EventType.STORE else ids[::-1], kind))
            made += len(ids)
        return np.concatenate(parts)[:events]

    def path(self, block: int) -> Ids:
        """Blocks from the root to `block`."""
        path = []
        while block >= 0:
            path.append(block)
            block = int(self.parents[block])
        return np.array(path[::-1], np.int64)

    def hashes(self, ids: Ids) -> npt.NDArray[np.uint64]:
        """u8 (n, 2), low half first."""
        return np.stack(_hashes(ids), axis=1)


def _hashes(ids: Ids) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Two halves that look random and are never 0: splitmix64 of the number."""
    lo = _mixed(ids.astype(np.uint64) * np.uint64(2) + np.uint64(1))
    return lo, _mixed(lo)


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + np.uint64(0x9E37_79B9_7F4A_7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return x ^ (x >> np.uint64(31))
