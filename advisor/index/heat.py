"""Levels of heat: how often placed blocks were used, so that the hottest are found without looking at the rest.

Each block row has a level, each chunk of 256 rows an upper bound of its levels, and the histogram counts blocks by
level. Levels are exact up to 127 touches and then four to each doubling.
"""

from __future__ import annotations

from advisor.index.jit import inlined, routine
from advisor.index.layout import HEAT_CHUNK_SHIFT, HISTOGRAM, Tables, int64

EXACT_TOUCHES_MAX = 127
EXACT_LEVEL_MAX = EXACT_TOUCHES_MAX + 1


@routine
def coarse_level(touches: int) -> int:
    doublings = int64(7)
    while touches >> (doublings + 1):
        doublings += 1
    return EXACT_LEVEL_MAX + 1 + (doublings - 7) * 4 + ((touches >> (doublings - 2)) & 3)


@inlined
def level_of(touches: int) -> int:
    """Of a placed block: 1 where it was never used, at most 229."""
    if touches <= EXACT_TOUCHES_MAX:
        return touches + 1
    return coarse_level(touches)


@inlined
def set_level(t: Tables, row: int, before: int, level: int) -> None:
    """Move a block between levels; 0 is not placed."""
    if before == level:
        return
    s = t.state
    if before > 0:
        s[HISTOGRAM + before] -= 1
    if level > 0:
        s[HISTOGRAM + level] += 1
    t.heat[row] = level
    if level > t.peaks[row >> HEAT_CHUNK_SHIFT]:
        t.peaks[row >> HEAT_CHUNK_SHIFT] = level
