"""What every replay counts, and of which requests."""

from __future__ import annotations

from typing import Any, NamedTuple

from advisor.index.jit import inlined

Array = Any
"""As numba types it."""

RUN_BLOCKS, RUN_TOKENS, HITS, COUNTERS = range(4)


class Trace(NamedTuple):
    """`requests.RequestTrace` for kernels. Requests before `counted_from` are not counted.

    `whole_blocks`: a request's last block counts as all others; otherwise it has what is left of the input.
    `run_tokens`: what each request found, filled.
    """

    ids: Array
    ends: Array
    input_tokens: Array
    block_tokens: Array
    depths: Array
    parents: Array
    counted_from: int
    whole_blocks: bool
    run_tokens: Array


@inlined
def leading(ids: Array, first: int, end: int, present: Array) -> int:
    """How many of a request's leading blocks are present."""
    run = 0
    while first + run < end and present[ids[first + run]]:
        run += 1
    return run


@inlined
def arrive(t: Trace, r: int, first: int, end: int, present: Array, out: Array) -> bool:
    """Count what request `r` finds when it arrives. Whether it is one of those that are counted."""
    run = leading(t.ids, first, end, present)
    whole = run == end - first and run > 0 and not t.whole_blocks
    tokens = t.input_tokens[r] if whole else run * t.block_tokens[r]
    t.run_tokens[r] = tokens
    if r < t.counted_from:
        return False
    out[RUN_BLOCKS] += run
    out[RUN_TOKENS] += tokens
    return True
