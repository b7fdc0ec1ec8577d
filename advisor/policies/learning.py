"""What the planner learns as it goes: what blocks are worth, and which of several arms finds the most.

The rules are the replay's (`advisor.tiers`), on the notes of the heat book. Each arm runs a shadow of the fastest
volume that moves nothing and has its own budget (see shadows.py).
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from advisor.index import ArrayIndex
from advisor.policies.heat_book import HeatBook
from advisor.policies.rules import hazard
from advisor.policies.rules.duel import TURN_REQUESTS
from advisor.policies.rules.noting import REQUESTS, tell_requests
from advisor.policies.rules.worth import LEARNING_S, MARGIN, price_after
from advisor.policies.shadows import SavedShadows, ShadowTiers
from advisor.tiers import noted
from advisor.tiers.duelling import ARMS, Duel
from advisor.tiers.fast_tier import MOVES
from advisor.tiers.learning import PRICE, SWEPT_S, Learned
from advisor.tiers.reads import Heat, TimedTrace

Array = npt.NDArray[Any]

SHADOWED_MAX = 4_096
"""Blocks that the shadows serve between two plans: of what comes after they see nothing."""


class SavedLearning(msgspec.Struct):
    """`Learning` in a checkpoint."""

    arms: int = 0
    due_us: int = 0
    hits: bytes = b""
    exposure: bytes = b""
    values: bytes = b""
    levels: bytes = b""
    counts: bytes = b""
    leader: int = 0
    turns: int = 0
    ended: int = 0
    learned_us: int = 0
    scores: bytes = b""
    found: bytes = b""
    moved: bytes = b""
    shadows: SavedShadows | None = None


class Learning:
    """Told what was used; asked which arm leads, and what a block must be worth. `arms`: a bit for each that may."""

    def __init__(self, book: HeatBook) -> None:
        self._book = book
        self._forget()

    def _forget(self) -> None:
        self.arms = 0
        self.due_us = 0
        """When the next sweep comes; 0 before the first use."""
        self._tables = Learned.nothing(0, hazard.HORIZON_MAX_S)
        self._duel = _duel(0)
        self._turns = 0
        """Of all requests so far."""
        self._ended = 0
        """Turns since the duel began."""
        self._learned_us = 0
        """Nothing moves by worth before."""
        self._shadows: ShadowTiers | None = None

    def prepare(self, arms: int, start: int, room: int) -> None:
        """From now on `arms` are allowed, and the fastest volume has room for so many blocks.

        `start` leads at first. Shadows of another volume are forgotten, all of it where nothing is to be learned.
        """
        if arms != self.arms:
            if arms == 0 or self.arms == 0:
                self._forget()
            if self.arms == 0 and self._book.turn:
                noted.classify(self._book.notes)
            leader = self.leader if self.arms and arms >> self.leader & 1 else start
            self._duel = self._duel._replace(allowed=arms)
            self._duel.leader[0] = leader
            self.arms = arms
        duels = arms & (arms - 1) != 0
        if not duels:
            self._shadows = None
        elif self._shadows is None or self._shadows.room != room:
            self._shadows = ShadowTiers(self._book.notes, room)
            self._turns = int(self._book.counts[REQUESTS]) // TURN_REQUESTS
            self._duel.moves[:] = 0

    @property
    def leader(self) -> int:
        return int(self._duel.leader[0])

    @property
    def least(self) -> float:
        """What a block that was just used must be worth to come: none is, before the first price is known."""
        price = float(self._tables.levels[PRICE])
        return max(MARGIN, price) if price > 0.0 else math.inf

    def earn(self, blocks: float, burst: float) -> None:
        """Budgets let so many blocks through since the last plan, and would never let more than a burst."""
        if self._shadows is not None:
            self._shadows.earn(blocks, burst)

    # -- what was used

    def lose(self, given: Array) -> None:
        """Slots of the book changed hands."""
        if self._shadows is not None and len(given):
            self._shadows.lose(given)

    def hear(self, index: ArrayIndex, rows: Array, slots: Array, rule: int, inflation: float) -> int:
        """The uses that the book put down happen, request by request. Returns when the first was, in µs; 0: none.

        `rule` and `inflation` make the notes' keys of eviction.
        """
        notes = self._book.notes
        uses = int(notes["left"][slots].sum())
        if uses == 0:
            return 0
        t = self._scratch(uses)
        requests = tell_requests(
            index.tables.blocks, notes, rows, slots, t.ids, t.ends, t.arrivals_s, t.input_tokens, t.block_tokens
        )
        first_us = round(float(t.arrivals_s[0]) * 1e6)
        if self.arms and self.due_us == 0:
            self.due_us = first_us + int(hazard.PERIOD_S * 1e6)
            self._learned_us = first_us + int(LEARNING_S * 1e6)
            self._tables.levels[SWEPT_S] = t.arrivals_s[0]
        shadows = self._shadows if self._shadows is not None else ShadowTiers.none()
        shadows.ranked = noted.serve_requests(
            notes, self._book.counts, t, requests, self._heat(shadows), rule, inflation, self.arms != 0,
            self._learned(), shadows.trace(t), SHADOWED_MAX if self._shadows is not None else 0, shadows.sample,
            shadows.tiers, self._duel, shadows.ghosts, shadows.ranking, shadows.is_ranking, shadows.ranked, MARGIN,
        )  # fmt: skip
        return first_us

    def end_turns(self) -> None:
        """Where 200 requests are over, the arm that found the most leads."""
        if self._shadows is None:
            return
        turns = int(self._book.counts[REQUESTS]) // TURN_REQUESTS
        for _ in range(turns - self._turns):
            self._ended += 1
            noted.close_turn(self._duel, self._shadows.tiers, self._ended)
        self._turns = turns

    def rank(self, now_us: int) -> None:
        """The time of a ranked batch has come."""
        shadows = self._shadows
        if shadows is None:
            return
        trace = shadows.trace(self._scratch(0))
        noted.rank_shadow(
            trace, self._heat(shadows), shadows.tiers, shadows.ranking, shadows.ranked, shadows.is_ranking, now_us / 1e6
        )
        shadows.ranked = 0

    def sweep_if_due(self, now_us: int, capacity: int, moves: int) -> bool:
        """Where its time has come, renew all that blocks are worth. `moves` into a volume of `capacity` so far.

        Returns whether blocks may move by it now.
        """
        if self.due_us == 0 or now_us < self.due_us:
            return False
        period_us = int(hazard.PERIOD_S * 1e6)
        self.due_us += ((now_us - self.due_us) // period_us + 1) * period_us
        notes, t = self._book.notes, self._scratch(0)
        self._book.part_from_lost()
        order = self._book.used()
        shadows = self._shadows if self._shadows is not None else ShadowTiers.none()
        duels, swaps = self._shadows is not None, now_us >= self._learned_us
        if duels:
            capacity, moves = shadows.tiers.by_worth.capacity, int(shadows.tiers.by_worth.counts[MOVES])
        noted.sweep(
            t, self._heat(shadows), self._learned(), order, capacity, moves, int(self._book.counts[REQUESTS]),
            duels and swaps, shadows.trace(t), shadows.in_sample(notes, order), shadows.tiers, shadows.waiting, MARGIN,
            now_us / 1e6,
        )  # fmt: skip
        return swaps

    def price_seen(self, price: float) -> None:
        """Where no shadow says it: the worth of the best block that the budget could not pay for, at a sweep."""
        if self._shadows is None:
            levels = self._tables.levels
            levels[PRICE] = price_after(float(levels[PRICE]), price)

    def _scratch(self, uses: int) -> TimedTrace:
        notes = self._book.notes
        ids, ends, input_tokens, block_tokens = (np.empty(uses, np.int64) for _ in range(4))
        return TimedTrace(
            ids, ends, np.empty(uses), input_tokens, block_tokens, notes["depth"], notes["parent"],
            np.zeros(uses, np.int64),
        )  # fmt: skip

    def _heat(self, shadows: ShadowTiers) -> Heat:
        notes = self._book.notes
        return Heat(notes["touches"], notes["touched_s"], notes["score"], shadows.pins)

    def _learned(self) -> Learned:
        notes = self._book.notes
        return self._tables._replace(classes=notes["group"], kinds=notes["kind"], worth=notes["worth"])

    # -- checkpoints

    def saved(self) -> SavedLearning:
        tables, duel = self._tables, self._duel
        return SavedLearning(
            self.arms, self.due_us, tables.hits.tobytes(), tables.exposure.tobytes(), tables.values.tobytes(),
            tables.levels.tobytes(), tables.counts.tobytes(), self.leader, self._turns, self._ended, self._learned_us,
            duel.scores.tobytes(), duel.hits.tobytes(), duel.moves.tobytes(),
            None if self._shadows is None else self._shadows.saved(self._book.used()),
        )  # fmt: skip

    def restore(self, saved: SavedLearning) -> None:
        """Into one that has learned nothing, on the book that was saved with it. Raises `ValueError`."""
        if saved.arms == 0:
            return
        tables = self._tables
        tables.hits[:] = np.frombuffer(saved.hits).reshape(tables.hits.shape)
        tables.exposure[:] = np.frombuffer(saved.exposure).reshape(tables.exposure.shape)
        tables.values[:] = np.frombuffer(saved.values).reshape(tables.values.shape)
        tables.levels[:] = np.frombuffer(saved.levels)
        tables.counts[:] = np.frombuffer(saved.counts, np.int64)
        self.arms, self.due_us, self._learned_us = saved.arms, saved.due_us, saved.learned_us
        self._turns, self._ended = saved.turns, saved.ended
        self._duel = _duel(saved.arms)
        self._duel.leader[0] = saved.leader
        self._duel.scores[:] = np.frombuffer(saved.scores)
        self._duel.hits[:] = np.frombuffer(saved.found, np.int64)
        self._duel.moves[:] = np.frombuffer(saved.moved, np.int64)
        if saved.shadows is not None:
            self._shadows = ShadowTiers(self._book.notes, saved.shadows.room)
            self._shadows.restore(saved.shadows, self._book.used())


def _duel(arms: int) -> Duel:
    by_arm = [np.zeros(ARMS, kind) for kind in (np.float64, np.int64, np.int64)]
    return Duel(arms, by_arm[0], by_arm[1], by_arm[2], np.zeros(1, np.int64))
