"""Load or recompute: what a reusable run costs to load, and how much of it is worth loading."""

from __future__ import annotations

from advisor.index.jit import rule


@rule
def first_token_s(
    fast_bytes: float,
    slow_bytes: float,
    computed_tokens: float,
    fast_rate: float,
    slow_rate: float,
    prefill_rate: float,
) -> float:
    """Both tiers are read at once, then the rest is computed. Rates in bytes/s and tokens/s."""
    return max(fast_bytes / fast_rate, slow_bytes / slow_rate) + computed_tokens / prefill_rate
