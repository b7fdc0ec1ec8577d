"""What every replay counts, and of which requests."""

from __future__ import annotations

from typing import Any, NamedTuple

from advisor.index.jit import inlined

Array = Any
"""As numba types it."""

RUN_BLOCKS, RUN_TOKENS, HITS, COUNTERS = range(4)


class Trace(NamedTuple):
    """`requests.RequestTrace` for kernels, and from which request on is counted. `run_tokens`: by request, filled."""

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
def count_run(t: Trace, r: int, run: int, blocks: int, out: Array) -> None:
    """Request r, of so many blocks, found the first `run` of them present.

    With `t.whole_blocks` a last block counts as all others, without it has what is left of the input.
    """
    tokens = t.input_tokens[r] if run == blocks and run > 0 and not t.whole_blocks else run * t.block_tokens[r]
    t.run_tokens[r] = tokens
    if r >= t.counted_from:
        out[RUN_BLOCKS] += run
        out[RUN_TOKENS] += tokens
