"""How likely a block is used soon: classes of blocks, and what became of each class by age, learned as it happens.

A block's class says how often it was used and after which gap; its age is the time since its last use. Of each class
and bin of ages two sums are kept: hits, and exposure, the share of the bin that blocks have lived through. Hits over
exposure is the hazard of the bin.
"""

from __future__ import annotations

import math
from typing import Any

from advisor.index.jit import inlined, routine

Array = Any
"""f64 (classes, bins) or (classes, bins + 1), as numba types it."""

BINS = 25
"""Ages of whole seconds up to 4, then two to each doubling, the last one from 4,096 s on."""
KINDS = 3
NEW_CHAIN, CONTINUATION, PARTIAL = range(KINDS)
"""Of a block used once: stored by a request that found nothing, or after blocks that were known, or not full."""
BANDS = 7
GAPS = 4
CLASSES = KINDS + BANDS * GAPS


@inlined
def age_bin(age_s: float) -> int:
    """Which of `BINS` an age falls in."""
    if age_s < 4.0:
        return max(0, int(age_s))
    fraction, exponent = math.frexp(age_s)
    found = 2 * (exponent - 1) + (1 if fraction >= 0.75 else 0)
    return min(found, BINS - 1)


@inlined
def bin_start_s(number: int) -> float:
    if number < 4:
        return float(number)
    start = 2.0 ** (number >> 1)
    return start * 1.5 if number & 1 else start


@inlined
def bin_place(age_s: float) -> float:
    """The bin and how much of it has passed, as one number: 3.5 is the middle of bin 3. The last goes on for ever."""
    number = age_bin(age_s)
    start = bin_start_s(number)
    width = start if number == BINS - 1 else bin_start_s(number + 1) - start
    return number + (age_s - start) / width


@inlined
def block_class(touches: int, kind: int, gap_s: float) -> int:
    """`gap_s`: between the last two uses."""
    if touches <= 1:
        return kind
    if touches <= 3:
        band = touches - 2
    else:
        band = 2 if touches <= 5 else 3 if touches <= 8 else 4 if touches <= 15 else 5 if touches <= 31 else 6
    gap = 0 if gap_s < 30.0 else 1 if gap_s < 120.0 else 2 if gap_s < 480.0 else 3
    return KINDS + band * GAPS + gap


@inlined
def expose(exposure: Array, group: int, from_s: float, to_s: float) -> None:
    """A block of class `group` lived through these ages unused."""
    start = bin_place(from_s)
    end = bin_place(to_s)
    while start < end:
        number = min(int(start), BINS - 1)
        stop = min(end, number + 1.0) if number < BINS - 1 else end
        exposure[group, number] += stop - start
        start = stop


@routine
def fade(hits: Array, exposure: Array, factor: float) -> None:
    for group in range(CLASSES):
        for number in range(BINS):
            hits[group, number] *= factor
            exposure[group, number] *= factor


@routine
def accumulate(hits: Array, exposure: Array, cumulative: Array, prior: float) -> None:
    """`cumulative[c, k]`: expected uses of a block of class c up to bin k's start, at the hazards of now.

    A class's hazard leans on that of all classes with the weight of `prior` blocks.
    """
    for group in range(CLASSES):
        cumulative[group, 0] = 0.0
    for number in range(BINS):
        all_hits = 0.01
        all_exposure = 1.0
        for group in range(CLASSES):
            all_hits += hits[group, number]
            all_exposure += exposure[group, number]
        common = all_hits / all_exposure
        for group in range(CLASSES):
            hazard = (hits[group, number] + prior * common) / (exposure[group, number] + prior)
            cumulative[group, number + 1] = cumulative[group, number] + min(0.95, hazard)


@inlined
def expected_uses(cumulative: Array, group: int, age_s: float, within_s: float) -> float:
    """Of a block of class `group` and this age."""
    start = bin_place(age_s)
    end = bin_place(age_s + within_s)
    a = min(int(start), BINS - 1)
    b = min(int(end), BINS - 1)
    low = cumulative[group, a] + (start - a) * (cumulative[group, a + 1] - cumulative[group, a])
    high = cumulative[group, b] + (end - b) * (cumulative[group, b + 1] - cumulative[group, b])
    return high - low
