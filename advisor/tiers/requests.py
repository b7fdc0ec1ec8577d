"""A trace with its arrival times, as the kernels of two tiers read it, and the same with a scan half-way."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from advisor.caches.requests import RequestTrace
from advisor.tiers.reads import TimedTrace

SCAN_REQUEST_BLOCKS = 64


def timed(trace: RequestTrace, arrivals_s: npt.ArrayLike, priorities: npt.ArrayLike | None = None) -> TimedTrace:
    """`arrivals_s` f64 and `priorities` by request; arrivals never fall. None: policies go by hashes alone."""
    return TimedTrace(
        trace.ids,
        trace.ends,
        np.asarray(arrivals_s, np.float64),
        trace.input_tokens,
        trace.block_tokens,
        trace.depths,
        trace.parents,
        np.zeros(trace.requests, np.int64) if priorities is None else np.asarray(priorities, np.int64),
    )


def cut_by_scan(trace: TimedTrace, fast_blocks: int) -> TimedTrace:
    """The first half of the requests, then one-off requests of 64 blocks, twice the fast tier in all.

    They arrive at the moment of the first request of the second half: nothing but the scan happens meanwhile.
    """
    half = len(trace.ends) // 2
    accesses = int(trace.ends[half - 1]) if half else 0
    scans = -(-2 * fast_blocks // SCAN_REQUEST_BLOCKS)
    blocks = len(trace.depths)
    new = np.arange(blocks, blocks + scans * SCAN_REQUEST_BLOCKS, dtype=np.int64)
    depths = np.tile(np.arange(SCAN_REQUEST_BLOCKS, dtype=np.int64), scans)
    block_tokens = int(trace.block_tokens[half])

    def then(values: npt.NDArray[np.int64], more: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.concatenate((values, more))

    def for_each_scan(value: int) -> npt.NDArray[np.int64]:
        return np.full(scans, value, np.int64)

    return TimedTrace(
        then(trace.ids[:accesses], new),
        then(trace.ends[:half], accesses + SCAN_REQUEST_BLOCKS * np.arange(1, scans + 1, dtype=np.int64)),
        np.concatenate((trace.arrivals_s[:half], np.full(scans, trace.arrivals_s[half]))),
        then(trace.input_tokens[:half], for_each_scan(SCAN_REQUEST_BLOCKS * block_tokens)),
        then(trace.block_tokens[:half], for_each_scan(block_tokens)),
        then(trace.depths, depths),
        then(trace.parents, np.where(depths == 0, -1, new - 1)),
        then(trace.priorities[:half], for_each_scan(0)),
    )
