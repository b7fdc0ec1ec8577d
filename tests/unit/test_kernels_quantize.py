"""Blocks as 8-bit floats with a scale a head: error bounds, and what is not a number."""

from __future__ import annotations

import pytest
import torch

from kernels import KvLayout, dequantize_blocks, quantize_blocks
from kernels.errors import ShapeError
from kernels.fp8 import ABSOLUTE_ERROR_MAX_SCALES, E4M3_MAX, RELATIVE_ERROR_MAX, SCALE_MIN

pytest_plugins = ["tests.kernel_variants"]

ROUNDING = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
NHD = KvLayout.NHD


def _blocks(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """NHD, heads of very different magnitudes."""
    drawn = torch.randn(1, 2, 1, 5, 4, 24, generator=torch.Generator().manual_seed(7))
    return (drawn * torch.tensor([1e-3, 1.0, 30.0, 1e3])[:, None]).to(dtype).to(device)


def _scale_of_each(scales: torch.Tensor) -> torch.Tensor:
    """`[n, layers, outer, heads]` beside NHD blocks."""
    return scales[:, :, :, None, :, None]


@pytest.mark.parametrize("dtype", ROUNDING)
def test_every_element_comes_back_within_the_bound(dtype: torch.dtype, device: torch.device) -> None:
    blocks = _blocks(dtype, device)
    values, scales = quantize_blocks(blocks, NHD)
    assert values.dtype == torch.float8_e4m3fn
    assert values.shape == blocks.shape
    assert scales.shape == (1, 2, 1, 4)
    back = dequantize_blocks(values, scales, NHD, dtype).double()
    exact = blocks.double()
    bound = torch.maximum(exact.abs() * RELATIVE_ERROR_MAX, _scale_of_each(scales) * ABSOLUTE_ERROR_MAX_SCALES)
    assert bool(((back - exact).abs() <= bound * (1 + 1e-5) + exact.abs() * ROUNDING[dtype]).all())


def test_scales_fill_the_range_head_by_head(device: torch.device) -> None:
    blocks = _blocks(torch.float32, device)
    values, scales = quantize_blocks(blocks, NHD)
    largest = blocks.abs().amax(dim=(3, 5))
    assert torch.allclose(scales, largest / E4M3_MAX, rtol=1e-6)
    assert bool((values.float().abs().amax(dim=(3, 5)) == E4M3_MAX).all())


@pytest.mark.parametrize("layout", [KvLayout.HND, KvLayout.UNIVERSAL])
def test_layouts_hold_the_same_values_and_scales(layout: KvLayout, device: torch.device) -> None:
    blocks = _blocks(torch.bfloat16, device)
    order = NHD.order(layout)
    values, scales = quantize_blocks(blocks, NHD)
    other = quantize_blocks(blocks.permute(order), layout)
    assert torch.equal(other.scales, scales)
    assert torch.equal(other.values.view(torch.uint8), values.view(torch.uint8).permute(order))
    back = dequantize_blocks(other.values, other.scales, layout)
    assert torch.equal(back, dequantize_blocks(values, scales, NHD).permute(order))


def test_numbers_of_e4m3_come_back_exactly(device: torch.device) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = every[every.isfinite()].to(device)
    blocks = numbers.reshape(1, 1, 1, 127, 1, 2)
    values, scales = quantize_blocks(blocks, NHD)
    assert scales.item() == 1.0
    assert torch.equal(dequantize_blocks(values, scales, NHD, torch.float32), blocks)


def test_ties_go_to_the_even_neighbour(device: torch.device) -> None:
    """448 makes the scale 1; 17 lies between 16 and 18, 19 between 18 and 20, and so on."""
    row = torch.tensor([448.0, 17.0, 19.0, 21.0, -17.0, 31.0, 0.0009765625, 0.0029296875], device=device)
    values, _ = quantize_blocks(row.reshape(1, 1, 1, 1, 1, 8), NHD)
    assert values.float().flatten().tolist() == [448.0, 16.0, 20.0, 20.0, -16.0, 32.0, 0.0, 0.00390625]


def test_groups_of_zeros_and_of_tiny_numbers_stay_finite(device: torch.device) -> None:
    blocks = torch.zeros(1, 1, 1, 2, 3, 4, device=device)
    blocks[..., 1, :] = 1e-38
    values, scales = quantize_blocks(blocks, NHD)
    assert scales.flatten().tolist()[:2] == [SCALE_MIN, SCALE_MIN]
    assert dequantize_blocks(values, scales, NHD, torch.float32).count_nonzero() == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_group_with_what_is_no_number_comes_back_as_nan_and_no_other(bad: float, device: torch.device) -> None:
    blocks = torch.ones(1, 2, 1, 3, 2, 4, device=device)
    blocks[0, 1, 0, 2, 1, 3] = bad
    back = dequantize_blocks(*quantize_blocks(blocks, NHD), NHD)
    assert bool(back[0, 1, 0, :, 1].isnan().all())
    assert back.isnan().sum() == 12


def test_long_pages_are_quantised_in_parts(device: torch.device) -> None:
    blocks = torch.linspace(-4, 4, 300 * 20, device=device).reshape(1, 1, 1, 300, 1, 20)
    values, scales = quantize_blocks(blocks, NHD)
    assert scales.item() == pytest.approx(4 / E4M3_MAX)
    assert torch.equal(values.float(), (blocks * (1 / scales)).to(torch.float8_e4m3fn).float())


def test_no_blocks_are_no_values(device: torch.device) -> None:
    values, scales = quantize_blocks(torch.zeros(0, 1, 1, 2, 3, 4, device=device), NHD)
    assert dequantize_blocks(values, scales, NHD).shape == (0, 1, 1, 2, 3, 4)


def test_what_cannot_be_quantised_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"blocks hold torch\.int8: quantise torch\.float16"):
        quantize_blocks(torch.zeros(1, 1, 1, 2, 3, 4, dtype=torch.int8), NHD)
    values, scales = quantize_blocks(torch.zeros(1, 1, 1, 2, 3, 4), NHD)
    with pytest.raises(ShapeError, match=r"scales are \(1, 1, 1, 2\).*need \(1, 1, 1, 3\)"):
        dequantize_blocks(values, scales[..., :2], NHD)
    with pytest.raises(ShapeError, match=r"values hold torch\.float32"):
        dequantize_blocks(values.float(), scales, NHD)
