"""How fast this machine reads memory at random: what any index of this size has to pay."""

from __future__ import annotations

import time

import numpy as np

from advisor.index.jit import kernel
from advisor.index.layout import Array, int64

_READS = 4_000_000


@kernel
def sum_at(values: Array, places: Array) -> int:
    total: int = int64(0)
    for i in range(len(places)):
        total += values[places[i]]
    return total


def random_access_ns(table_bytes: int) -> float:
    """Nanoseconds of one independent read of a random cache line in a table of `table_bytes`."""
    values = np.ones(table_bytes // 8, np.int64)
    places = np.random.default_rng(1).integers(0, len(values), _READS)
    sum_at(values, places[:1000])
    started = time.perf_counter()
    sum_at(values, places)
    return (time.perf_counter() - started) / _READS * 1e9
