"""NH-64, the checksum of bytes that never pass the host. Constants and the small steps; pure Python, any length.

Bytes are cut into chunks of 4 KiB, the last one filled up with zeros, and a chunk into 512 little-endian 64-bit words.
With `lo` and `hi` the halves of a word, and k, k' two keys of its place in the chunk:

    s  = Σ ((lo + k.lo) mod 2^32) × ((hi + k.hi) mod 2^32)  mod 2^64        NH of UMAC (Black et al., CRYPTO 1999)
    s' = the same sum with the keys k'
    v  = mix(s xor mix(s' + (j + 1) × G))                                   j: the chunk's number; mix: a bijection
    checksum = mix((length + 1) × C) + Σ v over all chunks                        mod 2^64

Every sum is of independent terms in any order, so threads of a GPU share it, and no carry runs along the block.

What it detects, for faults that do not know the keys:

- Two different chunks of one length have equal (s, s') for at most 2^-64 of all keys: NH is 2^-32-almost universal, and
  the two key sequences are drawn apart. The proof is for keys drawn at random; ours are the output of a generator
  (SplitMix64) that no stored data was made with.
- A change within one half of one word always changes (s, s'): the difference of s is that of the half times the other
  half plus its key, which is zero for one value only, and for s' that value is another (k and k' differ in both halves
  of every word; `tests/unit/test_kernels_checksum.py` looks).
- A chunk whose (s, s') changed keeps v with probability 2^-64, and never where only one of the two changed. One v that
  changed always changes the checksum.
- Several changed chunks, or chunks that changed places, cancel with probability 2^-64, since v is mixed with the place.
- Blocks of other lengths whose chunks are equal (zeros cut off or added) always differ, since the length's term does.

So a fault passes with probability of about 2^-63, that of any 64-bit checksum. It is no defence against someone who
writes bytes on purpose: the keys are public.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

CHECKSUM_NAME = "nh64"
"""What a slot header calls it."""

CHUNK_BYTES = 4096
CHUNK_WORDS = CHUNK_BYTES // 8
GOLDEN = 0x9E3779B97F4A7C15
LENGTH_MULTIPLIER = 0xD6E8FEB86659FD93
MIX_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MIX_SHIFTS = (30, 27, 31)
KEY_SEED = 0x243F6A8885A308D3
"""The first digits of pi after the point."""

MASK64 = 0xFFFF_FFFF_FFFF_FFFF


def mix(word: int) -> int:
    """SplitMix64's finaliser, a bijection of 64-bit words."""
    word = (word ^ word >> MIX_SHIFTS[0]) * MIX_MULTIPLIERS[0] & MASK64
    word = (word ^ word >> MIX_SHIFTS[1]) * MIX_MULTIPLIERS[1] & MASK64
    return word ^ word >> MIX_SHIFTS[2]


def length_term(length_bytes: int) -> int:
    """What the length adds to the checksum, 0 to 2^64 - 1."""
    return mix((length_bytes + 1) * LENGTH_MULTIPLIER & MASK64)


@cache
def keys() -> np.ndarray[Any, np.dtype[np.uint64]]:
    """`[2, 512]`: k and k' of each word of a chunk."""
    words = [mix(KEY_SEED + (number + 1) * GOLDEN & MASK64) for number in range(2 * CHUNK_WORDS)]
    return np.array(words, np.uint64).reshape(2, CHUNK_WORDS)
