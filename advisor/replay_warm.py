"""Compile what replays of traces compile, before the first one would."""

from __future__ import annotations

import numpy as np

from advisor.caches import POLICIES, RequestTrace, replay_cache
from advisor.caches.distances import stack_distances
from advisor.index.array_index import ArrayIndex
from advisor.index.keys import PlaceKey
from advisor.index.layout import IndexSize
from advisor.tiers import Costs, Tiering, replay_tiers, timed
from advisor.tiers.policies import ADMISSIONS
from event_plane.schema import RECORD_DTYPE

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


def warm_served() -> None:
    """A place run as a cache, by records that may be written to: a trace's, unlike a stream's."""
    index = ArrayIndex(IndexSize.for_blocks(256, 1024))
    records = np.zeros(2, RECORD_DTYPE)
    records["sequence_hash_lo"] = 1, 2
    place = index.place(PlaceKey(1, 3, "warm"))
    index.serve_from(records, place=place, namespace_id=1, capacity_blocks=2, now_us=0)
