"""NH-64 on the CPU: numba's compiled loops, which use the processor's vector units and let other threads run."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.compiled import compiled
from kernels.nh64 import CHUNK_BYTES, CHUNK_WORDS, GOLDEN, MIX_MULTIPLIERS, MIX_SHIFTS, keys, length_term

_LOW = np.uint64(0xFFFF_FFFF)
_HALF = np.uint64(32)
_BYTE = np.uint64(8)
_GOLDEN = np.uint64(GOLDEN)
_SHIFT_0, _SHIFT_1, _SHIFT_2 = (np.uint64(shift) for shift in MIX_SHIFTS)
_MULTIPLIER_0, _MULTIPLIER_1 = (np.uint64(multiplier) for multiplier in MIX_MULTIPLIERS)

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Words = np.ndarray[Any, np.dtype[np.uint64]]
Ids = np.ndarray[Any, np.dtype[np.int64]]


def checksum_rows(rows: Bytes, ids: Ids) -> Ids:
    """The checksum of `rows[i]` for each id, as the bits of an int64. `rows`: `[blocks, bytes]`, each row unbroken."""
    if rows.ctypes.data % 8 or rows.strides[0] % 8:
        rows, ids = _aligned(rows, ids), np.arange(len(ids))
    whole_bytes = rows.shape[1] // CHUNK_BYTES * CHUNK_BYTES
    words = rows[:, :whole_bytes].view(np.uint64)
    sums = np.full(len(ids), length_term(rows.shape[1]), np.uint64)
    _add_chunks(words, rows[:, whole_bytes:], ids, keys(), sums)
    return sums.view(np.int64)


def _aligned(rows: Bytes, ids: Ids) -> Bytes:
    """The rows named, copied to where each starts at a multiple of 8."""
    words = np.empty((len(ids), -(-rows.shape[1] // 8)), np.uint64)
    copied = words.view(np.uint8)[:, : rows.shape[1]]
    np.copyto(copied, rows[ids])
    return copied


@compiled
def _add_chunks(words: Words, tails: Bytes, ids: Ids, key: Words, sums: Words) -> None:
    """Add to each of `sums` the chunks of its row: the whole ones in `words`, the last one in `tails`."""
    whole = words.shape[1] // CHUNK_WORDS
    last = np.zeros(CHUNK_WORDS, np.uint64)
    for place in range(ids.shape[0]):
        row = ids[place]
        for chunk in range(whole):
            first = chunk * CHUNK_WORDS
            sums[place] += _chunk_value(words[row, first : first + CHUNK_WORDS], key, chunk)
        if tails.shape[1]:
            last[:] = 0
            for at in range(tails.shape[1]):
                last[at >> 3] |= np.uint64(tails[row, at]) << (np.uint64(at & 7) * _BYTE)
            sums[place] += _chunk_value(last, key, whole)


@compiled
def _chunk_value(words: Words, key: Words, chunk: int) -> np.uint64:
    first = np.uint64(0)
    second = np.uint64(0)
    for at in range(CHUNK_WORDS):
        low, high = words[at] & _LOW, words[at] >> _HALF
        k, other = key[0, at], key[1, at]
        first += ((low + (k & _LOW)) & _LOW) * ((high + (k >> _HALF)) & _LOW)
        second += ((low + (other & _LOW)) & _LOW) * ((high + (other >> _HALF)) & _LOW)
    value: np.uint64 = _mix(first ^ _mix(second + np.uint64(chunk + 1) * _GOLDEN))
    return value


@compiled
def _mix(word: np.uint64) -> np.uint64:
    word = (word ^ (word >> _SHIFT_0)) * _MULTIPLIER_0
    word = (word ^ (word >> _SHIFT_1)) * _MULTIPLIER_1
    return word ^ (word >> _SHIFT_2)
