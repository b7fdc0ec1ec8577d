"""Permutes between layouts and reshards between tensor-parallel sizes, against plain torch."""

from __future__ import annotations

import itertools

import pytest
import torch

from kernels import KvLayout, permute_blocks, reshard_blocks
from kernels.errors import ShapeError

pytest_plugins = ["tests.kernel_variants"]

EINSUM = {KvLayout.NHD: "nlothd", KvLayout.HND: "nlohtd", KvLayout.UNIVERSAL: "nhlotd"}
SIZES = {"n": 2, "l": 2, "o": 2, "t": 3, "h": 4, "d": 8}
PAIRS = list(itertools.product(KvLayout, KvLayout))


def _blocks(layout: KvLayout, dtype: torch.dtype, device: torch.device, **sizes: int) -> torch.Tensor:
    shape = [{**SIZES, **sizes}[letter] for letter in EINSUM[layout]]
    numbers = torch.arange(torch.Size(shape).numel(), device=device).reshape(shape)
    return numbers.remainder(251).to(dtype) if dtype == torch.uint8 else numbers.to(dtype)


def _relaid(blocks: torch.Tensor, source: KvLayout, target: KvLayout) -> torch.Tensor:
    """By the names of the axes alone, as a check on `KvLayout`."""
    return blocks.permute([EINSUM[source].index(letter) for letter in EINSUM[target]]).contiguous()


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_permute_moves_every_element_to_its_place(source: KvLayout, target: KvLayout, device: torch.device) -> None:
    blocks = _blocks(source, torch.float16, device)
    permuted = permute_blocks(blocks, source, target)
    assert permuted.is_contiguous()
    assert torch.equal(permuted, _relaid(blocks, source, target))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float32])
def test_permute_takes_odd_sizes_of_any_dtype(dtype: torch.dtype, device: torch.device) -> None:
    blocks = _blocks(KvLayout.NHD, torch.uint8, device, h=3, t=5, d=7, o=1).to(dtype)
    permuted = permute_blocks(blocks, KvLayout.NHD, KvLayout.UNIVERSAL)
    wanted = _relaid(blocks, KvLayout.NHD, KvLayout.UNIVERSAL)
    assert torch.equal(permuted.view(torch.uint8), wanted.view(torch.uint8))


def test_permute_reads_blocks_with_gaps_and_writes_into_out(device: torch.device) -> None:
    pool = _blocks(KvLayout.NHD, torch.int32, device, n=4, h=6)
    some = pool[::2, :, :, :, 1:5]
    out = torch.zeros(2, 4, 2, 2, 3, 16, dtype=torch.int32, device=device)[..., 4:12]
    assert permute_blocks(some, KvLayout.NHD, KvLayout.UNIVERSAL, out) is out
    assert torch.equal(out, _relaid(some, KvLayout.NHD, KvLayout.UNIVERSAL))


def test_permute_of_no_blocks_is_empty(device: torch.device) -> None:
    none = _blocks(KvLayout.HND, torch.float16, device)[:0]
    assert permute_blocks(none, KvLayout.HND, KvLayout.NHD).shape == (0, 2, 2, 3, 4, 8)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_reshard_gives_each_worker_its_heads(source: KvLayout, target: KvLayout, device: torch.device) -> None:
    whole = _blocks(source, torch.int16, device, h=12)
    wanted = _relaid(whole, source, target)
    for held, count in ((2, 3), (4, 1)):
        shards = list(whole.chunk(held, dim=source.head_axis))
        resharded = reshard_blocks(shards, source, target, count)
        for given, part in zip(resharded, wanted.chunk(count, dim=target.head_axis), strict=True):
            assert given.is_contiguous()
            assert torch.equal(given, part)


def test_reshard_for_one_worker_needs_only_the_shards_that_it_touches(device: torch.device) -> None:
    whole = _blocks(KvLayout.NHD, torch.int16, device, h=12)
    shards: list[torch.Tensor | None] = list(whole.chunk(4, dim=KvLayout.NHD.head_axis))
    shards[0] = shards[3] = None
    (second,) = reshard_blocks(shards, KvLayout.NHD, KvLayout.HND, 4, [1])
    assert torch.equal(second, _relaid(whole, KvLayout.NHD, KvLayout.HND)[:, :, :, 3:6])
    with pytest.raises(ShapeError, match="shard 0 is None, but heads 0 to 5 are wanted"):
        reshard_blocks(shards, KvLayout.NHD, KvLayout.HND, 2, [0])


def test_what_cannot_be_resharded_is_refused() -> None:
    shard = torch.zeros(1, 2, 2, 3, 4, 8)
    with pytest.raises(ShapeError, match="8 heads cannot be cut for 3 workers: choose a divisor of 8"):
        reshard_blocks([shard, shard], KvLayout.NHD, KvLayout.NHD, 3)
    with pytest.raises(ShapeError, match="there is no target rank 2: give ranks from 0 to 1"):
        reshard_blocks([shard], KvLayout.NHD, KvLayout.NHD, 2, [2])
    with pytest.raises(ShapeError, match=r"all shards of a block are alike"):
        reshard_blocks([shard, shard.half()], KvLayout.NHD, KvLayout.NHD, 2)
    with pytest.raises(ShapeError, match="every shard is None or there is none"):
        reshard_blocks([None], KvLayout.NHD, KvLayout.NHD, 1)


def test_what_cannot_be_permuted_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"NHD blocks have the axes blocks, layers, .*split heads × head_dim"):
        permute_blocks(torch.zeros(2, 2, 2, 3, 32), KvLayout.NHD, KvLayout.HND)
    blocks = torch.zeros(1, 2, 2, 3, 4, 8)
    with pytest.raises(ShapeError, match=r"out is \(1, 2, 2, 3, 4, 8\).*the result \(1, 2, 2, 4, 3, 8\)"):
        permute_blocks(blocks, KvLayout.NHD, KvLayout.HND, torch.zeros_like(blocks))
