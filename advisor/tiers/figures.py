"""What a replay through two tiers comes to, as policies' authors count it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from advisor.tiers.fast_tier import BOUNCED, MOVES, USEFUL, FastTier
from advisor.tiers.reads import (
    ALWAYS_LOAD,
    CHOOSE,
    FAST_BLOCKS,
    FAST_TOKENS,
    FIRST_TOUCHES,
    FULL_RUNS,
    INPUT_TOKENS,
    RECOMPUTED_TOKENS,
    RUNS,
    Reads,
)


@dataclass(frozen=True)
class Costs:
    """What reading, computing and keeping costs. Rates in bytes/s and tokens/s; prices in dollars, 0 where none is set.

    `recompute_dollars_per_hour` is what a second of prefill costs, times 3,600.
    """

    token_bytes: int = 327_680
    fast_bytes_per_s: float = 6e9
    slow_bytes_per_s: float = 1e9
    prefill_tokens_per_s: float = 10_000.0
    fast_dollars_per_gb_month: float = 0.0
    moved_dollars_per_gb: float = 0.0
    recompute_dollars_per_hour: float = 0.0

    @property
    def priced(self) -> bool:
        return bool(self.fast_dollars_per_gb_month or self.moved_dollars_per_gb or self.recompute_dollars_per_hour)


@dataclass(frozen=True, slots=True)
class Spread:
    """Of the time to first token, in seconds, over the requests that are counted."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: npt.NDArray[np.float64]) -> Spread:
        if not len(seconds):
            return cls(0.0, 0.0, 0.0, 0.0)
        p50, p90, p99 = (float(value) for value in np.percentile(seconds, (50, 90, 99)))
        return cls(float(seconds.mean()), p50, p90, p99)


@dataclass(frozen=True, slots=True)
class TierFigures:
    """`fhit`: tokens of the reusable run found in the fast tier over input tokens.

    `moves_per_block`: moves over different blocks. `precision`: moves that were hit before they left. `ping_pong`:
    moves of a block dropped less than 600 s before. `full`: requests whose whole run was in the fast tier over those
    that had one. `write_amplification`: moves over block hits. All of them are 0 where nothing was counted.
    `first_token_s` and `recomputed_tokens`: choosing for each read how much of the run to load.
    """

    fhit: float
    moves: int
    moves_per_block: float
    precision: float
    write_amplification: float
    ping_pong: float
    full: float
    first_token_s: Spread
    first_token_s_always_load: Spread
    recomputed_tokens: int

    @classmethod
    def of(cls, tier: FastTier, reads: Reads) -> TierFigures:
        """Counts of moves cover the whole run, those of reads what is counted of it."""
        counts, moves = reads.counts, int(tier.counts[MOVES])
        seconds = reads.first_token_s[reads.counted_from :]
        return cls(
            fhit=_share(counts[FAST_TOKENS], counts[INPUT_TOKENS]),
            moves=moves,
            moves_per_block=_share(moves, counts[FIRST_TOUCHES]),
            precision=_share(tier.counts[USEFUL], moves),
            write_amplification=_share(moves, counts[FAST_BLOCKS]),
            ping_pong=_share(tier.counts[BOUNCED], moves),
            full=_share(counts[FULL_RUNS], counts[RUNS]),
            first_token_s=Spread.of(seconds[:, CHOOSE]),
            first_token_s_always_load=Spread.of(seconds[:, ALWAYS_LOAD]),
            recomputed_tokens=int(counts[RECOMPUTED_TOKENS]),
        )


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0
