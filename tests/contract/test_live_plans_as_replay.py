"""One rule, two drivers: the live planner moves what a replay of the same requests moves."""

from __future__ import annotations

import random

import numpy as np
import pytest

from advisor.caches.requests import RequestTrace
from advisor.policies.instant_moves import InstantFold
from advisor.tiers import Costs, Tiering, policies, timed
from advisor.tiers.fast_tier import MOVES
from event_plane.schema import EventType, Namespace, RecordFlag

FAST_BLOCKS = 40
TENANT = Namespace(tenant="acme")
WATERMARKS = {"high_watermark": (FAST_BLOCKS + 0.5) / 100, "low_watermark": (FAST_BLOCKS + 0.1) / 100}
"""Between them lies no block: room is made for a block that comes, and for no other reason, as in a replay."""


def sessions(seed: int, requests: int) -> list[tuple[float, list[int]]]:
    """Arrivals and paths of hashes (from 1): sessions of growing length that share system prompts, and one-off ones."""
    chance = random.Random(seed)
    fresh = iter(range(100, 1_000_000))
    prompts = [[next(fresh) for _ in range(3)] for _ in range(3)]
    open_sessions: list[list[int]] = []
    served, now_s = [], 1_000.0
    for _ in range(requests):
        now_s += chance.choice([0.5, 2.0, 11.0])
        if open_sessions and chance.random() < 0.65:
            path = chance.choice(open_sessions[-8:])
        else:
            path = list(chance.choice(prompts))
            open_sessions.append(path)
        path += [next(fresh) for _ in range(chance.randint(1, 3))]
        served.append((now_s, list(path)))
    return served


def replayed(served: list[tuple[float, list[int]]], tiering: Tiering) -> tuple[set[int], int]:
    """Hashes in the fast tier at the end, and moves."""
    ids: dict[int, int] = {}
    parents: list[int] = []
    depths: list[int] = []
    accesses, ends = [], []
    for _, path in served:
        for depth, h in enumerate(path):
            if h not in ids:
                ids[h] = len(ids)
                parents.append(ids[path[depth - 1]] if depth else -1)
                depths.append(depth)
            accesses.append(ids[h])
        ends.append(len(accesses))
    tokens = np.array([16 * len(path) for _, path in served], np.int64)
    trace = RequestTrace(
        np.array(accesses, np.int64), np.array(ends, np.int64), tokens, np.full(len(served), 16, np.int64),
        np.array(depths, np.int64), np.array(parents, np.int64),
    )  # fmt: skip
    run = policies._run(timed(trace, [at for at, _ in served]), tiering, Costs(), scan_from=-1)
    names = list(ids)
    return {names[i] for i in np.flatnonzero(run.tier.present)}, int(run.tier.counts[MOVES])


def planned(
    served: list[tuple[float, list[int]]], tiering: Tiering, eviction: str | None = None
) -> tuple[set[int], int]:
    fold = InstantFold(
        [
            {"id": "fast", "speed_rank": 0, "capacity_blocks": 100, **WATERMARKS},
            {"id": "slow", "speed_rank": 1, "capacity_blocks": 4_096},
        ],
        {
            "admission": tiering.admission, "eviction": eviction or tiering.eviction,
            "moves_per_block": tiering.budget or 0.0, "hysteresis_s": 0.0,
            "promote_moves_max": 65_536, "demote_moves_max": 65_536, "moves_open_max": 65_536,
        },
    )  # fmt: skip
    for now_s, path in served:
        fold.tick(round(now_s * 1e6))
        present = next((at for at, h in enumerate(path) if not fold.held(h, TENANT)), len(path))
        parents = [0, *path]
        missing = [
            fold.event(EventType.STORE, "slow", h, TENANT, parents[at], flags=RecordFlag.COPY)
            for at, h in enumerate(path)
            if at >= present
        ]
        if missing:
            fold.send(missing)
        fold.use(path, TENANT)
    fold.tick(round(served[-1][0] * 1e6) + 40_000_000)
    moves = [move for move in fold.done if move.kind == "promote"]
    return {h for _, path in served for h in path if fold.fastest(h, TENANT) == "fast"}, len(moves)


@pytest.mark.parametrize("budget", [None, 0.2])
@pytest.mark.parametrize(
    ("admission", "eviction"),
    [("touch-2", "lru-leaf"), ("touch-2", "lfuda-leaf"), ("touch-3", "lru-leaf"), ("ghost", "lru-leaf"),
     ("ranked", "value")],
)  # fmt: skip
def test_same_requests_same_moves(
    admission: str, eviction: str, budget: float | None
) -> None:
    served = sessions(seed=3, requests=150)
    tiering = Tiering(admission, eviction, FAST_BLOCKS, budget)
    present, moves = replayed(served, tiering)
    assert moves > 3 * FAST_BLOCKS // 2, "the trace makes the tier change"
    assert planned(served, tiering) == (present, moves)


def test_same_requests_same_moves_where_arms_duel() -> None:
    served = sessions(seed=3, requests=300)
    tiering = Tiering("duel", "value", FAST_BLOCKS, None)
    present, moves = replayed(served, tiering)
    assert moves > 3 * FAST_BLOCKS // 2
    assert planned(served, tiering, "worth") == (present, moves)


@pytest.mark.parametrize(
    ("admission", "requests", "budget"),
    [("hazard", 150, None), ("hazard", 150, 0.2), ("auto", 300, None), ("auto", 300, 0.2)],
)
def test_what_goes_by_worth_moves_nearly_the_same(admission: str, requests: int, budget: float | None) -> None:
    """Of blocks that are worth the same, another one may leave first."""
    served = sessions(seed=3, requests=requests)
    tiering = Tiering(admission, "value", FAST_BLOCKS, budget)
    present, moves = replayed(served, tiering)
    live_present, live_moves = planned(served, tiering, "worth")
    assert live_moves == pytest.approx(moves, rel=0.1)
    assert len(live_present & present) >= 0.8 * FAST_BLOCKS
