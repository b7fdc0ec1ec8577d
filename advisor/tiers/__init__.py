"""Two tiers, replayed on a trace of requests: what each admission finds in the fast one, and for how many moves.

Everything is written through to the slow tier; the fast one holds copies. Pure, compiled; the rules are those of
`advisor.policies.rules`, which the live planner asks too.
"""

from advisor.tiers.figures import Costs, Spread, TierFigures
from advisor.tiers.policies import (
    ADMISSIONS,
    EVICTIONS,
    Tiering,
    UnknownTiering,
    found_by_request,
    own_eviction,
    replay_tiers,
    scan_survival,
)
from advisor.tiers.reads import TimedTrace
from advisor.tiers.requests import timed

__all__ = [
    "ADMISSIONS",
    "EVICTIONS",
    "Costs",
    "Spread",
    "TierFigures",
    "Tiering",
    "TimedTrace",
    "UnknownTiering",
    "found_by_request",
    "own_eviction",
    "replay_tiers",
    "scan_survival",
    "timed",
]
