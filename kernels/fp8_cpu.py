"""Quantising on the CPU: numpy over pieces that stay in the cache, and two compiled loops over their bits.

Step for step the arithmetic of the GPU's kernel, so that both give the same bits. Floats are handled by their integers,
for numpy has neither bfloat16 nor float8.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from kernels.compiled import compiled
from kernels.fp8 import E4M3_MAX, SCALE_MIN

Floats = np.ndarray[Any, np.dtype[np.float32]]
Bits = np.ndarray[Any, np.dtype[Any]]

_NORMAL_MIN = np.uint32(0x3C80_0000)
"""2^-6, the smallest e4m3 number with a full mantissa, as the bits of a float32."""

_MOST = np.float32(E4M3_MAX)
_INFINITY = np.uint32(0x7F80_0000)
_MAGNITUDE = np.uint32(0x7FFF_FFFF)
_RAISED = np.float32(2.0**14)
"""Added to a smaller magnitude it makes float32 round to steps of 2^-9, e4m3's among its smallest."""

_RAISED_BITS = np.uint32(0x4680_0000)
_U32 = np.uint32
_KEPT = np.uint32(20)
"""Bits of a float32's mantissa that e4m3 has not."""

_BELOW_HALF = np.uint32((1 << 19) - 1)
_BIASES = np.uint32((127 - 7) << 3)
_NAN_CODE = np.uint32(0x7F)
_SIGN = np.uint32(0x80)
_SIGN_SHIFT = np.uint32(24)
_ONE = np.uint32(1)


def quantize(blocks: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
    """All with the axes `[blocks, layers, outer, heads, tokens, head_dim]`, scales without the last two."""
    codes = values.view(torch.uint8).numpy()
    for place in np.ndindex(*blocks.shape[:2]):
        piece = blocks[place]
        wide = _widened(piece).reshape(piece.shape[0] * piece.shape[1], -1)
        largest = np.empty(len(wide), np.uint32)
        _largest(wide.view(np.uint32), largest)
        scale = np.maximum(largest.view(np.float32) / np.float32(E4M3_MAX), np.float32(SCALE_MIN))
        scale[largest >= _INFINITY] = np.nan
        scales[place] = torch.from_numpy(scale).view(piece.shape[:2])
        code = np.empty(wide.shape, np.uint8)
        scaled, raised = np.empty((2, wide.shape[1]), np.float32)
        _encode(wide, np.float32(1.0) / scale, scaled, raised, scaled.view(np.uint32), raised.view(np.uint32), code)
        codes[place] = code.reshape(piece.shape)


def dequantize(values: torch.Tensor, scales: torch.Tensor, blocks: torch.Tensor) -> None:
    codes, scale = values.view(torch.uint8).numpy(), scales.numpy()
    for place in np.ndindex(*values.shape[:2]):
        code = np.ascontiguousarray(codes[place]).reshape(scale[place].size, -1)
        wide = np.empty(code.shape, np.float32)
        _decode(code, _numbers(), scale[place].reshape(-1), wide)
        _narrow(wide.reshape(codes[place].shape), blocks[place])


@cache
def _numbers() -> Floats:
    """What each of the 256 codes stands for."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def _widened(piece: torch.Tensor) -> Floats:
    """A contiguous float32 copy."""
    if piece.dtype == torch.bfloat16:
        bits = piece.view(torch.int16).numpy().view(np.uint16).astype(np.uint32, order="C")
        bits <<= np.uint32(16)
        return bits.view(np.float32)
    return np.array(piece.numpy(), np.float32, order="C")


def _narrow(wide: Floats, piece: torch.Tensor) -> None:
    """Write float32 into a tensor, rounded to nearest, ties to even."""
    if piece.dtype != torch.bfloat16:
        with np.errstate(over="ignore"):  # past float16's range, which is its infinity
            np.copyto(piece.numpy(), wide, casting="same_kind")
        return
    rounded = np.empty(wide.shape, np.uint16)
    _to_bfloat16(np.ascontiguousarray(wide).view(np.uint32).reshape(-1), rounded.reshape(-1))
    np.copyto(piece.view(torch.int16).numpy().view(np.uint16), rounded)


@compiled
def _largest(bits: Bits, largest: Bits) -> None:
    """The largest magnitude of each row; among floats' bits it is the largest integer, NaN above all."""
    for row in range(bits.shape[0]):
        most = np.uint32(0)
        for at in range(bits.shape[1]):
            most = max(most, bits[row, at] & _MAGNITUDE)
        largest[row] = most


@compiled
def _encode(
    wide: Floats, reciprocals: Floats, scaled: Floats, raised: Floats, scaled_bits: Bits, raised_bits: Bits, codes: Bits
) -> None:
    """e4m3 of each row times its reciprocal, rounded to nearest, ties to even.

    `scaled` and `raised` are one row to work in, `_bits` the same memory as integers. numba widens sums of 32-bit
    integers to 64 bits, which takes four times as long: hence the casts.
    """
    for row in range(wide.shape[0]):
        reciprocal = reciprocals[row]
        for at in range(wide.shape[1]):
            number = wide[row, at] * reciprocal
            number = _MOST if number > _MOST else number
            number = -_MOST if number < -_MOST else number
            scaled[at] = number
            raised[at] = abs(number) + _RAISED
        for at in range(wide.shape[1]):
            word = scaled_bits[at]
            magnitude = _U32(word & _MAGNITUDE)
            # Exponent and three bits of mantissa, with the exponent's bias taken from 127 to 7.
            rounded = _U32(_U32(magnitude + _BELOW_HALF) + _U32(_U32(magnitude >> _KEPT) & _ONE))
            code = _U32(_U32(rounded >> _KEPT) - _BIASES)
            code = _U32(code if magnitude >= _NORMAL_MIN else raised_bits[at] - _RAISED_BITS)
            scaled_bits[at] = _U32(min(code, _NAN_CODE)) | _U32(_U32(word >> _SIGN_SHIFT) & _SIGN)
        for at in range(wide.shape[1]):
            codes[row, at] = np.uint8(scaled_bits[at])


@compiled
def _decode(codes: Bits, numbers: Floats, scales: Floats, wide: Floats) -> None:
    for row in range(codes.shape[0]):
        scale = scales[row]
        for at in range(codes.shape[1]):
            wide[row, at] = numbers[codes[row, at]] * scale


@compiled
def _to_bfloat16(bits: Bits, rounded: Bits) -> None:
    for at in range(bits.shape[0]):
        word = bits[at]
        up = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        rounded[at] = np.uint16(up if word & _MAGNITUDE <= _INFINITY else np.uint32(0x7FC0))
