"""Caches of one tier, replayed on a trace of requests: how many blocks each eviction policy finds. Pure, compiled.

The rules are those of the papers and simulators named at each; what is counted is said at `policies.CacheFigures`.
"""

from advisor.caches.policies import (
    CAPACITY_BLOCKS_MAX,
    POLICIES,
    CacheFigures,
    Replayed,
    UnknownPolicy,
    replay_cache,
    require_policy,
)
from advisor.caches.requests import RequestTrace

__all__ = [
    "CAPACITY_BLOCKS_MAX",
    "POLICIES",
    "CacheFigures",
    "Replayed",
    "RequestTrace",
    "UnknownPolicy",
    "replay_cache",
    "require_policy",
]
