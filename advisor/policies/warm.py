"""Compile what the planner compiles, before a service's first plan would."""

from __future__ import annotations

import numpy as np

from advisor.policies.instant_moves import InstantFold
from advisor.policies.rules.duel import TURN_REQUESTS
from advisor.policies.state import PolicyState
from event_plane.schema import Namespace


def warm() -> None:
    """A few plans that need every kernel of the planner."""
    tenant = Namespace(tenant="warm")
    volumes = [
        {"id": "fast", "speed_rank": 0, "capacity_blocks": 4},
        {"id": "slow", "speed_rank": 1, "capacity_blocks": 64},
    ]
    quotas = [{"tenant": "warm", "volume": "fast", "blocks": 4}]
    fold = InstantFold(volumes, {"admission": "auto", "eviction": "lfuda-leaf", "quotas": quotas}, blocks_max=256)
    for at in range(1, 9):
        fold.store("slow", [10 * at, 10 * at + 1], tenant)
        for _ in range(TURN_REQUESTS // 8):
            fold.use([10 * at, 10 * at + 1], tenant)
        fold.tick(at * 6_000_000)
    state = fold.fold.policies
    state.learning.lose(np.zeros(1, np.int64))
    PolicyState().restore(state.saved())
