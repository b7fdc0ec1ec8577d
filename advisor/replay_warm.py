"""Compile what replays of traces compile, before the first one would."""

from __future__ import annotations

import numpy as np

from advisor.caches import POLICIES, RequestTrace, replay_cache
from advisor.caches.distances import stack_distances
from advisor.tiers import Costs, Tiering, replay_tiers, timed
from advisor.tiers.policies import ADMISSIONS

_HASHES = np.array([[1, 0], [2, 0], [1, 0], [3, 0]], np.uint64)
"""Two requests of two blocks, with one in common."""


def _small_trace() -> RequestTrace:
    return RequestTrace.of(_HASHES, ends=[2, 4], depths=[0, 1, 0, 1], input_tokens=[32, 32], block_tokens=[16, 16])


def warm_caches() -> None:
    """Through each policy of one tier, and the pictures' distances."""
    trace = _small_trace()
    for policy in POLICIES:
        replay_cache(trace, policy, 2)
    stack_distances(trace.ids, np.empty(trace.blocks, np.int64), np.zeros(5, np.int64), np.empty(4, np.int64))


def warm_tiers() -> None:
    """Through each admission of two tiers."""
    trace = timed(_small_trace(), [0.0, 1.0])
    for admission, how in ADMISSIONS.items():
        replay_tiers(trace, Tiering(admission, how.eviction, 2, None), Costs())
