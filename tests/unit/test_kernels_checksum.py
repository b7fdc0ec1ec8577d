"""NH-64: its definition, its equality on CPU and GPU, and what it sees."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kernels import checksum_blocks
from kernels.checksum import CHECKSUM_NAME, checksum_bytes, unsigned
from kernels.errors import BlockIndexError, ShapeError
from kernels.nh64 import CHUNK_BYTES, CHUNK_WORDS, GOLDEN, MASK64, keys, length_term, mix

pytest_plugins = ["tests.kernel_variants"]

LENGTHS = [0, 1, 7, 8, 15, 16, 17, 4_095, 4_096, 4_097, 8_192, 40_000]


def _by_definition(payload: bytes) -> int:
    """The docstring of `kernels.nh64` in plain integers."""
    total = length_term(len(payload))
    both = [[int(key) for key in row] for row in keys()]
    for number, at in enumerate(range(0, len(payload), CHUNK_BYTES)):
        chunk = payload[at : at + CHUNK_BYTES].ljust(CHUNK_BYTES, b"\0")
        sums = [0, 0]
        for place in range(CHUNK_WORDS):
            low = int.from_bytes(chunk[8 * place : 8 * place + 4], "little")
            high = int.from_bytes(chunk[8 * place + 4 : 8 * place + 8], "little")
            for side, row in enumerate(both):
                key_high, key_low = divmod(row[place], 1 << 32)
                sums[side] += (low + key_low) % (1 << 32) * ((high + key_high) % (1 << 32))
        total += mix(sums[0] & MASK64 ^ mix(sums[1] + (number + 1) * GOLDEN & MASK64))
    return total & MASK64


def _tensor(payload: bytes, device: torch.device) -> torch.Tensor:
    return torch.tensor(np.frombuffer(payload, np.uint8).copy(), device=device)[None]


@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_has_the_checksum_of_the_definition(length: int, device: torch.device) -> None:
    payload = random.Random(length).randbytes(length)
    assert checksum_bytes(payload) == _by_definition(payload)
    assert unsigned(checksum_blocks(_tensor(payload, device))) == [_by_definition(payload)]


def test_known_checksums_never_change() -> None:
    """Slots on disks carry them."""
    assert CHECKSUM_NAME == "nh64"
    assert [checksum_bytes(payload) for payload in (b"", b"a", bytes(range(256)) * 33)] == [
        0xB55A8FA067537A73,
        0x9D518E0AFD2002C3,
        0x8550B95299A3286D,
    ]


def test_blocks_of_any_dtype_and_stride_are_taken_where_they_lie(device: torch.device) -> None:
    flat = torch.arange(4 * 2_000, device=device).to(torch.bfloat16)
    pool = torch.as_strided(flat, (4, 3, 500), (2_000, 500, 1))
    wanted = [checksum_bytes(block.contiguous().view(torch.uint8).cpu().numpy().tobytes()) for block in pool]
    assert unsigned(checksum_blocks(pool)) == wanted
    assert unsigned(checksum_blocks(pool, [2, 0, 2])) == [wanted[2], wanted[0], wanted[2]]
    assert checksum_blocks(pool, []).shape == (0,)


@pytest.mark.parametrize("start", [0, 1, 8])
def test_the_address_of_a_block_makes_no_difference(start: int, device: torch.device) -> None:
    payload = random.Random(1).randbytes(5_000)
    flat = torch.zeros(start + 5_000, dtype=torch.uint8, device=device)
    flat[start:] = _tensor(payload, device)[0]
    assert unsigned(checksum_blocks(flat[start:].view(2, 2_500))) == [
        checksum_bytes(payload[:2_500]), checksum_bytes(payload[2_500:]),
    ]  # fmt: skip


def test_keys_of_a_word_differ_in_both_halves() -> None:
    """So no value of one half hides a change of the other from both sums."""
    first, second = keys()
    assert not np.any((first & 0xFFFFFFFF) == (second & 0xFFFFFFFF))
    assert not np.any((first >> 32) == (second >> 32))
    assert len(np.unique(keys())) == 2 * CHUNK_WORDS


@pytest.mark.parametrize("content", ["zeros", "random"])
def test_every_flipped_bit_is_seen(content: str) -> None:
    payload = bytearray(4_096 + 9) if content == "zeros" else bytearray(random.Random(2).randbytes(4_096 + 9))
    seen = {checksum_bytes(payload)}
    for at in range(len(payload)):
        payload[at] ^= 1 << at % 8
        seen.add(checksum_bytes(payload))
        payload[at] ^= 1 << at % 8
    assert len(seen) == len(payload) + 1


def test_pairs_of_top_bits_that_cancel_in_a_plain_sum_are_seen() -> None:
    """A sum of words times odd numbers passes two flipped top bits; so would an exclusive or."""
    draw = random.Random(3)
    payload = bytearray(64 * 1024)
    wanted = checksum_bytes(payload)
    for _ in range(300):
        first, second = draw.sample(range(len(payload) // 8), 2)
        for word in (first, second):
            payload[8 * word + 7] ^= 0x80
        assert checksum_bytes(payload) != wanted
        for word in (first, second):
            payload[8 * word + 7] ^= 0x80


def test_pieces_that_changed_places_are_seen() -> None:
    payload = random.Random(4).randbytes(64 * 1024)
    wanted = checksum_bytes(payload)
    for piece in (4, 8, 512, 4_096, 16_384):
        swapped = payload[piece : 2 * piece] + payload[:piece] + payload[2 * piece :]
        assert checksum_bytes(swapped) != wanted


def test_zeros_cut_off_or_added_are_seen() -> None:
    lengths = [*range(40), 4_095, 4_096, 4_097, 8_192]
    assert len({checksum_bytes(bytes(length)) for length in lengths}) == len(lengths)


def test_checksums_spread_over_all_64_bits() -> None:
    """Counters as payloads: each bit of the checksum is set in about half of them."""
    sums = [checksum_bytes(number.to_bytes(8, "little")) for number in range(2_000)]
    ones = [sum(value >> bit & 1 for value in sums) for bit in range(64)]
    assert min(ones) > 850
    assert max(ones) < 1_150


def test_what_has_no_checksum_is_refused() -> None:
    with pytest.raises(ShapeError, match="gather first"):
        checksum_blocks(torch.zeros(3, 4, 5).transpose(1, 2))
    with pytest.raises(ShapeError, match="a tensor without axes has no blocks"):
        checksum_blocks(torch.tensor(1.0))
    with pytest.raises(ShapeError, match=r"the payload has strides \(2,\): give bytes that lie without gaps"):
        checksum_bytes(memoryview(bytes(9))[::2])
    with pytest.raises(BlockIndexError, match="block 3 is outside the pool"):
        checksum_blocks(torch.zeros(3, 4), [3])
