"""What each request finds, and what its first token takes: counted the same for every policy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from advisor.index.jit import routine
from advisor.policies.rules.reading import first_token_s
from advisor.tiers.fast_tier import USEFUL, FastTier

Array = Any
"""As numba types it."""

INPUT_TOKENS, FAST_TOKENS, FAST_BLOCKS, RUNS, FULL_RUNS, FIRST_TOUCHES, RECOMPUTED_TOKENS = range(7)
ALWAYS_LOAD, CHOOSE = range(2)


class TimedTrace(NamedTuple):
    """`caches.RequestTrace` with arrival times and priorities by request, for kernels."""

    ids: Array
    ends: Array
    arrivals_s: Array
    input_tokens: Array
    block_tokens: Array
    depths: Array
    parents: Array
    priorities: Array


class Heat(NamedTuple):
    """What is known of each block, whatever tier it is in: `pins` is the request (from 1) that last used it."""

    touches: Array
    last_s: Array
    scores: Array
    pins: Array


class Reads(NamedTuple):
    """`counts` by the names above; `first_token_s` (requests, 2): always loading, and choosing for each read.

    `fast_tokens`: what each request found in the fast tier, counted or not.
    Rates in bytes/s and tokens/s. What is recomputed is counted for choosing.
    """

    counts: Array
    first_token_s: Array
    fast_tokens: Array
    counted_from: int
    fast_rate: float
    slow_rate: float
    prefill_rate: float
    token_bytes: float

    @classmethod
    def counted(
        cls,
        requests: int,
        counted_from: int,
        fast_rate: float,
        slow_rate: float,
        prefill_rate: float,
        token_bytes: float,
    ) -> Reads:
        """Nothing counted yet."""
        counts = np.zeros(7, np.int64)
        by_request = (np.zeros((requests, 2)), np.zeros(requests, np.int64))
        return cls(counts, *by_request, counted_from, fast_rate, slow_rate, prefill_rate, token_bytes)


@routine
def count_read(t: TimedTrace, r: int, first: int, end: int, heat: Heat, tier: FastTier, reads: Reads) -> int:
    """The blocks of the run, which end at the first one never seen. Call it before the request touches anything.

    To choose is to load the leading part of the run that gives the soonest first token, perhaps none.
    """
    counted = r >= reads.counted_from
    last = end - 1
    last_tokens = t.input_tokens[r] - (end - first - 1) * t.block_tokens[r]
    run = 0
    fast = 0
    fast_tokens = 0.0
    tokens = 0.0
    best_s = t.input_tokens[r] / reads.prefill_rate
    best_tokens = 0.0
    loaded_s = best_s
    for i in range(first, end):
        block = t.ids[i]
        if heat.touches[block] == 0:
            break
        run += 1
        block_tokens = last_tokens if i == last else t.block_tokens[r]
        tokens += block_tokens
        if tier.present[block]:
            fast += 1
            fast_tokens += block_tokens
            if not tier.hit[block]:
                tier.hit[block] = True
                tier.counts[USEFUL] += 1
        loaded_s = first_token_s(
            fast_tokens * reads.token_bytes,
            (tokens - fast_tokens) * reads.token_bytes,
            t.input_tokens[r] - tokens,
            reads.fast_rate,
            reads.slow_rate,
            reads.prefill_rate,
        )
        if loaded_s < best_s:
            best_s = loaded_s
            best_tokens = tokens
    reads.first_token_s[r, ALWAYS_LOAD] = loaded_s
    reads.first_token_s[r, CHOOSE] = best_s
    reads.fast_tokens[r] = int(fast_tokens)
    if counted:
        reads.counts[INPUT_TOKENS] += t.input_tokens[r]
        reads.counts[FAST_TOKENS] += int(fast_tokens)
        reads.counts[FAST_BLOCKS] += fast
        reads.counts[RUNS] += run > 0
        reads.counts[FULL_RUNS] += run > 0 and fast == run
        reads.counts[RECOMPUTED_TOKENS] += t.input_tokens[r] - int(best_tokens)
    return run
