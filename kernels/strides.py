"""How two tensors of one shape are copied in runs: which axes are walked as one, and how wide each access may be. Pure.

Every copy of this room, gathers, scatters, permutes and reshards alike, is one plan: a *run* that lies unbroken on both
sides, repeated along a few axes that stride on their own way on each side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

ACCESS_BYTES_MAX = 16
TILED_AXES = 2
PLAIN_AXES = 2
"""Axes that are not in the tile, so far as one launch takes them."""


class Axis(NamedTuple):
    """`size` steps, of so many elements in the source and in the target."""

    size: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Sizes and strides in accesses of `access_bytes` each.

    `run` accesses follow one another on both sides. `axes` are exactly four: the first, next in the target after the
    run; the second, next in the source; two more. Those not needed have size 1. `looped` are left for the caller.
    """

    access_bytes: int
    run: int
    axes: tuple[Axis, Axis, Axis, Axis]
    looped: tuple[Axis, ...]


def merged_axes(shape: Sequence[int], source: Sequence[int], target: Sequence[int]) -> list[Axis]:
    """The axes of a copy, slowest in the target first; two that follow on from each other on both sides are one."""
    axes = [Axis(*axis) for axis in zip(shape, source, target, strict=True) if axis[0] != 1]
    axes.sort(key=lambda axis: (-axis.target, -axis.source))
    merged: list[Axis] = []
    for axis in axes:
        if merged and merged[-1].source == axis.source * axis.size and merged[-1].target == axis.target * axis.size:
            merged[-1] = Axis(merged[-1].size * axis.size, axis.source, axis.target)
        else:
            merged.append(axis)
    return merged


def plan_copy(axes: Sequence[Axis], element_bytes: int, aligned_to: Sequence[int]) -> CopyPlan:
    """The plan of a copy whose block axis is walked apart. `aligned_to`: every address and block stride, in bytes."""
    rest = list(axes)
    run = rest.pop().size if rest and rest[-1].source == rest[-1].target == 1 else 1
    strides = [stride * element_bytes for axis in rest for stride in (axis.source, axis.target)]
    access_bytes = gcd(ACCESS_BYTES_MAX, run * element_bytes, *aligned_to, *strides)

    def in_accesses(axis: Axis) -> Axis:
        source, target = (stride * element_bytes // access_bytes for stride in (axis.source, axis.target))
        return Axis(axis.size, source, target)

    ordered = _tiled_first([in_accesses(axis) for axis in rest])
    kept, looped = ordered[: TILED_AXES + PLAIN_AXES], ordered[TILED_AXES + PLAIN_AXES :]
    padded = [*kept, *[Axis(1, 0, 0)] * (TILED_AXES + PLAIN_AXES - len(kept))]
    a, b, c, d = padded
    return CopyPlan(access_bytes, run * element_bytes // access_bytes, (a, b, c, d), tuple(looped))


def _tiled_first(axes: list[Axis]) -> list[Axis]:
    """The axis with the smallest stride in the target, then that in the source, then the others, longest first.

    A tile over the first two is a patch in which both sides' neighbours lie together, however small the run.
    """
    if not axes:
        return []
    by_target = min(axes, key=lambda axis: axis.target)
    others = [axis for axis in axes if axis is not by_target]
    if not others:
        return [by_target]
    by_source = min(others, key=lambda axis: axis.source)
    others = [axis for axis in others if axis is not by_source]
    return [by_target, by_source, *sorted(others, key=lambda axis: -axis.size)]


class Tile(NamedTuple):
    """What one program copies, all powers of two: accesses of the run, steps of the first two axes, blocks."""

    run: int
    first: int
    second: int
    blocks: int


def choose_tile(plan: CopyPlan, blocks: int, accesses: int) -> Tile:
    """At most `accesses` of them, run first, then both tiled axes alike, then blocks. Raises nothing."""
    run = min(power_of_two(plan.run), accesses)
    left = accesses // run
    limits = [power_of_two(axis.size) for axis in plan.axes[:TILED_AXES]]
    sizes = [1, 1]
    while left > 1:
        growing = [at for at in range(TILED_AXES) if sizes[at] < limits[at]]
        if not growing:
            break
        sizes[min(growing, key=lambda at: sizes[at])] *= 2
        left //= 2
    return Tile(run, sizes[0], sizes[1], min(power_of_two(blocks), left))


def power_of_two(number: int) -> int:
    """The smallest that is at least `number`, which is 1 or more."""
    return 1 << (number - 1).bit_length()
