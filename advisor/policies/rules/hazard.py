"""How likely a block is used soon: classes of blocks, and what became of each class by age, learned as it happens.

A block's class says how often it was used, after which gap, and by what request last; its age is the time since its
last use. Of each class and bin of ages two sums are kept: hits, and exposure, the share of the bin that blocks have
lived through. Hits over exposure is the hazard of the bin.
"""

from __future__ import annotations

import math
from typing import Any

from advisor.index.jit import rule

Array = Any
"""f64 (classes, bins) or (classes, bins + 1), as numba types it: `CLASSES`, or `TOLD_CLASSES` with priorities."""

BINS = 25
"""Ages of whole seconds up to 4, then two to each doubling, the last one from 4,096 s on."""
PERIOD_S = 10.0
HORIZON_MIN_S = 20.0
HORIZON_MAX_S = 900.0
PRIOR_BLOCKS = 5.0
SHAPE_PRIOR_BLOCKS = 60.0
"""Blocks of a class come a request at a time: what shapes have in common gives way slowly."""
KINDS = 3
NEW_CHAIN, CONTINUATION, PARTIAL = range(KINDS)
"""Of a block used once: stored by a request that found nothing, or after blocks that were known, or not full."""
BANDS = 10
GAPS = 5
BY_HASH = KINDS + BANDS * GAPS
SHAPES = 8
"""Of the request that last used a block: how much of it was new, and whether it was long."""
LONG_BLOCKS = 32
PRIORITIES = 4
"""Of that request too, where told: higher ones are as the highest. Each has classes of its own."""
CLASSES = BY_HASH * SHAPES
TOLD_CLASSES = CLASSES * PRIORITIES


@rule
def age_bin(age_s: float) -> int:
    """Which of `BINS` an age falls in."""
    if age_s < 4.0:
        return max(0, int(age_s))
    fraction, exponent = math.frexp(age_s)
    found = 2 * (exponent - 1) + (1 if fraction >= 0.75 else 0)
    return min(found, BINS - 1)


@rule
def bin_start_s(number: int) -> float:
    if number < 4:
        return float(number)
    start = 2.0 ** (number >> 1)
    return start * 1.5 if number & 1 else start


@rule
def bin_place(age_s: float) -> float:
    """The bin and how much of it has passed, as one number: 3.5 is the middle of bin 3. The last goes on for ever."""
    number = age_bin(age_s)
    start = bin_start_s(number)
    width = start if number == BINS - 1 else bin_start_s(number + 1) - start
    return number + (age_s - start) / width


@rule
def _band_of(touches: int) -> int:
    """2, 3, 4–5, 6–8, 9–15, then one to each doubling."""
    if touches <= 3:
        return touches - 2
    if touches <= 8:
        return 2 if touches <= 5 else 3
    _, exponent = math.frexp(float(touches))
    return min(exponent, BANDS - 1)


@rule
def _gap_of(gap_s: float) -> int:
    return 0 if gap_s < 10.0 else 1 if gap_s < 30.0 else 2 if gap_s < 120.0 else 3 if gap_s < 480.0 else 4


@rule
def request_shape(blocks: int, stored: int) -> int:
    """Of a request of so many blocks, of which so many were stored by it."""
    fresh = 0 if stored <= 1 else 1 if stored <= 4 else 2 if stored <= 12 else 3
    return 2 * fresh + (1 if blocks > LONG_BLOCKS else 0)


@rule
def block_class(touches: int, kind: int, gap_s: float, shape: int, priority: int) -> int:
    """`gap_s`: between the last two uses; `shape` and `priority`: of the request of the last."""
    first = (min(max(priority, 0), PRIORITIES - 1) * SHAPES + shape) * BY_HASH
    if touches <= 1:
        return first + kind
    return first + KINDS + _band_of(touches) * GAPS + _gap_of(gap_s)


@rule
def _value_after(values: Array, group: int, gap: int) -> float:
    """Of a block of `group` that was just used after that gap: one count of its band leads on to the next band."""
    first = group // BY_HASH * BY_HASH + KINDS
    if group < first:
        return float(values[first + gap, 0])
    band = (group - first) // GAPS
    here = values[first + band * GAPS + gap, 0]
    above = values[first + min(band + 1, BANDS - 1) * GAPS + gap, 0]
    onward = 1.0 if band < 2 else 0.5 if band == 2 else 1.0 / 3.0 if band == 3 else 2.0 ** (1 - band)
    return float(here * (1.0 - onward) + above * onward)


@rule
def expose(exposure: Array, group: int, from_s: float, to_s: float) -> None:
    """A block of class `group` lived through these ages unused."""
    start = bin_place(from_s)
    end = bin_place(to_s)
    while start < end:
        number = min(int(start), BINS - 1)
        stop = min(end, number + 1.0) if number < BINS - 1 else end
        exposure[group, number] += stop - start
        start = stop


@rule
def fade_factor(elapsed_s: float, requests: int) -> float:
    """What tables keep over a time with so many requests: a half for half an hour or 2,000 requests, the longer one."""
    half_life_s = max(1_800.0, 2_000.0 * elapsed_s / max(1, requests))
    return float(0.5 ** (elapsed_s / half_life_s))


@rule
def horizon_s(capacity_blocks: int, moves_per_s: float, longest_s: float) -> float:
    """How far ahead a use still counts: a quarter of the time that a block stays, from 20 s to `longest_s`."""
    stay_s = capacity_blocks / max(moves_per_s, 1e-9)
    return min(longest_s, max(HORIZON_MIN_S, 0.25 * stay_s))


@rule
def fade(hits: Array, exposure: Array, factor: float) -> None:
    for group in range(len(hits)):
        for number in range(BINS):
            hits[group, number] *= factor
            exposure[group, number] *= factor


@rule
def _revalue_bin(
    hits: Array,
    exposure: Array,
    values: Array,
    group: int,
    number: int,
    alike: float,
    gap: int,
    half_fade: float,
    whole_fade: float,
) -> None:
    """`alike`: the hazard of the shapes together; the fades: what a use counts after half of the bin, and after it."""
    leaning = hits[group, number] + SHAPE_PRIOR_BLOCKS * alike
    unused = math.exp(-leaning / (exposure[group, number] + SHAPE_PRIOR_BLOCKS))
    used = (1.0 - unused) * half_fade * (1.0 + _value_after(values, group, gap))
    if number == BINS - 1:
        values[group, BINS] = used / (1.0 - unused * whole_fade)
        values[group, number] = values[group, BINS]
    else:
        values[group, number] = used + unused * whole_fade * values[group, number + 1]


@rule
def revalue(hits: Array, exposure: Array, values: Array, horizon_s: float) -> None:
    """`values[c, k]`: expected uses to come of a block of class c at bin k's start, each less by e for each horizon.

    After a use the block is of another class, whose value at age 0 is that of the last time: a step of value iteration.
    A class's hazard leans on that of all shapes with the weight of `SHAPE_PRIOR_BLOCKS`, theirs on that of all classes
    with `PRIOR_BLOCKS`.
    """
    classes = len(hits)
    for number in range(BINS - 1, -1, -1):
        common = (0.01 + hits[:, number].sum()) / (1.0 + exposure[:, number].sum())
        start = bin_start_s(number)
        last = number == BINS - 1
        width = start if last else bin_start_s(number + 1) - start
        whole_fade = math.exp(-width / horizon_s)
        half_fade = math.exp(-0.5 * width / horizon_s)
        gap = _gap_of(start)
        for first in range(0, classes, CLASSES):
            for by_hash in range(first, first + BY_HASH):
                alike = PRIOR_BLOCKS * common + hits[by_hash : first + CLASSES : BY_HASH, number].sum()
                alike /= PRIOR_BLOCKS + exposure[by_hash : first + CLASSES : BY_HASH, number].sum()
                for group in range(by_hash, first + CLASSES, BY_HASH):
                    _revalue_bin(hits, exposure, values, group, number, alike, gap, half_fade, whole_fade)


@rule
def value_at(values: Array, group: int, age_s: float) -> float:
    place = bin_place(age_s)
    number = min(int(place), BINS - 1)
    if number == BINS - 1:
        return float(values[group, BINS])
    part = place - number
    return float(values[group, number] * (1.0 - part) + values[group, number + 1] * part)
