"""Gather and scatter against plain indexing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import gather_blocks, scatter_blocks
from kernels.errors import BlockIndexError, ShapeError

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.int8]


def _pool(dtype: torch.dtype, blocks: int = 6) -> torch.Tensor:
    return torch.arange(blocks * 24).remainder(120).reshape(blocks, 2, 3, 4).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_takes_blocks_in_the_order_named(dtype: torch.dtype) -> None:
    pool = _pool(dtype)
    staging = gather_blocks(pool, [4, 0, 4])
    assert staging.dtype == dtype
    assert staging.is_contiguous()
    assert torch.equal(staging, torch.stack([pool[4], pool[0], pool[4]]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scatter_writes_only_the_blocks_named(dtype: torch.dtype) -> None:
    pool = _pool(dtype)
    before = pool.clone()
    staging = (_pool(dtype, 2) + 1).to(dtype)
    scatter_blocks(staging, pool, [5, 1])
    assert torch.equal(pool[5], staging[0])
    assert torch.equal(pool[1], staging[1])
    assert torch.equal(pool[[0, 2, 3, 4]], before[[0, 2, 3, 4]])


def test_gather_writes_into_the_staging_given() -> None:
    pool = _pool(torch.float16)
    out = torch.zeros(2, 2, 3, 4, dtype=torch.float16)
    assert gather_blocks(pool, [3, 2], out) is out
    assert torch.equal(out[0], pool[3])


def test_gather_reads_a_pool_with_padding_between_blocks() -> None:
    flat = torch.arange(6 * 32, dtype=torch.int16)
    pool = torch.as_strided(flat, (6, 2, 3, 4), (32, 12, 4, 1))
    assert torch.equal(gather_blocks(pool, [5])[0].flatten(), torch.arange(160, 184, dtype=torch.int16))
    scatter_blocks(torch.zeros(1, 2, 3, 4, dtype=torch.int16), pool, [5])
    assert flat[160:184].sum() == 0
    assert torch.equal(flat[184:192], torch.arange(184, 192, dtype=torch.int16))


def test_no_blocks_is_an_empty_copy() -> None:
    pool = _pool(torch.float16)
    assert gather_blocks(pool, []).shape == (0, 2, 3, 4)
    scatter_blocks(torch.empty(0, 2, 3, 4, dtype=torch.float16), pool, [])
    assert torch.equal(pool, _pool(torch.float16))


@pytest.mark.parametrize("bad", [-1, 6])
def test_index_outside_the_pool_is_named_and_nothing_is_written(bad: int) -> None:
    pool = _pool(torch.float16)
    with pytest.raises(BlockIndexError, match=f"block {bad} is outside the pool: give indexes from 0 to 5"):
        gather_blocks(pool, [0, bad])
    with pytest.raises(BlockIndexError, match=f"block {bad} "):
        scatter_blocks(torch.zeros(2, 2, 3, 4, dtype=torch.float16), pool, [0, bad])
    assert torch.equal(pool, _pool(torch.float16))


def test_scatter_refuses_a_block_named_twice() -> None:
    pool = _pool(torch.int8)
    with pytest.raises(BlockIndexError, match="block 3 is written twice"):
        scatter_blocks(torch.zeros(3, 2, 3, 4, dtype=torch.int8), pool, [3, 1, 3])
    assert torch.equal(pool, _pool(torch.int8))


def test_staging_that_does_not_fit_is_refused() -> None:
    pool = _pool(torch.float16)
    with pytest.raises(ShapeError, match=r"staging has shape \(1, 2, 3, 4\), the blocks need \(2, 2, 3, 4\)"):
        scatter_blocks(torch.zeros(1, 2, 3, 4, dtype=torch.float16), pool, [0, 1])
    with pytest.raises(ShapeError, match=r"out holds torch\.float32"):
        gather_blocks(pool, [0], torch.zeros(1, 2, 3, 4))
    with pytest.raises(ShapeError, match="one element in several places"):
        gather_blocks(pool, [0], torch.zeros(1, dtype=torch.float16).expand(1, 2, 3, 4))


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 15), unique=True, max_size=16), dtype=st.sampled_from(DTYPES))
def test_scatter_undoes_gather(ids: list[int], dtype: torch.dtype) -> None:
    pool = torch.arange(16 * 8).remainder(120).reshape(16, 8).to(dtype)
    emptied = pool.clone()
    emptied[ids] = 0
    scatter_blocks(gather_blocks(pool, ids), emptied, ids)
    assert torch.equal(emptied, pool)
