"""Any strided copy, cut into runs and tiles by `kernels.strides`, moves the bytes that it should."""

from __future__ import annotations

import itertools
from math import prod

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import gather_blocks, scatter_blocks
from kernels.strides import ACCESS_BYTES_MAX, choose_tile, merged_axes, plan_copy, power_of_two
from tests.examples import examples

pytest_plugins = ["tests.kernel_variants"]

SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=6)


@st.composite
def strided(draw: st.DrawFn, shape: list[int]) -> list[int]:
    """Strides in elements under which no two elements of the shape meet: some order of the axes, some gaps."""
    strides = [0] * len(shape)
    step = 1
    for axis in draw(st.permutations(range(len(shape)))):
        strides[axis] = step
        step *= shape[axis] + draw(st.sampled_from([0, 0, 1]))
    return strides


@st.composite
def copies(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    shape = draw(SHAPES)
    return shape, draw(strided(shape)), draw(strided(shape))


def _offsets(shape: list[int], strides: list[int]) -> list[int]:
    return [
        sum(index * stride for index, stride in zip(place, strides, strict=True))
        for place in itertools.product(*map(range, shape))
    ]


@settings(max_examples=examples(100), deadline=None)
@given(copy=copies(), element_bytes=st.sampled_from([1, 2, 4]), address=st.sampled_from([0, 2, 4, 16]))
def test_a_plan_moves_each_byte_to_its_place_once(
    copy: tuple[list[int], list[int], list[int]], element_bytes: int, address: int
) -> None:
    shape, source, target = copy
    plan = plan_copy(merged_axes(shape, source, target), element_bytes, [address])
    assert address % plan.access_bytes == 0
    assert ACCESS_BYTES_MAX % plan.access_bytes == 0
    axes = [*plan.axes, *plan.looped]
    moved = {
        (at_source + step, at_target + step)
        for at_source, at_target in zip(
            _offsets([axis.size for axis in axes], [axis.source * plan.access_bytes for axis in axes]),
            _offsets([axis.size for axis in axes], [axis.target * plan.access_bytes for axis in axes]),
            strict=True,
        )
        for step in range(plan.run * plan.access_bytes)
    }
    wanted = {
        (at_source * element_bytes + byte, at_target * element_bytes + byte)
        for at_source, at_target in zip(_offsets(shape, source), _offsets(shape, target), strict=True)
        for byte in range(element_bytes)
    }
    assert moved == wanted


@settings(max_examples=examples(100), deadline=None)
@given(copy=copies(), blocks=st.integers(1, 40), accesses=st.sampled_from([1, 64, 1024]))
def test_a_tile_is_of_powers_of_two_and_no_larger_than_allowed(
    copy: tuple[list[int], list[int], list[int]], blocks: int, accesses: int
) -> None:
    plan = plan_copy(merged_axes(*copy), 1, [0])
    tile = choose_tile(plan, blocks, accesses)
    assert all(side == power_of_two(side) for side in tile)
    assert prod(tile) <= accesses
    if tile.run < plan.run:
        assert prod(tile[1:]) == 1 or tile.run == accesses


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(copy=copies(), dtype=st.sampled_from([torch.uint8, torch.int16, torch.float32]), drawn=st.data())
def test_scatter_undoes_gather_of_any_strided_pool(
    copy: tuple[list[int], list[int], list[int]], dtype: torch.dtype, drawn: st.DataObject, device: torch.device
) -> None:
    shape, source, target = copy
    ids = drawn.draw(st.lists(st.integers(0, shape[0] - 1), unique=True), label="ids")
    flat = torch.arange(1, 2 + max(_offsets(shape, source)), device=device).remainder(251).to(dtype)
    pool = torch.as_strided(flat, shape, source)
    staging = gather_blocks(pool, ids)
    assert np.array_equal(staging.cpu().numpy(), pool.cpu().numpy()[ids])
    emptied = torch.as_strided(torch.zeros(1 + max(_offsets(shape, target)), dtype=dtype, device=device), shape, target)
    scatter_blocks(staging, emptied, ids)
    wanted = np.zeros(shape, staging.cpu().numpy().dtype)
    wanted[ids] = pool.cpu().numpy()[ids]
    assert np.array_equal(emptied.cpu().numpy(), wanted)
