"""Which threshold of touches would find the most: one shadow of the fast volume for each, on a sample of the blocks.

A shadow holds hashes, moves nothing, and gives way by last use. The sample is one of `SAMPLE` blocks, by tag, and a
shadow is as much smaller than the volume. Scores and the turn of the lead are `rules.duel`'s.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from advisor.policies.rules.admission import touched_enough
from advisor.policies.rules.duel import MOVE_HITS, TURN_REQUESTS, duel_score, leader_of

SAMPLE = 16
THRESHOLDS = (1, 2, 3)
SHADOW_BLOCKS_MAX = 1 << 16


class SavedDuel(msgspec.Struct):
    """`Duel` in a checkpoint: each shadow's tags, the first to go first."""

    shadows: tuple[list[int], ...] = ([], [], [])
    scores: tuple[float, ...] = (0.0, 0.0, 0.0)
    hits: tuple[int, ...] = (0, 0, 0)
    moves: tuple[int, ...] = (0, 0, 0)
    leader: int = 1
    requests: int = 0


class Duel:
    """Fed with touches, in order; asked for the threshold that leads."""

    def __init__(self) -> None:
        self._shadows: list[dict[int, None]] = [{} for _ in THRESHOLDS]
        self._scores = np.zeros(len(THRESHOLDS))
        self._hits = [0] * len(THRESHOLDS)
        self._moves = [0] * len(THRESHOLDS)
        self._leader = 1
        self._requests = 0

    @property
    def threshold(self) -> int:
        """From which touch on blocks should come."""
        return THRESHOLDS[self._leader]

    def touch(self, tags: list[int], touches: list[int], roots: int, fast_blocks: int) -> None:
        """Blocks were used, `roots` of them the first of their sequence: so many requests."""
        room = max(1, min(fast_blocks // SAMPLE, SHADOW_BLOCKS_MAX))
        for tag, count in zip(tags, touches, strict=True):
            # The low bits name the slot of the note: the sample is taken by others.
            if (tag >> 40) % SAMPLE:
                continue
            for arm, threshold in enumerate(THRESHOLDS):
                self._touch_shadow(arm, tag, touched_enough(count, threshold), room)
        self._requests += roots
        while self._requests >= TURN_REQUESTS:
            self._requests -= TURN_REQUESTS
            self._end_turn()

    def _touch_shadow(self, arm: int, tag: int, may_come: bool, room: int) -> None:
        shadow = self._shadows[arm]
        if tag in shadow:
            self._hits[arm] += 1
            del shadow[tag]
            shadow[tag] = None
        elif may_come:
            self._moves[arm] += 1
            shadow[tag] = None
            while len(shadow) > room:
                del shadow[next(iter(shadow))]

    def _end_turn(self) -> None:
        for arm in range(len(THRESHOLDS)):
            score = duel_score(float(self._scores[arm]), self._hits[arm], self._moves[arm], MOVE_HITS)
            self._scores[arm] = score
            self._hits[arm] = self._moves[arm] = 0
        self._leader = int(leader_of(self._scores, (1 << len(THRESHOLDS)) - 1, self._leader))

    def saved(self) -> SavedDuel:
        return SavedDuel(
            tuple(list(shadow) for shadow in self._shadows), tuple(self._scores.tolist()), tuple(self._hits),
            tuple(self._moves), self._leader, self._requests,
        )  # fmt: skip

    def restore(self, saved: SavedDuel) -> None:
        self._shadows = [dict.fromkeys(tags) for tags in saved.shadows]
        self._scores = np.array(saved.scores)
        self._hits, self._moves = list(saved.hits), list(saved.moves)
        self._leader, self._requests = saved.leader, saved.requests

    def described(self) -> list[Any]:
        """For a digest."""
        return list(msgspec.structs.astuple(self.saved()))
