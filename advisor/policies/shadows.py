"""The arms' shadows of the fastest volume: what each would hold, on a sample of the blocks."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from advisor.policies.rules.admission import BUCKET_START_BLOCKS
from advisor.policies.rules.eviction import LFUDA_LEAF, LRU_LEAF, VALUE
from advisor.tiers import noted
from advisor.tiers.duelling import Shadows
from advisor.tiers.fast_tier import BOUNCED, HEAPED, TOKENS, FastTier
from advisor.tiers.reads import TimedTrace

Array = npt.NDArray[Any]

SHADOW_BLOCKS_MAX = 6_144
"""Of a larger volume a shadow is a sample."""
RULES = (VALUE, LRU_LEAF, LFUDA_LEAF, LRU_LEAF, LRU_LEAF, VALUE)
"""By arm: who leaves its shadow first."""
NO_LIMIT = 1e18
"""Blocks in a bucket where no budget is in force."""


class SavedShadow(msgspec.Struct, array_like=True):
    """Slots and keys of what a shadow holds, its heap, `FastTier.counts` and `levels`."""

    slots: bytes
    keys: bytes
    heap: bytes
    counts: bytes
    levels: bytes


class SavedShadows(msgspec.Struct):
    """`ShadowTiers` in a checkpoint. Ghosts: slots, and the turns at which their blocks were kept out."""

    room: int
    parents: bytes
    tiers: list[SavedShadow]
    ghost_slots: bytes
    ghost_turns: bytes
    ranking: bytes


class ShadowTiers:
    """A `FastTier` for each arm, by slots of the book, for a volume of `room` blocks: one in `sample` of them."""

    def __init__(self, notes: Array, room: int) -> None:
        slots = len(notes)
        self.room = room
        self.sample = 1
        while room // self.sample > SHADOW_BLOCKS_MAX:
            self.sample *= 2
        capacity = max(1, room // self.sample)
        self.tiers = Shadows(*(FastTier.empty(slots, capacity, rule) for rule in RULES))
        for tier in self.tiers:
            tier.levels[TOKENS] = BUCKET_START_BLOCKS / self.sample
        self.ghosts = np.zeros(slots, np.int64)
        self.ranking = np.zeros(slots, np.int64)
        self.is_ranking = np.zeros(slots, np.bool_)
        self.ranked = 0
        """Slots in `ranking`: what the next ranked batch looks at."""
        self.pins = np.zeros(slots, np.int64)
        self.waiting = np.zeros(slots, np.int64)
        """Scratch, as `pins` is: zero between requests."""
        self.parents = np.full(slots, -1, np.int64)
        """Of blocks in the sample: the nearest ancestor in it."""
        if slots:
            noted.parents_in_sample(notes, self.sample, self.parents)

    @staticmethod
    @cache
    def none() -> ShadowTiers:
        """Where there is no duel: nothing, in arrays of the same kinds."""
        return ShadowTiers(np.zeros(0), 1)

    def trace(self, t: TimedTrace) -> TimedTrace:
        """`t` for the sample: its ids are to be filled in."""
        return t._replace(ids=np.empty(len(t.ids), np.int64), parents=self.parents)

    def in_sample(self, notes: Array, slots: Array) -> Array:
        if self.sample == 1:
            return slots
        mixed = notes["tag"][slots] * np.uint64(noted.SAMPLE_MIX) >> np.uint64(noted.SAMPLE_SHIFT)
        chosen: Array = slots[mixed % np.uint64(self.sample) == 0]
        return chosen

    def earn(self, blocks: float, burst: float) -> None:
        for tier in self.tiers:
            if blocks >= NO_LIMIT:
                tier.levels[TOKENS] = NO_LIMIT
                continue
            if tier.levels[TOKENS] >= NO_LIMIT / 2:
                tier.levels[TOKENS] = BUCKET_START_BLOCKS / self.sample  # a limit came into force
            earned = float(tier.levels[TOKENS]) + blocks / self.sample
            tier.levels[TOKENS] = min(earned, max(1.0, burst / self.sample))

    def lose(self, given: Array) -> None:
        """What was in the slots `given` is forgotten, by those that were below it too."""
        noted.lose_slots(given, np.zeros(len(self.parents), np.bool_), self.parents, self.tiers, self.ghosts)
        self.is_ranking[given] = False
        kept = self.ranking[: self.ranked]
        kept = kept[self.is_ranking[kept]]
        self.ranking[: len(kept)] = kept
        self.ranked = len(kept)

    def saved(self, used: Array) -> SavedShadows:
        """`used`: slots of the book in use."""
        ghosts = np.flatnonzero(self.ghosts)
        return SavedShadows(
            self.room,
            self.parents[used].astype("<i4").tobytes(),
            [_saved(tier) for tier in self.tiers],
            ghosts.astype("<i4").tobytes(),
            self.ghosts[ghosts].tobytes(),
            self.ranking[: self.ranked].astype("<i4").tobytes(),
        )

    def restore(self, saved: SavedShadows, used: Array) -> None:
        """Into empty ones of the same room. Raises `ValueError`."""
        self.parents[used] = np.frombuffer(saved.parents, "<i4")
        for tier, each in zip(self.tiers, saved.tiers, strict=True):
            slots, heap = self._slots(each.slots), self._slots(each.heap)
            keys = np.frombuffer(each.keys)
            if not len(heap) <= len(slots) == len(keys) <= tier.capacity:
                raise ValueError(f"a shadow of {tier.capacity} blocks holds {len(slots)}, {len(heap)} in its heap")
            noted.restore_tier(tier, slots, keys, heap, self.parents)
            tier.counts[:] = np.frombuffer(each.counts, np.int64)
            tier.levels[:] = np.frombuffer(each.levels)
        ghosts, ranking = self._slots(saved.ghost_slots), self._slots(saved.ranking)
        self.ghosts[ghosts] = np.frombuffer(saved.ghost_turns, np.int64)
        self.ranking[: len(ranking)] = ranking
        self.is_ranking[ranking] = True
        self.ranked = len(ranking)

    def _slots(self, saved: bytes) -> Array:
        slots = np.frombuffer(saved, "<i4").astype(np.int64)
        if len(slots) and not 0 <= slots.min() <= slots.max() < len(self.ghosts):
            raise ValueError(f"a shadow names slots {slots.min()} to {slots.max()}; there are {len(self.ghosts)}")
        return slots


def _saved(tier: FastTier) -> SavedShadow:
    slots = np.flatnonzero(tier.present)
    counts = tier.counts.copy()
    counts[BOUNCED] = 0  # no shadow's figure, and when blocks left it is not kept
    heap = tier.heap[: tier.counts[HEAPED]]
    return SavedShadow(
        slots.astype("<i4").tobytes(), tier.keys[slots].tobytes(), heap.astype("<i4").tobytes(), counts.tobytes(),
        tier.levels.tobytes(),
    )  # fmt: skip
