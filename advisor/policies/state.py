"""What the planner keeps from plan to plan: owned by the fold, changed by its entries alone."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from advisor.index import ArrayIndex, IndexFault, Key
from advisor.policies.budgets import Bucket
from advisor.policies.eviction import Ageing
from advisor.policies.heat_book import HeatBook
from advisor.policies.learning import Learning, SavedLearning

Array = npt.NDArray[Any]

WAITING_MAX = 1 << 16
"""Blocks that wait for a batch. Past it the newest do not wait."""


class SavedPolicies(msgspec.Struct):
    """`PolicyState` in a checkpoint. `waiting` are rows of the index that is saved with it."""

    buckets: dict[str, Bucket] = {}
    ageing: dict[str, Ageing] = {}
    waiting: bytes = b""
    due_us: int = 0
    used: bytes = b""
    notes: bytes = b""
    counts: bytes = b"\0" * 24
    learning: SavedLearning = msgspec.field(default_factory=SavedLearning)
    promoted: int = 0
    planned_us: int = 0


class PolicyState:
    """Mutated by a plan and by nothing else."""

    def __init__(self) -> None:
        self.book = HeatBook()
        self.learning = Learning(self.book)
        self.promoted = 0
        """Promotions to the fastest volume so far."""
        self.planned_us = 0
        """The time of the last plan."""
        self.buckets: dict[str, Bucket] = {}
        """Budgets, by what they limit."""
        self.ageing: dict[str, Ageing] = {}
        """By volume."""
        self.waiting: dict[int, None] = {}
        """Rows touched since the last batch, in order."""
        self.due_us = 0
        """When the next batch comes; 0 before the first touch."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Numbers are not copied one by one, as `deepcopy` would, while the fold waits: `waiting` may be long."""
        made = copy.copy(self)
        memo[id(self)] = made
        for name, value in vars(self).items():
            setattr(made, name, dict(value) if value is self.waiting else copy.deepcopy(value, memo))
        return made

    def wait(self, rows: Array) -> None:
        """As many as there is room for, the first first."""
        for first in range(0, len(rows), WAITING_MAX):
            for row in rows[first : first + WAITING_MAX].tolist():
                if len(self.waiting) >= WAITING_MAX:
                    return
                self.waiting[row] = None

    def ageing_of(self, volume: str) -> Ageing:
        return self.ageing.setdefault(volume, Ageing())

    def saved(self) -> SavedPolicies:
        used, notes, counts = self.book.saved()
        waiting = np.array(list(self.waiting), "<i8").tobytes()
        return SavedPolicies(
            self.buckets, self.ageing, waiting, self.due_us, used, notes, counts, self.learning.saved(), self.promoted,
            self.planned_us,
        )  # fmt: skip

    def restore(self, saved: SavedPolicies) -> None:
        """Raises `ValueError` for bytes that are none of `saved`."""
        self.buckets = dict(saved.buckets)
        self.ageing = dict(saved.ageing)
        rows: npt.NDArray[Any] = np.frombuffer(saved.waiting, "<i8")
        self.waiting = dict.fromkeys(rows.tolist())
        self.due_us = saved.due_us
        self.promoted, self.planned_us = saved.promoted, saved.planned_us
        self.book.restore(saved.used, saved.notes, saved.counts)
        self.learning.restore(saved.learning)

    def described(self, index: ArrayIndex) -> list[Any]:
        """For a digest: no row numbers."""
        waiting = sorted(f"{k.namespace_id:x} {k.group} {k.sequence_hash:x}" for k in _keys(index, self.waiting))
        return [
            [[name, b.level, b.filled_us] for name, b in sorted(self.buckets.items())],
            [[name, a.inflation, a.hand, a.target] for name, a in sorted(self.ageing.items())],
            [waiting, self.due_us, *self.book.described(), self.promoted, self.planned_us],
            self.learning.saved(),
        ]


def _keys(index: ArrayIndex, rows: Iterable[int]) -> list[Key]:
    keys = []
    for row in rows:
        try:
            block = index.block(row)
        except IndexFault:
            continue  # it went while it waited
        if block.placements:
            keys.append(block.key)
    return keys
