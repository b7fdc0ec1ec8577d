"""What every replay counts, and of which requests."""

from __future__ import annotations

from typing import Any

from advisor.index.jit import inlined

Array = Any
"""As numba types it."""

RUN_BLOCKS, RUN_TOKENS, HITS, COUNTERS = range(4)


@inlined
def leading(ids: Array, first: int, end: int, present: Array) -> int:
    """How many of a request's leading blocks are present."""
    run = 0
    while first + run < end and present[ids[first + run]]:
        run += 1
    return run


@inlined
def count_run(out: Array, run: int, blocks: int, input_tokens: int, block_tokens: int, whole_blocks: bool) -> None:
    """`whole_blocks`: a last block counts as all others; otherwise it has what is left of the input."""
    out[RUN_BLOCKS] += run
    if run == blocks and run > 0 and not whole_blocks:
        out[RUN_TOKENS] += input_tokens
    else:
        out[RUN_TOKENS] += run * block_tokens
