"""Admissions and evictions of the fast tier by name, and a replay of one pair at one size and budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from advisor.errors import AdvisorError
from advisor.policies.rules import eviction as evictions
from advisor.policies.rules.hazard import CLASSES, HORIZON_MAX_S, TOLD_CLASSES
from advisor.policies.rules.score import NO_SCORE
from advisor.policies.rules.worth import MARGIN, SAVING_HORIZON_S, SAVING_MARGIN
from advisor.tiers import deciding, duelling, kernels
from advisor.tiers.fast_tier import FastTier
from advisor.tiers.figures import Costs, TierFigures
from advisor.tiers.learning import Learned
from advisor.tiers.reads import Heat, Reads, TimedTrace
from advisor.tiers.requests import cut_by_scan

FAST_BLOCKS_MAX = 2**31 - 1
UNLIMITED = 1e18
"""Blocks of budget that each first touch brings where there is no limit."""


class UnknownTiering(AdvisorError):
    """An admission, eviction, size or budget that there is not."""


@dataclass(slots=True)
class Run:
    """One replay's arrays. `hot` is filled when request `scan_from` arrives."""

    trace: TimedTrace
    heat: Heat
    tier: FastTier
    reads: Reads
    budget: float
    margin: float
    scan_from: int
    hot: npt.NDArray[np.bool_]

    def by_block(self) -> npt.NDArray[np.int64]:
        return np.zeros(len(self.trace.depths), np.int64)


def _at_each_request(kind: int, threshold: int = 0) -> Callable[[Run], None]:
    def run(r: Run) -> None:
        kernels.at_each_request(
            r.trace, r.heat, r.tier, r.reads, r.budget, kind, threshold, r.by_block(), r.scan_from, r.hot
        )

    return run


def _ranked(r: Run) -> None:
    is_waiting = np.zeros(len(r.trace.depths), np.bool_)
    kernels.in_ranked_batches(
        r.trace, r.heat, r.tier, r.reads, r.budget, r.by_block(), is_waiting, r.scan_from, r.hot
    )


def _learning(*arms: int) -> Callable[[Run], None]:
    def run(r: Run) -> None:
        blocks, capacity = len(r.trace.depths), r.tier.capacity
        saves = r.margin != MARGIN and duelling.BY_WORTH in arms
        chosen = (duelling.BY_WORTH,) if saves else arms
        duels = len(chosen) > 1
        rules = (evictions.VALUE, evictions.LRU_LEAF, evictions.LFUDA_LEAF, evictions.LRU_LEAF, evictions.LRU_LEAF)
        shadow = (FastTier.empty(blocks if duels else 0, capacity, rule) for rule in (*rules, evictions.VALUE))
        allowed = sum(1 << arm for arm in chosen)
        by_arm = [np.zeros(duelling.ARMS, kind) for kind in (np.float64, np.int64, np.int64)]
        leader = np.full(1, chosen[0], np.int64)
        duel = duelling.Duel(allowed, by_arm[0], by_arm[1], by_arm[2], leader)
        duelling.learning(
            r.trace,
            r.heat,
            r.tier,
            r.reads,
            r.budget,
            r.margin,
            Learned.nothing(
                blocks,
                SAVING_HORIZON_S if saves else HORIZON_MAX_S,
                TOLD_CLASSES if r.trace.priorities.any() else CLASSES,
            ),
            duelling.Shadows(*shadow),
            duel,
            r.by_block(),
            r.by_block(),
            r.by_block(),
            np.zeros(blocks, np.bool_),
            r.by_block(),
            np.arange(blocks),
            r.scan_from,
            r.hot,
        )

    return run


@dataclass(frozen=True, slots=True)
class Admission:
    """How one is run, and the eviction that goes with it where none is named."""

    run: Callable[[Run], None]
    eviction: str


ADMISSIONS = {
    "always": Admission(_at_each_request(deciding.ALWAYS), "lru"),
    "touch-2": Admission(_at_each_request(deciding.TOUCHES, 2), "lfuda-leaf"),
    "touch-3": Admission(_at_each_request(deciding.TOUCHES, 3), "lru-leaf"),
    "ghost": Admission(_at_each_request(deciding.GHOST), "lru-leaf"),
    "ranked": Admission(_ranked, "value"),
    "hazard": Admission(_learning(duelling.BY_WORTH), "value"),
    "duel": Admission(_learning(duelling.FIRST, duelling.SECOND, duelling.THIRD), "value"),
    "auto": Admission(_learning(*range(duelling.ARMS)), "value"),
}
EVICTIONS = ("lru", "lru-leaf", "lfuda-leaf")


@dataclass(frozen=True, slots=True)
class Tiering:
    """What decides over a fast tier of so many blocks. `budget`: moves for each different block, None unlimited.

    `save_moves`: `hazard` and `auto` go by worth alone, and move only what brings a quarter of a hit soon.

    Raises `UnknownTiering`, naming what there is.
    """

    admission: str
    eviction: str
    fast_blocks: int
    budget: float | None
    save_moves: bool = False

    def __post_init__(self) -> None:
        if self.admission not in ADMISSIONS:
            known = ", ".join(ADMISSIONS)
            raise UnknownTiering(f"admission {self.admission!r} is not known: choose one of {known}")
        own = ADMISSIONS[self.admission].eviction
        if self.eviction not in EVICTIONS and self.eviction != own:
            known = ", ".join(dict.fromkeys((*EVICTIONS, own)))
            raise UnknownTiering(f"{self.admission} has no eviction {self.eviction!r}: choose one of {known}")
        if not 1 <= self.fast_blocks <= FAST_BLOCKS_MAX:
            raise UnknownTiering(
                f"a fast tier of {self.fast_blocks} is no number of blocks: give 1 to {FAST_BLOCKS_MAX}"
            )
        if self.budget is not None and not 0 <= self.budget <= 1e6:
            raise UnknownTiering(f"budget {self.budget} is no number of moves for each block: give 0 to 1000000")


def own_eviction(admission: str) -> str:
    """Where none is named. Raises `UnknownTiering`."""
    if admission not in ADMISSIONS:
        raise UnknownTiering(f"admission {admission!r} is not known: choose one of {', '.join(ADMISSIONS)}")
    return ADMISSIONS[admission].eviction


def replay_tiers(trace: TimedTrace, tiering: Tiering, costs: Costs, *, counted_from: int = 0) -> TierFigures:
    """Run the whole trace. What requests before `counted_from` read is not counted, what they move is."""
    run = _run(trace, tiering, costs, counted_from=counted_from, scan_from=-1)
    return TierFigures.of(run.tier, run.reads)


def found_by_request(trace: TimedTrace, tiering: Tiering) -> npt.NDArray[np.int64]:
    """Tokens of each request's run that it found in the fast tier."""
    found: npt.NDArray[np.int64] = _run(trace, tiering, Costs(), scan_from=-1).reads.fast_tokens
    return found


def scan_survival(trace: TimedTrace, tiering: Tiering, costs: Costs) -> float:
    """Of the blocks in the fast tier touched at least twice before the scan, the share there after it; 1 of none."""
    if not len(trace.ends):
        return 1.0
    run = _run(cut_by_scan(trace, tiering.fast_blocks), tiering, costs, scan_from=len(trace.ends) // 2)
    hot = int(run.hot.sum())
    return float((run.hot & run.tier.present).sum() / hot) if hot else 1.0


def _run(trace: TimedTrace, tiering: Tiering, costs: Costs, *, scan_from: int, counted_from: int = 0) -> Run:
    blocks = len(trace.depths)
    heat = Heat(
        np.zeros(blocks, np.int64), np.zeros(blocks), np.full(blocks, NO_SCORE), np.zeros(blocks, np.int64)
    )
    rates = (costs.fast_bytes_per_s, costs.slow_bytes_per_s, costs.prefill_tokens_per_s)
    run = Run(
        trace,
        heat,
        FastTier.empty(blocks, min(tiering.fast_blocks, blocks), evictions.NAMES[tiering.eviction]),
        Reads.counted(len(trace.ends), counted_from, *rates, float(costs.token_bytes)),
        UNLIMITED if tiering.budget is None else tiering.budget,
        SAVING_MARGIN if tiering.save_moves else MARGIN,
        scan_from,
        np.zeros(blocks, np.bool_),
    )
    if blocks:
        ADMISSIONS[tiering.admission].run(run)
    return run
