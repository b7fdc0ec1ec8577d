"""Gather and scatter against plain indexing, with the reference and with Triton."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from kernels import copy_blocks, gather_blocks, scatter_blocks
from kernels.errors import BlockIndexError, ShapeError

pytest_plugins = ["tests.kernel_variants"]

DTYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
PAST_31_BITS = (1 << 31) + 4096


def _pool(dtype: torch.dtype, device: torch.device, blocks: int = 6) -> torch.Tensor:
    return torch.arange(blocks * 24).remainder(120).reshape(blocks, 2, 3, 4).to(dtype).to(device)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in shape, dtype and every bit."""
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_takes_blocks_in_the_order_named(dtype: torch.dtype, device: torch.device) -> None:
    pool = _pool(dtype, device)
    staging = gather_blocks(pool, [4, 0, 4])
    assert staging.is_contiguous()
    assert _same(staging, torch.stack([pool[4], pool[0], pool[4]]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scatter_writes_only_the_blocks_named(dtype: torch.dtype, device: torch.device) -> None:
    pool = _pool(dtype, device)
    before = pool.clone()
    staging = (_pool(torch.float32, device, 2) + 1).to(dtype)
    scatter_blocks(staging, pool, [5, 1])
    for block, wanted in enumerate([before[0], staging[1], before[2], before[3], before[4], staging[0]]):
        assert _same(pool[block], wanted)


def test_gather_writes_into_the_staging_given(device: torch.device) -> None:
    pool = _pool(torch.float16, device)
    out = torch.zeros(2, 2, 3, 4, dtype=torch.float16, device=device)
    assert gather_blocks(pool, [3, 2], out) is out
    assert _same(out, torch.stack([pool[3], pool[2]]))


def test_ids_may_be_a_tensor_of_any_int_dtype(device: torch.device) -> None:
    pool = _pool(torch.float32, device)
    for dtype in (torch.int64, torch.int32, torch.uint8):
        assert _same(gather_blocks(pool, torch.tensor([5, 1], dtype=dtype, device=device)), pool[[5, 1]])
    scatter_blocks(pool[:2].clone(), pool, torch.tensor([2, 3], dtype=torch.int32, device=device))
    assert _same(pool[2:4], pool[:2])


def test_gather_reads_a_pool_with_padding_between_blocks(device: torch.device) -> None:
    flat = torch.arange(6 * 32, dtype=torch.int16, device=device)
    pool = torch.as_strided(flat, (6, 2, 3, 4), (32, 12, 4, 1))
    assert gather_blocks(pool, [5])[0].flatten().tolist() == list(range(160, 184))
    scatter_blocks(torch.zeros(1, 2, 3, 4, dtype=torch.int16, device=device), pool, [5])
    assert flat[160:184].sum() == 0
    assert flat[184:192].tolist() == list(range(184, 192))


@pytest.mark.parametrize("block_elements", [1, 3, 7, 16, 33, 4_099])
@pytest.mark.parametrize("start", [0, 1])
def test_blocks_of_odd_sizes_at_odd_addresses_are_copied_whole(
    block_elements: int, start: int, device: torch.device
) -> None:
    flat = torch.arange(start + 5 * block_elements, device=device).remainder(251).to(torch.uint8)
    pool = flat[start:].view(5, block_elements)
    assert _same(gather_blocks(pool, [3, 1]), torch.stack([pool[3], pool[1]]))
    target = torch.zeros(5 * block_elements + 2, dtype=torch.uint8, device=device)
    scatter_blocks(pool[3:], target[1:-1].view(5, block_elements), [0, 4])
    wanted = torch.cat([pool[3], torch.zeros(3 * block_elements, dtype=torch.uint8, device=device), pool[4]])
    assert _same(target[1:-1], wanted)
    assert target[0] == target[-1] == 0


def test_blocks_longer_than_a_tile_are_copied_whole(device: torch.device) -> None:
    pool = torch.arange(3 * 10_000, dtype=torch.int32, device=device).view(3, 10_000)
    assert _same(gather_blocks(pool, [2, 0]), pool[[2, 0]])


def test_a_pool_whose_axes_lie_in_any_order_is_read_right(device: torch.device) -> None:
    pool = torch.arange(7 * 2 * 3 * 5 * 4, dtype=torch.int16, device=device).view(5, 3, 7, 4, 2).permute(2, 4, 0, 3, 1)
    assert _same(gather_blocks(pool, [6, 2]), pool[[6, 2]])
    target = torch.zeros_like(pool.contiguous()).permute(0, 2, 1, 4, 3)
    scatter_blocks(pool[[1, 3]].permute(0, 2, 1, 4, 3).contiguous(), target, [5, 4])
    assert _same(target[[5, 4]], pool[[1, 3]].permute(0, 2, 1, 4, 3))


def test_more_axes_than_one_launch_takes_are_copied_by_several(device: torch.device) -> None:
    pool = torch.arange(192, dtype=torch.int32, device=device).view(2, 2, 3, 2, 2, 2, 2).permute(0, 5, 3, 1, 6, 4, 2)
    assert _same(gather_blocks(pool, [1, 0]), pool[[1, 0]])


@pytest.mark.parametrize("block_dim", [0, 1])
@pytest.mark.parametrize("evenly", [True, False])
def test_layers_of_their_own_are_gathered_into_whole_blocks_and_back(
    block_dim: int, evenly: bool, device: torch.device
) -> None:
    """`evenly`: the layers are parts of one allocation; else each lies somewhere of its own."""
    shape = (6, 2, 4, 8) if block_dim == 0 else (2, 6, 4, 8)
    together = torch.arange(3 * 384, dtype=torch.int16, device=device).view(3, *shape)
    apart = [torch.empty(1000 * n, dtype=torch.int16, device=device) for n in (1, 3, 2)]
    layers = list(together) if evenly else [a[: 384].view(shape).copy_(b) for a, b in zip(apart, together, strict=True)]
    staging = gather_blocks(layers, [5, 0, 2], block_dim=block_dim)
    wanted = together.movedim(1 + block_dim, 0)[[5, 0, 2]]
    assert _same(staging, wanted)
    emptied = [torch.zeros_like(layer) for layer in layers]
    scatter_blocks(staging, emptied, [5, 0, 2], block_dim=block_dim)
    for layer, original in zip(emptied, layers, strict=True):
        back, kept = layer.movedim(block_dim, 0), original.movedim(block_dim, 0)
        assert _same(back[[5, 0, 2]], kept[[5, 0, 2]])
        assert back[[1, 3, 4]].count_nonzero() == 0


def test_blocks_go_straight_from_one_pool_to_another(device: torch.device) -> None:
    source = torch.arange(6 * 3 * 2 * 8, dtype=torch.int16, device=device).view(6, 3, 2, 8)
    target = torch.zeros(4, 3, 2, 8, dtype=torch.int16, device=device)
    copy_blocks(source, [5, 1], target, [0, 3])
    assert _same(target[[0, 3]], source[[5, 1]])
    assert target[1:3].count_nonzero() == 0


def test_blocks_go_between_whole_blocks_and_layers_apart(device: torch.device) -> None:
    whole = torch.arange(6 * 3 * 2 * 8, dtype=torch.int16, device=device).view(6, 3, 2, 8)
    layers = [torch.zeros(2, 4 + 96 * n, 8, dtype=torch.int16, device=device)[:, :4] for n in (0, 2, 1)]
    copy_blocks(whole, [5, 1], layers, [0, 3], target_block_dim=1)
    for number, layer in enumerate(layers):
        assert _same(layer[:, [0, 3]], whole[[5, 1], number].movedim(0, 1))
        assert layer[:, 1:3].count_nonzero() == 0
    back = torch.zeros_like(whole)
    copy_blocks(layers, [3, 0], back, [1, 5], source_block_dim=1)
    assert _same(back[[1, 5]], whole[[1, 5]])


def test_pools_that_do_not_fit_each_other_are_refused() -> None:
    pool = torch.zeros(4, 3, 8)
    with pytest.raises(BlockIndexError, match="2 blocks are read and 1 written"):
        copy_blocks(pool, [0, 1], torch.zeros(4, 3, 8), [2])
    with pytest.raises(BlockIndexError, match="block 2 is written twice"):
        copy_blocks(pool, [0, 1], torch.zeros(4, 3, 8), [2, 2])
    with pytest.raises(ShapeError, match=r"the source has shape \(4, 3, 8\), the blocks need \(4, 3, 9\)"):
        copy_blocks(pool, [0], torch.zeros(7, 3, 9), [2])
    with pytest.raises(ShapeError, match=r"the source has shape \(4, 3, 8\), the other 2 layers: give \[blocks, 2,"):
        copy_blocks(pool, [0], [torch.zeros(7, 8)] * 2, [2])
    with pytest.raises(ShapeError, match="the source has 1 layers, the target 2"):
        copy_blocks([torch.zeros(7, 8)], [0], [torch.zeros(7, 8)] * 2, [2])


def test_some_layers_go_into_their_place_in_the_staging(device: torch.device) -> None:
    pool = torch.arange(5 * 4 * 2 * 3, dtype=torch.float32, device=device).view(5, 4, 2, 3)
    staging = torch.zeros(2, 4, 2, 3, device=device)
    gather_blocks(pool[:, 1:3], [4, 1], staging[:, 1:3])
    assert _same(staging[:, 1:3], pool[[4, 1], 1:3])
    assert staging[:, [0, 3]].count_nonzero() == 0
    layers = [pool[:, n].contiguous() for n in range(4)]
    gather_blocks(layers[3:], [4, 1], staging[:, 3:])
    assert _same(staging[:, 1:], pool[[4, 1], 1:])


def test_blocks_counted_by_an_inner_axis_of_one_tensor(device: torch.device) -> None:
    pool = torch.arange(2 * 2 * 5 * 6, dtype=torch.int32, device=device).view(2, 2, 5, 6)
    assert _same(gather_blocks(pool, [3, 0], block_dim=2), pool.movedim(2, 0)[[3, 0]])


def test_blocks_past_31_bits_of_elements_are_found(tmp_path: Path, device: torch.device) -> None:
    size = PAST_31_BITS + 64
    if device.type == "cpu":
        # A sparse file: only the pages that are touched take memory or disk.
        flat = torch.from_file(str(tmp_path / "pool"), shared=True, size=size, dtype=torch.int8)
    else:
        flat = torch.zeros(size, dtype=torch.int8, device=device)
    pool = torch.as_strided(flat, (3, 64), (PAST_31_BITS // 2, 1))
    content = torch.arange(64, dtype=torch.int8, device=device)
    scatter_blocks(content[None], pool, [2])
    assert _same(flat[PAST_31_BITS:], content)
    assert _same(gather_blocks(pool, [2, 1]), torch.stack([content, torch.zeros_like(content)]))


def test_no_blocks_is_an_empty_copy(device: torch.device) -> None:
    pool = _pool(torch.float16, device)
    assert gather_blocks(pool, []).shape == (0, 2, 3, 4)
    assert gather_blocks(pool[:, :, :0], [1]).shape == (1, 2, 0, 4)
    scatter_blocks(torch.empty(0, 2, 3, 4, dtype=torch.float16, device=device), pool, [])
    assert _same(pool, _pool(torch.float16, device))


@pytest.mark.parametrize("bad", [-1, 6])
def test_index_outside_the_pool_is_named_and_nothing_is_written(bad: int, device: torch.device) -> None:
    pool = _pool(torch.float16, device)
    with pytest.raises(BlockIndexError, match=f"block {bad} is outside the pool: give indexes from 0 to 5"):
        gather_blocks(pool, [0, bad])
    with pytest.raises(BlockIndexError, match=f"block {bad} "):
        scatter_blocks(torch.zeros(2, 2, 3, 4, dtype=torch.float16, device=device), pool, torch.tensor([0, bad]))
    assert _same(pool, _pool(torch.float16, device))


def test_ids_that_nobody_checked_read_zeros_and_write_nothing_when_out_of_range(interpreted: ModuleType) -> None:
    """As on a GPU, where ids are used as they are."""
    pool, ids = torch.ones(3, 40, dtype=torch.int16), torch.tensor([2, 3, -1])
    staging = torch.full((3, 40), 7, dtype=torch.int16)
    interpreted.copy([pool], [staging], ids, None)
    assert staging.unique(dim=1).flatten().tolist() == [1, 0, 0]
    interpreted.copy([staging + 4], [pool], None, ids)
    assert pool.unique(dim=1).flatten().tolist() == [1, 1, 5]
    pool[2] = 0
    assert interpreted.checksum(pool, ids).unique().numel() == 1


def test_ids_that_are_no_ints_are_refused() -> None:
    with pytest.raises(BlockIndexError, match=r"block ids are torch\.float32 \(2,\): give a vector of ints"):
        gather_blocks(torch.zeros(3, 4), torch.tensor([0.0, 1.0]))


def test_scatter_refuses_a_block_named_twice(device: torch.device) -> None:
    pool = _pool(torch.int8, device)
    with pytest.raises(BlockIndexError, match="block 3 is written twice"):
        scatter_blocks(torch.zeros(3, 2, 3, 4, dtype=torch.int8, device=device), pool, [3, 1, 3])
    assert _same(pool, _pool(torch.int8, device))


def test_staging_that_does_not_fit_is_refused() -> None:
    pool = _pool(torch.float16, torch.device("cpu"))
    with pytest.raises(ShapeError, match=r"staging has shape \(1, 2, 3, 4\), the blocks need \(2, 2, 3, 4\)"):
        scatter_blocks(torch.zeros(1, 2, 3, 4, dtype=torch.float16), pool, [0, 1])
    with pytest.raises(ShapeError, match=r"out holds torch\.float32"):
        gather_blocks(pool, [0], torch.zeros(1, 2, 3, 4))
    with pytest.raises(ShapeError, match="one element in several places"):
        gather_blocks(pool, [0], torch.zeros(1, dtype=torch.float16).expand(1, 2, 3, 4))
    with pytest.raises(ShapeError, match="one element in several places"):
        scatter_blocks(pool[:2], torch.zeros(1, 2, 3, 4, dtype=torch.float16).expand(6, 2, 3, 4), [0, 1])


def test_pools_that_are_none_are_refused() -> None:
    with pytest.raises(ShapeError, match="a sequence without a layer"):
        gather_blocks([], [0])
    with pytest.raises(ShapeError, match=r"a layer is \(3, 5\).*the first \(3, 4\)"):
        gather_blocks([torch.zeros(3, 4), torch.zeros(3, 5)], [0])
    with pytest.raises(ShapeError, match=r"block_dim is 2, the pool has shape \(3, 4\)"):
        gather_blocks(torch.zeros(3, 4), [0], block_dim=2)
    with pytest.raises(ShapeError, match=r"complex128 takes 16 bytes: copy it as smaller elements"):
        gather_blocks(torch.zeros(3, 4, dtype=torch.complex128), [0])
